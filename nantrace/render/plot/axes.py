"""What the pictures have in common: where they are drawn, their colours, and the words around them.

The one place that knows whether matplotlib is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nantrace.errors import NantraceError
from nantrace.render.cells import harmless, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FINE, BAD, GREY, SOFT = "#1d4f7c", "#7fa8cc", "#b3261e", "#5f6368", "#e8eaed"
_NAME = 36  # characters of a name beside an axis


def axes(ax: Axes | None, width: float = 9.0, height: float = 4.2) -> Axes:
    """The given Axes, or those of a new figure of `width` x `height` inches.

    Raises:
        NantraceError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        told = "pictures are drawn by matplotlib, which is not installed: pip install 'nantrace[plot]'"
        raise NantraceError(told) from error
    if ax is not None:
        return ax
    from matplotlib import pyplot  # a figure that a notebook shows by itself

    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def written(name: str, width: int = _NAME) -> str:
    """A name as matplotlib shows it: no control characters, no mathematics, not too long."""
    return shorten(harmless(name), width).replace("$", r"\$")


def haloed(width: float = 2.5) -> list[Any]:
    """A white edge around words or marks, which keeps them legible on lines and hatching."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=width, foreground="white")]


def finish(ax: Axes, title: str, note: str = "", legend: bool = True, beside: float = 6.0) -> Axes:
    """Title, the legend `beside` the axis (in points), and below what was joined or left out."""
    from matplotlib.transforms import ScaledTranslation

    ax.set_title(title, loc="left", fontsize="medium")
    if note:
        lines = [ax.get_xlabel(), *note.replace(". ", ".\n").split("\n")]
        ax.set_xlabel("\n".join(line for line in lines if line))
    if legend and ax.get_legend_handles_labels()[0]:
        place = ax.transAxes + ScaledTranslation(beside / 72, 0, ax.figure.dpi_scale_trans)
        ax.legend(
            loc="upper left",
            bbox_to_anchor=(1.0, 1.0),
            bbox_transform=place,
            borderaxespad=0.0,
            fontsize="small",
            frameon=False,
        )
    return ax


def empty(ax: Axes, title: str, why: str) -> Axes:
    """A picture of nothing, which says why."""
    ax.text(0.5, 0.5, why, ha="center", va="center", transform=ax.transAxes, color=GREY)
    ax.set_xticks([])
    ax.set_yticks([])
    return finish(ax, title, legend=False)
