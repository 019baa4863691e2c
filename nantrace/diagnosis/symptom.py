"""What was noticed, before anybody asks why: a spike, a nonfinite tensor, a skipped update, a bad batch, an exception.

Four observations that are easily taken for one another. Each is told with what it proves and what it leaves open. Pure;
blames nothing.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nantrace.diagnosis.observation import Observation, numbered
from nantrace.diagnosis.scale import readings
from nantrace.diagnosis.stalled import stalled
from nantrace.diagnosis.verdict import Status
from nantrace.events import Role, Trace, distinct, nonfinite_rows
from nantrace.steps import (
    by_number,
    figures,
    had_nonfinite_numbers,
    is_nonfinite,
    likely,
    shows_nonfinite,
    told,
    was_skipped,
)

_FEWEST, _WINDOW = 8, 128  # finite losses before a step that make a distribution, and the most that count
_BEYOND = 3.0  # spreads above the upper decile
_SHARE = 0.1  # of the median: no spread is taken for less, or a flat curve would spike at every step
#: What is left open of nonfinite values, beside a verdict that may know it.
_DAMAGE: dict[Status | None, str] = {
    "fault": "The verdict says where it began and what it reached.",
    "contained": "No harm by it was seen; the verdict says what is known of that.",
    "expected": "No harm by it was seen.",
}
_OPEN = "It does not prove damage: a mask may have put it there, or a skipped update thrown it away."


def symptoms(trace: Trace, status: Status | None = None) -> tuple[Observation, ...]:
    """Everything that stands out in the ledger and the events of a trace.

    Args:
        trace: what was recorded.
        status: that of the verdict beside which they are shown: what it knows of damage is not left open.

    Returns:
        The exception that ended the block, nonfinite values, bad batches, skipped updates and how to read the scale,
        spikes of the loss, and weights that stand still, in this order. Empty for a run in which nothing stands out.
    """
    found = [
        *_raised(trace),
        *_nonfinite(trace, status),
        *_bad_batches(trace),
        *_skips(trace),
        *readings(trace),
        *_spikes(trace),
        *stalled(trace),
    ]
    return tuple(found)


def _raised(trace: Trace) -> Iterator[Observation]:
    raised = trace.raised
    if raised is None:
        return
    broken_off = () if raised.step is None else (raised.step,)
    rows = by_number(trace.steps, broken_off).values()
    bad = not set().union(*_bad_steps(trace)).isdisjoint(broken_off) or any(map(shows_nonfinite, rows))
    yield Observation(
        "raised",
        broken_off,
        f"The block was ended by {raised.said}.",
        ("A nonfinite value had been seen in that step.",) if bad else ("No nonfinite value had been seen in it.",),
        "It proves that some code, perhaps a check or a logger, stopped there.",
        "It does not prove that a tensor was nonfinite, nor that the code which raised is where it began.",
    )


def _nonfinite(trace: Trace, status: Status | None) -> Iterator[Observation]:
    rows = [row for row in likely(trace.steps, had_nonfinite_numbers) if "step" in row and shows_nonfinite(row)]
    outside, of_ops = _bad_steps(trace)
    outside |= {int(row["step"]) for row in rows}
    inside = sorted(of_ops - outside)
    bad = sorted(outside) or inside
    if not bad:
        return
    losses = [int(row["step"]) for row in rows if is_nonfinite(row.get("loss"))]
    evidence = (f"The loss was nonfinite in {numbered(losses)}.",) if losses else ("No loss was nonfinite.",)
    yield Observation(
        "nonfinite",
        tuple(bad),
        f"A nonfinite value was seen in {numbered(bad)}.",
        (*evidence, *_inside_alone(inside, bool(outside))),
        "It proves that a NaN or an infinity existed.",
        _DAMAGE.get(status, _OPEN),
    )


def _inside_alone(steps: Sequence[int], others: bool) -> tuple[str, ...]:
    """Ops compute with infinities that no module puts out: of such steps only a trace of ops knows."""
    if not steps:
        return ()
    where = f"In {numbered(steps)} only" if others else "Only"
    return (f"{where} results of single ops held one, and no output of a module, gradient or state.",)


def _bad_batches(trace: Trace) -> Iterator[Observation]:
    for row in told(trace.steps):
        found = row.get("batch_check") or ()
        if found:
            batch = "" if row.get("batch_id") is None else f" (batch {row['batch_id']})"
            yield Observation(
                "bad_batch",
                (int(row["step"]),),
                f"The batch of step {row['step']}{batch} stands out: {_finding(found[0])}.",
                tuple(f"{_finding(each)}." for each in found[1:]),
                "It proves what the batch held when the step ended.",
                "It does not prove that this made the step fail: put the batch through a step in float32 to see.",
            )


def _finding(found: Mapping[str, Any]) -> str:
    samples = found.get("samples") or ()
    where = f" in {numbered(list(samples), 'sample')}" if samples else ""
    return f"{found.get('tensor')} {found.get('finding')}{where}"


def _skips(trace: Trace) -> Iterator[Observation]:
    rows = [row for row in likely(trace.steps, was_skipped) if row.get("skipped")]
    if not rows:
        return
    attempted = sum(int(count or 0) for _, count in figures(trace.steps, "attempted"))
    skipped = sum(int(row["skipped"]) for row in rows)
    names = list(dict.fromkeys(str(name) for row in rows for name in row.get("skipped_by") or ()))
    by = (f"Nonfinite gradients: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}.",) if names else ()
    yield Observation(
        "skipped_update",
        tuple(int(row["step"]) for row in rows),
        f"{skipped:,} of {attempted:,} attempted updates were skipped.",
        by,
        "It proves that a scaled gradient was nonfinite and that this update left the weights as they were.",
        "It does not prove that the model is broken: a scale that is too large for float16 does the same.",
    )


def _spikes(trace: Trace) -> Iterator[Observation]:
    before: deque[float] = deque()  # the last losses, in order of time and of size
    ordered: list[float] = []
    spikes: list[tuple[int, float, float, float]] = []
    for step, loss in figures(trace.steps, "loss"):
        if not isinstance(loss, (int, float)) or not math.isfinite(loss):
            continue
        if len(ordered) >= _FEWEST:
            low, median, high = (_quantile(ordered, share) for share in (0.1, 0.5, 0.9))
            if loss > high + _BEYOND * max(high - low, _SHARE * abs(median)):
                spikes.append((int(step or 0), float(loss), median, high))
        if len(before) == _WINDOW:
            del ordered[bisect.bisect_left(ordered, before.popleft())]
        before.append(float(loss))
        bisect.insort(ordered, float(loss))
    if not spikes:
        return
    step, loss, median, high = max(spikes, key=lambda spike: spike[1] - spike[3])
    skipped = by_number(trace.steps, [step]).get(step, {}).get("skipped")
    yield Observation(
        "loss_spike",
        tuple(spike[0] for spike in spikes),
        f"The loss of step {step} was {loss:.4g}; before it the median was {median:.4g}, nine in ten below {high:.4g}.",
        ("The update of that step was skipped.",) if skipped else (),
        "It proves that this loss lies far outside what this run's losses were before.",
        "It is finite and proves no overflow: a hard batch, a learning rate or a bad label does the same.",
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The quantile of sorted numbers, between two of them in proportion."""
    place = share * (len(ordered) - 1)
    below = int(place)
    low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    return low + (place - below) * (high - low)


def _bad_steps(trace: Trace) -> tuple[set[int], set[int]]:
    """Steps with a nonfinite row that is not an op's, and those with one that is."""
    bad = nonfinite_rows(trace.events)
    ops = [number for number, site in enumerate(trace.sites) if site.role is Role.OP]
    of_op = np.isin(trace.events["site"], ops)
    outside, inside = (set(map(int, distinct(trace.events["step"][bad & rows]))) for rows in (~of_op, of_op))
    return outside, inside
