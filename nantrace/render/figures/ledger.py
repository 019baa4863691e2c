"""Loss, gradient, scale and skips over the steps, attempted and committed updates apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nantrace.events import Phase, Role, Trace, nonfinite_rows
from nantrace.render.figures.numbers import CHUNK, Flags, Floats, Rows, cut, largest, steps_of
from nantrace.render.wording import plural

MOST_POINTS = 400


@dataclass(frozen=True)
class Ledger:
    """One point a step, or for several consecutive ones.

    Attributes:
        steps: number of the (first) step of each point.
        loss: NaN where it was not recorded or not finite; `loss_bad`: it was not finite.
        gradient: without the scale: the norm over all gradients, or where the ledger holds no norms the largest
            finite magnitude of one after backward. `gradient_bad`: it was not finite.
        gradient_name: which of the two.
        scale: of the gradient scaler before the step; NaN without one.
        attempted, committed, skipped: how many updates.
        note: what was joined or is missing, as a sentence; empty if nothing.
    """

    steps: Rows
    loss: Floats
    loss_bad: Flags
    gradient: Floats
    gradient_bad: Flags
    gradient_name: str
    scale: Floats
    attempted: Rows
    committed: Rows
    skipped: Rows
    note: str

    @property
    def is_empty(self) -> bool:
        numbers = np.concatenate([self.loss, self.gradient, self.scale])
        return not (np.isfinite(numbers).any() or np.any([self.loss_bad, self.gradient_bad, self.attempted > 0]))


def ledger(trace: Trace) -> Ledger:
    """The ledger of a whole trace; without one, the steps that hold events and their gradients."""
    rows: list[Mapping[str, Any]] = list(trace.steps) or [{"step": int(step)} for step in steps_of(trace)]
    steps = np.array([int(row.get("step", place)) for place, row in enumerate(rows)], dtype=np.int64)
    loss, scale = _column(rows, "loss"), _column(rows, "scale_before")
    gradient, gradient_bad = _gradients(trace, steps)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        gradient = np.where(scale > 0, gradient / scale, gradient)
    norm = _column(rows, "gradient_norm")
    has_norm = _given(rows, "gradient_norm")
    if has_norm.any():
        gradient, gradient_bad = (
            np.where(np.isfinite(norm), norm, np.nan),
            gradient_bad | (has_norm & ~np.isfinite(norm)),
        )
    begins = cut(len(rows), MOST_POINTS)
    counts = [np.array([int(row.get(name) or 0) for row in rows], dtype=np.int64) for name in _COUNTS]
    attempted, committed, skipped = (_join(np.add, count, begins) for count in counts)
    return Ledger(
        steps=steps[begins] if len(rows) else steps,
        loss=_join(np.fmax, np.where(np.isfinite(loss), loss, np.nan), begins),
        loss_bad=_join(np.logical_or, ~np.isfinite(loss) & _given(rows, "loss"), begins),
        gradient=_join(np.fmax, gradient, begins),
        gradient_bad=_join(np.logical_or, gradient_bad, begins),
        gradient_name="gradient norm, unscaled" if has_norm.any() else "largest gradient magnitude, unscaled",
        scale=_join(np.fmin, scale, begins),
        attempted=attempted,
        committed=committed,
        skipped=skipped,
        note=_note(trace, len(rows), len(begins)),
    )


_COUNTS = ("attempted", "committed", "skipped")


def _note(trace: Trace, steps: int, points: int) -> str:
    said = [] if trace.steps or not steps else ["The trace holds no ledger: only gradients are shown."]
    if points < steps:
        joined = f"{plural(steps, 'step')} in {plural(points, 'point')}"
        said.append(f"{joined}: the largest loss and gradient and the smallest scale of each.")
    return " ".join(said)


def _join(how: Any, values: Any, begins: Rows) -> Any:
    return how.reduceat(values, begins) if len(values) else values


def _given(rows: list[Mapping[str, Any]], name: str) -> Flags:
    return np.array([isinstance(row.get(name), (int, float)) for row in rows], dtype=bool)


def _column(rows: list[Mapping[str, Any]], name: str) -> Floats:
    return np.array([_number(row.get(name)) for row in rows], dtype=np.float64)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _gradients(trace: Trace, steps: Rows) -> tuple[Floats, Flags]:
    """Largest magnitude of the gradients that backward left, by step, and whether any was nonfinite."""
    size, bad = np.full(len(steps), np.nan), np.zeros(len(steps), dtype=bool)
    sites = [
        number
        for number, site in enumerate(trace.sites)
        if site.role is Role.GRAD and site.phase in (Phase.BACKWARD, Phase.POST_BACKWARD)
    ]
    chosen = np.zeros(len(trace.sites) or 1, dtype=bool)
    chosen[sites] = True
    for start in range(0, len(trace), CHUNK):
        events = trace.events[start : start + CHUNK]
        events = events[chosen[events["site"]]]
        place = np.searchsorted(steps, events["step"])
        known = steps[np.minimum(place, len(steps) - 1)] == events["step"]
        np.fmax.at(size, place[known], largest(events[known]))
        np.logical_or.at(bad, place[known], nonfinite_rows(events[known]))
    return size, bad
