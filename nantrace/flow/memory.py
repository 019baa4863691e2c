"""What is known of each piece of memory: all finite, or which event wrote which nonfinite element.

Memory whose every write was seen and was finite is not looked at again. That is an assumption (a kernel may write
without saying so); the recorder checks it before it calls anything a birth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from nantrace.flow.values import FLOATS, SMALL, Masks, Scanner, local, masks, planes, storage_key
from nantrace.flow.writers import Writers

_aminmax = torch.aminmax
_INFINITY = math.inf


@dataclass(frozen=True)
class Look:
    """What is nonfinite in a tensor, where, and the ids of the events that wrote it."""

    nan: int
    posinf: int
    neginf: int
    nan_ids: frozenset[int]
    inf_ids: frozenset[int]
    masks: Masks | None = None

    @property
    def ids(self) -> frozenset[int]:
        return self.nan_ids | self.inf_ids


@dataclass(frozen=True)
class Unseen:
    """Who wrote memory that was not looked at.

    Attributes:
        collective: other processes write into the memory, at some time after the op was called.
        read: events whose nonfinite values this process gave the op.
        storage: a reference that keeps the memory's address from being taken by another.
    """

    op: str
    phase: str
    module: str | None
    where: str | None = None
    collective: bool = False
    read: frozenset[int] = frozenset()
    storage: StorageWeakRef | None = None


class Memory:
    """Looks at tensors and keeps the books.

    Args:
        external: makes the event of nonfinite elements that nobody was seen writing, and returns its id.
        unwritten: told that memory which an op handed out is read before it was written, by the op's negative number;
            returns the id of its event.

    Attributes:
        finite: storages whose every write was seen and was finite.
        tainted: storages that an event wrote nonfinite elements into, at some time; none of them is in `finite`.
        unseen: storages that were written while nobody looked.
        unread: how many tensors could not be read, by reason.
    """

    def __init__(self, external: Callable[[Tensor, Masks], int], unwritten: Callable[[int], int]) -> None:
        self.scanner, self.writers = Scanner(), Writers()
        self.tainted = self.writers.entries
        self.finite: set[int] = set()
        self.unseen: dict[int, Unseen] = {}
        self.unread: dict[str, int] = {}
        self._external, self._unwritten = external, unwritten

    def is_known_finite(self, tensor: Tensor) -> bool:
        return storage_key(tensor) in self.finite

    def are_known_finite(self, tensors: Iterable[Tensor]) -> bool:
        """Whether all of them are; in doubt, not."""
        finite = self.finite
        for tensor in tensors:
            if type(tensor) is not Tensor and type(tensor) is not Parameter:
                return False
            try:
                if tensor.untyped_storage()._cdata not in finite:
                    return False
            except RuntimeError:  # no storage to ask
                return False
        return True

    def are_finite(self, values: Iterable[Any], reads: Iterable[bool]) -> bool:
        """Whether all tensors among an op's arguments that it reads are known to be; in doubt, not."""
        finite = self.finite
        try:
            for value, is_read in zip(values, reads, strict=False):
                kind = type(value)
                if kind is Tensor or kind is Parameter:
                    if is_read and value.untyped_storage()._cdata not in finite and value.dtype in FLOATS:
                        if not self._plainly_finite(value):
                            return False
                        self.mark_finite(value)
                elif kind is list or kind is tuple:
                    if not self.are_finite(value, repeat(is_read)):
                        return False
                elif isinstance(value, Tensor):
                    return False
        except RuntimeError:  # no storage to ask
            return False
        return True

    def mark_finite(self, tensor: Tensor) -> None:
        """The tensor was looked at and is finite; its memory is known to be if it covers all of it."""
        tensor, key = local(tensor), storage_key(tensor)
        if key is None or key in self.tainted:
            return
        if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
            self.finite.add(key)

    def blame(self, plane: Tensor, found: Masks, id: int) -> None:
        """The event `id` wrote the nonfinite elements `found` in a plane."""
        self.writers.write(plane, found.bad, id, every=found.count == plane.numel())
        self.finite.discard(plane.untyped_storage()._cdata)

    def look(self, tensor: Tensor) -> Look | None:
        """What is nonfinite in it and who wrote that; None if nothing is. What nobody wrote gets an external event."""
        if self._plainly_finite(tensor):
            return None
        for plane in planes(tensor, self.unread):
            found = self.scanner.nonfinite(plane)
            if found is None:
                continue
            nan_ids = self._wrote(plane, found.nan_mask) if found.nan else frozenset()
            inf_ids = self._wrote(plane, found.inf_mask) if found.posinf + found.neginf else frozenset()
            if 0 in nan_ids or 0 in inf_ids:
                id = self._external(plane, found)
                self.writers.adopt(plane, found.bad, id)
                self.finite.discard(plane.untyped_storage()._cdata)
                nan_ids = frozenset(i or id for i in nan_ids)
                inf_ids = frozenset(i or id for i in inf_ids)
            return Look(found.nan, found.posinf, found.neginf, nan_ids, inf_ids, found)
        return None

    def _wrote(self, plane: Tensor, mask: Tensor) -> frozenset[int]:
        """Ids of the events that wrote these elements; 0 among them if somebody unseen did."""
        return frozenset(self._unwritten(id) if id < 0 else id for id in self.writers.of(plane, mask))

    def written_by(self, tensor: Tensor, id: int) -> Tensor | None:
        """Mask of the elements that the event `id` wrote; None if that cannot be told."""
        return self.writers.by(tensor.detach(), id)

    def wrote_plainly(self, tensor: Tensor) -> bool:
        """A tensor was just written: whether it is plain, small and finite. The short way, for almost every output."""
        key = self._plainly_finite(tensor)
        if not key:
            return False
        if self.unseen:
            self.unseen.pop(key, None)
        self.finite.add(key)
        return True

    def _plainly_finite(self, tensor: Tensor) -> int:
        """The key of its memory if it is plain, small and finite, and its memory never was nonfinite; 0 if not."""
        kind = type(tensor)
        output = self.scanner.outputs.get(tensor.dtype) if kind is Tensor or kind is Parameter else None
        if output is None:
            return 0
        try:
            storage = tensor.untyped_storage()
            if not 0 < tensor.numel() < SMALL or not tensor.is_cpu or not storage.nbytes():
                return 0
            key: int = storage._cdata
            if key in self.tainted:
                return 0
            _aminmax(tensor, out=output[0])
        except RuntimeError:  # sparse, nested, functorch: no memory of its own, or no such statistic
            return 0
        low, high = output[1].tolist()
        return key if low > -_INFINITY and high < _INFINITY else 0  # false for NaN

    def wrote(self, plane: Tensor) -> bool:
        """A plane was just written: whether it is finite."""
        storage = plane.untyped_storage()
        key = storage._cdata
        if self.unseen:
            self.unseen.pop(key, None)
        if not self.scanner.is_finite(plane):
            return False
        if key in self.tainted:
            if plane.numel() * plane.element_size() != storage.nbytes():
                return True
            self.writers.forget(key)
        self.finite.add(key)
        return True

    def wrote_unseen(self, tensor: Tensor, who: Unseen) -> None:
        """A tensor was written by an op that nobody looked at."""
        for plane in planes(tensor):
            key = plane.untyped_storage()._cdata
            self.finite.discard(key)
            self.unseen[key] = who

    def hand_over(self, tensor: Tensor, who: Unseen) -> None:
        """Other processes are about to write into a tensor: what is finite in it now, they will have made nonfinite."""
        for plane in planes(tensor):
            storage = plane.untyped_storage()
            key = storage._cdata
            self.finite.discard(key)
            if key in self.tainted:
                self.writers.write(plane, ~masks(plane).bad, 0)
            self.unseen[key] = replace(who, storage=StorageWeakRef(storage))  # type: ignore[no-untyped-call]

    def written_by_nobody(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Its planes that hold nonfinite elements which nobody was seen writing."""
        found = []
        for plane in planes(tensor):
            nonfinite = self.scanner.nonfinite(plane)
            if nonfinite is not None and 0 in self.writers.of(plane, nonfinite.bad):
                found.append(plane)
        return tuple(found)

    def who_wrote(self, tensor: Tensor) -> Unseen | None:
        key = storage_key(tensor)
        return None if key is None else self.unseen.get(key)


def neutralise(tensor: Tensor) -> None:
    """Make a tensor finite in place: NaN to 0, infinities to +-1e4."""
    with torch.no_grad():
        for plane in planes(tensor):
            plane.detach().nan_to_num_(0.0, 1e4, -1e4)
