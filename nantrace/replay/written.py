"""Replays under the module tracer; the trace file of a bisection is one of them, with the lineage of its op pass."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

from nantrace.capture.targets import refuse_unwritable
from nantrace.capture.tracer import Tracer
from nantrace.diagnosis.verdict import Verdict
from nantrace.errors import TraceExistsError
from nantrace.flow.live import Observe, op_row
from nantrace.lineage import Lineage
from nantrace.replay.replays import Replays, called
from nantrace.replay.step import Step


def refuse_taken(path: str | os.PathLike[str] | None) -> None:
    """Raise before the first replay, not after the last.

    Raises:
        TraceExistsError: the path is taken.
        NantraceError: nothing can be written there.
    """
    if path is None:
        return
    if os.path.lexists(path):
        raise TraceExistsError(f"{os.fspath(path)} exists already: choose another path, or remove it first.")
    refuse_unwritable(os.fspath(path))


def keep_verdict(path: str | os.PathLike[str], verdict: Verdict) -> None:
    """Store the verdict in the trace file: it rests on replays that the file does not hold."""
    from nantrace.store.writer import set_verdict  # needs h5py

    set_verdict(path, verdict.to_dict())


def tracer_of(step: Step, **options: Any) -> Tracer:
    """The module tracer for one replay; `options` are further ones of `Tracer`."""
    return Tracer(
        step.model,
        optimizer=step.optimizer,
        scaler=step.scaler,
        batch=step.batch,
        on_nonfinite="ignore",
        **options,
    )


def traced(
    replays: Replays,
    what: str,
    *,
    path: str | os.PathLike[str] | None = None,
    lineage: Lineage | None = None,
) -> Tracer:
    """One replay under the module tracer. `lineage` is stored with it, and a row for each nonfinite op output."""
    step = replays.step
    tracer = tracer_of(step, path=path, ops=None if lineage is None else _Known(lineage))
    with replays.one(what) as listener:
        with tracer:
            returned, error = called(step)
        listener.ended(returned, error)
    return tracer


class _Known:
    """Stands where the tracer expects an op recorder: hands over what an earlier replay recorded."""

    def __init__(self, lineage: Lineage) -> None:
        self._lineage = lineage
        self._observe: Observe | None = None

    def begin(self, observe: Observe) -> None:
        self._observe = observe

    def end(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for event in self._lineage.events:
            if self._observe is not None and event.op is not None:
                self._observe(*op_row(event))

    def take_batch(self, batch: Any) -> None:
        """A replay reads one batch."""

    def lineage(self) -> Lineage:
        return self._lineage
