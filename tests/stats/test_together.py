"""`extremes_together` against the slow reference, and what it leaves to be read one by one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nantrace.stats.reference import reference_row
from nantrace.stats.together import extremes_together
from tests.stats.kinds import READABLE, READABLE_ON_HOST, UNREADABLE
from tests.stats.tensors import DTYPES, IEEE, LAYOUTS, PATTERNS, fill, same


def _as_row(numel: int, low: float, high: float) -> tuple[float, ...]:
    return (numel, numel, 0, 0, 0, low, high, math.nan, -1, 0, 0, 0, 16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_told_of_stacked_tensors_is_what_the_reference_says(dtype: torch.dtype, layout: str) -> None:
    put = [LAYOUTS[layout](fill(dtype, pattern, 240)) for pattern in PATTERNS]
    for tensor, found in zip(put, extremes_together(put), strict=True):
        expected = reference_row(tensor)
        if found is not None:
            assert same(_as_row(*found), (*expected[:7], math.nan, -1, 0, 0, 0, 16))
            assert math.copysign(1.0, found[1]) == 1.0 or found[1] < 0  # no negative zero
        readable = dtype in IEEE and expected[0] and expected[0] == expected[1]
        assert (found is not None) == bool(readable)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=3, max_size=3),
        min_size=4,
        max_size=9,
    )
)
def test_each_row_of_a_stack_keeps_its_own_extremes(rows: list[list[float]]) -> None:
    found = extremes_together([torch.tensor(row) for row in rows])
    for row, extremes in zip(rows, found, strict=True):
        finite = all(math.isfinite(value) for value in row)
        assert extremes == ((3, min(row) + 0.0, max(row) + 0.0) if finite else None)


def test_tensors_of_several_shapes_and_dtypes_come_back_in_their_own_places() -> None:
    shapes = [(2,), (3,), (2,), (1, 2), (3,), (2,), (3,), (2,), (3,)]
    put = [torch.full(shape, float(place)) for place, shape in enumerate(shapes)]
    put += [torch.full((2,), 50.0 + place, dtype=torch.float64) for place in range(4)]
    assert extremes_together(put) == [
        *(
            (tensor.numel(), float(place), float(place)) if tensor.dim() == 1 else None
            for place, tensor in enumerate(put[:9])
        ),
        *((2, 50.0 + place, 50.0 + place) for place in range(4)),
    ]


def test_large_tensors_and_those_without_company_are_left_to_be_read_by_themselves() -> None:
    large = [torch.ones(1025) for _ in range(6)]
    alone = [torch.ones(2), torch.ones(3), torch.ones(2), torch.ones(2)]
    assert extremes_together([*large, *alone]) == [None] * 10
    assert extremes_together([torch.ones(1024) for _ in range(4)]) == [(1024, 1.0, 1.0)] * 4


@pytest.mark.parametrize("kind", [*READABLE, *READABLE_ON_HOST])
def test_no_kind_of_tensor_is_told_wrongly(kind: str) -> None:
    make, plain = {**READABLE, **READABLE_ON_HOST}[kind]
    expected = reference_row(plain)
    for found in extremes_together([make() for _ in range(5)]):
        assert found is None or (same(_as_row(*found)[:7], expected[:7]) and expected[0] == expected[1])


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_read_is_left_alone(kind: str) -> None:
    make, _, _ = UNREADABLE[kind]
    assert extremes_together([make() for _ in range(5)]) == [None] * 5


def test_memory_that_was_freed_is_not_read() -> None:
    tensors = [torch.ones(8) for _ in range(5)]
    tensors[2].untyped_storage().resize_(0)
    assert extremes_together(tensors) == [(8, 1.0, 1.0), (8, 1.0, 1.0), None, (8, 1.0, 1.0), (8, 1.0, 1.0)]
