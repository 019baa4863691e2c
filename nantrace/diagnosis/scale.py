"""What the scale of a gradient scaler tells over the steps: it finds its level, probes, falls, or is not to blame.

A skipped update is how a scaler works, not a fault. Which of the patterns it belongs to is told with the numbers that
show it. Pure; reads the ledger alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from nantrace.diagnosis.observation import Observation
from nantrace.events import Trace
from nantrace.steps import had_scale, is_nonfinite, likely, rates

Rows = Sequence[Mapping[str, Any]]

_PERSISTENT = 4  # skips in a row that are no probing any more
_CALIBRATION = 20  # halvings that a scale may need: from 65,536 it has then gone far below 1
_SOON = 3  # steps after a rise of the learning rate
_RISE = 1.5
_WARMUP = 4  # rises in a row that make a warm-up


def readings(trace: Trace) -> tuple[Observation, ...]:
    """How the scale is to be read; empty without a gradient scaler."""
    rows = [row for row in likely(trace.steps, had_scale) if _scale(row) is not None and row.get("attempted")]
    if not rows:
        return ()
    found = [*_outside_the_scale(rows), *_runs(rows), *_same_batches(rows), *_onset(rows)]
    return tuple(found)


def _runs(rows: Rows) -> Iterator[Observation]:
    runs = _skipped_runs(rows)
    first = runs[0] if runs and runs[0][0] == 0 and _is_beginning(rows[0]) else None
    if first is not None and len(first) <= _CALIBRATION and first[-1] + 1 < len(rows) and _end(rows, first) >= 1:
        yield _calibration(rows, first)
        runs = runs[1:]
    lasting = [run for run in runs if len(run) >= _PERSISTENT or _end(rows, run) < 1]
    # A loss that is nonfinite before it is scaled explains its skip without the scale.
    single = [run for run in runs if not any(is_nonfinite(rows[place].get("loss")) for place in run)]
    if lasting:
        yield _persistent(rows, max(lasting, key=len))
    elif len(single) == 1 and len(single[0]) > 1 and single[0][-1] == len(rows) - 1:
        yield _last(rows, single[0])
    elif single:
        yield _occasional(rows, single)


def _calibration(rows: Rows, run: list[int]) -> Observation:
    return Observation(
        "calibration",
        _numbers(rows, run),
        f"{_first(len(run))} skipped while the scale fell from {_scale(rows[0]):,.6g} to "
        f"{_end(rows, run):,.6g}; the next was committed.",
        (),
        "A scaler begins high and finds its level: this is how it works.",
        "Nothing to do, unless updates are skipped later as well.",
    )


def _first(count: int) -> str:
    return "The first update was" if count == 1 else f"The first {count:,} updates were"


def _occasional(rows: Rows, runs: list[list[int]]) -> Observation:
    skipped = [place for run in runs for place in run]
    grown = [place for place in skipped if any((_after(row) or 0) > (_scale(row) or 0) for row in rows[:place])]
    evidence = (f"The scale had grown before {len(grown)} of these.",) if grown else ()
    return Observation(
        "occasional",
        _numbers(rows, skipped),
        f"1 of {len(rows):,} updates was skipped."
        if len(skipped) == 1
        else f"{len(skipped)} of {len(rows):,} updates were skipped, with committed updates in between.",
        evidence,
        "A scaler that grows its scale until a gradient overflows skips now and then: a skip happened, no more.",
        "The share of skipped updates is worth watching; it does not say that the model is broken.",
    )


def _last(rows: Rows, run: list[int]) -> Observation:
    return Observation(
        "occasional",
        _numbers(rows, run),
        f"The last {len(run)} of {len(rows):,} updates were skipped, one after the other.",
        (),
        "A scaler may skip a few in a row before it has found its level.",
        "Whether the next would have been committed is not seen: trace more steps.",
    )


def _persistent(rows: Rows, run: list[int]) -> Observation:
    goes_on = run[-1] == len(rows) - 1
    return Observation(
        "persistent_overflow",
        _numbers(rows, run),
        f"{len(run)} updates in a row were skipped while the scale fell from {_scale(rows[run[0]]):,.6g} to "
        f"{_end(rows, run):,.6g}" + (", up to the end of the trace." if goes_on else "."),
        (f"No scale above {_end(rows, run):,.6g} was small enough.",),
        "The gradients stayed nonfinite whatever the scale: it is not the scale that made them so.",
        "It leaves open where the first nonfinite gradient was born: a step in float32 shows if it is range alone.",
    )


def _outside_the_scale(rows: Rows) -> Iterator[Observation]:
    """A loss that is nonfinite before it is multiplied with a scale."""
    bad = [place for place, row in enumerate(rows) if is_nonfinite(row.get("loss"))]
    if not bad:
        return
    first = rows[bad[0]]
    before = [_scale(row) for row in rows[max(0, bad[0] - _PERSISTENT) : bad[0] + 1]]
    stable = len(set(before)) == 1
    evidence = (f"Up to step {first['step']} the scale stood at {before[0]:,.6g}.",) if stable else ()
    yield Observation(
        "nan_at_stable_scale" if stable else "nonfinite_loss",
        _numbers(rows, bad),
        f"The loss of step {first['step']} was {first['loss']} before it was scaled.",
        evidence,
        "This is no loss-scale problem: a smaller scale leaves the loss as it is.",
        "It leaves open where in the forward pass the value was born.",
    )


def _same_batches(rows: Rows) -> Iterator[Observation]:
    """Batches that were skipped each time, while others were not."""
    seen, skipped = Counter[str](), Counter[str]()
    for row in rows:
        if row.get("batch_id") is not None:
            seen[str(row["batch_id"])] += 1
            skipped[str(row["batch_id"])] += bool(row.get("skipped"))
    always = [batch for batch, count in skipped.items() if count >= 2 and count == seen[batch]]
    hits, total = sum(skipped[batch] for batch in always), sum(skipped.values())
    if not always or 2 * hits < total or 2 * total > sum(seen.values()):
        return
    places = [place for place, row in enumerate(rows) if row.get("skipped") and str(row.get("batch_id")) in always]
    yield Observation(
        "same_batches",
        _numbers(rows, places),
        f"{hits} of {total} skipped updates came with {numbered_batches(always)}, which were skipped every time.",
        (f"{sum(seen.values()) - total:,} updates with other batches were committed.",),
        "The skips go with the data, not with the time.",
        "Check these batches for extreme or nonfinite values, then a step with each of them in float32.",
    )


def numbered_batches(batches: Sequence[str]) -> str:
    """ "batch 3", "batches 3, 5, ..."."""
    if len(batches) == 1:
        return f"batch {batches[0]}"
    return f"batches {', '.join(batches[:4])}{', ...' if len(batches) > 4 else ''}"


def _onset(rows: Rows) -> Iterator[Observation]:
    """The first skip after committed updates, where the learning rate had just risen or ended its rise."""
    start = next((place for place, row in enumerate(rows) if not row.get("skipped")), len(rows))
    skip = next((place for place in range(start, len(rows)) if rows[place].get("skipped")), None)
    if skip is None:
        return
    highest = [_rate(row) for row in rows[: skip + 1]]
    for place in range(max(1, skip - _SOON), skip + 1):
        before, now = highest[place - 1], highest[place]
        if before and now and now >= _RISE * before:
            yield _onset_at(rows, skip, "onset_at_rise", f"rose from {before:.4g} to {now:.4g} at step ", place)
            return
    rises = _warmup_ends(highest, skip)
    if rises is not None:
        yield _onset_at(rows, skip, "onset_at_end_of_warmup", f"ended its rise at {highest[rises]:.4g} in step ", rises)


def _onset_at(rows: Rows, skip: int, kind: str, what: str, place: int) -> Observation:
    return Observation(
        kind,
        _numbers(rows, [skip]),
        f"The first skip after committed updates was in step {rows[skip]['step']}; the learning rate {what}"
        f"{rows[place]['step']}.",
        (),
        "The two lie close together in time.",
        "That one caused the other is not shown: run the same steps with the smaller learning rate to see.",
    )


def _warmup_ends(highest: list[float | None], skip: int) -> int | None:
    """The place where the learning rate is highest after a steady rise, if the skip follows soon."""
    for place in range(max(_WARMUP, skip - _SOON), skip + 1):
        rise = highest[place - _WARMUP : place + 1]
        steady = all(a is not None and b is not None and b > a for a, b in pairwise(rise))
        after = highest[place + 1 : skip + 1]
        if steady and after and all(rate is not None and rate <= (highest[place] or 0) for rate in after):
            return place
    return None


def _skipped_runs(rows: Rows) -> list[list[int]]:
    """Places of updates that were skipped one after another."""
    runs: list[list[int]] = []
    for place, row in enumerate(rows):
        if not row.get("skipped") or row.get("committed"):
            continue
        if runs and runs[-1][-1] == place - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def _is_beginning(row: Mapping[str, Any]) -> bool:
    return not (row.get("committed_total") or 0) - int(row.get("committed") or 0)


def _numbers(rows: Rows, places: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(rows[place]["step"]) for place in places)


def _scale(row: Mapping[str, Any]) -> float | None:
    value = row.get("scale_before")
    return float(value) if isinstance(value, (int, float)) else None


def _after(row: Mapping[str, Any]) -> float | None:
    value = row.get("scale_after")
    return float(value) if isinstance(value, (int, float)) else None


def _end(rows: Rows, run: Sequence[int]) -> float:
    """The scale that a run of skips left."""
    after = _after(rows[run[-1]])
    return after if after is not None else _scale(rows[run[-1]]) or math.nan


def _rate(row: Mapping[str, Any]) -> float | None:
    """The highest finite learning rate of a step."""
    finite = (float(rate) for rate in rates(row) if isinstance(rate, (int, float)) and math.isfinite(rate))
    return max(finite, default=None)
