"""The map of headroom as SVG: the darker or denser a cell, the nearer to overflow."""

from __future__ import annotations

from itertools import groupby

import numpy as np

from nantrace.diagnosis.verdict import Verdict
from nantrace.events import Trace
from nantrace.render.figures.headroom import Headroom, headroom_map
from nantrace.render.svg.marks import RIGHT, TOP, WIDTH, box, mark, names_below, picture, words

_NAMES = 250  # width of the column of names
_ROW = 16
_MOST = 16  # bits: from here on a cell is as pale as can be
_HATCH = (
    '<defs><pattern id="nantrace-hatch" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<path class="stroke" d="M0 0 6 6M6 0 0 6"/></pattern></defs>'
)


def headroom_svg(trace: Trace, verdict: Verdict | None) -> tuple[str, str]:
    """The picture and the note below it; both empty if the trace holds no events."""
    shown = headroom_map(trace, verdict)
    if not shown.bits.size:
        return "", ""
    bottom = TOP + _ROW * len(shown.modules)
    parts = [_HATCH, _legend(shown)]
    for row, name in enumerate(shown.modules):
        parts.append(words(_NAMES - 8, TOP + _ROW * row + 12, name, "small", "end", 40))
        parts += _cells(shown, row)
    width = _width(shown)
    for row, column in shown.births:
        parts.append(mark("star", _NAMES + (column + 0.5) * width, TOP + _ROW * (row + 0.5), "star", "birth"))
    parts += _steps(shown, bottom)
    over = f"{len(shown.steps)} columns, each a {shown.axis}"
    told = f"Bits left before overflow in {len(shown.modules)} rows of modules over {over}"
    return picture(parts, bottom + 40, told), shown.note


def _width(shown: Headroom) -> float:
    return (WIDTH - RIGHT - _NAMES) / len(shown.steps)


def _level(bits: float, bad: bool) -> int:
    """Whole bits, 0 to 16; -1 nonfinite; -2 nothing seen."""
    if bad:
        return -1
    return -2 if np.isnan(bits) else min(int(bits), _MOST)


def _cells(shown: Headroom, row: int) -> list[str]:
    """Neighbours of one level are one rectangle, which keeps a long trace small."""
    levels = [_level(bits, bad) for bits, bad in zip(shown.bits[row], shown.bad[row], strict=True)]
    parts, column, width = [], 0, _width(shown)
    for level, run in groupby(levels):
        count = len(list(run))
        x, y = _NAMES + column * width, TOP + _ROW * row
        place = f"{shown.modules[row]}, {shown.when(column, count)}"
        if level == -1:
            parts.append(box(x, y, count * width, _ROW - 1, "hatch", f"{place}: nonfinite"))
        elif level >= 0:
            depth = f' fill-opacity="{_opacity(level)}"'
            parts.append(box(x, y, count * width, _ROW - 1, "heat", f"{place}: {level} bits left", depth))
        column += count
    return parts


def _opacity(level: int) -> str:
    return f"{1 - 0.94 * level / _MOST:.2f}"


def _steps(shown: Headroom, bottom: float) -> list[str]:
    width = _width(shown)
    x = [_NAMES + (column + 0.5) * width for column in range(len(shown.steps))]
    return names_below(shown.columns, x, shown.axis, (_NAMES + WIDTH - RIGHT) / 2, bottom)


def _legend(shown: Headroom) -> str:
    parts, x = [words(_NAMES, 16, "bits left:", "small")], _NAMES + 64.0
    for level in (0, 2, 4, 8, 12, 16):
        told = f"{level}" if level < _MOST else "16 or more"
        parts.append(
            box(x, 6, 14, 12, "heat", "", f' fill-opacity="{_opacity(level)}"') + words(x + 18, 16, told, "small")
        )
        x += 34 + 6 * len(told)
    if shown.bad.any():
        parts.append(box(x, 6, 14, 12, "hatch") + words(x + 18, 16, "nonfinite", "small"))
        x += 86
    if shown.births:
        parts.append(mark("star", x + 8, 12, "star") + words(x + 20, 16, "birth", "small"))
    return "".join(parts)
