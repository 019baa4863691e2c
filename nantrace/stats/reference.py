"""What each column means, computed slowly: one Python number at a time, in row-major order. For tests.

Shares no code with the fast ways. float8 and float4 are decoded from their bits by the formats' definitions (OCP 8-bit
Floating Point Specification 1.0, Microscaling Formats 1.0); every other element goes through `tolist`, which is exact.

    numel      elements of the tensor, an expanded one counted as often as it is shown
    finite     elements of which every part is finite; finite + nan + posinf + neginf = numel
    nan        elements of which a part is NaN
    posinf     elements without NaN of which a part is +inf
    neginf     the remaining ones of which a part is -inf
    min, max   over the parts of finite elements; NaN if there is none
    absmin     smallest nonzero magnitude among those parts; NaN if there is none
    first_bad  row-major index of the first element that is not finite; -1 if there is none
    zero       finite elements of which every part is 0
    subnormal  finite elements of which a part is nonzero and smaller than the dtype's smallest normal number
    saturated  finite elements of which a part has the largest finite magnitude of the dtype

A real number has one part, a complex one two, and so has an element of float4_e2m1fn_x2. Integers and booleans have
neither subnormal nor saturated elements.
"""

from __future__ import annotations

import math

import torch

Parts = tuple[float, ...]

#: Exponent bits, fraction bits, bias, and how the top of the range is spent.
_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7, "nan"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fnuz": (4, 3, 8, "negative zero"),
    "float8_e5m2fnuz": (5, 2, 16, "negative zero"),
}
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def reference_row(tensor: torch.Tensor) -> tuple[float, ...]:
    """The full row of a plain strided tensor, in the order of `nantrace.stats.host.row`."""
    elements = _elements(tensor)
    normal, largest = _limits(tensor.dtype)
    finite = [parts for parts in elements if all(map(math.isfinite, parts))]
    bad = [index for index, parts in enumerate(elements) if not all(map(math.isfinite, parts))]
    nan = sum(any(map(math.isnan, parts)) for parts in elements)
    posinf = sum(math.inf in parts and not any(map(math.isnan, parts)) for parts in elements)
    numbers = [part for parts in finite for part in parts]
    magnitudes = [abs(number) for number in numbers if number != 0]
    return (
        len(elements),
        len(finite),
        nan,
        posinf,
        len(elements) - len(finite) - nan - posinf,
        min(numbers, default=math.nan),
        max(numbers, default=math.nan),
        min(magnitudes, default=math.nan),
        bad[0] if bad else -1,
        sum(all(part == 0 for part in parts) for parts in finite),
        sum(any(0 < abs(part) < normal for part in parts) for parts in finite),
        sum(any(abs(part) == largest for part in parts) for parts in finite),
        31,
    )


def _elements(tensor: torch.Tensor) -> list[Parts]:
    name = str(tensor.dtype).removeprefix("torch.")
    if name.startswith(("float8", "float4")):
        codes = tensor.detach().contiguous().view(torch.uint8).reshape(-1).tolist()
        return [byte_parts(name, code) for code in codes]
    parts = (tensor.real, tensor.imag) if tensor.is_complex() else (tensor,)
    return list(zip(*(map(float, part.detach().resolve_neg().reshape(-1).tolist()) for part in parts), strict=True))


def byte_parts(dtype: str, code: int) -> Parts:
    """The number or numbers that one byte of a float8 or float4 dtype stands for.

    Args:
        dtype: name without the prefix: "float8_e4m3fn".
        code: the byte, 0 to 255.
    """
    if dtype == "float4_e2m1fn_x2":
        return _nibble(code & 15), _nibble(code >> 4)
    if dtype == "float8_e8m0fnu":
        return (math.nan if code == 255 else 2.0 ** (code - 127),)
    exponent_bits, fraction_bits, bias, top = _FLOAT8[dtype]
    sign = -1.0 if code & 128 else 1.0
    exponent = (code & 127) >> fraction_bits
    fraction = code & ((1 << fraction_bits) - 1)
    if top == "negative zero" and code == 128:
        return (math.nan,)
    if top == "nan" and code & 127 == 127:
        return (math.nan,)
    if top == "ieee" and exponent == (1 << exponent_bits) - 1:
        return (math.nan if fraction else sign * math.inf,)
    if exponent == 0:
        return (sign * fraction * 2.0 ** (1 - bias - fraction_bits),)
    return (sign * (1 + fraction / (1 << fraction_bits)) * 2.0 ** (exponent - bias),)


def _nibble(code: int) -> float:
    return -_FLOAT4[code & 7] if code & 8 else _FLOAT4[code]


def _limits(dtype: torch.dtype) -> tuple[float, float]:
    """Smallest normal number and largest finite magnitude; such that no integer is below the one or at the other."""
    name = str(dtype).removeprefix("torch.")
    if name == "float4_e2m1fn_x2":
        return 1.0, 6.0
    if name == "float8_e8m0fnu":
        return 2.0**-127, 2.0**127
    if name in _FLOAT8:
        largest = max(abs(x) for code in range(256) for x in byte_parts(name, code) if math.isfinite(x))
        return 2.0 ** (1 - _FLOAT8[name][2]), largest
    if dtype.is_floating_point or dtype.is_complex:
        limits = torch.finfo(dtype)
        return limits.smallest_normal, limits.max
    return 0.0, math.inf
