"""Which rows of a trace a loss scale stands on, and their ranges without it. Pure.

The ledger says which scale a step had and what was called around it. Where that settles it, ranges are divided; where
it does not (whether a gradient between backward and the optimizer was unscaled already, say), a row is left as it is
and marked: it may be read with the scale or without.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nantrace.events import Phase, Role, Site, Trace
from nantrace.steps import by_number

Floats = npt.NDArray[np.float64]

# What a step did beside the usual: then not all of its backward passes need have begun at a scaled loss.
_UNUSUAL = ("bypassed", "by_hand", "never_scaled", "unscaled_early", "updated_early")


class _Stands(enum.IntEnum):
    """Whether the scale of its step stands on the tensor of a site."""

    NEVER = 0
    USUALLY = 1
    PERHAPS = 2
    UNLESS_UNSCALED = 3  # a fused optimizer divides on its own


@dataclass(frozen=True)
class Unscaled:
    """A trace whose ranges are without the scale wherever it is certain that it stood on them.

    Attributes:
        trace: with its own events if nothing was divided.
        perhaps: for each event by what it may have to be divided still; 1 where that is settled.
        scales: the least and the largest that were taken into account; None if there was none.
    """

    trace: Trace
    perhaps: Floats
    scales: tuple[float, float] | None = None


def without_scale(trace: Trace) -> Unscaled:
    """Divide minimum, maximum and smallest magnitude of losses and gradients by the scale of their step."""
    numbers, at = np.unique(trace.events["step"], return_inverse=True)
    ledger = by_number(trace.steps, numbers.tolist())
    rows = [ledger.get(number, {}) for number in numbers.tolist()]
    scales = [_scale(row) for row in rows]
    perhaps = np.ones(len(trace))
    if not any(scales):
        return Unscaled(trace, perhaps)
    scale = np.array([one or 1.0 for one in scales])[at]
    stands = np.array([_stands(site) for site in trace.sites], np.int64)[trace.events["site"]]
    certain = (stands == _Stands.USUALLY) & np.array([_is_usual(row) for row in rows])[at]
    taken_off = np.array(["after unscale_" in str(row.get("gradient_read")) for row in rows])[at]
    never = (stands == _Stands.NEVER) | ((stands == _Stands.UNLESS_UNSCALED) & taken_off)
    perhaps[~certain & ~never] = scale[~certain & ~never]
    used = scale[~never & (scale != 1)]
    span = (float(used.min()), float(used.max())) if used.size else None
    return Unscaled(_divided(trace, np.where(certain, scale, 1.0)), perhaps, span)


def _divided(trace: Trace, divisor: Floats) -> Trace:
    if (divisor == 1).all():
        return trace
    events = trace.events.copy()
    for name in ("min", "max", "absmin"):
        events[name] /= divisor
    return replace(trace, events=events)


def _stands(site: Site) -> _Stands:
    if site.role == Role.LOSS:
        return _Stands.USUALLY
    if site.role in (Role.GRAD_OUTPUT, Role.GRAD_INPUT, Role.GRAD) and site.phase == Phase.BACKWARD:
        return _Stands.USUALLY
    if site.role == Role.OP and site.phase in (Phase.LOSS, Phase.BACKWARD, Phase.POST_BACKWARD):
        return _Stands.PERHAPS
    if site.role == Role.GRAD:
        return _Stands.UNLESS_UNSCALED if site.phase == Phase.OPTIMIZER else _Stands.PERHAPS
    return _Stands.NEVER


def _scale(row: Mapping[str, Any]) -> float | None:
    """The scale of a step, of one without an update the one that was heard last; None if there is nothing to divide."""
    heard = _conduct(row).get("scales") or [None]
    value = row.get("scale_before", heard[-1])
    number = float(value) if isinstance(value, (int, float)) else 0.0
    return number if math.isfinite(number) and number > 0 and number != 1 else None


def _is_usual(row: Mapping[str, Any]) -> bool:
    """Whether the only backward pass of the step began at a loss that its only scaler had scaled."""
    conduct = _conduct(row)
    once = conduct.get("backwards") == 1 and "autograd.grad" not in conduct.get("calls", ())
    return once and conduct.get("scales") == [_scale(row)] and not any(conduct.get(name) for name in _UNUSUAL)


def _conduct(row: Mapping[str, Any]) -> Mapping[str, Any]:
    found = row.get("conduct")
    return found if isinstance(found, Mapping) else {}
