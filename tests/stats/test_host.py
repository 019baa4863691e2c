"""`row` and `tensor_stats` against the slow reference, over dtypes, values and layouts."""

from __future__ import annotations

import math

import pytest
import torch

from nantrace.stats.host import row
from nantrace.stats.reference import reference_row
from tests.stats.tensors import DTYPES, LAYOUTS, PATTERNS, fill


def same(got: tuple[float, ...], expected: tuple[float, ...]) -> bool:
    return all(a == b or (a != a and b != b) for a, b in zip(got, expected, strict=True))


def in_range_mode(full: tuple[float, ...]) -> tuple[float, ...]:
    return (*full[:7], math.nan, full[8], 0, 0, 0, 16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_says_what_the_reference_says(dtype: torch.dtype, layout: str) -> None:
    for pattern in PATTERNS:
        tensor = LAYOUTS[layout](fill(dtype, pattern, 240))
        expected = reference_row(tensor)
        assert same(row(tensor, full=True), expected), (pattern, row(tensor, full=True), expected)
        assert same(row(tensor), in_range_mode(expected)), (pattern, row(tensor), expected)
