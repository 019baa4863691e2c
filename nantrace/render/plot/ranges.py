"""The picture of ranges along one step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nantrace.render.figures.ranges import Ranges
from nantrace.render.figures.ranges import ranges as ranges_of
from nantrace.render.plot.axes import BAD, FINE, GREY, INK, SOFT, axes, empty, finish, written

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from nantrace.diagnosis.verdict import Verdict
    from nantrace.events import Trace

_NAMED = 40  # bars that can be named one by one


def ranges(trace: Trace, verdict: Verdict | None = None, *, step: int | None = None, ax: Axes | None = None) -> Axes:
    """Smallest to largest finite magnitude of every event of one step, in order of execution.

    A logarithmic axis with the limits of the dtypes; nonfinite events and births are marked. Where the smallest
    magnitude is not known, because it was not measured and the tensor has both signs, a pale line goes down to the
    axis.

    Args:
        trace: of any length; an empty one gives an empty picture that says so.
        verdict: marks births and chooses the step.
        step: number of the step; by default that of the first birth, of the first nonfinite event, or the last.
        ax: where to draw; a new figure by default.

    Raises:
        NantraceError: matplotlib is not installed.
        ValueError: the trace holds no such step.
    """
    shown = ranges_of(trace, verdict, step)
    ax = axes(ax)
    if shown.step is None:
        return empty(ax, "Range along the step", "the trace holds no events")
    ax.set_yscale("log")
    ax.set_ylim(*shown.window())
    ax.set_xlim(-0.6, len(shown.high) - 0.4)
    _sides(ax, shown)
    _bars(ax, shown)
    _limits(ax, shown)
    _marks(ax, shown)
    _ticks(ax, shown)
    ax.set_ylabel("finite magnitude")
    return finish(ax, f"Range along step {shown.step}", shown.note)


def _sides(ax: Axes, shown: Ranges) -> None:
    for number, side in enumerate(shown.sides):
        if number % 2:
            ax.axvspan(side.start - 0.5, side.stop - 0.5, color=SOFT, zorder=0, linewidth=0)
        if side.stop - side.start > 0.06 * len(shown.high) or len(shown.sides) == 1:
            middle = (side.start + side.stop - 1) / 2
            ax.text(
                middle,
                0.015,
                side.name,
                transform=ax.get_xaxis_transform(),
                ha="center",
                va="bottom",
                fontsize="small",
                color=GREY,
            )


def _bars(ax: Axes, shown: Ranges) -> None:
    x, bottom = np.arange(len(shown.high)), shown.window()[0]
    seen = shown.high > 0
    known = seen & (shown.low > 0)
    width = min(max(300 / max(len(x), 1), 1.2), 7)
    if known.any():
        ax.vlines(x[known], shown.low[known], shown.high[known], color=INK, linewidth=width, label="finite range")
    if (seen & ~known).any():
        unknown = seen & ~known
        told = "down to zero, or not measured"
        ax.vlines(x[unknown], bottom, shown.high[unknown], color=FINE, linewidth=0.4 * width, label=told)
    style: dict[str, Any] = {"linestyle": "none", "color": INK}
    if seen.any():
        ax.plot(x[seen], shown.high[seen], marker="_", markersize=5, label="largest magnitude", **style)


def _limits(ax: Axes, shown: Ranges) -> None:
    bottom, top = shown.window()
    for number, (value, told) in enumerate(shown.limits()):
        style = ("--", ":", "-.")[number % 3]
        if bottom <= value <= top:
            ax.axhline(value, color=GREY, linestyle=style, linewidth=1, label=told)


def _marks(ax: Axes, shown: Ranges) -> None:
    """Nonfinite values have no place on the axis: they stand along its upper edge."""
    x, edge = np.arange(len(shown.high)), ax.get_xaxis_transform()
    style: dict[str, Any] = {"linestyle": "none", "transform": edge, "clip_on": False}
    if shown.inf.any():
        ax.plot(x[shown.inf], np.full(shown.inf.sum(), 0.92), marker="^", color=BAD, label="holds inf", **style)
    if shown.nan.any():
        ax.plot(x[shown.nan], np.full(shown.nan.sum(), 0.97), marker="x", color="black", label="holds NaN", **style)
    born = np.flatnonzero(shown.birth)
    for number, place in enumerate(born):
        ax.axvline(float(place), color=BAD, linewidth=1, label="" if number else "birth")
    if born.size:
        left = born[0] < 0.6 * len(x)
        ax.annotate(
            written(shown.names[born[0]]),
            (born[0], 0.82),
            xycoords=edge,
            xytext=(6 if left else -6, 0),
            textcoords="offset points",
            ha="left" if left else "right",
            fontsize="small",
            color=BAD,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )


def _ticks(ax: Axes, shown: Ranges) -> None:
    if len(shown.names) <= _NAMED:
        names = [written(name, 30) for name in shown.names]
        ax.set_xticks(np.arange(len(names)), names, rotation=90, fontsize="x-small")
        ax.set_xlabel("event, in order of execution")
    else:
        ax.set_xlabel("events, in order of execution" if shown.joined == 1 else "bars of events, in order of execution")
