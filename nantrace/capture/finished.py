"""Where the rows of finished steps go: into a file, into memory, or round and round in a flight recorder.

Numbers the events. Knows nothing of torch, nor of how a file is written.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nantrace.events import EVENT, Raised, Site
from nantrace.lineage import Lineage


class Writer(Protocol):
    """What a trace file must be able to take."""

    def add_sites(self, sites: Sequence[Site]) -> None: ...
    def append(self, rows: npt.NDArray[np.void]) -> None: ...
    def add_step(self, step: Mapping[str, Any]) -> None: ...
    def set_lineage(self, lineage: Lineage) -> None: ...
    def set_raised(self, raised: Raised) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class FinishedSteps:
    """Keeps finished steps.

    Args:
        writer: where they go; None keeps them in memory.
        keep: hold only the last so many back, and let them go when a step turns bad or at the end; None lets each go
            at once. Steps that were not kept leave their row in the ledger. In memory only the first time counts, so
            that at most twice `keep` steps are held.

    Attributes:
        steps: ledger of all that were let go, in memory only.
    """

    def __init__(self, writer: Writer | None, keep: int | None) -> None:
        self.steps: list[Mapping[str, Any]] = []
        self._writer = writer
        self._keep = keep
        self._held: collections.deque[tuple[npt.NDArray[np.void], Mapping[str, Any]]] = collections.deque()
        self._rows: list[npt.NDArray[np.void]] = []
        self._seq = 1
        self._sites = 0
        self._ahead = 0  # rows of the step that is still open which were written
        self._was_bad = self._released = False

    def add(self, rows: npt.NDArray[np.void], step: Mapping[str, Any], sites: Sequence[Site], bad: bool) -> None:
        """Take over a finished step; `bad` lets go what a flight recorder holds."""
        self._held.append((rows, step))
        turned = bad and not self._was_bad and not (self._writer is None and self._released)
        self._was_bad = bad
        while self._keep is not None and len(self._held) > self._keep:
            dropped, ledger = self._held.popleft()
            self._put(dropped[:0], {**ledger, "events": 0, "not_kept": len(dropped)})
        if self._keep is None or turned:
            self.release(sites)

    def spill(self, rows: npt.NDArray[np.void], sites: Sequence[Site]) -> None:
        """Write rows of the step that is still open; `add` gets them once more, before the others."""
        assert self._writer is not None and self._keep is None
        self._add_sites(sites)
        first = self._seq + self._ahead
        rows["seq"] = np.arange(first, first + len(rows))
        self._writer.append(rows)
        self._writer.flush()
        self._ahead += len(rows)

    def release(self, sites: Sequence[Site]) -> None:
        """Let go everything that is held back."""
        self._add_sites(sites)
        while self._held:
            self._put(*self._held.popleft())
        if self._writer is not None:
            self._writer.flush()
        self._released = True

    def events(self) -> npt.NDArray[np.void]:
        """All rows that are in memory, held back or not, in order."""
        rows = [*self._rows, *(rows for rows, _ in self._held)]
        events = np.concatenate(rows) if rows else np.zeros(0, EVENT)
        events["seq"] = np.arange(1, len(events) + 1)
        return events

    def ledger(self) -> tuple[Mapping[str, Any], ...]:
        """Ledger rows of all steps in memory, in order."""
        held, seq = [], self._seq
        for rows, step in self._held:
            held.append({**step, "first_seq": seq if len(rows) else 0})
            seq += len(rows)
        return (*self.steps, *held)

    def _put(self, rows: npt.NDArray[np.void], step: Mapping[str, Any]) -> None:
        step = {**step, "first_seq": self._seq if len(rows) else 0}
        rows["seq"] = np.arange(self._seq, self._seq + len(rows))
        self._seq += len(rows)
        if self._writer is None:
            self._rows.append(rows)
            self.steps.append(step)
        else:
            self._writer.append(rows[self._ahead :])
            self._writer.add_step(step)
            self._ahead = 0

    def _add_sites(self, sites: Sequence[Site]) -> None:
        if self._writer is not None and len(sites) > self._sites:
            self._writer.add_sites(sites[self._sites :])
            self._sites = len(sites)
