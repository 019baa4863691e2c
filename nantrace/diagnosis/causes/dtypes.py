"""What the floating-point dtypes can hold, without torch."""

from __future__ import annotations

#: dtype -> (largest finite value, smallest normal, smallest subnormal); the float8 formats: arXiv:2209.05433 (e4m3fn,
#: e5m2) and arXiv:2206.02915 (fnuz), the others: IEEE 754 and, for bfloat16, its 8-bit exponent and 7-bit mantissa.
_LIMITS: dict[str, tuple[float, float, float]] = {
    "float16": (65504.0, 2.0**-14, 2.0**-24),
    "bfloat16": (2.0**127 * (2 - 2.0**-7), 2.0**-126, 2.0**-133),
    "float32": (2.0**127 * (2 - 2.0**-23), 2.0**-126, 2.0**-149),
    "float64": (2.0**1023 * (2 - 2.0**-52), 2.0**-1022, 2.0**-1074),
    "float8_e4m3fn": (448.0, 2.0**-6, 2.0**-9),
    "float8_e5m2": (57344.0, 2.0**-14, 2.0**-16),
    "float8_e4m3fnuz": (240.0, 2.0**-7, 2.0**-10),
    "float8_e5m2fnuz": (57344.0, 2.0**-15, 2.0**-17),
}
_COMPLEX = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
#: dtypes whose largest value is small enough that ordinary activations and gradients reach it
_NARROW = frozenset(name for name, (largest, _, _) in _LIMITS.items() if largest < 1e5)


def limits(dtype: str) -> tuple[float, float, float] | None:
    """The largest finite value, the smallest normal and the smallest subnormal magnitude of a dtype.

    A complex dtype has the limits of its parts. A dtype that is not floating point, or unknown here, has None.
    """
    name = dtype.removeprefix("torch.")
    return _LIMITS.get(_COMPLEX.get(name, name))


def largest(dtype: str) -> float | None:
    """The largest finite value of a dtype, or None for a dtype without limits."""
    found = limits(dtype)
    return found[0] if found else None


def is_narrow(dtype: str) -> bool:
    """Whether the dtype ends below 100,000: float16 and the float8 formats."""
    return _COMPLEX.get(dtype, dtype) in _NARROW


def rounds_to_zero(value: float, dtype: str) -> bool:
    """Whether a positive number becomes 0 in the dtype: it does up to half of the smallest subnormal."""
    found = limits(dtype)
    return found is not None and 0 <= value <= found[2] / 2


def wider(dtype: str) -> str:
    """The dtype to repeat a computation in: float32 for what is narrower, float64 for float32 and wider."""
    wide = dtype.startswith("complex")
    if _COMPLEX.get(dtype, dtype) in ("float32", "float64"):
        return "complex128" if wide else "float64"
    return "complex64" if wide else "float32"
