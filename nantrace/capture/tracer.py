"""`Tracer`: the context manager that puts the recorders around a model and takes them away again.

Has no opinion on what it records: whether a step is at fault is asked of a function that it was given.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from nantrace.capture.buffer import Buffer
from nantrace.capture.finished import FinishedSteps, Writer
from nantrace.capture.hooks import install
from nantrace.capture.lifecycle import Lifecycle
from nantrace.capture.quiet import Quiet
from nantrace.capture.sites import watched_modules
from nantrace.capture.state import StateRecorder
from nantrace.capture.steps import StepRecorder
from nantrace.capture.surroundings import eager_instead_of_compiled, facts, own_path, warn_user
from nantrace.errors import NantraceWarning, NonfiniteError
from nantrace.events import Site, Trace
from nantrace.lineage import Lineage

OnNonfinite = Literal["warn", "raise", "ignore"]
_ON_NONFINITE = ("warn", "raise", "ignore")
_STATS = ("auto", "range", "full")


class Judgement(NamedTuple):
    """What somebody with an opinion says of a step: a sentence or None, and whether the step is at fault."""

    sentence: str | None
    fault: bool


class StepObserver(Protocol):
    """Is told of steps: to keep their state before they run, to store what became of them."""

    def step_begins(self, tracer: Tracer) -> None:
        """Nothing of the step has run yet, nor been read."""

    def step_ended(self, trace: Trace, verdict: Judgement | None) -> None:
        """`trace` holds this step alone; `verdict` is None when nothing in it was nonfinite."""


class OpRecorder(Protocol):
    """Records ops from the time the first step has begun until before the last ends."""

    def begin(self, observe: Callable[[Site, tuple[Any, ...]], None]) -> None:
        """Start, and hand a row to `observe` for each nonfinite output of an op."""

    def end(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def lineage(self) -> Lineage:
        """The flow of nonfinite values; asked once, after the end."""


class Tracer:
    """Records what each module reads and puts out, gradients and state, step by step.

    Tracing changes no bit of the step and leaves nothing behind. A failure of the recorder is reported once as a
    `NantraceWarning`; then recording stops and training goes on.

    Args:
        model: the model to trace; wrappers (compiled, data parallel) count as what they wrap.
        path: file to write; None keeps the trace in memory.
        optimizer, scaler: those of the step, where known; they are found when they step otherwise.
        batch: what the step reads, a tensor or any nesting of them.
        modules: globs on FQNs that select modules. None selects by `depth` alone.
        depth: deepest level of modules to record; 0 the model alone, None all.
        on_nonfinite: what a fault does at the end of its step: "warn" once a trace, "raise" from `mark_step` or at
            exit, or "ignore".
        keep_steps: hold only so many steps back, and keep them when a step goes nonfinite and at the end.
        overwrite: replace an existing file.
        stats: "range", "full", or "auto": range on a CPU, full where it costs the same.
        judge: says of a step with nonfinite values what to tell the user.
        observers: told when steps begin and end.
        ops: records single ops.
        open_writer: (path, modules=, meta=, overwrite=) -> writer; that of `nantrace.store` by default.

    Attributes:
        faults: how many steps were at fault so far.

    Raises:
        TypeError: `model` is not a module.
        ValueError: an option is out of range, or a glob matches no module.

    Example:
        >>> with Tracer(model) as tracer:
        ...     loss_of(model(batch)).backward()
        >>> len(tracer.trace)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        path: str | os.PathLike[str] | None = None,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        batch: Any = None,
        modules: str | Sequence[str] | None = None,
        depth: int | None = None,
        on_nonfinite: OnNonfinite = "warn",
        keep_steps: int | None = None,
        overwrite: bool = False,
        stats: Literal["auto", "range", "full"] = "auto",
        judge: Callable[[Trace], tuple[str | None, bool]] | None = None,
        observers: Sequence[StepObserver] = (),
        ops: OpRecorder | None = None,
        open_writer: Callable[..., Writer] | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"trace got a {type(model).__name__} as model: pass a torch.nn.Module")
        if depth is not None and (not isinstance(depth, int) or depth < 0):
            raise ValueError(
                f"depth is {depth!r}: pass 0 for the model alone, a larger integer, or None for all modules"
            )
        if keep_steps is not None and (not isinstance(keep_steps, int) or keep_steps < 1):
            raise ValueError(f"keep_steps is {keep_steps!r}: pass a positive integer, or None to keep every step")
        _check("on_nonfinite", on_nonfinite, _ON_NONFINITE)
        _check("stats", stats, _STATS)
        patterns = [modules] if isinstance(modules, str) else modules
        self._watched, self._modules = watched_modules(model, patterns, depth)
        self._model = model
        self._path, self._overwrite, self._open_writer = path, overwrite, open_writer
        self._optimizers = _several(optimizer)
        self._scaled = scaler is not None and scaler.is_enabled()
        self._batch, self._keep, self._stats = batch, keep_steps, stats
        self._on_nonfinite, self._judge = on_nonfinite, judge
        self._observers, self._ops = tuple(observers), ops
        self._options = {"modules": patterns, "depth": depth, "keep_steps": keep_steps, "stats": stats}
        self._meta: dict[str, Any] = {}
        self._lineage: Lineage | None = None
        self._entered = False
        self._exits = contextlib.ExitStack()
        self._thread: int | None = None
        self._writer: Writer | None = None
        self._failure: Exception | None = None
        self._unsaid: list[str] = []
        self._error: NonfiniteError | None = None
        self.faults = 0

    def __enter__(self) -> Tracer:
        if self._entered:
            raise RuntimeError("this tracer was entered before: make a new one with nantrace.trace(...) for each block")
        self._entered = True
        self._thread = threading.get_ident()
        self._meta = {**facts(self._model), **self._options}
        self._prepare()
        with contextlib.ExitStack() as exits:
            self._install(exits)
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._ops is not None:
                self._ops.end(kind, error, traceback)
            self._attempt(self._finish)
        finally:
            self._stop()
            self._exits.close()
            self._close()
            _running.discard(self)
        self._report(quietly=error is not None)

    @property
    def trace(self) -> Trace:
        """What was recorded of the finished steps. With a path it is read from the file once the block has ended."""
        if self._writer is not None:
            from nantrace.store.reader import load  # only this package opens files, and only here

            return load(self._path_written)
        return self._as_trace(self._finished.events(), self._finished.ledger())

    def mark_step(self, *, batch_id: Any = None, lr: Any = None, loss: Any = None) -> None:
        """End the step here.

        Args:
            batch_id: what to call the step's batch; a number or a string.
            lr: learning rate, or one a parameter group; that of the optimizer by default.
            loss: the loss, a number or a tensor; the root of backward by default.

        Raises:
            RuntimeError: outside the block.
            NonfiniteError: a step up to here was at fault and `on_nonfinite` is "raise".
        """
        if not self._entered or self._thread is None:
            raise RuntimeError(
                "mark_step was called outside of the block of its tracer: call it within `with ... as tracer`"
            )
        step = self._steps.step
        if step is not None:
            step.batch_id, step.lr = batch_id, lr
            step.loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        self._attempt(self._steps.end)
        self._report(quietly=False)

    def _prepare(self) -> None:
        """Make the recorders, and the file: whatever can be wrong is wrong before a hook is placed."""
        self._buffer = Buffer(self._stats == "full", self._stats != "range")
        state = StateRecorder(self._model, self._buffer)
        state.read_names()
        self._meta["aliases"] = state.aliases
        if self._path is not None:
            self._path_written = own_path(self._path, self._meta.get("rank"))
            self._writer = self._opened(self._path_written)
        self._finished = FinishedSteps(self._writer, self._keep)
        self._steps = StepRecorder(
            self._buffer,
            state,
            optimizers=self._optimizers,
            batch=self._batch,
            scaled=self._scaled,
            begins=self._step_begins,
            ended=self._step_ended,
            failed=self._failed,
        )

    def _opened(self, path: str) -> Writer:
        if self._open_writer is None:
            from nantrace.store.writer import TraceWriter  # needs h5py, which a trace in memory does not

            return TraceWriter(path, modules=self._modules, meta=self._meta, overwrite=self._overwrite)
        return self._open_writer(path, modules=self._modules, meta=self._meta, overwrite=self._overwrite)

    def _install(self, exits: contextlib.ExitStack) -> None:
        steps = self._steps
        exits.enter_context(eager_instead_of_compiled())
        exits.callback(steps.gradients.remove)
        for undo in install(steps.calls, self._watched):
            exits.callback(undo)
        exits.enter_context(Lifecycle(steps))
        _watch_forks()
        _running.add(self)
        steps.active = steps.calls.active = steps.gradients.active = True
        self._attempt(steps.open)
        if self._ops is not None:
            self._ops.begin(self._observe_op)

    def _observe_op(self, site: Site, numbers: tuple[Any, ...]) -> None:
        self._buffer.rows.append((self._buffer.number_of(site), 0, numbers))

    def _finish(self) -> None:
        if self._ops is not None:
            self._lineage = self._ops.lineage()
        self._steps.end()
        self._finished.release(self._buffer.sites)
        if self._writer is not None and self._lineage is not None:
            self._writer.set_lineage(self._lineage)

    def _close(self) -> None:
        if self._writer is not None:
            try:
                self._writer.close()
            except Exception as error:
                self._failed(error)

    def _step_begins(self) -> None:
        with Quiet():
            for observer in self._observers:
                observer.step_begins(self)

    def _step_ended(self, rows: npt.NDArray[np.void], ledger: dict[str, Any]) -> None:
        judgement = None
        bad = bool((rows["nan"] + rows["posinf"] + rows["neginf"]).any())
        if self._observers or bad:
            trace = self._as_trace(rows, ({**ledger, "first_seq": 1},))
            if bad and self._judge is not None:
                judgement = Judgement(*self._judge(trace))
            for observer in self._observers:
                observer.step_ended(trace, judgement)
        fault = bad if self._judge is None else judgement is not None and judgement.fault
        self._finished.add(rows, ledger, self._buffer.sites, fault)
        if fault:
            self._found(judgement.sentence if judgement else None, ledger["step"])

    def _found(self, sentence: str | None, step: int) -> None:
        self.faults += 1
        if self.faults == 1 and self._on_nonfinite != "ignore":
            sentence = sentence or f"step {step} went nonfinite: look at the trace for where"
            if self._on_nonfinite == "raise":
                self._error = NonfiniteError(sentence)
            else:
                self._say(sentence)

    def _as_trace(self, rows: npt.NDArray[np.void], steps: Any) -> Trace:
        return Trace(rows, tuple(self._buffer.sites), self._modules, tuple(steps), self._meta, self._lineage)

    def _attempt(self, what: Callable[[], Any]) -> None:
        """Do something of the recorder's own, unless it has failed before."""
        if self._failure is None:
            try:
                what()
            except Exception as error:
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Stop recording, and say so once."""
        if self._failure is None:
            self._failure = error
            self._stop()
            self._say(f"nantrace stopped recording after {type(error).__name__}: {error}; training goes on untraced")

    def _stop(self) -> None:
        self._steps.active = self._steps.calls.active = self._steps.gradients.active = False

    def _say(self, sentence: str) -> None:
        """Warn now; where warnings are errors, wait until raising one cannot break the user's step."""
        try:
            warn_user(sentence)
        except NantraceWarning:
            self._unsaid.append(sentence)

    def _report(self, quietly: bool) -> None:
        """Raise what waits to be raised; `quietly` when an exception of the user's is on its way."""
        error, self._error = self._error, None
        unsaid, self._unsaid = self._unsaid, []
        if not quietly:
            for sentence in unsaid:
                warn_user(sentence)
            if error is not None:
                raise error
        elif error is not None:
            self._say(str(error))

    def abandon(self) -> None:
        """Record nothing more. The process was forked: the trace belongs to the parent."""
        self._failure = self._failure or RuntimeError("forked")
        self._stop()


# A forked child inherits hooks and an open file that are not its own.
_running: weakref.WeakSet[Tracer] = weakref.WeakSet()


def _after_fork() -> None:
    for tracer in list(_running):
        tracer.abandon()


@functools.cache
def _watch_forks() -> None:
    """Once a process: it cannot be undone, so it waits until somebody traces."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)


def _check(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}: pass one of {', '.join(map(repr, allowed))}")


def _several(
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None,
) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    # Only what steps like one counts as one: some wrappers are no subclass of Optimizer.
    return [optimizer] if hasattr(optimizer, "param_groups") else list(optimizer)  # type: ignore[list-item]
