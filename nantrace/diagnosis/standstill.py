"""Training that stands still: a gradient scaler skips update after update over a loss that no scale makes finite.

Reads the ledger alone. One skipped step is what a scaler is for; lowering the scale is all it does about it, which
changes nothing where the loss was nonfinite before it was scaled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from nantrace.steps import is_nonfinite


def standstill(ledger: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """The last steps, if each was skipped over a nonfinite loss; empty unless there are several.

    Two optimizers that skip once each in their turn are one bad batch, not a row of skips: some parameter must have
    gone without its update twice.
    """
    row: list[Mapping[str, Any]] = []
    for entry in reversed(ledger):
        if not is_stuck(entry):
            break
        row.append(entry)
    skips = Counter(name for entry in row for name in entry.get("skipped_by", ("",)))
    again = any(count > 1 for count in skips.values())
    return tuple(int(entry["step"]) for entry in reversed(row)) if again else ()


def is_stuck(entry: Mapping[str, Any]) -> bool:
    """Whether every update of a step was skipped, and its loss, without the scale, was nonfinite."""
    bad = is_nonfinite(entry.get("loss"))
    return bool(bad and entry.get("skipped") and not entry.get("committed") and "step" in entry)


def stands_still(steps: Sequence[int]) -> str:
    """The sentence that says so."""
    return (
        f"In steps {steps[0]} to {steps[-1]} the loss was nonfinite before it was scaled, and GradScaler skipped every "
        "update: training stands still, and lowering the scale cannot change that."
    )
