"""Steps of training that had no backward: how often their forward failed in a row, up to the end of the trace.

A round is what a loop does between two decisions whether to go on: one call of the model, or as many as in the steps
that were trained. Knows no cause, and not what the loop looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nantrace.diagnosis.modules.seen import Seen
from nantrace.diagnosis.standstill import FEWEST, is_left_out, left_out_for_ever
from nantrace.events import Role, Trace
from nantrace.steps import Step, is_nonfinite


@dataclass(frozen=True)
class GivenUp:
    """The last rounds of a trace, each of which failed and was left out.

    Attributes:
        steps: their numbers.
        times: how many rounds.
        trained: a loss was told or gradients were cleared in them, which an evaluation does not do.
        sink: the row that the first of them that has rows put out; None if no row shows the failure.
    """

    steps: tuple[int, ...]
    times: int
    trained: bool
    sink: int | None

    @property
    def stands_still(self) -> bool:
        return self.times >= FEWEST

    @property
    def said(self) -> str:
        return left_out_for_ever(self.steps, self.times, self.trained)


def given_up(seen: Seen) -> GivenUp | None:
    """The failed rounds at the end; None if there are none, or if an output that fails does not mean a loss that does.

    Without an optimizer, an update or cleared gradients it may be inference, which is judged by its output anyway.
    """
    if not seen.checked or not tells(seen):
        return None
    numbers, times, trained, sink = [], 0, False, None
    usual = _usual(seen)
    for entry in reversed(seen.trace.steps):
        if _is_empty(entry):
            continue
        count, whole, first = _failed(seen, entry, usual) if is_left_out(entry) else (0, False, None)
        if count:
            numbers.append(int(entry["step"]))
            times += count
            trained = trained or bool(entry.get("left_out")) or is_nonfinite(entry.get("loss"))
            sink = sink if first is None else first
        if not whole:
            break
    return GivenUp(tuple(reversed(numbers)), times, trained, sink) if times else None


def as_given_up(trace: Trace) -> Step | None:
    """The ledger of the last step of a trace, with the number of its failed rounds, if all of it was given up."""
    found = given_up(Seen.of(trace))
    now = trace.steps[-1]
    if found is None or not is_left_out(now) or now["step"] not in found.steps:
        return None
    own = found if len(found.steps) == 1 else None
    return {**now, "nonfinite": 1, "left_out": own.times if own is not None else max(1, now.get("left_out") or 0)}


def bad_outputs(seen: Seen, step: int) -> list[int]:
    """The nonfinite rows, masks aside, that calls from outside put out in a step."""
    rows = (row for call in seen.outermost(step) for row in call.outputs)
    return sorted(row for row in rows if seen.bad[row] and not seen.mark[row])


def differentiated(seen: Seen, step: int) -> bool:
    """Whether a backward was seen in the step."""
    return bool(seen.rows(step, Role.LOSS, Role.GRAD, Role.GRAD_OUTPUT).size)


def tells(seen: Seen) -> bool:
    """Whether no step was trained to a finite loss beside such outputs, as where padding is left out of the loss."""
    losses = np.flatnonzero((seen.role == Role.LOSS) & ~seen.bad)
    return not any(_was_bad_before(seen, int(loss)) for loss in losses)


def _was_bad_before(seen: Seen, loss: int) -> bool:
    """Whether the last call of the model before a loss, which it was made of, put out something nonfinite."""
    step = int(seen.step[loss])
    if not seen.bad[seen.bounds(step)[0] : loss].any():
        return False
    begin = max((row for row in _calls(seen, step) if row < loss), default=loss)
    return any(begin <= row < loss for row in bad_outputs(seen, step))


def _is_empty(entry: Mapping[str, Any]) -> bool:
    """What was put on record after the last step, with nothing else in it."""
    return is_left_out(entry) and not any(entry.get(key) for key in ("events", "not_kept", "left_out", "loss"))


def _usual(seen: Seen) -> int | None:
    """The calls of the model in a step that was trained; the fewest, as an evaluation may stand in the same step."""
    trained = (int(entry["step"]) for entry in seen.ledger.values() if entry.get("attempted"))
    counts = [len(list(_calls(seen, step))) for step in trained]
    return min((count for count in counts if count), default=None)


def _calls(seen: Seen, step: int) -> Iterator[int]:
    """The first row behind which each call of the model from outside returned."""
    for call in seen.outermost(step):
        if not call.foreign and call.outputs:
            yield min(call.outputs)


def _failed(seen: Seen, entry: Mapping[str, Any], usual: int | None) -> tuple[int, bool, int | None]:
    """The failed rounds at the end of a step, whether these are all of it, and the first row that shows one."""
    step = int(entry["step"])
    begins = sorted(_calls(seen, step))
    cleared = int(entry.get("left_out") or 0)
    if not begins or is_nonfinite(entry.get("loss")):
        thrown = bool(entry.get("nonfinite") and (cleared or entry.get("contained"))) and not begins
        told = is_nonfinite(entry.get("loss")) or thrown
        bad = bad_outputs(seen, step)
        return (max(1, cleared), True, bad[0] if bad else None) if told else (0, False, None)
    bad, last = bad_outputs(seen, step), seen.bounds(step)[1]
    size = math.ceil(len(begins) / cleared) if cleared else usual or len(begins)
    count, first, end = 0, None, last
    for begin in begins[-size::-size] or begins[:1]:
        held = [row for row in bad if begin <= row < end]
        if not held:
            return count, False, first
        count, first, end = count + 1, held[0], begin
    return count, True, first
