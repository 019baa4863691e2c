"""The picture of the ledger: loss, gradient and scale over the steps, and what became of each update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nantrace.render.figures.ledger import Ledger
from nantrace.render.figures.ledger import ledger as ledger_of
from nantrace.render.plot.axes import BAD, GREY, INK, axes, empty, finish

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from nantrace.events import Trace

_MARKED = 60  # points that are marked one by one on their lines
_UPDATES = 0.04  # where the strip of updates stands, as a part of the axis' height


def ledger(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Loss, size of the unscaled gradients and scale over steps; updates committed, skipped, or not attempted.

    The scale has an axis of its own on the right, if there is a gradient scaler. Values that are not finite stand
    along the upper edge.

    Raises:
        NantraceError: matplotlib is not installed.
    """
    shown = ledger_of(trace)
    ax = axes(ax)
    if shown.is_empty:
        return empty(ax, "Ledger", "the trace holds neither losses nor gradients nor updates")
    _scale_of_axis(ax, shown)
    loss, gradient = ("-o", "--s") if len(shown.steps) <= _MARKED else ("-", "--")
    if np.isfinite(shown.loss).any():
        ax.plot(shown.steps, shown.loss, loss, color=INK, markersize=3, label="loss")
    if np.isfinite(shown.gradient).any():
        ax.plot(shown.steps, shown.gradient, gradient, color=GREY, markersize=3, label=shown.gradient_name)
    _at_edge(ax, shown.steps[shown.loss_bad], 0.98, "x", "loss not finite")
    _at_edge(ax, shown.steps[shown.gradient_bad], 0.94, "^", "gradient not finite")
    _updates(ax, shown)
    ax.set_xlabel("step")
    ax.set_ylabel("loss, size of the gradients")
    _whole_steps(ax, shown)
    scaled = bool(np.isfinite(shown.scale).any())
    if scaled:
        _scale(ax, shown)
    return finish(ax, "Ledger", shown.note, beside=60.0 if scaled else 6.0)


def _scale_of_axis(ax: Axes, shown: Ledger) -> None:
    """Logarithmic where all is positive; around zero linear otherwise."""
    values = np.concatenate([shown.loss, shown.gradient])
    values = values[np.isfinite(values) & (values != 0)]
    if (shown.loss < 0).any():
        ax.set_yscale("symlog", linthresh=float(np.abs(values).min()))
    elif values.size:
        ax.set_yscale("log")
        ax.set_ylim(values.min() / 10, values.max() * 10)
    else:
        ax.set_yticks([])


def _at_edge(ax: Axes, steps: npt.NDArray[np.int64], height: float, marker: str, label: str, colour: str = BAD) -> None:
    if len(steps):
        style: dict[str, Any] = {"linestyle": "none", "clip_on": False, "transform": ax.get_xaxis_transform()}
        ax.plot(steps, np.full(len(steps), height), marker=marker, color=colour, label=label, **style)


def _updates(ax: Axes, shown: Ledger) -> None:
    """A strip along the lower edge; a joined point can be in several rows of it."""
    if not shown.attempted.any():
        return
    rows = (
        (shown.committed > 0, "|", GREY, "update committed", _UPDATES),
        (shown.skipped > 0, "X", BAD, "update skipped", _UPDATES + 0.05),
        (shown.attempted == 0, ".", "black", "no update attempted", _UPDATES),
    )
    for chosen, marker, colour, label, height in rows:
        _at_edge(ax, shown.steps[chosen], height, marker, label, colour)


def _whole_steps(ax: Axes, shown: Ledger) -> None:
    from matplotlib.ticker import MaxNLocator

    if len(shown.steps) <= 12:
        ax.set_xticks(shown.steps)
    else:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlim(shown.steps.min() - 0.5, shown.steps.max() + 0.5)


def _scale(ax: Axes, shown: Ledger) -> None:
    right = ax.twinx()
    right.plot(shown.steps, shown.scale, drawstyle="steps-mid", linestyle=":", color="black")
    right.set_yscale("log", base=2)
    low, high = np.nanmin(shown.scale), np.nanmax(shown.scale)
    if low > 0:
        right.set_ylim(low / 4, high * 4)
    right.set_ylabel("scale of the gradients")
    ax.plot([], [], linestyle=":", color="black", label="scale (right axis)")
