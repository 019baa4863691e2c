"""What a ledger alone says: whether a loss or a gradient went nonfinite, and whether an update took it up. Pure.

Without rows of tensors no module can be named, and nothing is said of buffers, activations or optimizer state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nantrace.diagnosis.verdict import Origin, Verdict
from nantrace.events import Trace

_ALONE = "Only the ledger was kept: of tensors it holds the loss and the norms of the gradients, nothing else."
_ADVICE = 'Trace the step with stats="auto", which reads every module\'s tensors, to see where the value was born.'


def is_ledger_alone(trace: Trace) -> bool:
    """Whether the trace was made to hold no rows of tensors."""
    return not len(trace) and bool(trace.steps) and trace.meta.get("stats") == "none"


def by_ledger(trace: Trace) -> Verdict:
    """The verdict on the first step that went wrong."""
    contained: Verdict | None = None
    for step in trace.steps:
        for name in ("loss", "gradient_norm"):
            value = step.get(name)
            if not isinstance(value, float) or math.isfinite(value):
                continue
            harmless = bool(step.get("skipped")) and not step.get("committed")
            verdict = _verdict(step, name, value, harmless)
            if not harmless:
                return verdict
            contained = contained or verdict
    return contained or Verdict("clean", evidence=(_ALONE,))


def _verdict(step: Mapping[str, Any], name: str, value: float, harmless: bool) -> Verdict:
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
    advice = () if harmless else (_ADVICE,)
    return Verdict("contained" if harmless else "fault", origin=origin, evidence=(said, _ALONE), advice=advice)
