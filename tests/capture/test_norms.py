"""Norms of gradients in whatever dtype, layout and size, against float64."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nantrace.capture.ledger.norms import norms_of, total, values_of

SIZES = (1, 7, 4095, 4096, 5000, 300_000)  # a larger tensor is summed in another way than a small one


def _exact(tensor: torch.Tensor) -> float:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return torch.linalg.vector_norm(tensor.to(wide)).item()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64], ids=str
)
def test_norms_are_those_of_float64_whatever_the_size_and_the_order(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    put = [(str(size), torch.randn(size).to(dtype)) for size in SIZES]
    put += [("transposed", torch.randn(90, 70).t().to(dtype)), ("sliced", torch.randn(90, 140)[:, ::2].to(dtype))]
    put = [*put[::2], *put[1::2]]
    found = norms_of(put)
    assert found.names == tuple(name for name, _ in put) and found.unread == ()
    close = 1e-6 if dtype in (torch.float32, torch.float64) else 1e-4
    assert found.values.tolist() == pytest.approx([_exact(tensor) for _, tensor in put], rel=close)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from([3, 4096, 6000]), min_size=1, max_size=6), st.integers(0, 2**31))
def test_each_tensor_keeps_its_own_norm(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    put = [(str(i), torch.randn(size, generator=generator) * 10**i) for i, size in enumerate(sizes)]
    assert norms_of(put).values.tolist() == pytest.approx([_exact(tensor) for _, tensor in put], rel=1e-5)


@pytest.mark.parametrize("size", [8, 8192])
def test_a_nonfinite_gradient_has_a_nonfinite_norm_and_a_large_finite_one_a_finite_norm(size: int) -> None:
    nan, infinite, large = torch.ones(size), torch.ones(size), torch.full((size,), 1e30)
    nan[size // 2], infinite[-1] = math.nan, -math.inf
    found = norms_of([("nan", nan), ("inf", infinite), ("large", large)]).values.tolist()
    assert math.isnan(found[0]) and found[1] == math.inf
    assert found[2] == pytest.approx(1e30 * math.sqrt(size), rel=1e-6)


def test_what_has_no_norm_is_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nested tensors are new
        nested = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(1, 2)], layout=torch.strided)
    freed = torch.ones(5000)
    freed.untyped_storage().resize_(0)
    found = norms_of([("nested", nested), ("freed", freed), ("plain", torch.ones(4)), ("whole", torch.ones(4).int())])
    assert found.names == ("plain",) and found.unread == ("nested", "freed", "whole")
    assert values_of(nested) is None


def test_the_norm_of_all_is_that_of_the_norms() -> None:
    assert total([3.0, 4.0]) == 5.0
    assert total([3e300, 4e300]) == pytest.approx(5e300)
    assert total([]) == 0.0 and total([1.0, math.inf]) == math.inf and math.isnan(total([math.nan, math.inf]))
