"""Columns of a trace that the pictures and the tree share: magnitudes, headroom, which rows are nonfinite.

Knows the limits of dtypes; draws nothing and judges nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nantrace.diagnosis.modules.seen import LARGEST
from nantrace.events import Columns, Trace, nonfinite_rows

#: Smallest normal magnitude of the floating dtypes that training uses.
SMALLEST_NORMAL = {
    "float16": 2.0**-14,
    "bfloat16": 2.0**-126,
    "float32": 2.0**-126,
    "float64": 2.0**-1022,
    "complex64": 2.0**-126,
    "complex128": 2.0**-1022,
    "float8_e4m3fn": 2.0**-6,
    "float8_e5m2": 2.0**-14,
}

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]

CHUNK = 1 << 20  # rows taken at a time, which bounds the memory of a long trace


def first_nonfinite(trace: Trace) -> int | None:
    """The first row that holds a nonfinite element; rows after its chunk are not read."""
    for start in range(0, len(trace), CHUNK):
        bad = np.flatnonzero(nonfinite_rows(trace.events[start : start + CHUNK]))
        if bad.size:
            return start + int(bad[0])
    return None


def largest(events: npt.NDArray[np.void]) -> Floats:
    """Largest finite magnitude of each row; NaN where no element is finite."""
    return np.asarray(np.maximum(np.abs(events["min"]), np.abs(events["max"])))


def smallest(events: npt.NDArray[np.void]) -> Floats:
    """Smallest finite magnitude of each row: measured, or known because all elements have one sign; else NaN."""
    low, high = events["min"], events["max"]
    known = np.where(low > 0, low, np.where(high < 0, -high, np.nan))
    return np.where(events["columns"] & Columns.ABSMIN, events["absmin"], known)


def limits(trace: Trace) -> Floats:
    """Largest finite magnitude of each site's dtype; NaN for a dtype that cannot overflow into infinity."""
    return np.array([LARGEST.get(site.dtype, np.nan) for site in trace.sites] or [np.nan])


def headroom(trace: Trace, rows: slice = slice(None)) -> Floats:
    """Bits left before overflow, log2(largest of the dtype / largest of the tensor); NaN where that says nothing."""
    events = trace.events[rows]
    size = largest(events)
    with np.errstate(divide="ignore", over="ignore"):
        bits = np.log2(limits(trace)[events["site"]]) - np.log2(size)
    return np.where(np.isfinite(bits), np.maximum(bits, 0.0), np.nan)


def steps_of(trace: Trace) -> Rows:
    """The numbers of the steps that hold events, ascending; steps follow each other in a trace."""
    step = trace.events["step"]
    return step[np.flatnonzero(np.diff(step, prepend=step[:1] - 1 if len(step) else 0))].astype(np.int64)


def bounds(trace: Trace, step: int) -> slice:
    """The rows of one step."""
    column = trace.events["step"]
    return slice(int(np.searchsorted(column, step)), int(np.searchsorted(column, step, "right")))


def ticks(count: int) -> list[int]:
    """Which of `count` places are told on an axis: at most eleven, round numbers of places apart, and the last.

    The last one is left out where the one before it stands too near for two labels.
    """
    strides = (factor * 10**power for power in range(19) for factor in (1, 2, 5))
    stride = next(stride for stride in strides if stride * 10 >= count)
    places = list(range(0, count, stride))
    return [*places, count - 1] if places and count - 1 - places[-1] >= 0.6 * stride else places


def cut(count: int, most: int) -> Rows:
    """Where at most `most` equal pieces of `count` things begin."""
    size = max(-(-count // most), 1)
    return np.arange(0, count, size)
