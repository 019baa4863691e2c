"""Exact counts of tensors of one byte an element, in host memory. Knows the 256 bytes of a format; of layouts, pieces.

Numbers that are all finite are told by the extreme bytes. Where something is nonfinite, formats of which it lies at the
tops of both halves are counted by comparing; of the others, and where all columns are wanted, each byte is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from nantrace.stats.exact import NAN, RANGE, Mask, Row, Tally
from nantrace.stats.formats import ByteFormat, byte_format
from nantrace.stats.layout import Layout, array_of, lay_out, pieces, row_major

_LONG = 1024 * 1024  # bytes that are read twice, the second time from the cache
_SHORT = 128 * 1024  # bytes that masks are made of
_MAGNITUDE = np.uint8(127)

Bytes = npt.NDArray[np.uint8]


def byte_row(tensor: torch.Tensor, full: bool) -> Row:
    """The row of a nonempty tensor of a dtype that `byte_format` knows."""
    form = byte_format(tensor.dtype)
    layout = lay_out(tensor.view(torch.uint8))
    ends = None if full else byte_extremes(layout.elements, form)
    if ends is not None:
        numel = tensor.numel()
        return (numel, numel, 0, 0, 0, *ends, NAN, -1, 0, 0, 0, RANGE)
    tally = _histogram(layout, form) if full or not form.outward else _compared(layout, form)
    if tally.finite < tensor.numel() // layout.repeats:
        tally.first_bad = _first_bad(layout, form)
    return tally.row(full, layout.repeats)


def byte_extremes(elements: torch.Tensor, form: ByteFormat) -> tuple[float, float] | None:
    """Smallest and largest number of one or more; None if any is nonfinite, or if bytes are pairs of numbers."""
    if not form.monotone:
        return None
    low, high = math.inf, -math.inf
    for array in _arrays(elements, _LONG):
        ends = [form.numbers[code] for code in _end_bytes(array, form)]
        if not all(map(math.isfinite, ends)):
            return None
        low, high = min(low, *ends), max(high, *ends)
    return low + 0.0, high + 0.0


def _end_bytes(array: Bytes, form: ByteFormat) -> tuple[int, ...]:
    """Bytes among which are the smallest number, the largest one, and a nonfinite one if there is any."""
    signed = array.view(np.int8)
    highest, above = int(array.max()), int(signed.max())
    if not form.outward:  # the ends of either half
        return highest, above % 256, int(array.min()), int(signed.min()) % 256
    if highest >= 128 and above >= 0:
        return highest, above
    return highest, int(array.min())  # all are of one sign


def _compared(layout: Layout, form: ByteFormat) -> Tally:
    """Counts of an outward format, without the extended columns."""
    tally = Tally()
    infinite = [int(code) for code in np.flatnonzero(np.isinf(form.values[:128, 0]))]  # one, or none
    for array in _arrays(layout.elements, _SHORT):
        magnitudes = array & _MAGNITUDE
        bad = _bad(magnitudes, form)
        count = int(np.count_nonzero(bad))
        tally.finite += len(array) - count
        for code in infinite if count else ():
            either, positive = int(np.count_nonzero(magnitudes == code)), int(np.count_nonzero(array == code))
            tally.posinf, tally.neginf = tally.posinf + positive, tally.neginf + either - positive
            count -= either
        tally.nan += count
        if count < len(array):
            _see_good(array, bad, form, tally)
    return tally


def _bad(magnitudes: Bytes, form: ByteFormat) -> Mask:
    return magnitudes >= np.uint8(form.first_nonfinite)


def _see_good(array: Bytes, bad: Mask, form: ByteFormat, tally: Tally) -> None:
    """Takes in the range of the elements that are not bad, of which there is one at least."""
    if bad.any():  # dropping elements costs more than putting a good one in their place
        array = np.where(bad, array[int(bad.argmin())], array)
    ends = [form.numbers[code] for code in _end_bytes(array, form)]
    tally.see(min(ends), max(ends))


def _histogram(layout: Layout, form: ByteFormat) -> Tally:
    """All counts, from how often each of the 256 bytes occurs."""
    histogram = torch.zeros(256, dtype=torch.int64)
    for piece in pieces(layout.elements, _LONG):
        histogram += torch.bincount(piece, minlength=256)
    counts = histogram.numpy()
    values, magnitudes, bad = form.values, np.abs(form.values), form.nonfinite
    is_nan: Mask = np.logical_or.reduce(np.isnan(values), axis=1)
    posinf = (values == np.inf).any(1) & ~is_nan
    subnormal = ((magnitudes > 0) & (magnitudes < form.normal)).any(1) & ~bad

    def total(mask: Mask) -> int:
        return int(counts[mask].sum())

    tally = Tally(finite=total(~bad), nan=total(is_nan), posinf=total(posinf), neginf=total(bad & ~is_nan & ~posinf))
    tally.zero, tally.subnormal = total((values == 0).all(1)), total(subnormal)
    tally.saturated = total((magnitudes == form.largest).any(1) & ~bad)
    present = values[(counts > 0) & ~bad]
    if present.size:
        tally.see(float(present.min()), float(present.max()))
        tally.absmin = float(np.abs(present[present != 0]).min(initial=math.inf))
    return tally


def _first_bad(layout: Layout, form: ByteFormat) -> int:
    layout, before = row_major(layout), 0
    for array in _arrays(layout.elements, _SHORT):
        found = np.flatnonzero(_bad(array & _MAGNITUDE, form) if form.outward else form.nonfinite[array])
        if len(found):
            return layout.flat_index(found[:1] + before)
        before += len(array)
    raise AssertionError("a nonfinite element was counted and is not there")


def _arrays(elements: torch.Tensor, size: int) -> Iterator[Bytes]:
    if elements.dim() == 1 and elements.is_contiguous():  # one array, without a copy
        whole = array_of(elements)
        return (whole[start : start + size] for start in range(0, len(whole), size))
    return (array_of(piece) for piece in pieces(elements, size))
