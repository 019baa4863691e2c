"""Where the rows of finished steps go: into a file, into memory, or round and round in a flight recorder.

Numbers the events, and decides of which steps more is kept than numbers. Knows nothing of torch, nor of how a file is
written.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from nantrace.events import EVENT, Raised, Site, nonfinite_rows
from nantrace.lineage import Lineage
from nantrace.steps import STEP, packed, shows_nonfinite, steps_from


class Writer(Protocol):
    """What a trace file must be able to take."""

    def add_sites(self, sites: Sequence[Site]) -> None: ...
    def append(self, rows: npt.NDArray[np.void]) -> None: ...
    def add_step(self, step: Mapping[str, Any], whole: bool = True) -> None: ...
    def complete_step(self, place: int, step: Mapping[str, Any]) -> None: ...
    def set_lineage(self, lineage: Lineage) -> None: ...
    def set_raised(self, raised: Raised) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


_ROOM = 64  # steps
_NOTABLE = 10_000  # some 5 MB
_TURNS = 20
_LONGEST = 1.0  # seconds between flushes while no rows are written: a flush costs as much as a small step


class _Held(NamedTuple):
    """A step that is held back: its place among all steps, its rows, and what is known of it."""

    place: int
    rows: npt.NDArray[np.void]
    step: Mapping[str, Any]


class FinishedSteps:
    """Keeps finished steps.

    Every step leaves its numbers. All that is known of it is kept where its rows are, and where it went wrong or a
    decision was taken; of at most 10,000 steps without rows.

    Args:
        writer: where they go; None keeps them in memory, 85 bytes a step beside what is kept whole.
        keep: hold the rows of only the last so many back, and let them go when a step turns bad (the first 20 times)
            or at the end; None lets each go at once. Steps that have no rows to begin with do not count. In memory
            only the first time counts, so that at most twice `keep` steps are held.
    """

    def __init__(self, writer: Writer | None, keep: int | None) -> None:
        self._writer = writer
        self._keep = keep
        self._held: collections.deque[_Held] = collections.deque()
        self._rows: list[npt.NDArray[np.void]] = []
        self._numbers = np.zeros(_ROOM, STEP)  # of the steps, in memory only; grows ahead of them
        self._said: dict[int, Mapping[str, Any]] = {}  # in memory only
        self._steps = 0
        self._notable = 0
        self._seq = 1
        self._sites = 0
        self._ahead = 0  # rows of the step that is still open which were written
        self._was_bad = False
        self._turns = 0
        self._flushed_at = time.monotonic()

    def add(
        self,
        rows: npt.NDArray[np.void],
        step: Mapping[str, Any],
        sites: Sequence[Site],
        bad: bool,
        notable: bool = False,
    ) -> None:
        """Take over a finished step; `bad` lets go what a flight recorder holds, `notable` keeps all that is known."""
        detailed = step.get("detailed") is not False
        turned = bad and not self._was_bad and self._turns < (_TURNS if self._writer is not None else 1)
        self._was_bad = bad
        if detailed and self._keep is None:
            self._add_sites(sites)
            self._put_rows(rows)
            self._put_step(_numbered(rows, step, self._seq - len(rows)), True)
            self.flush()
            return
        notable = notable or self._is_notable(step, bad)
        self._put_step(_kept_back(rows, step), notable)
        if detailed and self._keep is not None:
            self._held.append(_Held(self._steps - 1, rows, step))
            if len(self._held) > self._keep:
                self._held.popleft()
        if turned:
            self._turns += 1
            self.release(sites)
        elif notable or time.monotonic() - self._flushed_at >= _LONGEST:
            self.flush()

    def spill(self, rows: npt.NDArray[np.void], sites: Sequence[Site]) -> None:
        """Write rows of the step that is still open; `add` gets them once more, before the others."""
        assert self._writer is not None and self._keep is None
        self._add_sites(sites)
        first = self._seq + self._ahead
        rows["seq"] = np.arange(first, first + len(rows))
        self._writer.append(rows)
        self.flush()
        self._ahead += len(rows)

    def release(self, sites: Sequence[Site]) -> None:
        """Let go everything that is held back, and write what waits."""
        self._add_sites(sites)
        while self._held:
            held = self._held.popleft()
            self._put_rows(held.rows)
            step = _numbered(held.rows, held.step, self._seq - len(held.rows))
            if self._writer is None:
                self._said[held.place] = step
            else:
                self._writer.complete_step(held.place, step)
        self.flush()

    def flush(self) -> None:
        """Write the numbers that wait."""
        self._flushed_at = time.monotonic()
        if self._writer is not None:
            self._writer.flush()

    def events(self) -> npt.NDArray[np.void]:
        """All rows that are in memory, held back or not, in order."""
        rows = [*self._rows, *(held.rows for held in self._held)]
        events = np.concatenate(rows) if rows else np.zeros(0, EVENT)
        events["seq"] = np.arange(1, len(events) + 1)
        return events

    def ledger(self) -> Sequence[Mapping[str, Any]]:
        """All steps in memory, in order."""
        said, seq = dict(self._said), self._seq
        for held in self._held:
            said[held.place] = _numbered(held.rows, held.step, seq)
            seq += len(held.rows)
        return steps_from(self._numbers[: self._steps].copy(), said)

    def _put_rows(self, rows: npt.NDArray[np.void]) -> None:
        rows["seq"] = np.arange(self._seq, self._seq + len(rows))
        self._seq += len(rows)
        if self._writer is None:
            self._rows.append(rows)
        else:
            self._writer.append(rows[self._ahead :])
            self._ahead = 0

    def _put_step(self, step: Mapping[str, Any], whole: bool) -> None:
        if self._writer is not None:
            self._writer.add_step(step, whole)
        else:
            if self._steps == len(self._numbers):
                self._numbers = np.concatenate([self._numbers, np.zeros(len(self._numbers), STEP)])
            self._numbers[self._steps] = packed(step)
            if whole:
                self._said[self._steps] = step
        self._steps += 1

    def _is_notable(self, step: Mapping[str, Any], bad: bool) -> bool:
        """Whether more than numbers is kept of a step without rows; a decision of the user's always is."""
        if step.get("decisions"):
            return True
        said = any(step.get(key) for key in ("skipped", "cleared", "left_out", "contained"))
        if self._notable < _NOTABLE and (bad or said or shows_nonfinite(step)):
            self._notable += 1
            return True
        return False

    def _add_sites(self, sites: Sequence[Site]) -> None:
        if self._writer is not None and len(sites) > self._sites:
            self._writer.add_sites(sites[self._sites :])
            self._sites = len(sites)


def _numbered(rows: npt.NDArray[np.void], step: Mapping[str, Any], first: int) -> Mapping[str, Any]:
    """The step with the number of the first of its rows, 0 without any."""
    return {**step, "first_seq": first if len(rows) else 0, **_nonfinite(rows)}


def _kept_back(rows: npt.NDArray[np.void], step: Mapping[str, Any]) -> Mapping[str, Any]:
    """The step as it stands while its rows are held back, and for ever if they are dropped."""
    return {**step, "events": 0, "not_kept": len(rows), **_nonfinite(rows)} if len(rows) else step


def _nonfinite(rows: npt.NDArray[np.void]) -> dict[str, int]:
    count = int(np.count_nonzero(nonfinite_rows(rows)))
    return {"nonfinite": count} if count else {}
