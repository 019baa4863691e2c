"""Replays a step until the op is found in which its first harmful nonfinite value was born.

Replay 1 looks at the ends alone: does the step fail, and in which part? Then every op is watched at once, which is the
quickest narrowing there is unless the step has very many ops; then it is narrowed module by module first. What one run
cannot settle, `diagnosis.blame` asks further replays for. The last replay runs without probes: the failure explained
must be the failure that happens.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nantrace.capture.sites import is_compiled
from nantrace.capture.surroundings import own_path, rank
from nantrace.diagnosis.blame import Frozen, blame
from nantrace.diagnosis.causes.hyperparameters import checks_of_beta, fact_of_beta
from nantrace.diagnosis.diagnose import diagnose
from nantrace.diagnosis.verdict import Verdict
from nantrace.errors import NantraceError
from nantrace.flow.record import Recording
from nantrace.lineage import Lineage
from nantrace.replay.afford import in_words, is_affordable
from nantrace.replay.anomaly import anomaly_evidence
from nantrace.replay.coarse.backward import Suspects, narrow_backward
from nantrace.replay.coarse.forward import Inside, as_called, modules_of, narrow_forward, tree_of
from nantrace.replay.coarse.gaps import unobserved
from nantrace.replay.compare import difference
from nantrace.replay.confirm import Runs, confirmed, needs_confirmation, region_of
from nantrace.replay.ends import Ends
from nantrace.replay.replays import Replays
from nantrace.replay.step import Step
from nantrace.replay.written import keep_verdict, refuse_taken, traced

_SHOWN = 4

Within = Callable[[str | None, str], bool]


def bisect(
    step: Step,
    *,
    capture: str | os.PathLike[str] | None = None,
    depth: Literal["module", "op"] = "op",
    anomaly: bool = False,
    max_replays: int = 20,
    path: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Verdict:
    """Replay `step` and say where its first harmful nonfinite value was born. The caller's state stays as it is.

    Args:
        step: what to replay; an exception that it raises is evidence, and is not raised here.
        capture: a captured step to replay from, in place of the present state.
        depth: "module" stops at modules, "op" goes on to one op.
        anomaly: also ask `torch.autograd.detect_anomaly` where it can be right.
        max_replays: how often the step may run; what is open then is `inconclusive`.
        path: file for a trace of the failing step, with the flow of nonfinite values through its ops; of several ranks
            each writes its own, "step.r00001.h5".
        progress: told one line about each replay.

    Raises:
        ReplayError: the step's state cannot be kept, for lack of memory or because it is not initialised.
        CaptureError: the capture cannot be read, or is that of another model.
        TraceExistsError: `path` is taken.
        NantraceError: nothing can be written there.
        ValueError: an option is out of range.
    """
    if depth not in ("module", "op"):
        raise ValueError(f'depth is {depth!r}: pass "module" or "op".')
    if not isinstance(max_replays, int) or max_replays < 1:
        raise ValueError(f"max_replays is {max_replays!r}: pass a positive integer.")
    if rank() is None:
        refuse_taken(path)
    if capture is None:
        with Replays(step, max_replays, progress) as replays:
            return _bisect(replays, depth, anomaly, path)
    from nantrace.replay.captured import applied

    with applied(step, capture, most=max_replays, progress=progress) as captured:
        assert captured.step is not None
        with Replays(captured.step, max_replays - len(captured.tried), progress) as replays:
            verdict = _bisect(replays, depth, anomaly, path)
    return captured.judged(verdict)


@dataclass(frozen=True)
class _Found:
    """What the narrowing came to: the verdict, what it rests on, and how it was found."""

    verdict: Verdict
    watched: Ends
    lineage: Lineage | None = None
    how: tuple[str, ...] = ()


def _bisect(replays: Replays, depth: str, anomaly: bool, path: str | os.PathLike[str] | None) -> Verdict:
    first = replays.plain("the ends only")
    own = None if path is None else own_path(path, rank())
    if rank() is not None:
        refuse_taken(own)  # not before: other ranks may need this one
    if not replays.left:
        return _finished(replays, _cut_short(first), first, None, ())
    found = _by_module(replays) if depth == "module" else _by_op(replays, first)
    extra = anomaly_evidence(replays, first) if anomaly else ()
    compiled = is_compiled(replays.step.model)
    runs = Runs(first, found.watched, None, compiled, _suspects(replays), tuple(replays.probed))
    if replays.left and needs_confirmation(found.verdict, runs):
        last = replays.plain("the ends only, to confirm")
        runs = dataclasses.replace(runs, last=last, suspects=_suspects(replays))
    verdict = confirmed(found.verdict, runs)
    if compiled:
        extra += ("The model is compiled: the ops were watched in an eager run of it, the ends in compiled ones.",)
    if path is not None:
        extra += _file_written(replays, path, found.lineage, first)
    finished = _finished(replays, verdict, first, found.lineage, (*found.how, *extra))
    if own is None or not os.path.exists(own):
        return finished
    try:
        keep_verdict(own, finished)
    except (NantraceError, OSError) as error:
        said = f"The verdict could not be stored in {os.fspath(path or own)} ({error})."
        return dataclasses.replace(finished, evidence=(*finished.evidence, said))
    return finished


def _file_written(
    replays: Replays, path: str | os.PathLike[str], lineage: Lineage | None, first: Ends
) -> tuple[str, ...]:
    """Write the trace file in one more replay; what there is to say of it."""
    if not replays.left:
        return ("No trace was written: no replay was left.",)
    try:
        traced(replays, "all modules, for the trace file", path=path, lineage=lineage)
    except (NantraceError, OSError) as error:
        return (f"No trace was written: {error}",)
    what = difference(first, replays.latest)
    return (f"The rows of the trace file are of a replay that differed from the first: {what}.",) if what else ()


def _finished(
    replays: Replays, verdict: Verdict, first: Ends, lineage: Lineage | None, last_words: tuple[str, ...]
) -> Verdict:
    """The verdict with what was observed around it: the step's own exception first."""
    raised = (f"The step raised {first.error}.",) if first.error else ()
    if raised and verdict.status in ("clean", "expected"):
        said, verdict = _broken_off(verdict, first, lineage)
        last_words = (*said, *last_words)
    settings = tuple(
        f"The step changes a switch of the whole process ({changed}); replays put it back."
        for changed in replays.settings
        if changed != "warning filters"
    )
    outside = (*_changed(replays), *_opaque(replays, first))
    evidence = (*raised, *verdict.evidence, *outside, *settings, *last_words)
    return dataclasses.replace(verdict, evidence=evidence, replays=replays.count)


