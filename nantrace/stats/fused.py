"""All statistics of a tensor on a CUDA device in one pass: a Triton kernel that adds one row to a table on the device.

Knows kernels; with what they are launched, `nantrace.stats.fused_launch` does. Importing it imports triton:
`nantrace.stats.policy` asks first whether it is there.

The kernel compares codes as integers and combines what its programs found by integer atomics (add, min, max), which
give the same bits whatever the order and the number of programs:

    magnitude = code & MAGNITUDE          key = -magnitude if code < 0 else magnitude
    nan: magnitude >= NAN (fnuz: code == -128)   inf: magnitude == INF   low, high: min, max of key over the finite
    absmin: least nonzero magnitude   subnormal: 0 < magnitude < NORMAL   saturated: magnitude == LARGEST
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from nantrace.stats.formats import FLOAT_FORMATS

#: Columns of a row: nan, posinf, neginf, low, high, absmin, first bad, zero, subnormal, saturated; and what they hold
#: while no element was seen.
WIDTH = 10
FAR = 2**63 - 1
UNTOUCHED = (0, 0, 0, FAR, -FAR, FAR, FAR, 0, 0, 0)
DIMS = 4  # dimensions with gaps between them that the kernel can walk


@dataclass(frozen=True)
class Codes:
    """What the kernel is compiled for: a format, by the magnitudes at which its parts begin.

    `inf` is -1 in formats without infinity; `negative_zero_is_nan` holds of the fnuz formats.
    """

    bits: torch.dtype
    magnitude: int
    nan: int
    inf: int
    normal: int
    largest: int
    negative_zero_is_nan: bool = False

    def constants(self) -> dict[str, Any]:
        return {
            "MAGNITUDE": self.magnitude,
            "NAN": self.nan,
            "INF": self.inf,
            "NORMAL": self.normal,
            "LARGEST": self.largest,
            "FNUZ": self.negative_zero_is_nan,
            "WIDE": self.bits == torch.int64,
        }


def _formats() -> dict[torch.dtype, Codes]:
    formats = {
        dtype: Codes(form.bits, form.magnitude, form.inf + 1, form.inf, form.normal, form.largest)
        for dtype, form in FLOAT_FORMATS.items()
    }
    for name, codes in {
        "float8_e4m3fn": Codes(torch.int8, 127, nan=127, inf=-1, normal=8, largest=126),
        "float8_e5m2": Codes(torch.int8, 127, nan=125, inf=124, normal=4, largest=123),
        "float8_e4m3fnuz": Codes(torch.int8, 127, 128, -1, normal=8, largest=127, negative_zero_is_nan=True),
        "float8_e5m2fnuz": Codes(torch.int8, 127, 128, -1, normal=4, largest=127, negative_zero_is_nan=True),
    }.items():
        if hasattr(torch, name):
            formats[getattr(torch, name)] = codes
    return formats


FORMATS = _formats()


@triton.jit
def _key(code, MAGNITUDE: tl.constexpr):
    magnitude = code & MAGNITUDE
    return magnitude, tl.where(code < 0, -magnitude, magnitude)


@triton.jit
def _is_nan(code, magnitude, NAN: tl.constexpr, FNUZ: tl.constexpr):
    if FNUZ:
        return code == -128
    else:
        return magnitude >= NAN


@triton.jit
def _look(
    data,
    start,
    count,
    LAST: tl.constexpr,
    counts,
    ends,
    first,
    size1,
    size2,
    size3,
    step0,
    step1,
    step2,
    step3,
    MAGNITUDE: tl.constexpr,
    NAN: tl.constexpr,
    INF: tl.constexpr,
    NORMAL: tl.constexpr,
    LARGEST: tl.constexpr,
    FNUZ: tl.constexpr,
    integer: tl.constexpr,
    far: tl.constexpr,
    PAIR: tl.constexpr,
    WALK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds one block of elements to what the lanes have seen. LAST: the block is not full."""
    nan, posinf, neginf, zero, subnormal, saturated = counts
    low, high, least = ends
    place = start + tl.arange(0, BLOCK).to(tl.int64)
    offset = place
    if WALK == 2:
        offset = _step(place, size1, size2, size3, step0, step1, step2, step3)
    if PAIR:
        offset = offset * 2
    if LAST:
        inside = place < count
        code = tl.load(data + offset, mask=inside, other=0).to(integer)
        twin = tl.load(data + offset + 1, mask=inside, other=0).to(integer) if PAIR else code
    else:
        inside = tl.full([BLOCK], True, tl.int1)
        code = tl.load(data + offset).to(integer)
        twin = tl.load(data + offset + 1).to(integer) if PAIR else code
    magnitude, key = _key(code, MAGNITUDE)
    is_nan = _is_nan(code, magnitude, NAN, FNUZ)
    is_posinf = (key == INF) & (INF > 0)
    is_neginf = (key == -INF) & (INF > 0)
    is_zero = magnitude == 0
    is_subnormal = (magnitude > 0) & (magnitude < NORMAL)
    is_saturated = magnitude == LARGEST
    under, over, nonzero = key, key, tl.where(magnitude > 0, magnitude, far)
    if PAIR:
        other, twin_key = _key(twin, MAGNITUDE)
        is_nan |= _is_nan(twin, other, NAN, FNUZ)
        is_posinf = (is_posinf | (twin_key == INF)) & ~is_nan
        is_neginf = (is_neginf | (twin_key == -INF)) & ~is_nan & ~is_posinf
        is_zero &= other == 0
        is_subnormal |= (other > 0) & (other < NORMAL)
        is_saturated |= other == LARGEST
        under, over = tl.minimum(key, twin_key), tl.maximum(key, twin_key)
        nonzero = tl.minimum(nonzero, tl.where(other > 0, other, far))
    bad = is_nan | is_posinf | is_neginf  # lanes outside hold zeros, which are never bad
    good = inside & ~bad
    counts = (
        nan + is_nan.to(tl.int32),
        posinf + is_posinf.to(tl.int32),
        neginf + is_neginf.to(tl.int32),
        zero + (good & is_zero).to(tl.int32),
        subnormal + (good & is_subnormal).to(tl.int32),
        saturated + (good & is_saturated).to(tl.int32),
    )
    ends = (
        tl.minimum(low, tl.where(good, under, far)),
        tl.maximum(high, tl.where(good, over, -far)),
        tl.minimum(least, tl.where(good, nonzero, far)),
    )
    if tl.max(bad.to(tl.int32), 0) > 0:  # nearly always nothing is bad, and indices are dear
        index = place
        if WALK == 1:
            index = _step(place, size1, size2, size3, step0, step1, step2, step3)
        first = tl.minimum(first, tl.where(bad, index, 0x7FFFFFFFFFFFFFFF))
    return counts, ends, first


