"""Weights that stand still over the traced steps: no gradient, a gradient of zero, or an update too small to matter.

Reads what the ledger sampled of each parameter that requires a gradient: whole gradients, and the update of 64 elements
or some more, where the gradient of these was like that of the rest. Frozen parameters are not in it; one that is zero
and was never moved may be meant to begin that way and is left alone, and so is one whose gradient is rounding beside
those of the others. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nantrace.diagnosis.observation import Observation
from nantrace.events import Trace
from nantrace.steps import had_scale, is_nonfinite, likely, rates, told

Table = npt.NDArray[np.float64]

GRADIENT = 1e-10  # norm below which a gradient counts as vanished
UPDATE = 1e-7  # of the weight: below the spacing of float32 next to 1
_ROUNDING = 1e-5  # of the median gradient norm: below it a gradient may be rounding alone
_FEWEST = 3  # committed and sampled steps
_SHARE = 0.02  # of the parameters: fewer are told by name only where they never had a gradient
_NAMES = 4


@dataclass(frozen=True)
class _Window:
    """Sampled steps x parameters: norms of gradients, updates relative to the weight, and norms of weights.

    NaN where there is no gradient, or no update to tell. `not_held` names what no optimizer held in any of the steps;
    `had_gradient` what had a gradient of which the steps tell no norm: it was sparse, or came in a step between.
    """

    names: tuple[str, ...]
    steps: tuple[int, ...]
    gradient: Table
    update: Table
    size: Table
    not_held: frozenset[str]
    had_gradient: frozenset[str]


def stalled(trace: Trace, *, gradient: float = GRADIENT, update: float = UPDATE) -> tuple[Observation, ...]:
    """What did not move over the window of sampled steps whose update was committed and whose gradients were finite.

    Args:
        trace: with at least three such steps; empty otherwise.
        gradient: norm, without the scale, up to which a gradient counts as vanished.
        update: largest change, as a share of the weight's norm, that counts as standing still.
    """
    window = _window(trace)
    if window is None:
        return ()
    return tuple(_found(trace, window, gradient, update))


def _found(trace: Trace, window: _Window, gradient: float, update: float) -> Iterator[Observation]:
    gradients = np.nan_to_num(window.gradient, nan=np.inf)
    measured = ~np.isnan(window.update).all(axis=0)
    is_zero = (window.size == 0).all(axis=0)
    unheld: npt.NDArray[np.bool_] = np.array([name in window.not_held for name in window.names], dtype=bool)
    missing = np.asarray(np.isnan(window.gradient).all(axis=0))
    untold: npt.NDArray[np.bool_] = np.array([name in window.had_gradient for name in window.names], dtype=bool)
    zero = (gradients == 0).all(axis=0) & ~is_zero
    rounding = _is_rounding(window)
    tiny = (gradients <= gradient).all(axis=0) & ~zero & ~is_zero
    small = tiny & ~(rounding & _beside_others(window.names, rounding | zero | missing))
    rest = ~(missing | zero | tiny | is_zero | unheld | rounding) & measured
    moved = (np.nan_to_num(window.update) > 0).any(axis=0)
    unmoved = rest & ~moved
    slow = rest & moved & (np.nan_to_num(window.update) <= update).all(axis=0)
    yield from _told(window, unheld & ~missing, "not_in_optimizer", *_NOT_HELD)
    yield from _told(window, missing & ~untold, "no_gradient", *_NO_GRADIENT)
    yield from _told(window, zero, "zero_gradient", *_zero_words(trace))
    yield from _told(window, small, "small_gradient", f"had a gradient norm of at most {gradient:g}", *_SMALL)
    yield from _told(window, unmoved, "unmoved", *_UNMOVED)
    yield from _told(window, slow, "small_update", f"were moved by at most {update:g} of their norm", *_SLOW)


def _is_rounding(window: _Window) -> npt.NDArray[np.bool_]:
    """Which gradients were never above rounding, measured by the median of those that are not zero.

    A bias before a norm shifts what the norm takes away again: its gradient is zero but for rounding, by construction.
    """
    medians = [np.median(row[row > 0]) if (row > 0).any() else 0.0 for row in window.gradient]
    return np.asarray((window.gradient < _ROUNDING * np.array(medians)[:, None]).all(axis=0))


def _beside_others(names: Sequence[str], lost: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which parameters stand in a module of which another is not lost: no gradient vanished on the way to it."""
    reached = {_module(name) for name, is_lost in zip(names, lost, strict=True) if not is_lost}
    return np.array([_module(name) in reached for name in names], dtype=bool)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


