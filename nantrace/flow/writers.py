"""Who wrote each nonfinite element: a map from memory to one event id per element.

The map's key is the storage, never the tensor: views share what was written through any of them. Elements that became
finite again keep their old writer; that is harmless, because writers are only ever asked about elements that are
nonfinite now. A storage is held weakly, so recording keeps no activation alive, and its address cannot be taken by
another while its entry stands.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

#: Entries of storages that died are dropped when the map has grown by this many.
_SWEEP = 256


class Writers:
    """Event ids by storage and element; id 0 means that nobody was seen writing it.

    Attributes:
        entries: storage -> (reference to it, bytes an element, ids). Ask it whether a storage was ever nonfinite.
    """

    def __init__(self) -> None:
        self.entries: dict[int, tuple[StorageWeakRef, int, Tensor]] = {}
        self._sweep_at = _SWEEP

    def of(self, plane: Tensor, mask: Tensor) -> frozenset[int]:
        """Ids of those who wrote the elements of `plane` that `mask` selects; 0 among them if somebody unseen did."""
        entry = self.entries.get(plane.untyped_storage()._cdata)
        if entry is None:
            return frozenset((0,))
        _, width, ids = entry
        if width != plane.element_size():  # read through another dtype's view: any writer may be meant
            return frozenset(torch.unique(ids).tolist()) - {0} or frozenset((0,))
        return frozenset(torch.unique(_like(ids, plane)[mask]).tolist())

    def write(self, plane: Tensor, mask: Tensor, writer: int) -> None:
        """From now on `writer` wrote the elements that `mask` selects."""
        width, ids = self._entry(plane)
        if width != plane.element_size():
            ids.fill_(writer)
        else:
            _like(ids, plane).masked_fill_(mask, writer)

    def adopt(self, plane: Tensor, mask: Tensor, writer: int) -> None:
        """As `write`, but only for elements that nobody was seen writing."""
        width, ids = self._entry(plane)
        if width == plane.element_size():
            mask = mask & (_like(ids, plane) == 0)
        self.write(plane, mask, writer)

    def forget(self, key: int) -> None:
        """All of this storage was overwritten with finite values."""
        self.entries.pop(key, None)

    def _entry(self, plane: Tensor) -> tuple[int, Tensor]:
        storage = plane.untyped_storage()
        width = plane.element_size()
        count = storage.nbytes() // width
        entry = self.entries.get(storage._cdata)
        if entry is None or (entry[1] == width and entry[2].numel() < count):
            ids = torch.zeros(count, dtype=torch.int32, device=plane.device)
            if entry is not None:  # the storage was resized
                ids[: entry[2].numel()] = entry[2]
            self._sweep()
            entry = self.entries[storage._cdata] = (StorageWeakRef(storage), width, ids)
        return entry[1], entry[2]

    def _sweep(self) -> None:
        if len(self.entries) < self._sweep_at:
            return
        for key in [key for key, (reference, _, _) in self.entries.items() if reference.expired()]:
            del self.entries[key]
        self._sweep_at = len(self.entries) + _SWEEP


def _like(ids: Tensor, plane: Tensor) -> Tensor:
    """The ids seen through the same view of the storage as `plane`."""
    return ids.as_strided(plane.size(), plane.stride(), plane.storage_offset())