def _broken_off(verdict: Verdict, first: Ends, lineage: Lineage | None) -> tuple[tuple[str, ...], Verdict]:
    """A step that raised before anything harmful was nonfinite: what is said of that, and the verdict."""
    what = "Nothing nonfinite was seen" if verdict.status == "clean" else "Nothing harmful was nonfinite"
    said: tuple[str, ...] = (f"{what} before it raised; what comes after did not run.",)
    advice: tuple[str, ...] = ("Mend what raised, then bisect again.",)
    betas = lineage.unit_betas if lineage is not None and first.stepping else []
    if first.raised == "ZeroDivisionError" and betas:
        beta = max(betas, key=lambda each: (each.time, each.name))
        said, advice = (*said, fact_of_beta(beta)), checks_of_beta(beta.name, beta.group)
    region = (f"{first.stepping}.step",) if first.stepping else ("the step",)
    stage = "optimizer" if first.stepping else verdict.stage
    return said, dataclasses.replace(verdict, status="inconclusive", stage=stage, region=region, advice=advice)


def _cut_short(first: Ends) -> Verdict:
    places = tuple(dict.fromkeys(str(end) for end in first.nonfinite))[:10]
    said = f"One replay was allowed, which looked at the ends alone: {first.in_words()}."
    return Verdict("inconclusive", evidence=(said,), region=places or ("the step",))


# ---------------------------------------------------------------------------------------------------- modules
def _by_module(replays: Replays) -> _Found:
    with_ends = traced(replays, "all modules")
    verdict = diagnose(with_ends.trace)
    return _Found(verdict, replays.latest, None, ("Modules were watched, no ops: depth is module.",))


# ---------------------------------------------------------------------------------------------------- ops
def _by_op(replays: Replays, first: Ends) -> _Found:
    cost = replays.cost
    if is_affordable(cost):
        return _pass(replays, None, "every op", f"Every op of the step was watched at once: {in_words(cost)}.")
    if not first.failed:
        why = "No end was nonfinite to narrow down from: every op of the step was watched."
        return _pass(replays, None, "every op", why)
    found = _narrowed(replays, first, in_words(cost))
    if found is not None:
        return found
    return _pass(replays, None, "every op", "Narrowing by modules led nowhere; every op of the step was watched.")


def _narrowed(replays: Replays, first: Ends, cost: str) -> _Found | None:
    """The region first, then the ops within; None if the origin is not in there."""
    before = replays.count
    region: Inside | Suspects | None
    if _begins_in_backward(first):
        what, region = "backward nodes", narrow_backward(replays, most=max(1, replays.left - 4))
    else:
        what, region = "modules", _narrowed_forward(replays)
    if region is None:
        return None
    names = region.names()
    many = f"Not every op of the step was watched at once ({cost}): {what} were searched first"
    if replays.left < 2:
        return _Found(Verdict("inconclusive", evidence=(f"{many}, and the replays ran out.",), region=names), first)
    many = f"{many}, in {replays.count - before} replays"
    found = _pass(replays, region.within, "ops of the region", f"{many}; only ops within {_listed(names)} were.")
    wider = region.widened(_gaps(found))
    if wider != region and replays.left > 2:  # something nonfinite came into the region from outside
        how = f"{many}; only ops within {_listed(wider.names())} were."
        found = _pass(replays, wider.within, "ops of the region and of what leads into it", how)
    verdict = found.verdict
    named = verdict.origin is not None and (verdict.origin.op or verdict.stage in ("input", "state"))
    return found if verdict.status == "fault" and named and not _gaps(found) else None


