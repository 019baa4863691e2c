"""The picture of a matrix: axis x outcome."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from nantrace.render.figures.matrix import Matrix, Record
from nantrace.render.figures.matrix import matrix as matrix_of
from nantrace.render.plot.axes import GREY, SOFT, axes, empty, finish, written

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HATCHES = {
    "fault": ("xxxx", "#e9b3af"),
    "contained": ("////", "#f2dcae"),
    "inconclusive": ("....", "#dadce0"),
    "not_reproduced": ("\\\\\\\\", "#dadce0"),
    "expected": ("", "#cfe0ef"),
    "clean": ("", "#d5ead8"),
}
_OTHER = ("--", "#e8eaed")


def matrix(records: Iterable[Record], *, ax: Axes | None = None) -> Axes:
    """What became of the step under each change: a row an axis, a column an outcome, the detail at the right.

    Args:
        records: (axis, outcome, detail), for example ("dtype=bfloat16", "clean", "loss 0.31"). Several with the same
            axis and outcome are counted.
        ax: where to draw; a new figure by default.

    Raises:
        NantraceError: matplotlib is not installed.
    """
    shown = matrix_of(records)
    ax = axes(ax, height=1.5 + 0.3 * len(shown.axes))
    if not shown.axes:
        return empty(ax, "Matrix", "no records")
    _cells(ax, shown)
    names = [written(name) for name in shown.axes]
    ax.set_yticks(np.arange(len(names)), names, fontsize="small")
    ax.set_xticks(
        np.arange(len(shown.outcomes)),
        [written(name.replace("_", " "), 20).replace(" ", "\n") for name in shown.outcomes],
    )
    ax.set_xlim(-0.5, len(shown.outcomes) - 0.5)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlabel("outcome")
    ax.set_ylabel("what was changed")
    finish(ax, "Matrix: one change at a time", shown.note, legend=False)
    _details(ax, shown)
    return ax


def _cells(ax: Axes, shown: Matrix) -> None:
    from matplotlib.patches import Rectangle

    for row in range(0, len(shown.axes), 2):
        ax.axhspan(row - 0.5, row + 0.5, color=SOFT, alpha=0.5, zorder=0, linewidth=0)
    for row, counts in enumerate(shown.counts):
        for column, count in enumerate(counts):
            if not count:
                continue
            hatch, colour = _HATCHES.get(shown.outcomes[column], _OTHER)
            where = (column - 0.42, row - 0.4)
            ax.add_patch(Rectangle(where, 0.84, 0.8, facecolor=colour, edgecolor=GREY, hatch=hatch, linewidth=0.8))
            if count > 1:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
                ax.text(column, row, f"{count:,}", ha="center", va="center", fontsize="small", bbox=box)


def _details(ax: Axes, shown: Matrix) -> None:
    """Tick labels of a second axis, which the layout of the figure makes room for."""
    if not any(shown.details):
        return
    right = ax.secondary_yaxis("right")
    right.set_yticks(np.arange(len(shown.details)), [written(detail, 44) for detail in shown.details])
    right.tick_params(length=0, labelsize="small", labelcolor=GREY)
