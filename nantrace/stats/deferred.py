"""Statistics that stay on an asynchronous device until the end of a step. Knows codes and pieces; waits for nothing.

Every column of a row is computed by operations whose result has a size known beforehand, into a table on the device.
`DeviceTable.drain` fetches it in one copy, the only moment that waits. Extremes are found among codes turned into
integers of the same order, so that no device's way with subnormals or NaN counts and no float64 is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nantrace.stats.exact import EMPTY_RANGE, FULL, NAN, PASSES, RANGE, Mask, Row, merge
from nantrace.stats.formats import FLOAT_FORMATS, FloatFormat, byte_format, is_byte_float
from nantrace.stats.host import strided_row, unread_row
from nantrace.stats.layout import Layout, lay_out, pieces, row_major
from nantrace.stats.unwrap import UnreadableError, check_readable, quiet, resolved, unwrapped

PIECE = 4 * 1024 * 1024  # elements: bounds the memory that masks need
_BLOCK = 1024  # rows
_WIDTH = 10  # nan, posinf, neginf, low, high, first bad, absmin, zero, subnormal, saturated
_LIMIT = 2**32 - 1
_LEAST, _MOST = -(2**63), 2**63 - 1
_NOTHING = torch.empty(0)

Number = Callable[[int], float]


@dataclass(frozen=True)
class _Piece:
    """A row of the table: the statistics of some consecutive elements, and how to read its integers as numbers."""

    index: int
    count: int
    number: Number
    magnitude: Number


@dataclass(frozen=True)
class _Strided:
    """What was put into the table of one strided tensor."""

    layout: Layout  # of no memory: it would stay alive until the rows are fetched
    pieces: tuple[_Piece, ...]


_Slot = tuple[bool, list["Row | _Strided"]]  # whether it has all columns, and its parts


class DeviceTable:
    """Rows of tensors of one device, on that device. Any thread may add.

    Reads what lies in strided memory, in whatever wrapper. The elements of a sparse tensor, and of a jagged one with
    holes, can only be found by waiting for the device: they are not read.
    """

    failure: str | None = None  # there is nothing here that a machine may lack

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._blocks: list[torch.Tensor] = []  # never moved: another stream may be writing to one
        self._used = 0
        self._slots: list[_Slot] = []
        self._lock = threading.Lock()
        self._lookups: dict[torch.dtype, _Lookup] = {}

    def add(self, tensor: torch.Tensor, full: bool) -> int:
        """Queue the computation of a tensor's row; its index in what `drain` returns next. Never raises."""
        try:
            with quiet():
                parts = [self._part(part, full) for part in _parts(tensor)]
        except Exception:  # memory may be short, a kernel may be missing: no reason to stop a training step
            parts = [unread_row(tensor)]
        with self._lock:
            self._slots.append((full, parts))
            return len(self._slots) - 1

    def add_all(self, tensors: list[torch.Tensor], full: bool) -> list[int]:
        return [self.add(tensor, full) for tensor in tensors]

    def drain(self) -> list[Row]:
        """The rows since the last drain, in the shape of `nantrace.stats.host.row`; waits for the device."""
        with self._lock:
            slots, self._slots = self._slots, []
            used, self._used = self._used, 0
        table: list[list[int]] = []
        if used:
            if self._device.type != "cpu":  # rows may come from several streams
                torch.accelerator.synchronize(self._device)
            with quiet():
                table = torch.cat(self._blocks[: -(-used // _BLOCK)]).narrow(0, 0, used).cpu().tolist()
        return [_row(parts, table, full) for full, parts in slots]

    def _part(self, tensor: torch.Tensor, full: bool) -> Row | _Strided:
        check_readable(tensor)
        tensor = tensor.detach()
        if tensor.numel() == 0 or tensor._is_zerotensor():  # known without reading
            return strided_row(tensor, full)
        tensor = resolved(tensor)
        measure: _Measure
        if is_byte_float(tensor.dtype):
            measure = self._lookup(tensor.dtype)
            tensor = tensor.view(torch.uint8)
        elif tensor.dtype in FLOAT_FORMATS:
            measure = _FloatCodes(FLOAT_FORMATS[tensor.dtype])
        else:
            measure = _Integers(unsigned=tensor.dtype == torch.uint64)
        layout = row_major(lay_out(tensor))
        written = tuple(self._write(piece, measure, full) for piece in pieces(layout.elements, PIECE))
        return _Strided(replace(layout, elements=_NOTHING), written)

    def _write(self, piece: torch.Tensor, measure: _Measure, full: bool) -> _Piece:
        columns = measure.columns(piece, full)
        columns += [columns[0]] * (_WIDTH - len(columns))  # not read where the columns were not asked for
        index, row = self._next()
        row.copy_(torch.stack([column.long() for column in columns]))
        return _Piece(index, len(piece), measure.number, measure.magnitude)

    def _next(self) -> tuple[int, torch.Tensor]:
        with self._lock:
            index, self._used = self._used, self._used + 1
            if index == len(self._blocks) * _BLOCK:
                with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
                    self._blocks.append(torch.empty(_BLOCK, _WIDTH, dtype=torch.int64, device=self._device))
            return index, self._blocks[index // _BLOCK][index % _BLOCK]

    def _lookup(self, dtype: torch.dtype) -> _Lookup:
        if dtype not in self._lookups:
            with torch.inference_mode(False):
                self._lookups[dtype] = _Lookup(dtype, self._device)
        return self._lookups[dtype]


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that, one behind the other, hold the values."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UnreadableError("a graph is being captured")
    tensor = unwrapped(tensor)
    if tensor.is_nested:
        if tensor.layout is torch.strided:
            return list(tensor.unbind())
        if tensor._lengths is not None:  # type: ignore[attr-defined]
            raise UnreadableError("where its holes are is known to the device alone")
        return [tensor._values]  # type: ignore[list-item]
    if tensor.is_mkldnn:
        return [tensor.to_dense()]
    if tensor.layout is not torch.strided:
        raise UnreadableError("which of its elements are stored is known to the device alone")
    return [tensor.dequantize() if tensor.is_quantized else tensor]


def _row(parts: list[Row | _Strided], table: list[list[int]], full: bool) -> Row:
    if len(parts) == 1 and isinstance(parts[0], tuple):
        return parts[0]
    rows = [part if isinstance(part, tuple) else _strided_row(part, table, full) for part in parts]
    merged = merge(rows or [EMPTY_RANGE], full)
    return (*merged[:12], merged[12] | PASSES)


def _strided_row(part: _Strided, table: list[list[int]], full: bool) -> Row:
    numbers = merge([_piece_row(piece, table[piece.index], full) for piece in part.pieces], full)
    layout, first_bad = part.layout, numbers[8]
    if first_bad >= 0:
        first_bad = layout.flat_index(np.array([first_bad]))
    counts = [count * layout.repeats for count in numbers[:5]]
    optional = [min(count * layout.repeats, _LIMIT) for count in numbers[9:12]]
    return (*counts, *numbers[5:8], first_bad, *optional, numbers[12])  # type: ignore[return-value]


def _piece_row(piece: _Piece, columns: list[int], full: bool) -> Row:
    nan, posinf, neginf, low, high, first_bad, least, zero, subnormal, saturated = columns
    bad = nan + posinf + neginf
    finite = piece.count - bad
    extremes = (piece.number(low), piece.number(high)) if finite else (NAN, NAN)
    first_bad = first_bad if bad else -1
    if not full:
        return (piece.count, finite, nan, posinf, neginf, *extremes, NAN, first_bad, 0, 0, 0, RANGE)
    absmin = piece.magnitude(least) if finite > zero else NAN
    counts = (piece.count, finite, nan, posinf, neginf)
    return (*counts, *extremes, absmin, first_bad, zero, subnormal, saturated, FULL)


class _FloatCodes:
    """Columns of a format whose codes can be compared."""

    def __init__(self, form: FloatFormat) -> None:
        self._form = form
        self.magnitude: Number = form.value

    def number(self, key: int) -> float:
        form = self._form
        return form.value(key if key >= 0 else (key ^ form.magnitude) & (form.sign | form.magnitude))

    def columns(self, piece: torch.Tensor, full: bool) -> list[torch.Tensor]:
        form = self._form
        bits = piece.view(form.bits)
        magnitudes = bits & form.magnitude
        nan, bad = _any(magnitudes > form.inf), _any(magnitudes >= form.inf)
        posinf = _any(bits == form.inf) & ~nan
        # As floats are ordered: the negative ones, whose codes run the other way, are turned around.
        keys = torch.where(bits < 0, bits ^ form.magnitude, bits)
        dropped = bad if bits.dim() == 1 else bad[:, None]
        low = keys.masked_fill(dropped, form.magnitude).amin()
        high = keys.masked_fill(dropped, -form.magnitude - 1).amax()
        count = nan.sum()
        positive = posinf.sum()
        range_ = [count, positive, bad.sum() - count - positive, low, high, _first(bad)]
        if not full:
            return range_
        nonzero = magnitudes != 0
        least = magnitudes.masked_fill(dropped | ~nonzero, form.magnitude).amin()
        subnormal = _any(nonzero & (magnitudes < form.normal)) & ~bad
        saturated = _any(magnitudes == form.largest) & ~bad
        return [*range_, least, (~_any(nonzero)).sum(), subnormal.sum(), saturated.sum()]


class _Lookup:
    """Columns of a format of one byte an element, each byte looked up in what the format says of it."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        form = byte_format(dtype)
        values, magnitudes = form.values, np.abs(form.values)
        finite = magnitudes[np.isfinite(magnitudes)]
        self._numbers = np.unique(np.concatenate([-finite, finite]))
        nan: Mask = np.logical_or.reduce(np.isnan(values), axis=1)
        bad: Mask = np.logical_or.reduce(~np.isfinite(values), axis=1)
        posinf = (values == np.inf).any(1) & ~nan
        none = len(self._numbers)  # the place of no number
        places = np.searchsorted(self._numbers, np.where(np.isfinite(values), values, 0))
        nonzero = np.where((magnitudes > 0) & ~bad[:, None], magnitudes, np.inf).min(1)
        columns: tuple[npt.NDArray[Any], ...] = (
            nan,
            posinf,
            bad & ~nan & ~posinf,
            np.where(bad, none, places.min(1)),
            np.where(bad, -1, places.max(1)),
            bad,
            np.where(np.isfinite(nonzero), np.searchsorted(self._numbers, nonzero), none),
            (values == 0).all(1),
            ((magnitudes > 0) & (magnitudes < form.normal)).any(1) & ~bad,
            (magnitudes == form.largest).any(1) & ~bad,
        )
        self._tables = [_there(column, device) for column in columns]

    def number(self, key: int) -> float:
        return float(self._numbers[key]) + 0.0

    magnitude = number

    def columns(self, piece: torch.Tensor, full: bool) -> list[torch.Tensor]:
        codes = piece.int()
        nan, posinf, neginf, low, high, bad, *rest = (table[codes] for table in self._tables[: _WIDTH if full else 6])
        range_ = [nan.sum(), posinf.sum(), neginf.sum(), low.amin(), high.amax(), _first(bad.bool())]
        return [*range_, rest[0].amin(), *(column.sum() for column in rest[1:])] if full else range_


def _there(column: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(column.astype(np.int16)).to(device, non_blocking=True)


class _Integers:
    """Columns of integers and booleans; of unsigned 64-bit ones the keys are moved by half of their range."""

    def __init__(self, unsigned: bool) -> None:
        self._shift = 2**63 if unsigned else 0

    def number(self, key: int) -> float:
        return float(key + self._shift)

    def magnitude(self, key: int) -> float:
        return self.number(key) if self._shift else float(-key)

    def columns(self, piece: torch.Tensor, full: bool) -> list[torch.Tensor]:
        keys = piece.view(torch.int64) ^ _LEAST if self._shift else piece.long()
        none = keys.new_zeros(())
        range_ = [none, none, none, keys.amin(), keys.amax(), none]
        if not full:
            return range_
        zero = keys == -self._shift
        if self._shift:
            least = keys.masked_fill(zero, _MOST).amin()
        else:  # negated: the magnitude of the smallest integer of a dtype doesn't fit into it
            least = torch.where(keys > 0, -keys, keys).masked_fill(zero, _LEAST).amax()
        return [*range_, least, zero.sum(), none, none]


_Measure = _FloatCodes | _Lookup | _Integers


def _any(parts: torch.Tensor) -> torch.Tensor:
    return parts if parts.dim() == 1 else parts[:, 0] | parts[:, 1]


def _first(mask: torch.Tensor) -> torch.Tensor:
    """Position of the first true element."""
    return mask.view(torch.uint8).argmax()
