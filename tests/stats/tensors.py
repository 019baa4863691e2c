"""Tensors to measure: every dtype, value pattern and layout. Used by the tests of this folder."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from nantrace.stats.exact import FULL

IEEE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
BYTES = tuple(
    getattr(torch, name)
    for name in (
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    )
    if hasattr(torch, name)
)
INTEGERS = (
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
DTYPES = (*IEEE, *COMPLEX, *BYTES, *INTEGERS)

_NAN, _INF = float("nan"), float("inf")


def _patterns(dtype: torch.dtype) -> dict[str, list[float]]:
    if dtype.is_complex:
        dtype = {torch.complex32: torch.float16, torch.complex64: torch.float32}.get(dtype, torch.float64)
    limits = torch.finfo(dtype)
    plain = [0.5, -2.0, 1.5, 3.0, -0.25, 7.0]
    return {
        "plain": plain,
        "nan first": [_NAN, *plain],
        "nan last": [*plain, _NAN],
        "all nan": [_NAN] * 6,
        "+inf": [1.0, _INF, 2.0],
        "-inf": [1.0, 2.0, -_INF],
        "all -inf": [-_INF] * 5,
        "all kinds": [_INF, 1.0, _NAN, -_INF, _INF, _NAN, -_INF, _INF, 0.0, -_INF, -1.0, 2.0],
        "largest": [1.0, limits.max, -limits.max, 0.0],
        "subnormal": [limits.smallest_normal / 2, limits.smallest_normal, -limits.tiny / 4, 0.0],
        "zeros": [0.0, -0.0, 0.0, -0.0],
        "all negative": [-1.0, -2.0, -3.0, _NAN],
        "inf among subnormals": [limits.smallest_normal / 2, _INF, -limits.smallest_normal / 2, -0.0],
    }


PATTERNS = tuple(_patterns(torch.float32))


def fill(dtype: torch.dtype, pattern: str, count: int) -> torch.Tensor:
    """`count` elements that repeat a pattern; bytes and integers have patterns of bits in place of numbers."""
    if dtype in BYTES:
        step = 1 + PATTERNS.index(pattern)
        return (torch.arange(count) * step % 256).to(torch.uint8).view(dtype)
    if dtype in INTEGERS:
        generator = torch.Generator().manual_seed(PATTERNS.index(pattern))
        size = torch.empty((), dtype=dtype).element_size()
        raw = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator)
        raw[: size * (count // 3)] = 0
        return (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)
    values = _patterns(dtype)[pattern]
    repeats = -(-2 * count // len(values))
    numbers = torch.tensor(values * repeats, dtype=torch.float64)
    if pattern in ("nan first", "nan last"):  # one in the whole tensor
        numbers = torch.nan_to_num(numbers, nan=1.0)
        numbers[0 if pattern == "nan first" else (2 * count if dtype.is_complex else count) - 1] = _NAN
    if dtype.is_complex:
        parts = numbers[: 2 * count].to(torch.float16 if dtype == torch.complex32 else torch.float64)
        return torch.view_as_complex(parts.view(-1, 2)).to(dtype)
    return numbers[:count].to(dtype)


#: From one-dimensional storage of 240 elements to a tensor of some layout.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t.view(2, 5, 4, 6),
    "transposed": lambda t: t.view(20, 12).t(),
    "channels_last": lambda t: t.view(2, 4, 6, 5).permute(0, 3, 1, 2),
    "expanded": lambda t: t[:12].view(3, 1, 4).expand(3, 5, 4),
    "sliced": lambda t: t.view(12, 20)[1:11:2, 3:17],
    "sliced and transposed": lambda t: t.view(4, 3, 20)[:, 1:, ::3].permute(2, 0, 1),
    "overlapping": lambda t: t.as_strided((7, 9), (3, 2), 1),
    "unaligned": lambda t: t[1:],
    "scalar": lambda t: t[3],
    "empty": lambda t: t[:0].view(0, 3),
    "one dimension": lambda t: t[::2],
}


def same(got: tuple[float, ...], expected: tuple[float, ...]) -> bool:
    """Whether two rows are equal, an absent number to an absent one, wherever they were measured."""
    got, expected = ((*row[:12], *(int(mask) & FULL for mask in row[12:])) for row in (got, expected))
    return all(a == b or (a != a and b != b) for a, b in zip(got, expected, strict=True))


def in_range_mode(full: tuple[float, ...]) -> tuple[float, ...]:
    """A full row without its extended columns."""
    return (*full[:7], math.nan, full[8], 0, 0, 0, 16)