def _begins_in_backward(first: Ends) -> bool:
    """Whether what went nonfinite first, as far as ends tell, is a gradient or what an update made of one."""
    return bool(first.losses and first.nonfinite) and first.nonfinite[0].place in ("gradient", "parameter", "moment")


def _narrowed_forward(replays: Replays) -> Inside:
    tree = as_called(replays, tree_of(replays.step.model))
    return Inside(modules_of(tree, narrow_forward(replays, tree, most=max(1, replays.left - 3))))


def _gaps(found: _Found) -> tuple[str | None, ...]:
    return () if found.lineage is None else unobserved(found.lineage)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _pass(replays: Replays, region: Callable[[], Within] | None, watch: str, *how: str) -> _Found:
    """The op pass, and the further replays that its judgement asks for; `how` says why this was watched.

    `region` is asked before each replay what of it to watch; None: everything.
    """
    if not replays.left:
        return _Found(Verdict("inconclusive", evidence=("The replays ran out.",), region=("the step",)), Ends())

    def recorded(what: str, **options: Any) -> tuple[Recording, Ends]:
        return replays.recorded(what, within=None if region is None else region(), **options)

    recording, ends = recorded(watch)
    lineage = recording.lineage
    frozen: Lineage | None = None
    neutralised: dict[frozenset[int], Lineage] = {}
    finding = blame(lineage)
    while finding.wants is not None and replays.left > 1:  # the last one is kept to confirm
        if isinstance(finding.wants, Frozen):
            frozen = recorded(f"{watch}, updates undone", freeze=True)[0].lineage
        else:
            times = finding.wants.times
            neutralised[times] = recorded(f"{watch}, other births made finite", neutral=times)[0].lineage
        finding = blame(lineage, frozen=frozen, neutralised=neutralised)
    verdict = finding.verdict
    if finding.wants is not None:
        verdict = _unfinished(verdict, "The replays ran out before this was settled.")
    return _Found(_trusted(verdict, recording, ends), ends, lineage, how)


def _trusted(verdict: Verdict, recording: Recording, ends: Ends) -> Verdict:
    """A recorder that stopped on the way, or ops on another thread: only part of the step was seen."""
    if recording.failure is not None:
        # What it had not seen being written looks like data from outside: nothing it says of origins can be trusted.
        said = f"The op recorder failed on the way ({type(recording.failure).__name__}: {recording.failure})."
        return _unfinished(_without_origin(verdict, "the step"), said)
    gradients = any(end.place == "gradient" for end in ends.nonfinite)
    unexplained = verdict.status != "fault" or verdict.cause == "bad_constant"
    if gradients and not recording.lineage.backwards and unexplained:
        return _unfinished(
            _without_origin(verdict, "the step's other threads"),
            "Gradients went nonfinite, but no backward pass ran on the step's own thread; ops of other threads cannot "
            "be watched: run forward and backward in the thread that runs the step.",
        )
    return verdict


def _without_origin(verdict: Verdict, region: str) -> Verdict:
    return Verdict("inconclusive", region=(region,), replays=verdict.replays)


def _unfinished(verdict: Verdict, why: str) -> Verdict:
    region = verdict.region or region_of(verdict)
    return dataclasses.replace(verdict, status="inconclusive", evidence=(why, *verdict.evidence), region=region)


# ---------------------------------------------------------------------------------------------------- surroundings
def _suspects(replays: Replays) -> tuple[str, ...]:
    """State that replays do not wind back."""
    opaque = tuple(f"{name} is a {kind}" for name, kind in replays.snapshot.opaque.items())
    return (*replays.untouched, *opaque)


def _changed(replays: Replays) -> tuple[str, ...]:
    if not replays.untouched:
        return ()
    more = f"; and {len(replays.untouched) - _SHOWN} more" if len(replays.untouched) > _SHOWN else ""
    changed = f"{'; '.join(replays.untouched[:_SHOWN])}{more}"
    return (f"The step changes values outside of model and batch, put back when all replays were over: {changed}.",)


def _opaque(replays: Replays, first: Ends) -> tuple[str, ...]:
    objects: dict[str, Any] = replays.snapshot.opaque
    if not objects:
        return ()
    named = ", ".join(f"{name} ({kind})" for name, kind in list(objects.items())[:_SHOWN])
    same = not any(difference(first, ends) for ends in replays.unprobed)
    matters = "the replays came out alike without" if same else "the replays did not come out alike"
    return (f"Cannot be wound back between replays: {named}; {matters}.",)
