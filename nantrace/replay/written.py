"""Writes what a bisection found as a trace file: the modules of one more replay, with the lineage of the op pass."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from nantrace.capture.tracer import Tracer
from nantrace.errors import TraceExistsError
from nantrace.events import Columns, Phase, Role, Site
from nantrace.lineage import Lineage, OpEvent
from nantrace.replay.replays import Replays, called


def refuse_taken(path: str | os.PathLike[str] | None) -> None:
    """Raise before the first replay, not after the last.

    Raises:
        TraceExistsError: the path is taken.
    """
    if path is not None and os.path.lexists(path):
        raise TraceExistsError(f"{os.fspath(path)} exists already: choose another path, or remove it first.")


def traced(
    replays: Replays,
    what: str,
    *,
    path: str | os.PathLike[str] | None = None,
    lineage: Lineage | None = None,
) -> Tracer:
    """One replay under the module tracer. `lineage` is stored with it, and a row for each nonfinite op output."""
    step = replays.step
    tracer = Tracer(
        step.model,
        path=path,
        optimizer=step.optimizer,
        scaler=step.scaler,
        batch=step.batch,
        on_nonfinite="ignore",
        ops=None if lineage is None else _Known(lineage),
    )
    with replays.one(what) as listener:
        with tracer:
            returned, error = called(step)
        listener.ended(returned, error)
    return tracer


class _Known(contextlib.AbstractContextManager[Any]):
    """Stands where the tracer expects an op recorder: hands over what an earlier replay recorded."""

    def __init__(self, lineage: Lineage) -> None:
        self._lineage = lineage

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def result(self) -> tuple[Lineage, Sequence[tuple[Site, tuple[Any, ...]]]]:
        return self._lineage, [op_row(event) for event in self._lineage.events if event.op is not None]


def op_row(event: OpEvent) -> tuple[Site, tuple[Any, ...]]:
    """A nonfinite op output as the site and the numbers of a trace's row."""
    phase = Phase[event.phase.upper()] if event.phase is not None else Phase.FORWARD
    site = Site(event.module, phase, Role.OP, "output", event.dtype, event.shape, event.op, event.node, event.where)
    numel = math.prod(event.shape)
    finite = numel - event.nan - event.posinf - event.neginf
    low = math.nan if event.min is None else event.min
    high = math.nan if event.max is None else event.max
    counts = (numel, finite, event.nan, event.posinf, event.neginf)
    return site, (*counts, low, high, math.nan, event.first_bad, 0, 0, 0, int(Columns.FIRST_BAD))
