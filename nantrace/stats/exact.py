"""Exact counts of strided tensors in host memory, for what `aminmax` alone cannot answer. Knows codes and layouts.

Works on pieces that fit the cache. A piece is masked only if its extremes say that something in it is nonfinite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from nantrace.stats.formats import FLOAT_FORMATS, FloatFormat
from nantrace.stats.layout import Layout, array_of, lay_out, pieces, row_major

PIECE = 64 * 1024  # elements
_POSITIONS = 64 * 1024  # more nonfinite elements than this are not sorted by place, the first is searched for
_LIMIT = 2**32 - 1  # where the event's optional counts stop

#: (numel, finite, nan, posinf, neginf, min, max, absmin, first_bad, zero, subnormal, saturated, columns)
Row = tuple[int, int, int, int, int, float, float, float, int, int, int, int, int]
Mask = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.unsignedinteger]

RANGE = 16  # Columns.FIRST_BAD, without the price of an enum
FULL = 31
KERNEL, PASSES = 32, 64  # of Columns as well: where a row was measured
NAN = float("nan")
EMPTY_RANGE: Row = (0, 0, 0, 0, 0, NAN, NAN, NAN, -1, 0, 0, 0, RANGE)


@dataclass
class Tally:
    """Running statistics over pieces of one tensor; `bad` holds positions of nonfinite elements in memory order."""

    finite: int = 0
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    min: float = math.inf
    max: float = -math.inf
    absmin: float = math.inf
    zero: int = 0
    subnormal: int = 0
    saturated: int = 0
    first_bad: int = -1
    bad: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def see(self, low: float, high: float) -> None:
        self.min, self.max = min(self.min, low), max(self.max, high)

    def row(self, full: bool, repeats: int = 1) -> Row:
        """The row of a tensor that shows each counted element `repeats` times."""
        counts = [count * repeats for count in (self.finite, self.nan, self.posinf, self.neginf)]
        some = self.finite > 0
        low, high = (self.min + 0.0, self.max + 0.0) if some else (NAN, NAN)
        absmin = self.absmin if full and self.absmin < math.inf else NAN
        optional = [min(count * repeats, _LIMIT) for count in (self.zero, self.subnormal, self.saturated)]
        if not full:
            optional = [0, 0, 0]
        return (sum(counts), *counts, low, high, absmin, self.first_bad, *optional, FULL if full else RANGE)  # type: ignore[return-value]


def merge(rows: list[Row], full: bool) -> Row:
    """The row of the concatenation of tensors that have these rows."""
    tally, before = Tally(), 0
    for row in rows:
        numel, finite, nan, posinf, neginf, low, high, absmin, first_bad, zero, subnormal, saturated, _ = row
        tally.finite, tally.nan = tally.finite + finite, tally.nan + nan
        tally.posinf, tally.neginf = tally.posinf + posinf, tally.neginf + neginf
        tally.zero, tally.subnormal = tally.zero + zero, tally.subnormal + subnormal
        tally.saturated += saturated
        if finite:
            tally.see(low, high)
        if absmin == absmin:
            tally.absmin = min(tally.absmin, absmin)
        if first_bad >= 0 and tally.first_bad < 0:
            tally.first_bad = before + first_bad
        before += numel
    return tally.row(full)


def float_row(tensor: torch.Tensor, full: bool) -> Row:
    """The row of a tensor of a dtype in `FLOAT_FORMATS`, nonempty, without lazy conjugation or negation."""
    layout, form = lay_out(tensor), FLOAT_FORMATS[tensor.dtype]
    if not full and layout.elements.numel() > PIECE:
        low, high = _extremes(layout.elements)
        if -math.inf < low and high < math.inf:
            numel = tensor.numel()
            return (numel, numel, 0, 0, 0, low + 0.0, high + 0.0, NAN, -1, 0, 0, 0, RANGE)
    tally, before, found = Tally(), 0, 0
    bad: Mask | None = None
    for codes in _code_pieces(layout, form):
        bad = _count_piece(codes, form, full, tally, suspect=bad is not None)
        if bad is not None and found <= _POSITIONS and (not found or not layout.ordered):
            positions = np.flatnonzero(bad)
            found += len(positions)
            tally.bad.append(positions[: 1 if layout.ordered else None] + before)
        before += len(codes)
    if found:
        known = found <= _POSITIONS or layout.ordered
        tally.first_bad = layout.flat_index(np.concatenate(tally.bad)) if known else _search(layout, form)
    return tally.row(full, layout.repeats)


def _extremes(elements: torch.Tensor) -> tuple[float, float]:
    real = torch.view_as_real(elements) if elements.is_complex() else elements
    low, high = torch.aminmax(real)
    return low.item(), high.item()


def _code_pieces(layout: Layout, form: FloatFormat) -> Iterator[Codes]:
    """The codes of all elements: arrays of shape (elements,), or (elements, 2) if they are complex.

    In numpy, on one thread: PyTorch's threads would wait for each other at each piece.
    """
    elements = layout.elements
    if elements.dim() == 1 and (elements.stride(0) == 1 or len(elements) == 1):  # one array, without a copy
        real = torch.view_as_real(elements) if elements.is_complex() else elements
        codes = _codes(real, form)
        for start in range(0, len(codes), PIECE):
            yield codes[start : start + PIECE]
    else:
        for piece in pieces(elements, PIECE):
            yield _codes(piece, form)


def _codes(real: torch.Tensor, form: FloatFormat) -> Codes:
    return array_of(real.view(form.bits)).view(form.code)


def _count_piece(codes: Codes, form: FloatFormat, full: bool, tally: Tally, suspect: bool) -> Mask | None:
    """Adds a piece to the tally. Returns which elements are nonfinite, None if none is.

    Whether all is finite is asked first, unless the piece is suspect: behind a bad one, all are often NaN.
    """
    if not suspect:
        low, high = _extreme_codes(codes, form)
        if low & form.magnitude < form.inf and high & form.magnitude < form.inf:
            tally.finite += len(codes)
            tally.see(form.value(low), form.value(high))
            if full:
                _count_finite(codes, form, tally)
            return None
    magnitudes = codes & codes.dtype.type(form.magnitude)
    is_nan = _any(magnitudes > form.inf)
    nan = _true(is_nan)
    if suspect and nan == 0:
        return _count_piece(codes, form, full, tally, suspect=False)
    tally.nan += nan
    if nan == len(codes):
        return is_nan
    bad = _any(magnitudes >= form.inf)
    count = _true(bad)
    if nan < count:
        is_posinf = _any(codes == form.inf)
        posinf = _true(is_posinf & ~is_nan if nan else is_posinf)
        tally.posinf += posinf
        tally.neginf += count - nan - posinf
    if count < len(codes):
        _count_good(codes, bad, len(codes) - count, form, full, tally)
    return bad


def _count_good(codes: Codes, bad: Mask, count: int, form: FloatFormat, full: bool, tally: Tally) -> None:
    """Adds the `count` elements that are not bad."""
    tally.finite += count
    if full:
        good = codes[~bad]
        _count_finite(good, form, tally)
    else:  # dropping elements costs more than putting a good one in their place
        some = codes[int(bad.argmin())]
        good = np.where(bad if codes.ndim == 1 else bad[:, None], some, codes)
    low, high = _extreme_codes(good, form)
    tally.see(form.value(low), form.value(high))


def _true(mask: npt.NDArray[np.generic]) -> int:
    return int(np.count_nonzero(mask))


def _any(parts: Mask) -> Mask:
    return parts if parts.ndim == 1 else parts[:, 0] | parts[:, 1]


def _all(parts: Mask) -> Mask:
    return parts if parts.ndim == 1 else parts[:, 0] & parts[:, 1]


def _extreme_codes(codes: Codes, form: FloatFormat) -> tuple[int, int]:
    """Codes of the smallest and the largest number, if all are finite; else one of the two is nonfinite.

    Nonnegative codes order as signed integers, negative ones as unsigned integers in reverse.
    """
    most, highest = int(codes.max()), int(codes.view(form.signed).max())
    low = most if most & form.sign else int(codes.min())
    return low, highest if highest >= 0 else int(codes.min())


def _count_finite(codes: Codes, form: FloatFormat, tally: Tally) -> None:
    magnitudes = codes & codes.dtype.type(form.magnitude)
    if int(magnitudes.max()) == form.largest:
        tally.saturated += _true(_any(magnitudes == form.largest))
    # One less, unsigned: zero becomes the largest code, and the smallest is that of the smallest nonzero magnitude.
    least = int((magnitudes - magnitudes.dtype.type(1)).min()) + 1
    if least > form.magnitude:
        tally.zero += len(codes)
        return
    tally.absmin = min(tally.absmin, form.value(least))
    tally.zero += _true(_all(magnitudes == 0))
    if least < form.normal:
        tally.subnormal += _true(_any((magnitudes != 0) & (magnitudes < form.normal)))


def _search(layout: Layout, form: FloatFormat) -> int:
    """Row-major index of the first nonfinite element, by reading in row-major order until there is one."""
    layout, before = row_major(layout), 0
    for codes in _code_pieces(layout, form):
        bad = np.flatnonzero(_any(codes & codes.dtype.type(form.magnitude) >= form.inf))
        if len(bad):
            return layout.flat_index(bad[:1] + before)
        before += len(codes)
    raise AssertionError("a nonfinite element was counted and is not there")


def integer_row(tensor: torch.Tensor, full: bool) -> Row:
    """The row of a nonempty tensor of integers or booleans: all finite, none subnormal or saturated."""
    layout = lay_out(tensor)
    tally = Tally(finite=layout.elements.numel())
    for piece in pieces(layout.elements, PIECE):
        codes = array_of(piece)
        low, high = int(codes.min()), int(codes.max())
        tally.see(float(low), float(high))
        if full:
            count = _true(codes)
            tally.zero += len(codes) - count
            nonzero = codes[codes != 0] if count < len(codes) else codes
            tally.absmin = min(tally.absmin, _least_magnitude(nonzero))
    return tally.row(full, layout.repeats)


def _least_magnitude(nonzero: npt.NDArray[np.generic]) -> float:
    # In two halves: the magnitude of the smallest integer of a dtype doesn't fit into it.
    above = nonzero[nonzero > 0]  # type: ignore[operator]
    below = nonzero[nonzero < 0] if len(above) < len(nonzero) else above[:0]  # type: ignore[operator]
    return min(float(above.min()) if len(above) else math.inf, -float(below.max()) if len(below) else math.inf)
