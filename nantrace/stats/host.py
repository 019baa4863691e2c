"""Statistics of one tensor, read on the host. Knows every kind of tensor; has no opinion on the numbers.

`extremes` is what hooks call: it serves a finite tensor in host memory, dense or small, in a few microseconds, and
leaves all else to `measure`, the careful path. `row` is either of them. It and `measure` hold their own guards: callers
need no `no_grad`, and no mode, transform or subclass of the user sees the reading.

An element that is a pair (complex numbers, float4_e2m1fn_x2) is NaN if either part is, else infinite if either part is;
zero if both are; subnormal or saturated if either is. Extremes run over the parts of finite elements. Elements that a
sparse tensor doesn't store are the zeros they stand for. Of a quantized tensor the dequantized values are read.
Integers and booleans are never subnormal nor saturated.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from nantrace.events import TensorStats
from nantrace.stats.byte_rows import byte_extremes, byte_row
from nantrace.stats.exact import EMPTY_RANGE, FULL, NAN, RANGE, Row, float_row, integer_row
from nantrace.stats.formats import FLOAT_FORMATS, REAL_FORMATS, byte_format, is_byte_float
from nantrace.stats.special import jagged_row, nested_row, sparse_row
from nantrace.stats.unwrap import PLAIN, UnreadableError, check_readable, quiet, resolved, unwrapped

_aminmax = torch.aminmax
_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_grad_enabled = torch.is_grad_enabled
_set_grad = torch._C._set_grad_enabled
_INF = math.inf

# Per dtype, pairs of one-element outputs with a view that numpy reads them through, which costs half of two `item()`.
# A caller takes one out and puts it back: pop and append are atomic, so threads and re-entrant calls never share one.
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_outputs: dict[torch.dtype, list[Any]] = {dtype: [] for dtype in REAL_FORMATS + _INTEGERS}

_SMALL = 4096  # elements: reading fewer out of order costs less than ordering them


def row(tensor: torch.Tensor, full: bool = False) -> Row:
    """The statistics of any tensor as a plain tuple, in the order of `EVENT` from "numel" on.

    Absent floats are NaN, no first nonfinite element is -1. A tensor whose values cannot be read has all counts 0 but
    `numel`, and no column. Reads a tensor of another device synchronously.
    """
    # A function mode would see the attributes of the tensor being read, so it is asked for first.
    if not full and not _function_modes() and not _dispatch_modes():
        if _grad_enabled():  # `out=` refuses a tensor that requires grad
            _set_grad(False)
            try:
                found = extremes(tensor)
            finally:
                _set_grad(True)
        else:
            found = extremes(tensor)
        if found is not None:
            numel, low, high = found
            return (numel, numel, 0, 0, 0, low, high, NAN, -1, 0, 0, 0, 16)
    return measure(tensor, full)[0]


def extremes(tensor: torch.Tensor) -> tuple[int, float, float] | None:
    """(numel, min, max) of a finite plain tensor in host memory, dense or small; None for any other.

    Gradient mode must be off and no mode active.
    """
    if type(tensor) in PLAIN:
        try:
            numel, pool = tensor.numel(), _outputs.get(tensor.dtype)
            if pool is None or not (numel <= _SMALL or tensor.is_contiguous()):
                return _dense_extremes(tensor)
            if tensor.is_cpu:
                pair, view = pool.pop() if pool else extent_output(tensor.dtype)
                _aminmax(tensor, out=pair)
                low, high = view.tolist()
                pool.append((pair, view))
                if low > -_INF and high < _INF:  # false for NaN
                    return numel, low + 0.0, high + 0.0
        except Exception:  # sparse, nested, empty, freed, wrapped, of a rare dtype: the careful path knows
            pass
    return None


def _dense_extremes(tensor: torch.Tensor) -> tuple[int, float, float] | None:
    """The same of dense elements in whatever order, of complex numbers and of float8, in the order of their memory."""
    numel = tensor.numel()
    if not numel or not tensor.is_cpu or tensor.is_conj() or tensor.is_neg() or not _is_dense(tensor):
        return None
    check_readable(tensor)
    flat = tensor.as_strided((numel,), (1,))
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    if flat.dtype in _outputs:
        found = extremes(flat)
        return None if found is None else (numel, *found[1:])
    ends = byte_extremes(flat.view(torch.uint8), byte_format(flat.dtype)) if is_byte_float(flat.dtype) else None
    return None if ends is None else (numel, *ends)


def extent_output(dtype: torch.dtype) -> tuple[tuple[torch.Tensor, torch.Tensor], Any]:
    """Two one-element outputs for `torch.aminmax`, and the numpy view to read both through: (outputs, view)."""
    with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
        if dtype == torch.bfloat16:  # as the upper halves of two float32, which numpy can read
            halves = torch.zeros(4, dtype=dtype)
            return (halves[1], halves[3]), halves.view(torch.float32).numpy()
        both = torch.zeros(2, dtype=dtype)
        return (both[0], both[1]), both.numpy()


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; True for a tensor that cannot be read."""
    numbers = row(tensor)
    return numbers[1] == numbers[0] or not numbers[12]


