"""The way from birth to sink as SVG, over the tree of modules."""

from __future__ import annotations

from nantrace.diagnosis.verdict import Verdict
from nantrace.events import Trace
from nantrace.render.figures.way import way
from nantrace.render.svg.marks import RIGHT, WIDTH, box, curve, legend, mark, picture, words

_NAMES, _ROW, _TOP = 250, 22, 30
_MARKS = {"birth": ("star", "star"), "way": ("circle", "point"), "sink": ("square", "stroke solid")}
_NAMED = 10  # stops that are named in the picture; more have it as a title only


def path_svg(trace: Trace | None, verdict: Verdict) -> tuple[str, str]:
    """The picture and the note below it; both empty if the verdict names no way of at least two stops."""
    shown = way(trace, verdict)
    if len(shown.stops) < 2:
        return "", ""
    parts = []
    for row, lane in enumerate(shown.lanes):
        if row % 2 == 0:
            parts.append(box(0, _TOP + _ROW * row, WIDTH, _ROW, "soft"))
        parts.append(words(8 + 10 * min(lane.depth, 8), _TOP + _ROW * row + 15, lane.name, "small", width=34))
    step = (WIDTH - RIGHT - _NAMES - 20) / (len(shown.stops) - 1)
    places = [(_NAMES + 20 + n * step, _TOP + _ROW * (stop.lane + 0.5)) for n, stop in enumerate(shown.stops)]
    parts.append(curve(places, "curve"))
    for number, (stop, (x, y)) in enumerate(zip(shown.stops, places, strict=True)):
        shape, css = _MARKS[stop.kind]
        name = f"{number + 1}. {shown.lanes[stop.lane].name}: {stop.what}"
        parts.append(mark(shape, x, y, css, name))
        if len(shown.stops) <= _NAMED or stop.kind != "way":
            late = x > WIDTH - 180
            y += 12 if shown.rises(number, before=late) else -3
            parts.append(words(x + (-10 if late else 10), y, stop.what, "told small", "end" if late else "start", 30))
    kinds = [kind for kind in _MARKS if any(stop.kind == kind for stop in shown.stops)]
    parts.append(legend((*_MARKS[kind], kind) for kind in kinds))
    told = f"The way of the nonfinite value in {len(shown.stops)} stops over {len(shown.lanes)} modules and tensors"
    return picture(parts, _TOP + _ROW * len(shown.lanes) + 6, told), shown.note