_SAMPLE = (
    "Looked at were at least 64 evenly spread elements of each, or all of a small one, whose gradient was like that of "
    "the rest."
)
_NOT_HELD = (
    "had a gradient but were in no optimizer that stepped",
    "They keep the values that they had.",
    "It leaves open whether they were made, or replaced, after the optimizer was given its parameters.",
)
_NO_GRADIENT = (
    "never had a gradient",
    "They were no part of what backward went through.",
    "It leaves open whether they are meant to be used, or are in other steps: freeze them, or look for the branch that "
    "leaves them out.",
)
_SMALL = (
    "Their part of the loss has all but no slope.",
    "It leaves open whether the loss still depends on them, and in which dtype their gradient is computed.",
)
_UNMOVED = (
    "had a gradient and were not moved by any update",
    "No update reached the sampled elements.",
    "Look at the learning rate of their group and the dtype of the weights: a small update may be rounded away.",
    (_SAMPLE,),
)
_SLOW = (
    "Updates of this size are lost in the rounding of the weights.",
    "Look at the learning rate of their group and the dtype of the weights.",
    (_SAMPLE,),
)


def _zero_words(trace: Trace) -> tuple[str, str, str]:
    half = any(site.dtype == "float16" for site in trace.sites)
    scaled = any(row.get("scale_before") is not None for row in likely(trace.steps, had_scale))
    why = "In float16 a gradient below 6e-8 becomes zero" + (
        "." if scaled else ", and no gradient scaler was seen." if half else "; so does one that a mask or ReLU cuts."
    )
    return ("had a gradient of exactly zero", "Nothing reaches them.", why)


def _told(
    window: _Window,
    which: npt.NDArray[np.bool_],
    kind: str,
    what: str,
    proves: str,
    leaves_open: str,
    evidence: tuple[str, ...] = (),
) -> Iterator[Observation]:
    count, all_ = int(which.sum()), len(window.names)
    if not count or (count < max(1, _SHARE * all_) and kind.startswith("small")):
        return
    names = [name for name, hit in zip(window.names, which, strict=True) if hit]
    shown = ", ".join(names[:_NAMES]) + (", ..." if count > _NAMES else "")
    yield Observation(
        kind,
        window.steps,
        f"{count:,} of {all_:,} parameters ({100 * count / all_:.0f} %) {what} in {len(window.steps)} sampled steps: "
        f"{shown}.",
        evidence,
        proves,
        leaves_open,
    )


def _window(trace: Trace) -> _Window | None:
    names: tuple[str, ...] = ()
    rows: list[tuple[int, Mapping[str, Any]]] = []
    for row in told(trace.steps):
        weights = row.get("weights")
        if not isinstance(weights, Mapping):
            continue
        if "names" in weights and tuple(weights["names"]) != names:
            names, rows = tuple(weights["names"]), []
        if row.get("committed") and not row.get("skipped") and _has_rate(row) and _is_finite(row):
            rows.append((int(row["step"]), weights))
    if len(rows) < _FEWEST or not names:
        return None
    return _Window(
        names,
        tuple(step for step, _ in rows),
        np.array([_numbers(weights["gradient"], len(names)) for _, weights in rows]),
        np.array([_numbers(weights["update"], len(names)) for _, weights in rows]),
        np.array([_numbers(weights.get("size", ()), len(names)) for _, weights in rows]),
        frozenset.intersection(*(frozenset(weights.get("not_held", ())) for _, weights in rows)),
        frozenset().union(*(weights.get("had_gradient", ()) for _, weights in rows)),
    )


def _numbers(values: Sequence[Any], length: int) -> list[float]:
    found = [float(value) if isinstance(value, (int, float)) else np.nan for value in values[:length]]
    return found + [np.nan] * (length - len(found))


def _is_finite(row: Mapping[str, Any]) -> bool:
    """Whether no gradient of a step was nonfinite: such a step says nothing of weights that stand still."""
    norms = (row.get("gradient_norm"), *row["weights"]["gradient"])
    return not any(map(is_nonfinite, norms))


def _has_rate(row: Mapping[str, Any]) -> bool:
    """A learning rate of zero, as in the first step of a warm-up, moves nothing and means nothing."""
    return row.get("lr") is None or any(rate != 0 for rate in rates(row))
