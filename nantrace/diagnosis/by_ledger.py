"""What a ledger alone says: whether a loss or a gradient went nonfinite, and whether an update took it up. Pure.

Without rows of tensors no module can be named, and nothing is said of buffers, activations or optimizer state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nantrace.diagnosis.standstill import stands_still, standstill
from nantrace.diagnosis.verdict import Origin, Verdict
from nantrace.events import Trace
from nantrace.steps import had_nonfinite_numbers, is_nonfinite, likely

_ALONE = "Only the ledger was kept: of tensors it holds the loss and the norms of the gradients, nothing else."
_UNSAMPLED = (
    "The step is outside the sample (every=N): of its tensors the ledger holds the loss and the norms of gradients."
)
_LATER = "Look at the next step that was recorded in detail, or trace with every=1 to see where the value was born."
_ADVICE = 'Trace the step with stats="auto", which reads every module\'s tensors, to see where the value was born.'


def is_ledger_alone(trace: Trace) -> bool:
    """Whether the trace was made to hold no rows of tensors, or of its last step."""
    if len(trace) or not trace.steps:
        return False
    return trace.meta.get("stats") == "none" or trace.steps[-1].get("detailed") is False


def by_ledger(trace: Trace) -> Verdict:
    """The verdict on the first step that went wrong."""
    return _of(trace.steps, standstill(trace.steps)) or Verdict("clean", evidence=(_ALONE,))


def with_unsampled(verdict: Verdict, trace: Trace) -> Verdict:
    """A verdict on the steps that were recorded in detail, with what the ledger says of those in between.

    One that went wrong before the origin of the verdict stands beside it; where the verdict names no fault, it does.
    """
    wrong = likely(trace.steps, had_nonfinite_numbers)
    found = _of((step for step in wrong if step.get("detailed") is False), standstill(trace.steps))
    if found is None or found.status != "fault" or found.origin is None:
        return verdict
    if verdict.status != "fault" or verdict.origin is None:
        return found
    if verdict.origin.step <= found.origin.step:
        return verdict
    said = f"{found.evidence[0][:-1]} already; that step was outside the sample, and no module of it was recorded."
    return dataclasses.replace(verdict, evidence=(*verdict.evidence, said))


def _of(steps: Iterable[Mapping[str, Any]], stuck: Sequence[int]) -> Verdict | None:
    """`stuck`: the steps in which training stands still, whose skips contain nothing."""
    contained: Verdict | None = None
    for step in steps:
        for name in ("loss", "gradient_norm"):
            value = step.get(name)
            if not is_nonfinite(value):
                continue
            stands = step.get("step") in stuck
            harmless = bool(step.get("skipped")) and not step.get("committed") and not stands
            verdict = _verdict(step, name, value, harmless, stuck if stands else ())
            if not harmless:
                return verdict
            contained = contained or verdict
    return contained


def _verdict(step: Mapping[str, Any], name: str, value: float, harmless: bool, stuck: Sequence[int]) -> Verdict:
    loss = name == "loss"
    what = "The loss" if loss else "The norm of the gradients"
    number = int(step.get("step", 0))
    said = f"{what} of step {number} was {value}" + (", and the update was skipped." if harmless else ".")
    origin = Origin(
        step=number,
        phase="loss" if loss else "backward",
        tensor="loss" if loss else "the gradients",
        kind="nan" if math.isnan(value) else "inf",
    )
    alone, further = (_UNSAMPLED, _LATER) if step.get("detailed") is False else (_ALONE, _ADVICE)
    advice = () if harmless else (further,)
    evidence = (said, *([stands_still(stuck)] if stuck else []), alone)
    return Verdict("contained" if harmless else "fault", origin=origin, evidence=evidence, advice=advice)
