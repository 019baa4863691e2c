"""What holds of the statistics of any tensor, on the host and in a device's table."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nantrace.stats.deferred import DeviceTable
from nantrace.stats.exact import Row, merge
from nantrace.stats.host import row
from nantrace.stats.reference import reference_row
from tests.stats.tensors import same

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NUMBERS = st.one_of(
    st.floats(width=16),
    st.floats(width=64),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 65504.0, -65504.0, 2.0**-24, 3.4028234663852886e38]),
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A float tensor of up to three dimensions with some of them permuted, sliced, reversed or expanded."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    count = math.prod(sizes)
    numbers = draw(st.lists(_NUMBERS, min_size=count, max_size=count))
    tensor = torch.tensor(numbers, dtype=torch.float64).to(draw(st.sampled_from(_FLOATS))).view(sizes)
    tensor = tensor.permute(draw(st.permutations(range(len(sizes)))))
    for dim in range(tensor.dim()):
        step = draw(st.integers(1, 2))
        tensor = tensor[(slice(None),) * dim + (slice(draw(st.integers(0, 1)), None, step),)]
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(dim := draw(st.integers(0, tensor.dim())))
        tensor = tensor.expand([draw(st.integers(1, 3)) if i == dim else -1 for i in range(tensor.dim())])
    return tensor


def both(tensor: torch.Tensor) -> list[Row]:
    table = DeviceTable("cpu")
    table.add(tensor, full=True)
    return [row(tensor, full=True), *table.drain()]


@settings(deadline=None, max_examples=120)
@given(tensors())
def test_counts_sum_to_the_number_of_elements_and_all_agrees_with_the_reference(tensor: torch.Tensor) -> None:
    for got in both(tensor):
        numel, finite, nan, posinf, neginf = got[:5]
        assert finite + nan + posinf + neginf == numel == tensor.numel()
        assert same(got, reference_row(tensor))
    assert same(row(tensor)[:7], reference_row(tensor)[:7]) and row(tensor)[8] == reference_row(tensor)[8]


@settings(deadline=None, max_examples=80)
@given(tensors())
def test_the_first_bad_element_is_bad_and_none_before_it_is(tensor: torch.Tensor) -> None:
    flat = tensor.reshape(-1).tolist()
    for got in both(tensor):
        if got[8] < 0:
            assert all(map(math.isfinite, flat))
        else:
            assert not math.isfinite(flat[got[8]]) and all(map(math.isfinite, flat[: got[8]]))


@settings(deadline=None, max_examples=80)
@given(tensors())
def test_extremes_run_over_finite_elements_only(tensor: torch.Tensor) -> None:
    finite = [number for number in tensor.reshape(-1).tolist() if math.isfinite(number)]
    for got in both(tensor):
        if finite:
            assert got[5:7] == (min(finite), max(finite))
        else:
            assert got[5] != got[5] and got[6] != got[6]


@settings(deadline=None, max_examples=60)
@given(tensors(), st.integers(1, 5), st.integers(1, 5))
def test_an_expanded_tensor_counts_each_element_as_often_as_it_is_shown(tensor: torch.Tensor, n: int, m: int) -> None:
    once = row(tensor, full=True)
    expanded = tensor.unsqueeze(0).unsqueeze(-1).expand(n, *tensor.shape, m)
    for got in both(expanded):
        assert got[:5] == tuple(count * n * m for count in once[:5])
        assert got[9:12] == tuple(count * n * m for count in once[9:12])
        assert same(got[5:8], once[5:8])
        assert got[8] == (once[8] * m if once[8] >= 0 else -1)


@settings(deadline=None, max_examples=60)
@given(tensors(), st.integers(0, 4))
def test_rows_of_two_halves_merge_into_the_row_of_the_whole(tensor: torch.Tensor, cut: int) -> None:
    flat = tensor.reshape(-1)
    halves = [row(flat[:cut], full=True), row(flat[cut:], full=True)]
    assert same(merge(halves, full=True), row(flat, full=True))
