"""The rows of the open step: those that the buffer holds, and those that were taken out of it ahead of its end.

A step that grows without end, of a loop without an optimizer, say, may not hold all its rows back. Knows no hooks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from nantrace.capture.buffer import Buffer
from nantrace.capture.ledger.open_step import OpenStep
from nantrace.capture.quiet import Quiet
from nantrace.events import EVENT, Phase

# Rows, and seconds, that a step may hold back when the next call of a module begins.
_MOST_ON_HOST, _MOST_ON_DEVICE, _LONGEST = 4096, 65_536, 2.0


class StepRows:
    """Collects the rows of one step after the other.

    Args:
        buffer: where rows arrive.
        spilled: takes rows of a step that grows without end, ahead of the rest; None keeps them all.
        on_host: whether the model computes on the host: fetching rows from a device waits for it.
    """

    def __init__(
        self, buffer: Buffer, spilled: Callable[[npt.NDArray[np.void]], None] | None, on_host: Callable[[], bool]
    ) -> None:
        self._buffer = buffer
        self._spilled = spilled
        self._on_host = on_host
        self._drained: list[npt.NDArray[np.void]] = []  # numbers already
        self._ahead = 0  # how many of these were spilled
        self._spilled_at = 0.0

    def begin(self, step: OpenStep) -> None:
        self._drained, self._ahead = [], 0
        self._spilled_at = step.started

    def of(self, step: OpenStep) -> npt.NDArray[np.void]:
        """All rows of the open step, numbered from 1. Waits for the device."""
        if not step.detailed and not len(self._buffer.rows) and not self._drained:
            return np.zeros(0, EVENT)
        self._drain(step)
        rows = np.concatenate(self._drained) if len(self._drained) > 1 else self._drained[0]
        rows["seq"] = np.arange(1, len(rows) + 1)
        return rows

    def spill_if_long(self, step: OpenStep) -> None:
        """Hand rows over if they wait for an end of the step that may never come."""
        if self._spilled is None or not self._is_long(step):
            return
        with Quiet():
            self._drain(step)
        for rows in self._drained[self._ahead :]:
            self._spilled(rows)
        self._ahead = len(self._drained)
        self._spilled_at = time.perf_counter()

    def _is_long(self, step: OpenStep) -> bool:
        if step.gradient_rows:  # an update is under way, and the step about to end
            return False
        waiting = len(self._buffer.rows)
        if waiting < _MOST_ON_HOST and (not waiting or time.perf_counter() - self._spilled_at < _LONGEST):
            return False
        return waiting >= _MOST_ON_DEVICE or self._on_host()

    def _drain(self, step: OpenStep) -> None:
        """Make numbers of the rows that the buffer holds."""
        for key in step.skipped() & step.gradient_rows.keys():
            self._buffer.relabel(*step.gradient_rows[key], Phase.POST_BACKWARD)
        step.gradient_rows.clear()
        self._drained.append(self._buffer.drain(step.number))
