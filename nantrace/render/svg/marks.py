"""Shapes, words and axes in SVG. Knows markup, nothing of traces; the page's style gives classes their colours."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from nantrace.render.cells import harmless, shorten
from nantrace.render.figures.numbers import ticks

WIDTH = 860  # of every picture, in its own units; the page scales it
LEFT, RIGHT, TOP = 64, 16, 44  # margins around the plot

#: Shapes of 10 units around the origin.
_SHAPES = {
    "cross": "M-4-4 4 4M-4 4 4-4",
    "triangle": "M0-5 5 4H-5Z",
    "star": "M0-8 2-3 8-3 3 1 5 7 0 3-5 7-3 1-8-3-2-3Z",
    "circle": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z",
    "square": "M-5-5H5V5H-5Z",
    "bar": "M0-4V4",
    "dot": "M-1.5 0a1.5 1.5 0 1 0 3 0a1.5 1.5 0 1 0-3 0Z",
    "dash": "M-9 0H9",
}


def escaped(text: object, width: int | None = None) -> str:
    """Text for markup and attributes: no character that a reader or a parser would obey; cut in the middle."""
    clean = harmless(text)
    return html.escape(clean if width is None else shorten(clean, width))


def number(value: float) -> str:
    """A coordinate: a tenth of a unit is enough."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def words(x: float, y: float, text: str, css: str = "", anchor: str = "start", width: int | None = None) -> str:
    style = f' class="{css}"' if css else ""
    place = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{number(x)}" y="{number(y)}"{style}{place}>{escaped(text, width)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<path class="{css}" d="M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}"/>'


def box(x: float, y: float, width: float, height: float, css: str, title: str = "", more: str = "") -> str:
    attributes = (
        f'class="{css}" x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"{more}'
    )
    return f"<rect {attributes}><title>{escaped(title)}</title></rect>" if title else f"<rect {attributes}/>"


def mark(shape: str, x: float, y: float, css: str, title: str = "") -> str:
    attributes = f'class="{css}" d="{_SHAPES[shape]}" transform="translate({number(x)} {number(y)})"'
    return f"<path {attributes}><title>{escaped(title)}</title></path>" if title else f"<path {attributes}/>"


def curve(points: Iterable[tuple[float, float]], css: str) -> str:
    """A line through points; one with a NaN interrupts it."""
    pieces, pen = [], "M"
    for x, y in points:
        if math.isnan(y):
            pen = "M"
            continue
        pieces.append(f"{pen}{number(x)} {number(y)}")
        pen = "L"
    return f'<path class="{css}" d="{"".join(pieces)}"/>' if pieces else ""


def legend(entries: Iterable[tuple[str, str, str]], y: float = 16) -> str:
    """(shape, class, meaning) one after the other, above the plot, in two lines if need be."""
    parts, x = [], float(LEFT)
    for shape, css, told in entries:
        wide = 8 if shape == "dash" else 0
        if x + 18 + wide + 6 * len(told) > WIDTH:
            x, y = float(LEFT), y + 17
        parts.append(mark(shape, x + 6 + wide / 2, y - 4, css) + words(x + 18 + wide, y, told, "small"))
        x += 34 + wide + 5.7 * len(told)
    return "".join(parts)


def picture(parts: Iterable[str], height: float, told: str) -> str:
    """The whole picture; `told` is what a reader who cannot see it is told."""
    size = f'viewBox="0 0 {WIDTH} {number(height)}" width="{WIDTH}" height="{number(height)}"'
    return f'<svg {size} role="img" aria-label="{escaped(told)}">{"".join(parts)}</svg>'


def names_below(names: Sequence[str], x: Sequence[float], axis: str, middle: float, bottom: float) -> list[str]:
    """Some of the names under their places `x`, and the name of the axis under its middle."""
    parts = [words(x[place], bottom + 15, names[place], "small", "middle") for place in ticks(len(x))]
    return [*parts, words(middle, bottom + 32, axis, "small", "middle")]


class LogAxis:
    """A vertical logarithmic axis: where a value stands, its ticks."""

    def __init__(self, low: float, high: float, top: float, bottom: float) -> None:
        self.low, self.high = math.log10(low), math.log10(high)
        self.top, self.bottom = top, bottom

    def at(self, value: float) -> float:
        """The place of a positive value; outside values stand at the end; NaN for any other."""
        if not value > 0:
            return math.nan
        part = (math.log10(value) - self.low) / (self.high - self.low)
        return self.bottom - min(max(part, 0.0), 1.0) * (self.bottom - self.top)

    def ticks(self) -> str:
        first, last = math.ceil(self.low), math.floor(self.high)
        every = max(-(-(last - first) // 7), 1)
        parts = []
        for power in range(first, last + 1, every):
            y = self.at(10.0**power)
            parts.append(line(LEFT, y, WIDTH - RIGHT, y, "grid") + words(LEFT - 6, y + 4, f"1e{power}", "small", "end"))
        return "".join(parts)


def vertical(text: str, top: float, bottom: float, x: float = 14) -> str:
    """The name of a vertical axis, along it."""
    place = f'transform="translate({number(x)} {number((top + bottom) / 2)}) rotate(-90)"'
    return f'<text class="small" text-anchor="middle" {place}>{escaped(text)}</text>'
