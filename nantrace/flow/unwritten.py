"""Memory that was handed out and not written yet: what it happens to hold is no value, unless somebody reads it so.

Knows which op handed it out. Its elements carry that op's number among the writers, a negative one, until one of them
is read as it is: only then is there an event.
"""

from __future__ import annotations

from torch import UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from nantrace.lineage import OpEvent

#: What was handed out on storages that died is dropped when this many have come.
_SWEEP = 256


class Unwritten:
    """Events that have not happened yet, by negative number."""

    def __init__(self) -> None:
        self._handed_out: dict[int, tuple[OpEvent, StorageWeakRef]] = {}
        self._last = 0
        self._sweep_at = _SWEEP

    def hand_out(self, event: OpEvent, storage: UntypedStorage) -> int:
        """Keep what would be said of it; returns the number that stands for it among the writers."""
        if len(self._handed_out) >= self._sweep_at:
            kept = {number: one for number, one in self._handed_out.items() if not _died(one[1])}
            self._handed_out, self._sweep_at = kept, len(kept) + _SWEEP
        self._last -= 1
        self._handed_out[self._last] = (event, StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        return self._last

    def event(self, number: int) -> OpEvent:
        """What was kept; its id is 0 until it has happened."""
        return self._handed_out[number][0]


def _died(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]
