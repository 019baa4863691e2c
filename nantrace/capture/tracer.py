"""`Tracer`: the context manager that puts the recorders around a model and takes them away again.

Has no opinion on what it records: whether a step is at fault is asked of a function that it was given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from nantrace.capture.buffer import Buffer
from nantrace.capture.conduct.heard import Conduct
from nantrace.capture.finished import FinishedSteps, Writer
from nantrace.capture.ledger.open_step import OpenStep
from nantrace.capture.listening import Listening
from nantrace.capture.observers import Judgement, OpRecorder, StepObserver
from nantrace.capture.options import (
    optimizers_in,
    patterns_in,
    refuse_no_batch,
    refuse_no_note,
    refuse_ops_without_tensors,
    refuse_wrong_options,
)
from nantrace.capture.quiet import Quiet
from nantrace.capture.raised import raised
from nantrace.capture.running import running, watch_forks
from nantrace.capture.sample import Sample
from nantrace.capture.sites import watched_modules
from nantrace.capture.state import StateRecorder
from nantrace.capture.steps import StepRecorder
from nantrace.capture.surroundings import eager_instead_of_compiled, facts, own_path
from nantrace.capture.targets import open_trace, refuse_written_twice
from nantrace.capture.telling import OnNonfinite, Telling
from nantrace.events import Raised, Site, Trace, nonfinite_rows
from nantrace.lineage import Lineage
from nantrace.steps import shows_nonfinite


class Tracer:
    """Records what each module reads and puts out, gradients and state, step by step; made by `nantrace.trace`.

    Tracing changes no bit of the step and leaves nothing behind. A failure of the recorder is reported once as a
    `NantraceWarning`; then recording stops and training goes on.

    Args:
        model: the model to trace; wrappers (compiled, data parallel) count as what they wrap.
        path: file to write; None keeps the trace in memory.
        optimizer, scaler: those of the step, where known; they are found when they step otherwise.
        batch: what the step reads, a tensor or any nesting of them.
        modules: globs on FQNs that select modules. None selects by `depth` alone.
        depth: deepest level of modules to record; 0 the model alone, None all.
        on_nonfinite: what a fault does at the end of its step: "warn" once a trace, "raise", or "ignore". What is
            raised comes out of the call that ended the step, once it has done its work: `optimizer.step` (with a
            scaler: `scaler.update`), the backward in which optimizers stepped, `mark_step`, or the block itself for
            a step that none of these ended. While an exception of the user's is under way it waits for the block's
            end, and is only a warning if that exception ends the block.
        keep_steps: hold only so many steps back, and keep them when a step goes nonfinite and at the end.
        every: record modules and state in every Nth step from step 0 on, and in a step after one in between that went
            wrong. Of the other steps only the ledger is kept, and `keep_steps` does not count them.
        overwrite: replace an existing trace.
        stats: "range", "full", or "auto": range on a CPU, full where it costs the same; "none" reads no tensor but the
            loss and the norms of the gradients, and keeps only the ledger of the steps.
        judge: says of a step with nonfinite values what to tell the user.
        departures: says of a row of the ledger which rules of mixed precision the step broke: a rule and a sentence
            each. A rule is warned of once, after its step and outside of hooks.
        observers: told when steps begin and end.
        ops: records single ops.
        open_writer: (path, modules=, meta=, overwrite=) -> writer; that of `nantrace.store` by default.

    A step that no update and no `mark_step` ends lasts for the whole block. Its rows go to the file as it grows, and
    stay in memory as well (some 130 bytes a tensor seen), since it is judged as a whole.

    A copy of the model made within the block keeps a no-op of the standard library in place of each hook of ours.

    Raises:
        TypeError: `model` is not a module, or an option is of a kind that it cannot take.
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
        every: int = 1,
        overwrite: bool = False,
        stats: Literal["auto", "range", "full", "none"] = "auto",
        judge: Callable[[Trace], tuple[str | None, bool, bool]] | None = None,
        departures: Callable[[Mapping[str, Any]], Sequence[tuple[str, str]]] | None = None,
        observers: Sequence[StepObserver] = (),
        ops: OpRecorder | None = None,
        open_writer: Callable[..., Writer] | None = None,
    ) -> None:
        refuse_wrong_options(
            model,
            path=path,
            scaler=scaler,
            batch=batch,
            depth=depth,
            on_nonfinite=on_nonfinite,
            keep_steps=keep_steps,
            every=every,
            overwrite=overwrite,
            stats=stats,
        )
        refuse_ops_without_tensors(ops, stats)
        if ops is not None and every > 1:
            raise ValueError(f"every is {every} with ops, which are recorded in all steps: leave one of the two out")
        patterns = patterns_in("modules", modules)
        self._watched, self._modules = watched_modules(model, patterns, depth)
        if stats == "none":
            self._watched = [dataclasses.replace(root, selected=False) for root in self._watched if not root.fqn]
        self._model = model
        self._file: str | None = None  # of this rank
        self._path, self._overwrite, self._open_writer = path, overwrite, open_writer
        self._optimizers = optimizers_in(optimizer)
        self._scaled = scaler is not None and scaler.is_enabled()
        self._batch, self._keep, self._stats = batch, keep_steps, stats
        self._telling, self._judge, self._departures = Telling(on_nonfinite), judge, departures
        self._observers, self._ops = tuple(observers), ops
        self._options = {"modules": patterns, "depth": depth, "keep_steps": keep_steps, "every": every, "stats": stats}
        self._sample = Sample(every)
        self._meta: dict[str, Any] = {}
        self._lineage: Lineage | None = None
        self._raised: Raised | None = None
        self._peeked: tuple[int, Judgement] | None = None
        self._entered = self._ended = False
        self._exits = contextlib.ExitStack()
        self._writer: Writer | None = None
        self._failure: Exception | None = None
        self._finished = FinishedSteps(None, keep_steps)

    def __enter__(self) -> Tracer:
        if self._entered:
            raise RuntimeError("this tracer was entered before: make a new one with nantrace.trace(...) for each block")
        self._entered = True
        self._telling.begin()
        self._meta = {**facts(self._model), **self._options, "optimizers": len(self._optimizers)}
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
            self._note_the_exception(error)
            self._attempt(self._finish)
            self._telling.say_departures()
        finally:
            self._listening.stop()
            self._exits.close()
            self._close()
            running.discard(self)
            self._ended = True
        self._telling.report(quietly=error is not None)

    @property
    def faults(self) -> int:
        """How many steps were at fault so far."""
        return self._telling.faults

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those of the model: handed over, or met when they first stepped in this block."""
        return self._steps.known_optimizers()

    @property
    def trace(self) -> Trace:
        """What was recorded of the finished steps. With a path it is read from the file.

        Within the block it is not complete.

        Raises:
            RuntimeError: before the block.
        """
        if not self._entered:
            raise RuntimeError("tracer.trace was asked for before the block: record within `with ... as tracer` first")
        if self._writer is not None and self._file is not None:
            from nantrace.store.reader import load  # only this package opens files, and only here

            self._attempt(self._finished.flush)
            return load(self._file)
        trace = self._as_trace(self._finished.events(), self._finished.ledger())
        return dataclasses.replace(trace, complete=self._ended, raised=self._raised)

    def mark_step(self, *, batch_id: Any = None, lr: Any = None, loss: Any = None) -> None:
        """End the step here.

        Args:
            batch_id: what to call the step's batch; a number or a string.
            lr: learning rate, or one a parameter group; that of the optimizer by default.
            loss: the loss, a number or a tensor, or its parts by name: {"ce": ..., "kl": ...}, of which "loss" or
                "total" is the whole; the root of backward by default.

        Raises:
            RuntimeError: outside the block.
            NonfiniteError: a step up to here was at fault and `on_nonfinite` is "raise".
        """
        self._refuse_outside("mark_step")
        step = self._steps.step
        if step is not None:
            step.batch_id, step.lr = batch_id, lr
            self._attempt(functools.partial(self._take_losses, step, loss))
        self._attempt(self._steps.end)
        self._tell()

    def batch(self, batch: Any) -> None:
        """Hand over what is about to be read: first thing in the body of a loop. It takes the place of `batch=`.

        A step begins here, and a capture holds its state and random streams as they are now. In the midst of a step
        (gradients are accumulated) it is a further batch of that step.

        Raises:
            TypeError: it is no batch.
            RuntimeError: outside the block.
            NonfiniteError: as for `mark_step`.

        Example:
            >>> for batch in loader:
            ...     tracer.batch(batch)
            ...     train(model, batch)
        """
        refuse_no_batch(batch)
        self._refuse_outside("batch")
        if self._ops is not None:
            self._attempt(functools.partial(self._ops.take_batch, batch))
        self._attempt(functools.partial(self._steps.take_batch, batch))
        self._tell()

    def note(self, kind: str, reason: str | None = None, **facts: Any) -> None:
        """Put a decision on record: in the row of the step that is open, or of the next one.

        Args:
            kind: what was decided or done: "quarantine", "warm_restart", "checkpoint", or any word of your own. The
                latest "checkpoint" is repeated in the rows of later steps.
            reason: why, in a sentence.
            facts: more by name, such as `batch_id=17`; of a `path` only its last part is kept.

        Raises:
            TypeError: `kind` or `reason` is not a text.
            ValueError: `kind` is empty.
            RuntimeError: outside the block.

        Example:
            >>> tracer.note("quarantine", reason="batch 17 holds NaN", batch_id=17)
        """
        refuse_no_note(kind, reason)
        self._refuse_outside("note")
        self._attempt(functools.partial(self._steps.note, kind, reason, facts))

    def _refuse_outside(self, name: str) -> None:
        if not self._entered or self._ended:
            raise RuntimeError(
                f"{name} was called outside of the block of its tracer: call it within `with ... as tracer`"
            )

    def _tell(self) -> None:
        """Say what waits to be said, where the user called us."""
        self._telling.say_departures()
        if not self._telling.users_exception_is_under_way():
            self._telling.report(quietly=False)

    def _take_losses(self, step: OpenStep, loss: Any) -> None:
        with Quiet():
            step.take_losses(loss)

    def _prepare(self) -> None:
        """Make the recorders, and the file: whatever can be wrong is wrong before a hook is placed."""
        for observer in self._observers:
            observer.block_begins()
        if self._path is not None:
            self._file = own_path(self._path, self._meta.get("rank"))
        kept = [observer.path for observer in self._observers if observer.path is not None]
        if kept:
            self._meta["capture"] = os.path.basename(kept[0]) if os.path.isabs(kept[0]) else kept[0]
        refuse_written_twice(self.files(), (file for tracer in running for file in tracer.files()))
        self._buffer = Buffer(self._stats == "full", self._stats != "range")
        state = StateRecorder(self._model, self._buffer)
        state.read_names()
        self._meta["aliases"] = state.aliases
        if self._file is not None:
            opened = self._open_writer or open_trace
            self._writer = opened(self._file, modules=self._modules, meta=self._meta, overwrite=self._overwrite)
        self._finished = FinishedSteps(self._writer, self._keep)
        writes_at_once = self._writer is not None and self._keep is None
        self._steps = StepRecorder(
            self._buffer,
            state,
            optimizers=self._optimizers,
            batch=self._batch,
            scaled=self._scaled,
            observes=self._stats != "none",
            sample=self._sample,
            listens=lambda in_detail: self._listening.listen(in_detail),
            begins=self._step_begins,
            reads=self._step_reads,
            closed=self._step_closed,
            ended=self._step_ended,
            waiting=self._telling.to_raise,
            spilled=self._spill if writes_at_once else None,
            failed=self._failed,
        )
        device = next((parameter.device.type for parameter in self._model.parameters()), "cpu")
        conduct = Conduct(device, lambda: [parameter for _, parameter in state.trained()], state.concerns, self._failed)
        self._listening = Listening(self._steps, conduct, self._watched, everywhere=self._stats != "none")

    def files(self) -> list[str]:
        """What this tracer and its observers write within the block."""
        found = [self._file, *(observer.path for observer in self._observers)]
        return [file for file in found if file is not None]

    def _install(self, exits: contextlib.ExitStack) -> None:
        exits.enter_context(eager_instead_of_compiled())
        self._listening.begin(exits)
        watch_forks()
        running.add(self)
        self._attempt(self._steps.open)
        if self._ops is not None:
            self._ops.begin(self._observe_op)

    def _observe_op(self, site: Site, numbers: tuple[Any, ...]) -> None:
        self._buffer.rows.add(self._buffer.number_of(site), 0, numbers)

    def _finish(self) -> None:
        if self._ops is not None:
            self._lineage = self._ops.lineage()
        self._steps.end()
        self._steps.end_with_notes()
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

    def _step_reads(self, batch: Any, handed_over: bool) -> None:
        for observer in self._observers:
            observer.step_reads(batch, handed_over)

    def _step_closed(self) -> None:
        """The next forward would end the step. What is to be raised must be known now."""
        with Quiet():
            for observer in self._observers:
                observer.step_closes()
        if self._telling.raises:
            rows, ledger = self._steps.so_far()
            judgement = self._judged(rows, ledger)
            self._peeked = None if judgement is None else (len(rows), judgement)
            if judgement is not None and judgement.fault:
                self._steps.end()

    def _step_ended(self, rows: npt.NDArray[np.void], ledger: dict[str, Any]) -> None:
        ledger, departs = self._conducted(ledger)
        for device, why in self._buffer.failures.items():
            told = f"nantrace's fused kernel failed on {device} ({why}): tensors there are read in several passes"
            self._telling.say_once(str(device), told)
        judgement = self._judged(rows, ledger)
        self._peeked = None
        if self._observers:
            trace = self._as_trace(rows, ({**ledger, "first_seq": 1},))
            for observer in self._observers:
                observer.step_ended(trace, judgement)
        fault = judgement is not None and judgement.fault
        if judgement is not None and judgement.contained:
            ledger["contained"] = True
        self._finished.add(rows, ledger, self._buffer.sites, fault, departs)
        if judgement is not None and fault:
            self._telling.fault(judgement.sentence, ledger["step"])

    def _conducted(self, ledger: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """The row of a step with how it was conducted, and whether that broke a rule for the first time.

        Outside the sample it stands only then.
        """
        conduct = self._listening.facts()
        whole = {**ledger, "conduct": conduct} if conduct else ledger
        broken = self._departures(whole) if conduct and self._departures is not None else ()
        first = [self._telling.departure(rule, sentence) for rule, sentence in broken]
        return (whole if ledger.get("detailed") is not False or any(first) else ledger), any(first)

    def _judged(self, rows: npt.NDArray[np.void], ledger: dict[str, Any]) -> Judgement | None:
        """None where nothing is nonfinite. Without a judge whatever is nonfinite is a fault."""
        if not shows_nonfinite(ledger) and not nonfinite_rows(rows).any():
            return None
        if self._peeked is not None and self._peeked[0] == len(rows):
            return self._peeked[1]
        if self._judge is None:
            return Judgement(None, True)
        return Judgement(*self._judge(self._as_trace(rows, ({**ledger, "first_seq": 1},))))

    def _spill(self, rows: npt.NDArray[np.void]) -> None:
        self._finished.spill(rows, self._buffer.sites)

    def _note_the_exception(self, error: BaseException | None) -> None:
        """Keep what ended the block early, but for an error of this tracer's own."""
        if error is None or error is self._telling.given:
            return
        step = self._steps.step
        within = step is not None and not step.closing
        self._raised = raised(error, step.number if step is not None and within else None)
        if self._writer is not None:
            self._attempt(functools.partial(self._writer.set_raised, self._raised))

    def _as_trace(self, rows: npt.NDArray[np.void], steps: Sequence[Mapping[str, Any]]) -> Trace:
        return Trace(rows, tuple(self._buffer.sites), self._modules, steps, self._meta, self._lineage)

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
            self._listening.stop()
            self._telling.say(
                f"nantrace stopped recording after {type(error).__name__}: {error}; training goes on untraced"
            )

    def abandon(self) -> None:
        """Record nothing more. The process was forked: the trace belongs to the parent."""
        self._failure = self._failure or RuntimeError("forked")
        self._listening.stop()
