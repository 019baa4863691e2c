"""Training that stands still: step after step is left out over values that no later step makes finite.

Either a gradient scaler skips update after update over a loss that no scale makes finite, or a check in the loop
leaves out step after step. Reads the ledger alone. One such step is what a scaler or a check is for; but lowering the
scale, or going on to the next batch, changes nothing where every step fails.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nantrace.steps import is_nonfinite

#: What is said of a run that goes no further: in a warning, and so in the capture that was written with it.
STANDS_STILL = "training stands still"
#: Times in a row that a step is left out before training stands still.
FEWEST = 2


def standstill(ledger: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """The last steps, if each was skipped over a nonfinite loss; empty unless there are several.

    Two optimizers that skip once each in their turn are one bad batch, not a row of skips: some parameter must have
    gone without its update twice.
    """
    row = ending(ledger, is_stuck)
    skips = Counter(name for entry in row for name in entry.get("skipped_by", ("",)))
    again = any(count >= FEWEST for count in skips.values())
    return tuple(int(entry["step"]) for entry in row) if again else ()


def ending(ledger: Sequence[Mapping[str, Any]], which: Callable[[Mapping[str, Any]], bool]) -> list[Mapping[str, Any]]:
    """The last steps, as far back as each of them is such a one."""
    return list(itertools.takewhile(which, reversed(ledger)))[::-1]


def is_stuck(entry: Mapping[str, Any]) -> bool:
    """Whether every update of a step was skipped, and its loss, without the scale, was nonfinite."""
    bad = is_nonfinite(entry.get("loss"))
    return bool(bad and entry.get("skipped") and not entry.get("committed") and "step" in entry)


def is_left_out(entry: Mapping[str, Any]) -> bool:
    """Whether a step had neither a backward nor an update. Of a step that left only its numbers it is not known."""
    return entry.get("backwards") == 0 and not entry.get("attempted")


def is_given_up(entry: Mapping[str, Any]) -> bool:
    """Whether a step was left out, and something in it is known to have been nonfinite."""
    return is_left_out(entry) and "step" in entry and (is_nonfinite(entry.get("loss")) or bool(entry.get("nonfinite")))


def rounds(entries: Sequence[Mapping[str, Any]]) -> int:
    """How often a step was begun and left out in these: a step that nothing ends holds several such rounds."""
    return sum(max(1, int(entry.get("left_out") or 0)) for entry in entries)


def stands_still(steps: Sequence[int]) -> str:
    """The sentence that says so of a scaler."""
    return (
        f"In steps {steps[0]} to {steps[-1]} the loss was nonfinite before it was scaled, and GradScaler skipped every "
        f"update: {STANDS_STILL}, and lowering the scale cannot change that."
    )


def left_out_for_ever(steps: Sequence[int], times: int, trained: bool) -> str:
    """The sentence that says so of a check in the loop; `trained`: they are known to be steps of training."""
    where = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    return f"In {where} the forward failed {times} times in a row, and no backward and no update followed: " + (
        f"every step is left out, and {STANDS_STILL}." if trained else "if it was to train, it stands still."
    )
