"""How the bits of each float format spell numbers. Knows codes; reads no tensor.

A code is an element's bits as an unsigned integer. Counting by codes is exact, the same on every machine, and holds
when the processor was told to take subnormals for zero (`torch.set_flush_denormal`), where comparing would not.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class FloatFormat:
    """A format laid out as in IEEE 754: sign, exponent, fraction; all exponent bits set is inf or NaN.

    Attributes:
        code: numpy's unsigned integer of the element's width.
        signed: the signed one, whose order is the floats' order among nonnegative elements.
        bits: torch's signed integer dtype of that width, to view a tensor as.
        sign, magnitude: masks of the sign bit and of all others.
        inf, normal, largest: magnitudes of infinity, of the smallest normal and of the largest finite number.
    """

    code: npt.DTypeLike
    signed: npt.DTypeLike
    bits: torch.dtype
    sign: int
    magnitude: int
    inf: int
    normal: int
    largest: int

    def value(self, code: int) -> float:
        """The number that a code stands for; -0 becomes 0.

        By integers as long as they hold it: arithmetic on floats may take subnormals for zero.
        """
        magnitude = code & self.magnitude
        if np.dtype(self.code).itemsize == 8:
            return float(np.frombuffer(code.to_bytes(8, "little"), dtype="<f8")[0]) if magnitude else 0.0
        exponent, fraction = divmod(magnitude, self.normal)
        fraction += self.normal if exponent else 0
        bias = self.inf // self.normal // 2
        number = math.ldexp(fraction, max(exponent, 1) - bias - self.normal.bit_length() + 1)
        return -number if code & self.sign and number else number


def _ieee(width: int, fraction: int, **types: Any) -> FloatFormat:
    sign = 1 << (width - 1)
    inf = sign - (1 << fraction)
    return FloatFormat(sign=sign, magnitude=sign - 1, inf=inf, normal=1 << fraction, largest=inf - 1, **types)


_HALF = _ieee(16, 10, code="<u2", signed="<i2", bits=torch.int16)
_SINGLE = _ieee(32, 23, code="<u4", signed="<i4", bits=torch.int32)
_DOUBLE = _ieee(64, 52, code="<u8", signed="<i8", bits=torch.int64)

#: The formats that are counted by code. A complex number is a pair of the format of its parts.
FLOAT_FORMATS: dict[torch.dtype, FloatFormat] = {
    torch.float16: _HALF,
    torch.bfloat16: _ieee(16, 7, code="<u2", signed="<i2", bits=torch.int16),
    torch.float32: _SINGLE,
    torch.float64: _DOUBLE,
    torch.complex32: _HALF,
    torch.complex64: _SINGLE,
    torch.complex128: _DOUBLE,
}
#: Those of real numbers, of which PyTorch itself finds the extremes.
REAL_FORMATS = tuple(dtype for dtype in FLOAT_FORMATS if not dtype.is_complex)


@dataclass(frozen=True)
class ByteFormat:
    """A format of which one byte holds one element, or a pair of which each half is a part, as of a complex number.

    Attributes:
        values: float64 of shape (256, parts): what each byte stands for.
        normal: smallest normal number.
        largest: largest finite magnitude.
    """

    values: npt.NDArray[np.float64]
    normal: float
    largest: float

    @property
    def monotone(self) -> bool:
        """Whether a byte is one number: these rise or fall over either half of the bytes, nonfinite ones at an end."""
        return bool(self.values.shape[1] == 1)

    @functools.cached_property
    def numbers(self) -> list[float]:
        """What each byte of a monotone format stands for."""
        numbers: list[float] = self.values[:, 0].tolist()
        return numbers

    @functools.cached_property
    def nonfinite(self) -> npt.NDArray[np.bool_]:
        """Which bytes are NaN or infinite, of a pair either part."""
        either: npt.NDArray[np.bool_] = np.logical_or.reduce(~np.isfinite(self.values), axis=1)
        return either

    @functools.cached_property
    def first_nonfinite(self) -> int:
        """The smallest byte that is nonfinite."""
        return int(self.nonfinite.argmax())

    @functools.cached_property
    def outward(self) -> bool:
        """Whether magnitudes rise over either half, the upper one negative, and nonfinite ones are at both tops."""
        tops = np.tile(np.arange(128) >= self.first_nonfinite, 2)
        if not self.monotone or not self.nonfinite.any() or not np.array_equal(self.nonfinite, tops):
            return False
        halves = np.abs(self.values.reshape(2, 128)[:, : self.first_nonfinite])
        return bool((np.diff(halves) > 0).all() and np.signbit(self.values[128 : 128 + self.first_nonfinite]).all())


#: By name, for a dtype that this PyTorch may not have: exponent of the smallest normal number.
_SMALLEST_NORMAL = {
    "float8_e4m3fn": -6,
    "float8_e4m3fnuz": -7,
    "float8_e5m2": -14,
    "float8_e5m2fnuz": -15,
    "float8_e8m0fnu": -127,
}
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def is_byte_float(dtype: torch.dtype) -> bool:
    """Whether `byte_format` knows the dtype."""
    name = str(dtype).removeprefix("torch.")
    return name in _SMALLEST_NORMAL or name == "float4_e2m1fn_x2"


@functools.cache
def byte_format(dtype: torch.dtype) -> ByteFormat:
    """The format of a float8 dtype, or of float4_e2m1fn_x2, whose element is a pair of numbers.

    Source of the values: OCP 8-bit Floating Point Specification 1.0 and Microscaling Formats 1.0; for `fnuz` PyTorch's
    own conversion.
    """
    name = str(dtype).removeprefix("torch.")
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    if name == "float4_e2m1fn_x2":
        nibble = np.array([*_FLOAT4, *(-x for x in _FLOAT4)])
        byte = codes.numpy()
        return ByteFormat(np.stack([nibble[byte & 15], nibble[byte >> 4]], axis=1), normal=1.0, largest=6.0)
    if name == "float8_e8m0fnu":  # no sign, no zero, no fraction: an exponent alone
        values = np.array([2.0 ** (code - 127) for code in range(255)] + [np.nan])
    else:
        values = codes.view(dtype).to(torch.float32).to(torch.float64).numpy()
    largest = float(np.abs(values[np.isfinite(values)]).max())
    return ByteFormat(values[:, None], normal=2.0 ** _SMALLEST_NORMAL[name], largest=largest)
