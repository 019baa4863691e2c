"""The map of headroom: modules x steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nantrace.render.figures.headroom import Headroom, headroom_map
from nantrace.render.figures.numbers import ticks
from nantrace.render.plot.axes import BAD, axes, empty, finish, haloed, written

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from nantrace.diagnosis.verdict import Verdict
    from nantrace.events import Trace

_LEAST, _MOST = 4.0, 16.0  # bits: between these the scale of colours ends


def headroom(trace: Trace, verdict: Verdict | None = None, *, ax: Axes | None = None) -> Axes:
    """Bits left before overflow for each module and step, the fewest in any phase; nonfinite cells are hatched.

    One bit is a factor of two. Dark is near the limit. Of a trace of one step the columns are its parts: before,
    forward, backward, after. More than 40 modules are grouped by name, more than 120 steps joined; the picture says so.

    Raises:
        NantraceError: matplotlib is not installed.
    """
    shown = headroom_map(trace, verdict)
    ax = axes(ax, height=1.8 + 0.19 * len(shown.modules))
    if not shown.bits.size:
        return empty(ax, "Headroom", "the trace holds no events")
    _colours(ax, shown)
    _hatched(ax, shown)
    if shown.births:
        rows, columns = zip(*shown.births, strict=True)
        star: dict[str, Any] = {"markersize": 13, "color": BAD, "markeredgewidth": 0.0, "path_effects": haloed(7)}
        ax.plot(columns, rows, "*", label="birth", linestyle="none", clip_on=False, zorder=3, **star)
    names = [written(name, 44) for name in shown.modules]
    ax.set_yticks(np.arange(len(names)), names, fontsize="small")
    _step_ticks(ax, shown)
    ax.set_ylabel("module")
    finish(ax, "Headroom: bits left before overflow", shown.note, legend=False)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, fontsize="small", frameon=False)
    return ax


def _colours(ax: Axes, shown: Headroom) -> None:
    from matplotlib import colormaps

    known = shown.bits[np.isfinite(shown.bits)]
    top = float(np.clip(np.ceil(known.max()), _LEAST, _MOST)) if known.size else _LEAST
    bits, colours = np.ma.masked_invalid(shown.bits), colormaps["cividis"].with_extremes(bad="white")
    image = ax.imshow(bits, aspect="auto", interpolation="none", cmap=colours, vmin=0.0, vmax=top)
    bar = ax.figure.colorbar(image, ax=ax, extend="max" if known.size and known.max() > top else "neither", pad=0.02)
    bar.set_label("bits left")


def _hatched(ax: Axes, shown: Headroom) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    cells = [Rectangle((column - 0.5, row - 0.5), 1, 1) for row, column in np.argwhere(shown.bad)]
    if not cells:
        return
    style: dict[str, Any] = {"facecolor": "white", "edgecolor": "black", "hatch": "xxxx", "linewidth": 0.0}
    ax.add_collection(PatchCollection(cells, **style))
    ax.bar([np.nan], [np.nan], label="nonfinite", **style)


def _step_ticks(ax: Axes, shown: Headroom) -> None:
    places, names = ticks(len(shown.steps)), shown.columns
    ax.set_xticks(places, [names[place] for place in places])
    ax.set_xlim(-0.5, len(shown.steps) - 0.5)
    ax.set_ylim(len(shown.modules) - 0.5, -0.5)
    ax.set_xlabel(shown.axis)
