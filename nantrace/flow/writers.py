"""Who wrote each nonfinite element: a map from memory to one event id per element.

The map's key is the storage, never the tensor: views share what was written through any of them. Elements that became
finite again keep their old writer; that is harmless, because writers are only ever asked about elements that are
nonfinite now. A storage is held weakly, so recording keeps no activation alive, and its address cannot be taken by
another while its entry stands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nantrace.flow.marked import equal, marks_all, once

#: Entries of storages that died are dropped when the map has grown by this many.
_SWEEP = 256
_LARGEST = torch.iinfo(torch.int32).max


@dataclass(slots=True)
class Entry:
    """Who wrote the elements of one storage: one event all of it, or one id an element.

    Attributes:
        storage: a reference that does not keep the memory alive.
        width: bytes an element, when it was written.
        whole: the one event that wrote every element; None if `ids` tells.
        ids: int32, one an element of the storage; 0 means that nobody was seen writing it.
    """

    storage: StorageWeakRef
    width: int
    whole: int | None = None
    ids: Tensor | None = None


class Writers:
    """Event ids by storage and element; id 0 means that nobody was seen writing it, a negative one that nobody has yet.

    Attributes:
        entries: by storage. Ask it whether a storage was ever nonfinite.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self._sweep_at = _SWEEP

    def of(self, plane: Tensor, mask: Tensor) -> frozenset[int]:
        """Ids of those who wrote the elements of `plane` that `mask` selects; 0 among them if somebody unseen did."""
        entry = self.entries.get(plane.untyped_storage()._cdata)
        if entry is None:
            return frozenset((0,))
        if entry.whole is not None:
            return frozenset((entry.whole,))
        assert entry.ids is not None
        if entry.width != plane.element_size():  # read through another dtype's view: any writer may be meant
            return frozenset(torch.unique(entry.ids).tolist()) - {0} or frozenset((0,))
        ids = _like(entry.ids, plane)
        every = marks_all(mask)
        smallest = int((ids if every else torch.where(mask, ids, _LARGEST)).min())
        chosen = ids if every else torch.where(mask, ids, smallest)
        if int(chosen.max()) == smallest:  # one writer
            return frozenset((smallest,))
        found = torch.bincount((chosen - smallest).reshape(-1)).nonzero().reshape(-1)  # without sorting
        return frozenset((found + smallest).tolist())

    def by(self, plane: Tensor, writer: int) -> Tensor | None:
        """Mask of the elements of `plane` that `writer` wrote; None if they cannot be told from others."""
        entry = self.entries.get(plane.untyped_storage()._cdata)
        if entry is None or entry.ids is None or entry.width != plane.element_size():
            return None
        return equal(_like(entry.ids, plane), writer)

    def write(self, plane: Tensor, mask: Tensor, writer: int, every: bool = False) -> None:
        """From now on `writer` wrote the elements that `mask` selects; `every`: these are all of the plane."""
        storage = plane.untyped_storage()
        if every and plane.numel() * plane.element_size() == storage.nbytes():
            self._sweep()
            self.entries[storage._cdata] = Entry(StorageWeakRef(storage), plane.element_size(), whole=writer)
            return
        width, ids = self._ids(plane)
        if width != plane.element_size():
            ids.fill_(writer)
        else:
            if not every:
                for dim, (size, stride) in enumerate(zip(plane.shape, plane.stride(), strict=True)):
                    if stride == 0 and size > 1:  # expanded: many elements, one place in memory
                        plane, mask = plane.narrow(dim, 0, 1), mask.any(dim, keepdim=True)
            here = _like(ids, once(plane) if every else plane)
            here.fill_(writer) if every else here.masked_fill_(mask, writer)

    def adopt(self, plane: Tensor, mask: Tensor, writer: int) -> None:
        """As `write`, but only for elements that nobody was seen writing."""
        width, ids = self._ids(plane)
        if width == plane.element_size():
            mask = mask & (_like(ids, plane) == 0)
        self.write(plane, mask, writer)

    def present(self) -> set[int]:
        """Ids of those whose elements lie in memory that is still in use."""
        found: set[int] = set()
        for entry in self.entries.values():
            if entry.storage.expired():
                continue
            if entry.whole is not None:
                found.add(entry.whole)
            elif entry.ids is not None:
                found.update(torch.unique(entry.ids).tolist())
        return found

    def forget(self, key: int) -> None:
        """All of this storage was overwritten with finite values."""
        self.entries.pop(key, None)

    def _ids(self, plane: Tensor) -> tuple[int, Tensor]:
        """Bytes an element and one id an element for the plane's storage, made or enlarged as needed."""
        storage = plane.untyped_storage()
        entry = self.entries.get(storage._cdata)
        width = plane.element_size() if entry is None else entry.width
        count = storage.nbytes() // width
        ids = None if entry is None else entry.ids
        if ids is None or ids.numel() < count:
            whole = 0 if entry is None or entry.whole is None else entry.whole
            longer = torch.full((count,), whole, dtype=torch.int32, device=plane.device)
            if ids is not None:  # the storage was resized
                longer[: ids.numel()] = ids
            ids = longer
            self._sweep()
            self.entries[storage._cdata] = Entry(StorageWeakRef(storage), width, ids=ids)
        return width, ids

    def _sweep(self) -> None:
        if len(self.entries) < self._sweep_at:
            return
        for key in [key for key, entry in self.entries.items() if entry.storage.expired()]:
            del self.entries[key]
        self._sweep_at = len(self.entries) + _SWEEP


def _like(ids: Tensor, plane: Tensor) -> Tensor:
    """The ids seen through the same view of the storage as `plane`."""
    return ids.as_strided(plane.size(), plane.stride(), plane.storage_offset())
