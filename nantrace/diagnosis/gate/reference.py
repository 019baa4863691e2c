"""The rules of a gate that hold a run against a reference: losses, gradient norms, seconds a step. Pure.

Compared are a median and an upper quantile: two numbers of a distribution, which say nothing of how good a model is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nantrace.diagnosis.gate.window import Row, Thresholds, Window, is_number, number
from nantrace.events import Trace

#: What changes how long a step takes when it is recorded in detail.
_RECORDING = ("stats", "modules", "depth")


class Point(NamedTuple):
    """A value of one step, and how many updates had been committed by then."""

    at: int
    step: int
    value: float


class Deviation(NamedTuple):
    """One number of two distributions, and how far they lie apart in percent of the reference."""

    name: str
    value: float
    reference: float
    percent: float


@dataclass(frozen=True)
class Compared:
    """What a comparison found.

    Attributes:
        deviations: median first.
        over: the updates that were compared, in words.
        beyond: steps whose value lies above what the upper quantile allows.
        largest: the largest value with its step.
        unseen: why nothing could be compared; then the rest is empty.
    """

    deviations: tuple[Deviation, ...] = ()
    over: str = ""
    beyond: tuple[int, ...] = ()
    largest: Point | None = None
    unseen: str = ""


def losses(a: Window, reference: Window, thresholds: Thresholds) -> Compared:
    """Losses of the updates that both committed."""
    a, reference, why = _aligned(a, reference)
    if why:
        return Compared(unseen=why)
    return _compared((a, reference), _loss, thresholds, thresholds.loss_tolerance, "losses")


def norms(a: Window, reference: Window, thresholds: Thresholds) -> Compared:
    """Norms of the gradients, without the scale; before clipping where that is known of both."""
    a, reference, why = _aligned(a, reference)
    if why:
        return Compared(unseen=why)
    clipped = [any("clip" in row for row in window.rows) for window in (a, reference)]
    measure: Callable[[Row], Any] = _norm
    if any(clipped):
        before = [_points(window, _before_clipping) for window in (a, reference)]
        if min(map(len, before)) >= thresholds.fewest:
            measure = _before_clipping
        elif not all(clipped):
            return Compared(unseen="only one of the two runs clipped its gradients before their norm was read")
    return _compared((a, reference), measure, thresholds, thresholds.norm_tolerance, "gradient norms")


def seconds(
    a: tuple[Trace, Window], reference: tuple[Trace, Window], thresholds: Thresholds
) -> tuple[str, list[float], list[float]]:
    """Seconds of the steps of both that can be compared; the first is why none can.

    Recording in detail takes time of its own: steps with the ledger alone are compared with their like, else detailed
    ones that were recorded alike.
    """
    plain = [_seconds(*side, detailed=False) for side in (a, reference)]
    if min(map(len, plain)) >= thresholds.fewest:
        return "", plain[0], plain[1]
    detailed = [_seconds(*side, detailed=True) for side in (a, reference)]
    if min(map(len, detailed)) < thresholds.fewest:
        counts = " and ".join(f"{len(d):,} in detail, {len(p):,} not" for p, d in zip(plain, detailed, strict=True))
        return f"the two hold too few steps recorded alike ({counts}; {thresholds.fewest} of a kind are asked)", [], []
    recorded = [_recording(trace) for trace, _ in (a, reference)]
    if recorded[0] != recorded[1]:
        return f"the two were recorded in different detail ({_differing(*recorded)}), which takes its time", [], []
    return "", detailed[0], detailed[1]


def _aligned(a: Window, reference: Window) -> tuple[Window, Window, str]:
    """Both with updates counted by the same optimizers; the last is why there are none such.

    Where some optimizers' state tells how many updates a run had committed before its trace, only these count: of the
    others, in the same run, it is not known.
    """
    sides = (a, reference)
    resumed = [side.resumed for side in sides if side.resumed]
    if not resumed:
        return a, reference, ""
    names = sorted(frozenset.intersection(*resumed))
    if not names or any(name not in side.totals for name in names for side in sides):
        said = " and ".join(", ".join(sorted(side.totals)) or "one optimizer" for side in sides)
        return a, reference, f"nothing counts the updates of both runs alike (the optimizers are {said})"
    return a.counted_by(names), reference.counted_by(names), ""


def _compared(
    sides: tuple[Window, Window], measure: Callable[[Row], Any], thresholds: Thresholds, tolerance: float, what: str
) -> Compared:
    a, b = (_points(side, measure) for side in sides)
    if not a or not b:
        return Compared(unseen=f"the {'trace' if not a else 'reference'} holds no finite {what} of committed updates")
    low, high = max(a[0].at, b[0].at), min(a[-1].at, b[-1].at)
    mine, its = ([point for point in points if low <= point.at <= high] for points in (a, b))
    if min(len(mine), len(its)) < thresholds.fewest:
        return Compared(
            unseen=f"{len(mine):,} {what} of committed updates {a[0].at:,} to {a[-1].at:,} and {len(its):,} of the "
            f"reference's {b[0].at:,} to {b[-1].at:,} belong to the same updates; {thresholds.fewest} are asked"
        )
    found, limit = _deviations([p.value for p in mine], [p.value for p in its], thresholds.quantile, tolerance)
    beyond = tuple(point.step for point in mine if point.value > limit)
    since = " of each trace" if not any(side.counts_the_run for side in sides) else ""
    return Compared(found, f"{low:,} to {high:,}{since}", beyond, max(mine, key=lambda point: point.value))


def _deviations(
    values: list[float], reference: list[float], quantile: float, tolerance: float
) -> tuple[tuple[Deviation, ...], float]:
    """Median and upper quantile, and the largest value that the tolerance allows the latter.

    The distance is taken in percent of the reference's own number, or of the spread of its upper half where that is
    larger: of a loss that passes through zero, a percentage of the loss would mean nothing.
    """
    probabilities = (0.5, quantile)
    (median, upper), (median_, upper_) = np.quantile(values, probabilities), np.quantile(reference, probabilities)
    spread = float(upper_ - median_)
    found = tuple(
        Deviation(name, float(value), float(its), _percent(float(value - its), max(abs(float(its)), spread)))
        for name, value, its in (("median", median, median_), (f"{100 * quantile:g}% quantile", upper, upper_))
    )
    return found, float(upper_) + tolerance / 100 * max(abs(float(upper_)), spread)


def _percent(distance: float, size: float) -> float:
    if size == 0:
        return 0.0 if distance == 0 else math.copysign(math.inf, distance)
    return 100 * distance / size


def _points(window: Window, measure: Callable[[Row], Any]) -> list[Point]:
    values = ((row, at, measure(row)) for row, at in window.committed)
    return [Point(at, number(row), value) for row, at, value in values if is_number(value) and math.isfinite(value)]


def _loss(row: Row) -> Any:
    return row.get("loss")


def _norm(row: Row) -> Any:
    return row.get("gradient_norm")


def _before_clipping(row: Row) -> Any:
    """None of a step of which it is not known whether it was clipped."""
    if "gradient_read" not in row:
        return None
    return row.get("gradient_norm_before_clipping", row.get("gradient_norm"))


def _seconds(trace: Trace, window: Window, detailed: bool) -> list[float]:
    alone = trace.meta.get("stats") == "none"
    rows = [row for row, _ in window.committed if detailed == (not alone and row.get("detailed") is not False)]
    return [float(row["seconds"]) for row in rows if is_number(row.get("seconds")) and math.isfinite(row["seconds"])]


def _recording(trace: Trace) -> Mapping[str, str]:
    """In words: a list in memory is a tuple when it comes out of a file."""
    told = {key: trace.meta.get(key) for key in _RECORDING}
    words = {key: ", ".join(v) if isinstance(v, (list, tuple)) else str(v) for key, v in told.items()}
    return {**words, "ops": "no" if trace.lineage is None else "yes"}


def _differing(a: Mapping[str, str], b: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {a[key]} and {b[key]}" for key in a if a[key] != b[key])
