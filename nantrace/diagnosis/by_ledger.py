"""What a ledger alone says: whether a loss or a gradient went nonfinite, and whether an update took it up. Pure.

Without rows of tensors no module can be named, and nothing is said of buffers, activations or optimizer state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nantrace.diagnosis.observation import numbered
from nantrace.diagnosis.standstill import (
    FEWEST,
    ending,
    is_given_up,
    is_left_out,
    left_out_for_ever,
    rounds,
    stands_still,
    standstill,
)
from nantrace.diagnosis.verdict import Origin, Status, Verdict
from nantrace.events import Trace
from nantrace.steps import had_nonfinite_numbers, is_nonfinite, likely, told

_ALONE = "Only the ledger was kept: of tensors it holds the loss and the norms of the gradients, nothing else."
_UNSAMPLED = (
    "The step is outside the sample (every=N): of its tensors the ledger holds the loss and the norms of gradients."
)
_DROPPED = "The rows of that step were not kept (keep_steps): the ledger holds its loss and the norms of its gradients."
_ROWS_FINITE = "No tensor of that step that was seen held it: the loss was told by mark_step(loss=)."
_LATER = "Look at the next step that was recorded in detail, or trace with every=1 to see where the value was born."
_NO_BACKWARD = "No step had a backward or an update: whether any loss was finite was not seen."
_TELL = "Tell the trace the loss of each step, with mark_step(loss=loss) before the check leaves it out."
_ADVICE = 'Trace the step with stats="auto", which reads every module\'s tensors, to see where the value was born.'


def is_ledger_alone(trace: Trace) -> bool:
    """Whether the trace was made to hold no rows of tensors, or of its last step."""
    if len(trace) or not trace.steps:
        return False
    return trace.meta.get("stats") == "none" or trace.steps[-1].get("detailed") is False


def by_ledger(trace: Trace) -> Verdict:
    """The verdict on the first step that went wrong."""
    return with_unread(_of(trace, trace.steps) or Verdict("clean", evidence=(_ALONE,)), trace)


def with_unsampled(verdict: Verdict, trace: Trace) -> Verdict:
    """A verdict on the steps that were recorded in detail, with what the ledger says of those in between.

    One that went wrong before the origin of the verdict stands beside it; where the verdict names no fault, it does.
    """
    wrong = likely(trace.steps, had_nonfinite_numbers)
    found = _of(trace, (step for step in wrong if _has_no_rows(step) or is_left_out(step)))
    if found is None or found.origin is None:
        return with_unread(_with_dropped(verdict, trace), trace)
    if found.status != "fault":
        return found if verdict.status in ("clean", "expected") else verdict
    if verdict.status != "fault" or verdict.origin is None:
        return found
    if verdict.origin.step <= found.origin.step:
        return verdict
    said = f"{found.evidence[0][:-1]} already; that step was outside the sample, and no module of it was recorded."
    return dataclasses.replace(verdict, evidence=(*verdict.evidence, said))


def with_unread(verdict: Verdict, trace: Trace) -> Verdict:
    """The verdict, with the steps that were left out before a backward and of whose loss nothing is known.

    Where training ended with several of these in a row, nothing says that it is well.
    """
    ended = _unread_at_the_end(trace)
    known = (step for step in told(trace.steps) if step.get("left_out") or step.get("cleared"))
    unread = [step for step in known if is_left_out(step) and _is_unread(step)]
    unread = [step for step in unread if step not in ended] + ended
    if verdict.status == "fault":
        return verdict
    if verdict.status == "clean" and is_ledger_alone(trace) and _trained_nothing(trace):
        advice = (_TELL, *verdict.advice)[:3]
        return dataclasses.replace(
            verdict, status="inconclusive", evidence=(_NO_BACKWARD, *verdict.evidence), advice=advice
        )
    if not unread:
        return verdict
    times, numbers = rounds(unread), [int(step["step"]) for step in unread]
    said = (
        f"{times} round{'s' * (times != 1)} without a backward or an update in {numbered(numbers)}: "
        "gradients were cleared, or the step was marked as ended. Whether the loss was finite there was not seen."
    )
    if not ended or verdict.status == "contained":
        return dataclasses.replace(verdict, evidence=(*verdict.evidence, said))
    advice = (_TELL, *verdict.advice)[:3]
    return dataclasses.replace(verdict, status="inconclusive", evidence=(said, *verdict.evidence), advice=advice)


def _unread_at_the_end(trace: Trace) -> list[Mapping[str, Any]]:
    """The last steps, if several in a row were left out unread; one alone may be an evaluation."""
    row = ending(trace.steps, _is_left_out_unread)
    return row if _trains(trace) and rounds(row) >= FEWEST else []


def _is_left_out_unread(step: Mapping[str, Any]) -> bool:
    noted = bool(step.get("decisions")) and not step.get("cleared")  # perhaps that alone, after the last step
    return is_left_out(step) and _is_unread(step) and not noted


def _trained_nothing(trace: Trace) -> bool:
    """Whether an optimizer was handed to a trace that saw no loss, no backward and no update."""
    quiet = all(is_left_out(step) and "loss" not in step for step in told(trace.steps))
    return bool(trace.meta.get("optimizers")) and len(list(told(trace.steps))) == len(trace.steps) and quiet


def _is_unread(step: Mapping[str, Any]) -> bool:
    """Whether neither a loss nor a row of a tensor tells what happened in a step."""
    return not step.get("events") and not step.get("not_kept") and "loss" not in step


def _has_no_rows(step: Mapping[str, Any]) -> bool:
    return step.get("detailed") is False or (bool(step.get("not_kept")) and not step.get("events"))


def _with_dropped(verdict: Verdict, trace: Trace) -> Verdict:
    """A verdict on the steps whose rows were kept, with what was nonfinite in the others.

    A fault would have been kept, as each step is judged when it ends: it was contained, or meant to be there.
    """
    if verdict.status not in ("clean", "expected"):
        return verdict
    bad = [step for step in likely(trace.steps, _had_nonfinite) if _has_no_rows(step) and step.get("nonfinite")]
    if not bad:
        return verdict
    count, numbers = sum(int(step["nonfinite"]) for step in bad), [int(step["step"]) for step in bad]
    thrown = any(step.get("contained") or step.get("skipped") for step in bad)
    said = (
        f"{count:,} nonfinite tensor{'s were' if count > 1 else ' was'} seen in {numbered(numbers)}, whose rows were "
        "not kept (keep_steps). When these steps ended no fault was seen in them."
    )
    status: Status = "contained" if thrown else "expected"
    return dataclasses.replace(verdict, status=status, evidence=(said, *verdict.evidence))


def _had_nonfinite(rows: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    return np.asarray(rows["nonfinite"] > 0)


def _of(trace: Trace, steps: Iterable[Mapping[str, Any]]) -> Verdict | None:
    """The first step that went wrong for good, or else the first that went wrong."""
    stuck = standstill(trace.steps)
    ended = ending(trace.steps, is_given_up) if _trains(trace) else []
    over = [int(step["step"]) for step in ended] if rounds(ended) >= FEWEST else []
    contained: Verdict | None = None
    for step in steps:
        for name in ("loss", "gradient_norm"):
            value = step.get(name)
            if not is_nonfinite(value):
                continue
            why = None
            if step.get("step") in stuck:
                why = stands_still(stuck)
            elif step.get("step") in over:
                why = left_out_for_ever(over, rounds(ended), True)
            left_out = is_left_out(step) and _trains(trace)
            harmless = (left_out or (bool(step.get("skipped")) and not step.get("committed"))) and why is None
            verdict = _verdict(step, name, value, harmless, why)
            if not harmless:
                return verdict
            contained = contained or verdict
    return contained


def _trains(trace: Trace) -> bool:
    """Whether a step without a backward was left out of a training, and is no inference."""
    if trace.raised is not None:
        return False
    known = bool(trace.meta.get("optimizers"))
    return known or any(step.get("attempted_total") or step.get("cleared") for step in told(trace.steps))


def _verdict(step: Mapping[str, Any], name: str, value: float, harmless: bool, why: str | None) -> Verdict:
    """`why`: the sentence on training that stands still, in which the step's skip contains nothing."""
    loss = name == "loss"
    what = "The loss" if loss else "The norm of the gradients"
    number = int(step.get("step", 0))
    excuse = ", and no backward and no update followed" if is_left_out(step) else ", and the update was skipped"
    said = f"{what} of step {number} was {value}{excuse * harmless}."
    origin = Origin(
        step=number,
        phase="loss" if loss else "backward",
        tensor="loss" if loss else "the gradients",
        kind="nan" if math.isnan(value) else "inf",
    )
    alone, further = (_ROWS_FINITE, _LATER) if step.get("events") else (_ALONE, _ADVICE)
    if _has_no_rows(step):
        alone, further = (_UNSAMPLED if step.get("detailed") is False else _DROPPED), _LATER
    advice = () if harmless else (further,)
    return Verdict(
        "contained" if harmless else "fault",
        origin=origin,
        evidence=tuple(text for text in (said, why, alone) if text),
        advice=advice,
    )
