"""The ledger as SVG."""

from __future__ import annotations

import math

import numpy as np

from nantrace.events import Trace
from nantrace.render.figures.ledger import Ledger, ledger
from nantrace.render.figures.numbers import Floats
from nantrace.render.svg.marks import (
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    LogAxis,
    curve,
    legend,
    mark,
    names_below,
    picture,
    vertical,
    words,
)

_PLOT = 200  # height
_MARKED = 60  # points that are marked one by one on their lines
_AXIS = 84  # width of the right axis, if there is a scale


def ledger_svg(trace: Trace) -> tuple[str, str]:
    """The picture and the note below it; both empty of a single step, and if the trace holds nothing of a ledger."""
    shown = ledger(trace)
    if shown.is_empty or len(shown.steps) < 2:
        return "", ""
    bottom, scaled = TOP + _PLOT, bool(np.isfinite(shown.scale).any())
    right = WIDTH - RIGHT - (_AXIS if scaled else 0)
    x = np.linspace(LEFT + 8, right - 8, len(shown.steps))
    values = np.abs(np.concatenate([shown.loss, shown.gradient]))
    axis = LogAxis(*_window(values), TOP + 30, bottom - 24)
    parts = [axis.ticks() if (values > 0).any() else "", vertical("loss, gradient", TOP, bottom)]
    parts.append(curve(zip(x, map(axis.at, np.abs(shown.loss)), strict=True), "curve"))
    parts.append(curve(zip(x, map(axis.at, shown.gradient), strict=True), "curve dashed"))
    parts += _points(shown, x, axis)
    parts += _scale(shown, x, right, bottom) if scaled else []
    parts += _updates(shown, x, bottom)
    parts += [
        _legend(shown, scaled),
        *names_below([*map(str, shown.steps.tolist())], x.tolist(), "step", (x[0] + x[-1]) / 2, bottom),
    ]
    told = f"Loss, gradient, scale and updates of {len(shown.steps)} points of steps"
    return picture(parts, bottom + 40, told), _note(shown)


def _note(shown: Ledger) -> str:
    negative = "Of a negative loss the magnitude is shown." if (shown.loss < 0).any() else ""
    return f"{shown.note} {negative}".strip()


def _window(values: Floats) -> tuple[float, float]:
    known = values[np.isfinite(values) & (values > 0)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.1, 10.0)
    return max(low / 3, 1e-307), min(high * 3, 1e307)


def _points(shown: Ledger, x: Floats, axis: LogAxis) -> list[str]:
    parts = []
    for place, step in enumerate(shown.steps):
        loss, gradient = shown.loss[place], shown.gradient[place]
        for value, name, shape in ((loss, "loss", "circle"), (gradient, shown.gradient_name, "square")):
            y = axis.at(abs(value))
            if not math.isnan(y) and len(shown.steps) <= _MARKED:
                parts.append(mark(shape, x[place], y, "point", f"step {step}: {name} {value:.4g}"))
        if shown.loss_bad[place]:
            parts.append(mark("cross", x[place], TOP + 7, "stroke", f"step {step}: loss not finite"))
        if shown.gradient_bad[place]:
            parts.append(mark("triangle", x[place], TOP + 20, "bad", f"step {step}: gradient not finite"))
    return parts


def _scale(shown: Ledger, x: Floats, right: float, bottom: float) -> list[str]:
    low, high = _window(shown.scale)
    axis = LogAxis(low, high, TOP + 30, bottom - 24)
    ys = [axis.at(value) for value in shown.scale]
    stairs = [point for n, y in enumerate(ys) for point in ((x[n], ys[n - 1] if n else y), (x[n], y))]
    held = sorted({float(np.nanmin(shown.scale)), float(np.nanmax(shown.scale))})
    marks = [words(right + 6, axis.at(value) + 4, _scale_name(value), "small") for value in held if value > 0]
    return [curve(stairs, "curve dotted"), *marks, vertical("scale", TOP, bottom, WIDTH - 6)]


def _scale_name(value: float) -> str:
    return f"{value:,.0f}" if value < 1e9 and value == int(value) else f"{value:.4g}"


def _updates(shown: Ledger, x: Floats, bottom: float) -> list[str]:
    parts = []
    for place, step in enumerate(shown.steps):
        if shown.skipped[place]:
            parts.append(mark("cross", x[place], bottom - 8, "warn", f"step {step}: update skipped"))
        elif shown.committed[place]:
            parts.append(mark("bar", x[place], bottom - 8, "stroke", f"step {step}: update committed"))
        else:
            parts.append(mark("dot", x[place], bottom - 8, "stroke", f"step {step}: no update attempted"))
    return parts


def _legend(shown: Ledger, scaled: bool) -> str:
    marked = len(shown.steps) <= _MARKED
    loss, gradient = ("circle", "point"), ("square", "point")
    if not marked:
        loss, gradient = ("dash", "curve"), ("dash", "curve dashed")
    entries = [(*loss, "loss")] if np.isfinite(shown.loss).any() else []
    entries += [(*gradient, shown.gradient_name)] if np.isfinite(shown.gradient).any() else []
    entries += [("dash", "curve dotted", "scale")] if scaled else []
    entries += [("cross", "stroke", "loss not finite")] if shown.loss_bad.any() else []
    entries += [("triangle", "bad", "gradient not finite")] if shown.gradient_bad.any() else []
    entries += [("bar", "stroke", "update committed")] if shown.committed.any() else []
    entries += [("cross", "warn", "update skipped")] if shown.skipped.any() else []
    return legend(entries)
