"""How far the ranges of one tensor may lie apart in two runs before that means something. Pure.

Two runs of one step round differently: in another order, in another dtype. What rounding explains is no difference.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from nantrace.diagnosis.causes.dtypes import limits
from nantrace.events import Role, Site, Trace

_ROUNDINGS = 32  # what a sum of a thousand terms gathers at random: the root of 1000

Floats = npt.NDArray[np.float64]


def epsilon(dtype: str) -> float:
    """The spacing of numbers at 1; 0 for a dtype that does not round."""
    found = limits(dtype)
    return found[2] / found[1] if found else 0.0  # the smallest subnormal is the spacing at the smallest normal


def coarsest(*traces: Trace) -> str | None:
    """The dtype with the fewest digits among all that were seen; None if none rounds.

    It counts for every tensor: what was computed in float16 under autocast is stored in float32 and stays coarse.
    """
    seen = [np.flatnonzero(np.bincount(trace.events["site"])) for trace in traces]
    dtypes = {trace.sites[number].dtype for trace, sites in zip(traces, seen, strict=True) for number in sites}
    found = max(sorted(dtypes), key=epsilon, default=None)
    return found if found is not None and epsilon(found) else None


def relative(dtype: str) -> float:
    """The allowed error, relative to a tensor's largest magnitude: half of the digits of the dtype.

    float64 1.5e-8, float32 3.5e-4, float16 0.031, bfloat16 0.088.
    """
    return math.sqrt(epsilon(dtype))


def absolute(dtype: str, usual: Floats) -> Floats:
    """The allowed error where a tensor is near zero: 32 roundings of numbers as large as is usual for its kind.

    A gradient that is zero in theory (of a bias before a normalization) is rounding of larger terms in both runs.
    """
    return min(_ROUNDINGS * epsilon(dtype), relative(dtype)) * usual


def usual_magnitudes(trace: Trace, sizes: Floats) -> Floats:
    """For each site the median of the largest magnitudes at all sites of its kind: phase, role, kind of moment.

    The median, because masks hold numbers near the end of the dtype.

    Args:
        trace: of which the sites are told.
        sizes: of each of its events what `counting` makes of it.
    """
    kinds: dict[tuple[int, int, str], int] = {}
    kind = np.array([kinds.setdefault(_kind(site), len(kinds)) for site in trace.sites], np.int32)
    usual = np.zeros(len(kinds))
    if len(kind):
        of_row = kind[trace.events["site"]]
        for number in range(len(kinds)):
            counted = sizes[(of_row == number) & (sizes > 0)]
            usual[number] = np.median(counted, overwrite_input=True) if counted.size else 0.0
    return usual[kind] if len(kind) else usual


def counting(events: npt.NDArray[np.void]) -> Floats:
    """The largest magnitude of each row that counts for what is usual; NaN where one element is nonfinite."""
    return np.where(events["finite"] < events["numel"], np.nan, magnitudes(events))


def magnitudes(events: npt.NDArray[np.void]) -> Floats:
    """The largest finite magnitude of each row; NaN where there is no finite element."""
    return np.asarray(np.maximum(np.abs(events["min"]), np.abs(events["max"])))


def _kind(site: Site) -> tuple[int, int, str]:
    return int(site.phase), int(site.role), site.slot.rpartition(".")[2] if site.role == Role.STATE else ""
