"""The public functions: the one place where capture, store, diagnosis, replay and rendering are joined.

Each function imports what it needs when called, so that reading a trace loads no torch, and looking at one no rule by
which it is judged.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from nantrace.capture.tracer import Tracer
    from nantrace.diagnosis.contrast.rows import Contrast
    from nantrace.diagnosis.difference.compare import Difference
    from nantrace.diagnosis.verdict import Verdict
    from nantrace.events import Trace
    from nantrace.flow.live import LiveOps
    from nantrace.render.report import Report
    from nantrace.replay.step import Step

__all__ = ["bisect", "diff", "load", "matrix", "report", "trace"]

#: Stuck steps that are remembered while a trace goes on: several optimizers may take turns.
_TURNS = 8


def trace(
    model: torch.nn.Module,
    path: str | os.PathLike[str] | None = None,
    *,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    batch: Any = None,
    modules: str | Sequence[str] | None = None,
    depth: int | None = None,
    ops: bool | str | Sequence[str] | None = False,
    on_nonfinite: Literal["warn", "raise", "ignore"] = "warn",
    capture: str | os.PathLike[str] | None = None,
    keep_steps: int | None = None,
    every: int = 1,
    overwrite: bool = False,
    stats: Literal["auto", "range", "full", "none"] = "auto",
) -> Tracer:
    """Record training steps; a context manager.

    Args:
        model: the model to trace. Nothing in it is changed.
        path: file to write; None keeps the trace in memory as `tracer.trace`. In a distributed run each rank writes
            its own: "step.r00001.h5" for rank 1.
        optimizer, scaler: found when they step if they are not handed over.
        batch: what the step reads, a tensor or any nesting of them; its tensors are named in the verdict. It is one
            object for all steps: in a loop over a loader call `tracer.batch(batch)` first thing in the body instead.
        modules: globs on FQNs that select modules; None all.
        depth: deepest level of modules to record: 0 the model alone, None all.
        ops: record single ops too, which costs more and names the op at fault: True for the whole step, or globs on
            the FQNs of the modules whose ops are to be looked at; False or None records none.
        on_nonfinite: what a fault does at the end of its step: "warn" once, "raise" a `NonfiniteError`, or "ignore".
            It is raised out of the call that ended the step, once that has done its work: `optimizer.step` (with a
            scaler: `scaler.update`), `tracer.mark_step`, or the block's end for a step that nothing else ended. An
            exception of yours that is under way goes first.
        capture: file for the state and the batch of the first step at fault, for `nantrace bisect --capture`. The batch
            and the random streams are those at `tracer.batch(batch)`. Without it the batch is taken as the step makes
            its first call, and the streams as the last update left them and as the first call finds them: a replay
            tries both.
        keep_steps: a flight recorder: hold the details of only so many steps back, and write them when a step turns
            out to be at fault, up to 20 times, and at the end. Others leave a row of numbers; SIGKILL loses what is
            held.
        every: a sample: record modules and state in every Nth step only, from step 0 on. The others leave their ledger
            (loss, norm of the gradients, learning rate, scale, updates, seconds); after one that shows a nonfinite
            number or a skipped update the next step is recorded in detail as well. `keep_steps` counts the steps in
            detail. SIGKILL loses at most the numbers of the steps of one second. Not together with `ops`.
        overwrite: replace an existing trace at `path` and an existing capture; nothing else is replaced.
        stats: "range" (counts, min, max), "full", or "auto": full where it costs the same. "none" reads no tensor but
            the loss and the norms of the gradients, and keeps only the ledger: what became of each update.

    Returns:
        What `with` binds. `tracer.trace` is the recorded `Trace` (read back if there is a `path`), also after the
        block; `tracer.batch(batch)` hands over what the step that comes reads; `tracer.mark_step(batch_id=, lr=,
        loss=)` ends a step where no optimizer does; `tracer.note(kind, reason)` puts a decision of yours on record;
        `tracer.faults` counts the steps at fault so far.

    Raises:
        TraceExistsError: `path` or `capture` is taken (when the block is entered, as with the next).
        NantraceError: a file cannot be written, or another block writes it meanwhile.
        TypeError, ValueError: an option is of the wrong kind, out of range, or a glob that matches no module.

    A model that is deep-copied or pickled as a whole within the block carries a no-op of the standard library in place
    of each hook; a `state_dict` carries nothing. Without an optimizer and without `mark_step` the block is one step.

    Example:
        >>> with nantrace.trace(model, "step.h5", optimizer=optimizer, batch=batch) as tracer:
        ...     loss_of(model(batch)).backward()
        ...     optimizer.step()
    """
    from nantrace.capture.options import optimizers_in, refuse_wrong_options
    from nantrace.capture.tracer import Tracer
    from nantrace.diagnosis.recipe import departures

    refuse_wrong_options(
        model,
        path=path,
        capture=capture,
        scaler=scaler,
        batch=batch,
        depth=depth,
        on_nonfinite=on_nonfinite,
        keep_steps=keep_steps,
        every=every,
        overwrite=overwrite,
        stats=stats,
    )
    optimizers = optimizers_in(optimizer)
    live = _live_ops(model, batch, optimizers or None, ops)
    observers = []
    if capture is not None:
        from nantrace.replay.capturing import StepCapture

        observers.append(StepCapture(model, optimizers, scaler, capture, overwrite))
    return Tracer(
        model,
        path=path,
        optimizer=optimizers,
        scaler=scaler,
        batch=batch,
        modules=modules,
        depth=depth,
        on_nonfinite=on_nonfinite,
        keep_steps=keep_steps,
        every=every,
        overwrite=overwrite,
        stats=stats,
        judge=_judge(path, live),
        departures=departures,
        observers=observers,
        ops=live,
    )


def load(path: str | os.PathLike[str], *, progress: Callable[[str], None] | None = None) -> Trace:
    """Read a trace file; needs no torch.

    Args:
        path: a file that `nantrace.trace` wrote.
        progress: told a line every so many thousand events.

    Raises:
        TraceFormatError: the file is not a trace, or one that this version cannot read.
        NantraceError: there is no such file.
        TypeError: `path` is not a path.
    """
    from nantrace.store.reader import load as read

    return read(path, progress)


def bisect(
    step_or_run: Step | Callable[..., Any],
    model: torch.nn.Module | None = None,
    batch: Any = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    capture: str | os.PathLike[str] | None = None,
    depth: Literal["module", "op"] = "op",
    anomaly: bool = False,
    max_replays: int = 20,
    path: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Verdict:
    """Replay a step, coarse to fine, until the op is found in which its first harmful nonfinite value was born.

    Args:
        step_or_run: a `nantrace.Step`, or its `run` function: `run(model, batch)`, or `run()` without a batch.
        model, batch, optimizer, scaler: as for `nantrace.Step`; only with a `run` function.
        capture: a captured step to replay from, in place of the present state.
        depth: "module" stops at modules, "op" goes on to one op.
        anomaly: also run `torch.autograd.detect_anomaly` where it can help.
        max_replays: how often the step may be run.
        path: file for the trace of the last replay.
        progress: told a line about each replay.

    Raises:
        ReplayError: the step cannot be replayed.
        CaptureError: the captured step cannot be read, or does not belong to this model.
        TypeError: a step and a model were both given, or neither.
    """
    from nantrace.replay.bisect import bisect as replay

    step = _step("bisect", step_or_run, model, batch, optimizer, scaler)
    return replay(
        step, capture=capture, depth=depth, anomaly=anomaly, max_replays=max_replays, path=path, progress=progress
    )


def matrix(
    step_or_run: Step | Callable[..., Any],
    model: torch.nn.Module | None = None,
    batch: Any = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    capture: str | os.PathLike[str] | None = None,
    axes: Iterable[str] | None = None,
    module: str | None = None,
    other_batch: Any = None,
    smallest: bool = True,
    max_replays: int = 60,
    progress: Callable[[str], None] | None = None,
) -> Contrast:
    """Run a step under one change at a time, each from the same state, and say what each pair of runs shows.

    Args:
        step_or_run: a `nantrace.Step`, or its `run` function: `run(model, batch)`, or `run()` without a batch.
        model, batch, optimizer, scaler: as for `nantrace.Step`; only with a `run` function.
        capture: a captured step to replay from, in place of the present state.
        axes: which to run, by name ("float32", "scaler-off", ...); None all that apply.
        module: FQN of the module to run in float32; None: the one in which the first nonfinite value was seen.
        other_batch: handed to the step in the row "another batch"; None: that row does not apply.
        smallest: also search for the fewest modules that have to run in float32 for the step to be finite.
        max_replays: how often the step may be run, at least 3.
        progress: told a line about each replay.

    Raises:
        ReplayError: the step cannot be replayed, or the model has no such module.
        CaptureError: the captured step cannot be read, or does not belong to this model.
        TypeError: a step and a model were both given, or neither.
        ValueError: there is no such axis, or `max_replays` is out of range.
    """
    from nantrace.replay.matrix import matrix as contrasted

    return contrasted(
        _step("matrix", step_or_run, model, batch, optimizer, scaler),
        capture=capture,
        axes=axes,
        module=module,
        other_batch=other_batch,
        smallest=smallest,
        max_replays=max_replays,
        progress=progress,
    )


def report(trace_or_verdict: Trace | Verdict) -> Report:
    """A trace with its verdict, or a verdict alone, ready to be printed, shown in a notebook, or saved.

    Raises:
        TypeError: something else was given.
    """
    from nantrace.diagnosis.diagnose import diagnose
    from nantrace.diagnosis.verdict import Verdict
    from nantrace.events import Trace
    from nantrace.render.report import Report

    if isinstance(trace_or_verdict, Verdict):
        return Report(trace_or_verdict)
    if isinstance(trace_or_verdict, Trace):
        return Report(diagnose(trace_or_verdict), trace_or_verdict)
    kind = type(trace_or_verdict).__name__
    raise TypeError(f"report got a {kind}: pass a Trace (nantrace.load(path), tracer.trace) or a Verdict.")


def diff(
    a: Trace,
    b: Trace,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Difference:
    """Say what two traces of the same step differ in: nonfinite values first, then ranges.

    The same step eager and compiled, in float16 and in float32, on two ranks, before and after a change. Statistics are
    compared, not elements.

    Args:
        a: the reference.
        b: the other.
        rtol, atol: an end of a range may move by `atol + rtol * (largest magnitude in a)`; None allows what rounding
            in the coarsest dtype of both traces explains.
        progress: told a line every so many thousand events.

    Raises:
        TypeError: something else than traces was given.
        ValueError: a tolerance is negative or NaN.

    Example:
        >>> difference = nantrace.diff(nantrace.load("float32.h5"), nantrace.load("float16.h5"))
        >>> print(difference)
    """
    from nantrace.events import Trace

    for given in (a, b):
        if not isinstance(given, Trace):
            kind = type(given).__name__
            raise TypeError(f"diff got a {kind}: pass two Traces (nantrace.load(path), tracer.trace).")
    from nantrace.diagnosis.difference.compare import compare

    return compare(a, b, rtol=rtol, atol=atol, progress=progress)


def _live_ops(
    model: torch.nn.Module, batch: Any, optimizer: Any, ops: bool | str | Sequence[str] | None
) -> LiveOps | None:
    """The op recorder of a trace, or None."""
    if ops is False or ops is None:
        return None
    from nantrace.capture.options import patterns_in
    from nantrace.flow.live import LiveOps

    return LiveOps(model, batch, optimizer, None if ops is True else patterns_in("ops", ops))


def _judge(
    path: str | os.PathLike[str] | None, live: LiveOps | None
) -> Callable[[Trace], tuple[str | None, bool, bool]]:
    """What a tracer asks of a step that holds nonfinite values.

    A step is judged by its own rows, with the ledger of those directly before it that were skipped or left out
    over a nonfinite value: two in a row are a fault. What is said of the first that is one names the op, where `live`
    records ops; whether it is one, the rows say, since the flow is not settled before the block ends.
    """
    from nantrace.capture.surroundings import own_path
    from nantrace.diagnosis.diagnose import diagnose
    from nantrace.diagnosis.modules.given_up import as_given_up
    from nantrace.diagnosis.standstill import is_stuck, standstill
    from nantrace.render.sentence import sentence

    before: list[Mapping[str, Any]] = []
    told: set[int] = set()

    def by_ops(trace: Trace, verdict: Verdict) -> Verdict:
        step = trace.steps[-1]["step"]
        if live is None or (told and step not in told):
            return verdict
        told.add(step)
        found = diagnose(dataclasses.replace(trace, lineage=live.lineage()))
        here = found.status == "fault" and found.origin is not None and found.origin.step == step
        return found if here else verdict

    def judge(trace: Trace) -> tuple[str | None, bool, bool]:
        now = trace.steps[-1]
        before[:] = [row for row in before if row["step"] < now["step"]]
        if before and before[-1]["step"] != now["step"] - 1:
            before.clear()
        steps = (*before, *trace.steps)
        whole = dataclasses.replace(trace, steps=steps)
        verdict = diagnose(whole)
        stuck = now if is_stuck(now) else as_given_up(trace)
        before[:] = [] if stuck is None else [*before[-_TURNS:], stuck]
        if verdict.status != "fault":
            return None, False, verdict.status == "contained"
        file = None if path is None else own_path(path, trace.meta.get("rank"))
        return sentence(by_ops(whole, verdict), file, since=next(iter(standstill(steps)), None)), True, False

    return judge


def _step(
    caller: str,
    step_or_run: Step | Callable[..., Any],
    model: torch.nn.Module | None,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
    scaler: torch.amp.GradScaler | None,
) -> Step:
    from nantrace.replay.step import Step

    if isinstance(step_or_run, Step):
        if any(given is not None for given in (model, batch, optimizer, scaler)):
            raise TypeError(
                f"{caller} got a Step and a model, batch, optimizer or scaler: the Step holds these already."
            )
        return step_or_run
    if model is None:
        kind = type(step_or_run).__name__
        raise TypeError(f"{caller} got a {kind} without a model: pass {caller}(run, model, batch) or a nantrace.Step.")
    return Step(step_or_run, model, batch, optimizer=optimizer, scaler=scaler)