def tensor_stats(tensor: torch.Tensor, columns: Literal["range", "full"] | None = None) -> TensorStats:
    """The statistics of one tensor.

    Args:
        tensor: of any kind, dtype, layout and device; it is read, never changed. Reading another device's synchronises.
        columns: "range" counts and finds extremes and the first nonfinite element; "full" adds absmin, zero, subnormal
            and saturated. By default "range" on a CPU and "full" elsewhere.

    Returns:
        Its statistics. `observed` is False where the values cannot be read, and `why` says the reason. Of a DTensor
        the local shard is read; of a functorch wrapper what it wraps.

    Raises:
        TypeError: `tensor` is not a tensor.
        ValueError: `columns` is none of the above.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor_stats got a {type(tensor).__name__}, pass a torch.Tensor")
    if columns not in (None, "range", "full"):
        raise ValueError(f'tensor_stats got columns={columns!r}, pass "range" or "full"')
    with torch._C.DisableTorchFunction():
        dtype, shape = str(tensor.dtype).removeprefix("torch."), _shape(tensor)
        full = columns == "full" or (columns is None and tensor.device.type not in ("cpu", "meta"))
    numbers, why = measure(tensor, full)
    return _as_stats(numbers, dtype, shape, why)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Sizes of the tensor that is read; -1 where a nested tensor's size varies."""
    try:
        with quiet():
            plain = unwrapped(tensor)
            if plain.is_nested and plain.layout is torch.strided:
                return tuple(_ragged_size(plain, dim) for dim in range(plain.dim()))
            return tuple(size if type(size) is int else -1 for size in plain.shape)
    except Exception:
        return _outer_shape(tensor)


def _ragged_size(nested: torch.Tensor, dim: int) -> int:
    try:
        return nested.size(dim)
    except RuntimeError:
        return -1


def _outer_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    try:
        return tuple(size if type(size) is int else -1 for size in tensor.shape)
    except Exception:
        return ()  # an uninitialized parameter


def _as_stats(numbers: Row, dtype: str, shape: tuple[int, ...], why: str | None) -> TensorStats:
    numel, finite, nan, posinf, neginf, low, high, absmin, first_bad, zero, subnormal, saturated, mask = numbers
    full = mask == FULL
    return TensorStats(
        dtype=dtype,
        shape=shape,
        numel=numel,
        finite=finite,
        nan=nan,
        posinf=posinf,
        neginf=neginf,
        min=low if low == low else None,
        max=high if high == high else None,
        first_bad=first_bad if mask & RANGE else None,
        absmin=absmin if absmin == absmin else None,
        zero=zero if full else None,
        subnormal=subnormal if full else None,
        saturated=saturated if full else None,
        observed=why is None,
        why=why,
    )


def measure(tensor: torch.Tensor, full: bool) -> tuple[Row, str | None]:
    """The row of any tensor, and why its values could not be read (None if they were)."""
    try:
        with quiet():
            return _careful(tensor, full), None
    except UnreadableError as reason:
        why = str(reason)
    except Exception as error:  # a kind of tensor that nobody foresaw is no reason to stop a training step
        why = f"reading it raised {type(error).__name__}: {error}"
    return unread_row(tensor), why


def unread_row(tensor: torch.Tensor) -> Row:
    """The row of a tensor whose values cannot be read."""
    return (_count(tensor), 0, 0, 0, 0, NAN, NAN, NAN, -1, 0, 0, 0, 0)


def _count(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        try:
            numel = tensor.numel()
        except Exception:
            return 0
        return numel if type(numel) is int else 0  # a symbolic size stays unasked: asking would guard on it


def _careful(tensor: torch.Tensor, full: bool) -> Row:
    tensor = unwrapped(tensor)
    if tensor.is_nested:
        return (nested_row if tensor.layout is torch.strided else jagged_row)(tensor, full, _careful)
    if tensor.is_mkldnn:
        tensor = tensor.to_dense()
    elif tensor.layout is not torch.strided:
        return sparse_row(tensor, full, _careful)
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    check_readable(tensor)
    return strided_row(tensor.detach(), full)


def strided_row(tensor: torch.Tensor, full: bool) -> Row:
    """The row of a plain strided tensor whose memory can be read. Call within `quiet`."""
    numel = tensor.numel()
    if numel == 0:
        return (*EMPTY_RANGE[:-1], FULL if full else RANGE)
    if tensor._is_zerotensor():  # has no memory
        return (
            numel,
            numel,
            0,
            0,
            0,
            0.0,
            0.0,
            NAN,
            -1,
            *((min(numel, 2**32 - 1), 0, 0, FULL) if full else (0, 0, 0, RANGE)),
        )
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    tensor = resolved(tensor)
    if tensor.dtype in FLOAT_FORMATS:
        return float_row(tensor, full)
    if is_byte_float(tensor.dtype):
        return byte_row(tensor, full)
    return integer_row(tensor, full)
