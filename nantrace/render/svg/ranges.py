"""Ranges along one step, as SVG."""

from __future__ import annotations

import math

from nantrace.diagnosis.verdict import Verdict
from nantrace.events import Trace
from nantrace.render.figures.ranges import Ranges, ranges
from nantrace.render.svg.marks import (
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    LogAxis,
    box,
    legend,
    line,
    mark,
    picture,
    vertical,
    words,
)

_PLOT = 250  # height


def ranges_svg(trace: Trace, verdict: Verdict | None) -> tuple[str, str]:
    """The picture and the note below it; both empty if the trace holds no events."""
    shown = ranges(trace, verdict)
    if shown.step is None:
        return "", ""
    bottom = TOP + _PLOT
    axis = LogAxis(*shown.window(), TOP + 26, bottom)
    parts = [*_sides(shown, bottom), axis.ticks(), vertical("finite magnitude", TOP, bottom)]
    lines, names = _limits(shown, axis)
    parts += [*lines, *_bars(shown, axis), *_marks(shown, bottom), *names, _legend(shown)]
    parts.append(words((LEFT + WIDTH - RIGHT) / 2, bottom + 32, "events, in order of execution", "small", "middle"))
    told = f"Finite range of {len(shown.high)} bars of events along step {shown.step}"
    return picture(parts, bottom + 40, told), shown.note


def _width(shown: Ranges) -> float:
    return (WIDTH - LEFT - RIGHT) / len(shown.high)


def _sides(shown: Ranges, bottom: float) -> list[str]:
    parts, width = [], _width(shown)
    for number, side in enumerate(shown.sides):
        x, wide = LEFT + side.start * width, (side.stop - side.start) * width
        if number % 2:
            parts.append(box(x, TOP, wide, bottom - TOP, "soft"))
        if wide > 7 * len(side.name):
            parts.append(words(x + wide / 2, bottom + 15, side.name, "small", "middle"))
    return parts


def _limits(shown: Ranges, axis: LogAxis) -> tuple[list[str], list[str]]:
    """Lines, which lie below the bars, and their names, which lie above all."""
    near = [(axis.at(value), told) for value, told in _near(shown)]
    lines = [line(LEFT, y, WIDTH - RIGHT, y, "limit") for y, _ in near]
    return lines, [words(WIDTH - RIGHT, y - 4, told, "told small", "end") for y, told in near]


def _near(shown: Ranges) -> list[tuple[float, str]]:
    low, high = shown.window()
    return [(value, told) for value, told in shown.limits() if low <= value <= high]


def _bars(shown: Ranges, axis: LogAxis) -> list[str]:
    width = _width(shown)
    thick = min(max(0.7 * width, 1.0), 12.0)
    parts = []
    for place, (low, high, name) in enumerate(zip(shown.low, shown.high, shown.names, strict=True)):
        x, top = LEFT + (place + 0.5) * width, axis.at(high)
        if not math.isnan(top):
            known = low > 0
            foot = axis.at(low) if known else axis.bottom
            span = f"{low:.3g} to {high:.3g}" if known else f"up to {high:.3g}"
            left = x - (thick if known else 0.4 * thick) / 2
            wide = thick if known else 0.4 * thick
            parts.append(box(left, top, wide, max(foot - top, 1.5), "bar" if known else "faint", f"{name}: {span}"))
            parts.append(line(x - thick / 2, top, x + thick / 2, top, "cap"))
    return parts


def _marks(shown: Ranges, bottom: float) -> list[str]:
    """Nonfinite values have no place on the axis: they stand above it."""
    width, parts, named = _width(shown), [], False
    for place, (nan, inf, birth, name) in enumerate(zip(shown.nan, shown.inf, shown.birth, shown.names, strict=True)):
        x = LEFT + (place + 0.5) * width
        if birth:
            parts.append(line(x, TOP, x, bottom, "birth"))
            right = x > WIDTH / 2
            if not named:
                parts.append(
                    words(x + (-6 if right else 6), TOP + 44, name, "told born small", "end" if right else "start", 44)
                )
            named = True
        parts += [mark("triangle", x, TOP + 20, "bad", f"{name}: inf")] if inf else []
        parts += [mark("cross", x, TOP + 7, "stroke", f"{name}: NaN")] if nan else []
    return parts


def _legend(shown: Ranges) -> str:
    entries = [("square", "bar", "finite range")] if (shown.low > 0).any() else []
    entries += [("dash", "limit", "limits of the dtype")] if _near(shown) else []
    unknown = (shown.high > 0) & ~(shown.low > 0)
    entries += [("square", "faint", "down to zero or not measured")] if unknown.any() else []
    entries += [("triangle", "bad", "holds inf")] if shown.inf.any() else []
    entries += [("cross", "stroke", "holds NaN")] if shown.nan.any() else []
    entries += [("bar", "birth", "birth")] if shown.birth.any() else []
    return legend(entries)
