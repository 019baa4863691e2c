"""The picture of the way from birth to sink."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nantrace.render.figures.way import Way, way
from nantrace.render.plot.axes import BAD, INK, SOFT, axes, empty, finish, haloed, written

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from nantrace.diagnosis.verdict import Verdict
    from nantrace.events import Trace

_MARKS = {"birth": ("*", 15, BAD), "way": ("o", 6, INK), "sink": ("s", 9, "black")}


def path(trace: Trace | None, verdict: Verdict, *, ax: Axes | None = None) -> Axes:
    """The way from where a value was born to what it damaged, from left to right, over the tree of modules.

    Args:
        trace: gives the order of the modules; None orders them by name.
        verdict: whose path is drawn.
        ax: where to draw; a new figure by default.

    Raises:
        NantraceError: matplotlib is not installed.
    """
    shown = way(trace, verdict)
    ax = axes(ax, height=2.2 + 0.26 * len(shown.lanes))
    if not shown.stops:
        return empty(ax, "Path", f"the verdict ({verdict.status}) names no origin")
    lanes = [stop.lane for stop in shown.stops]
    for lane in range(0, len(shown.lanes), 2):
        ax.axhspan(lane - 0.5, lane + 0.5, color=SOFT, zorder=0, linewidth=0)
    ax.plot(np.arange(len(lanes)), lanes, "-", color=INK, linewidth=1.5, zorder=2)
    _stops(ax, shown)
    names = [written(lane.name, 44) for lane in shown.lanes]
    ax.set_yticks(np.arange(len(names)), names, fontsize="small")
    ax.set_ylim(len(names) - 0.5, -0.8)  # room for the words at a stop in the first row
    ax.set_xlim(-0.5, max(len(lanes) - 0.2, 1.0))
    ax.set_xticks(np.arange(len(lanes)), [str(number + 1) for number in range(len(lanes))])
    ax.set_xlabel("stops on the way, in order")
    ax.set_ylabel("module, or what was damaged")
    return finish(ax, "From birth to sink" if len(lanes) > 1 else "Where it was born", shown.note)


def _stops(ax: Axes, shown: Way) -> None:
    for kind, (marker, size, colour) in _MARKS.items():
        places = [(n, stop.lane) for n, stop in enumerate(shown.stops) if stop.kind == kind]
        if places:
            x, y = zip(*places, strict=True)
            ax.plot(x, y, marker, markersize=size, color=colour, label=kind, linestyle="none", zorder=3)
    told = len(shown.stops) <= 12
    for number, stop in enumerate(shown.stops):
        if told or stop.kind != "way":
            right = number > 0.7 * len(shown.stops)
            ax.annotate(
                written(stop.what, 28),
                (number, stop.lane),
                xytext=(-8 if right else 8, -12 if shown.rises(number, before=right) else 6),
                textcoords="offset points",
                ha="right" if right else "left",
                fontsize="x-small",
                color="black",
                path_effects=haloed(),
                annotation_clip=False,
            )