@triton.jit
def _measure(
    data,
    row,
    count,
    program,
    programs,
    size1,
    size2,
    size3,
    step0,
    step1,
    step2,
    step3,
    MAGNITUDE: tl.constexpr,
    NAN: tl.constexpr,
    INF: tl.constexpr,
    NORMAL: tl.constexpr,
    LARGEST: tl.constexpr,
    FNUZ: tl.constexpr,
    WIDE: tl.constexpr,
    PAIR: tl.constexpr,
    WALK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the part of one program to a row.

    WALK 0: elements lie one behind the other in row-major order. 1: they do, but in another order, and the steps are
    those of the row-major index. 2: they have gaps, and the steps are those of the memory.
    """
    integer: tl.constexpr = tl.int64 if WIDE else tl.int32
    far: tl.constexpr = 0x7FFFFFFFFFFFFFFF if WIDE else 0x7FFFFFFF
    none = tl.zeros([BLOCK], tl.int32)
    counts = (none, none, none, none, none, none)
    ends = (tl.full([BLOCK], far, integer), tl.full([BLOCK], -far, integer), tl.full([BLOCK], far, integer))
    first = tl.full([BLOCK], 0x7FFFFFFFFFFFFFFF, tl.int64)
    whole = count // BLOCK * BLOCK
    begin = program.to(tl.int64) * BLOCK
    # Whole blocks are loaded without a mask, which lets a lane load several elements at once.
    for start in range(begin, whole, programs.to(tl.int64) * BLOCK):
        counts, ends, first = _look(
            data, start, count, False, counts, ends, first, size1, size2, size3, step0, step1, step2, step3,
            MAGNITUDE, NAN, INF, NORMAL, LARGEST, FNUZ, integer, far, PAIR, WALK, BLOCK,
        )  # fmt: skip
    if (whole < count) & ((whole // BLOCK) % programs == program):
        counts, ends, first = _look(
            data, whole, count, True, counts, ends, first, size1, size2, size3, step0, step1, step2, step3,
            MAGNITUDE, NAN, INF, NORMAL, LARGEST, FNUZ, integer, far, PAIR, WALK, BLOCK,
        )  # fmt: skip
    nan, posinf, neginf, zero, subnormal, saturated = counts
    low, high, least = ends
    _add(row + 0, nan)
    _add(row + 1, posinf)
    _add(row + 2, neginf)
    bottom = tl.min(low, 0).to(tl.int64)
    if bottom < far:  # a finite element was seen
        tl.atomic_min(row + 3, bottom)
        tl.atomic_max(row + 4, tl.max(high, 0).to(tl.int64))
    smallest = tl.min(least, 0).to(tl.int64)
    if smallest < far:
        tl.atomic_min(row + 5, smallest)
    index = tl.min(first, 0)
    if index < 0x7FFFFFFFFFFFFFFF:
        tl.atomic_min(row + 6, index)
    _add(row + 7, zero)
    _add(row + 8, subnormal)
    _add(row + 9, saturated)


@triton.jit
def _add(cell, counts):
    total = tl.sum(counts.to(tl.int64), 0)
    if total > 0:
        tl.atomic_add(cell, total)


@triton.jit
def _step(place, size1, size2, size3, step0, step1, step2, step3):
    """The place among elements of sizes (any, size1, size2, size3), as the sum of its index times the steps."""
    result = (place % size3) * step3
    place = place // size3
    result += (place % size2) * step2
    place = place // size2
    return result + (place % size1) * step1 + (place // size1) * step0


# The numbers of a call differ from call to call: compiling anew for those that 16 divides would only cost. Annotated,
# they are 64 bits wide whatever their value.
_NUMBERS = ("slot", "count", "size1", "size2", "size3", "step0", "step1", "step2", "step3")


@triton.jit(do_not_specialize=_NUMBERS)
def row_kernel(
    data,
    table,
    slot: tl.int64,
    count: tl.int64,
    size1: tl.int64,
    size2: tl.int64,
    size3: tl.int64,
    step0: tl.int64,
    step1: tl.int64,
    step2: tl.int64,
    step3: tl.int64,
    MAGNITUDE: tl.constexpr,
    NAN: tl.constexpr,
    INF: tl.constexpr,
    NORMAL: tl.constexpr,
    LARGEST: tl.constexpr,
    FNUZ: tl.constexpr,
    WIDE: tl.constexpr,
    PAIR: tl.constexpr,
    WALK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tensor, by all programs of the grid."""
    _measure(
        data, table + slot.to(tl.int64) * 10, count, tl.program_id(0), tl.num_programs(0),
        size1, size2, size3, step0, step1, step2, step3,
        MAGNITUDE, NAN, INF, NORMAL, LARGEST, FNUZ, WIDE, PAIR, WALK, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=("slot",))
def batch_kernel(
    sample,
    tensors,
    table,
    slot: tl.int64,
    MAGNITUDE: tl.constexpr,
    NAN: tl.constexpr,
    INF: tl.constexpr,
    NORMAL: tl.constexpr,
    LARGEST: tl.constexpr,
    FNUZ: tl.constexpr,
    WIDE: tl.constexpr,
    PAIR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tensor i of `tensors`, an int64 table of (address, elements), by the programs (i, *); their rows follow `slot`.

    `sample` is never read: its type is that of the elements.
    """
    which = tl.program_id(0)
    data = tl.load(tensors + 2 * which).to(sample.dtype)
    count = tl.load(tensors + 2 * which + 1)
    one = count * 0 + 1
    _measure(
        data, table + (slot + which).to(tl.int64) * 10, count, tl.program_id(1), tl.num_programs(1),
        one, one, one, one, one, one, one,
        MAGNITUDE, NAN, INF, NORMAL, LARGEST, FNUZ, WIDE, PAIR, 0, BLOCK,
    )  # fmt: skip
