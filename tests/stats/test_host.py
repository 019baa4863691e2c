"""`row` and `tensor_stats` against the slow reference, over dtypes, values, layouts and kinds of tensors."""

from __future__ import annotations

import concurrent.futures
import math
import re
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nantrace.events import TensorStats
from nantrace.stats import byte_rows, exact, host
from nantrace.stats.exact import merge
from nantrace.stats.host import extremes, is_finite, row, tensor_stats
from nantrace.stats.reference import reference_row
from tests.stats.kinds import READABLE, READABLE_ON_HOST, UNREADABLE
from tests.stats.tensors import BYTES, DTYPES, LAYOUTS, PATTERNS, fill, in_range_mode, same


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_says_what_the_reference_says(dtype: torch.dtype, layout: str) -> None:
    for pattern in PATTERNS:
        tensor = LAYOUTS[layout](fill(dtype, pattern, 240))
        expected = reference_row(tensor)
        assert same(row(tensor, full=True), expected), (pattern, row(tensor, full=True), expected)
        assert same(row(tensor), in_range_mode(expected)), (pattern, row(tensor), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_read_in_many_pieces_gives_the_same_row(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "PIECE", 7)
    monkeypatch.setattr(exact, "_POSITIONS", 20)
    monkeypatch.setattr(byte_rows, "_SHORT", 7)
    monkeypatch.setattr(byte_rows, "_LONG", 11)
    for dtype in (torch.float32, torch.complex64, torch.float8_e5m2, torch.float8_e4m3fn, torch.int16):
        for pattern in PATTERNS:
            tensor = LAYOUTS[layout](fill(dtype, pattern, 240))
            assert same(row(tensor, full=True), reference_row(tensor)), (dtype, pattern)
            assert same(row(tensor), in_range_mode(reference_row(tensor))), (dtype, pattern)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_tensors_in_any_order_of_memory_give_the_same_row(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_SMALL", 0)
    for dtype in DTYPES:
        for pattern in PATTERNS:
            tensor = LAYOUTS[layout](fill(dtype, pattern, 240))
            assert same(row(tensor), in_range_mode(reference_row(tensor))), (dtype, pattern)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float8_e5m2], ids=str)
def test_dense_memory_that_was_freed_is_not_read_in_any_order(dtype: torch.dtype) -> None:
    tensor = torch.ones(100, 60, dtype=dtype).t()
    assert extremes(tensor) == (6000, 0.0 if dtype.is_complex else 1.0, 1.0)
    tensor.untyped_storage().resize_(16)
    assert extremes(tensor) is None
    assert row(tensor)[0] == 6000 and row(tensor)[12] == 0  # no column was read


@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_each_of_the_256_codes_of_a_byte_format_is_read_by_its_definition(dtype: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8).view(dtype)
    for code in range(256):
        assert same(row(codes[code], full=True), reference_row(codes[code])), code


@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_a_byte_beside_any_two_others_is_read_by_its_definition(dtype: torch.dtype) -> None:
    others = [(0x00, 0x01), (0x7E, 0x81), (0x3C, 0x3D), (0xFE, 0xFD), (0x7B, 0xFB)]
    for code in range(256):
        for pair in others:
            tensor = torch.tensor([pair[0], code, pair[1]], dtype=torch.uint8).view(dtype)
            assert same(row(tensor), in_range_mode(reference_row(tensor))), (code, pair)


def test_the_statistics_of_a_tensor_by_name() -> None:
    tensor = torch.tensor([[0.0, -2.0, math.nan], [math.inf, 1e-40, torch.finfo(torch.float32).max]])
    assert tensor_stats(tensor, "full") == TensorStats(
        dtype="float32",
        shape=(2, 3),
        numel=6,
        finite=4,
        nan=1,
        posinf=1,
        neginf=0,
        min=-2.0,
        max=torch.finfo(torch.float32).max,
        first_bad=2,
        absmin=torch.tensor(1e-40).item(),
        zero=1,
        subnormal=1,
        saturated=1,
    )
    assert tensor_stats(tensor).zero is None and tensor_stats(tensor).absmin is None
    assert tensor_stats(tensor).first_bad == 2


def test_no_finite_element_has_no_extremes() -> None:
    stats = tensor_stats(torch.full((3,), math.nan), "full")
    assert (stats.min, stats.max, stats.absmin, stats.finite, stats.nan) == (None, None, None, 0, 3)
    assert tensor_stats(torch.ones(0)).numel == 0 and tensor_stats(torch.ones(0)).min is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_stats_and_row_are_the_same_numbers(dtype: torch.dtype) -> None:
    tensor = LAYOUTS["sliced and transposed"](fill(dtype, "all kinds", 240))
    stats, expected = tensor_stats(tensor, "full"), reference_row(tensor)
    got = (stats.numel, stats.finite, stats.nan, stats.posinf, stats.neginf, stats.min, stats.max, stats.absmin)
    assert got == tuple(None if number != number else number for number in expected[:8])
    assert (stats.first_bad, stats.zero, stats.subnormal, stats.saturated) == expected[8:12]
    assert (stats.dtype, stats.shape) == (str(dtype)[6:], tuple(tensor.shape))


@pytest.mark.parametrize("kind", {**READABLE, **READABLE_ON_HOST})
def test_every_kind_of_tensor_has_the_row_of_its_values(kind: str) -> None:
    make, plain = {**READABLE, **READABLE_ON_HOST}[kind]
    expected = reference_row(plain)
    assert same(row(make(), full=True), expected), (row(make(), full=True), expected)
    assert same(row(make()), in_range_mode(expected))
    assert tensor_stats(make()).observed


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_tensor_without_values_says_why_and_raises_nothing(kind: str) -> None:
    make, numel, why = UNREADABLE[kind]
    tensor = make()
    for full in (False, True):
        assert same(row(tensor, full), (numel, 0, 0, 0, 0, math.nan, math.nan, math.nan, -1, 0, 0, 0, 0))
    stats = tensor_stats(tensor)
    assert not stats.observed and why in str(stats.why)
    assert stats.numel == numel and stats.min is None and stats.first_bad is None
    assert is_finite(tensor)


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad], ids=["vmap", "grad"])
def test_inside_a_functorch_transform_the_wrapped_values_are_read(transform: Any) -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append((row(x, full=True), row(x)))
        return x.sum()

    tensor = torch.tensor([[1.0, math.nan], [-3.0, 2.0]])
    transform(function)(tensor)
    expected = reference_row(tensor)
    assert same(seen[0][0], expected) and same(seen[0][1], in_range_mode(expected))


def test_what_is_not_a_tensor_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=re.escape("tensor_stats got a list, pass a torch.Tensor")):
        tensor_stats([1.0])  # type: ignore[arg-type]


def test_other_columns_are_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=re.escape('tensor_stats got columns=\'all\', pass "range" or "full"')):
        tensor_stats(torch.ones(1), "all")  # type: ignore[arg-type]


class Listening(TorchDispatchMode):
    """Counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


class ListeningToFunctions(TorchFunctionMode):
    """Counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Listening, ListeningToFunctions])
def test_modes_of_the_user_see_no_measuring(mode: Any) -> None:
    finite, bad = torch.ones(4), torch.tensor([1.0, math.nan])
    with mode() as listening:
        for tensor in (finite, bad):
            row(tensor)
            row(tensor, full=True)
            tensor_stats(tensor)
    assert listening.seen == 0


@pytest.mark.parametrize("kind", {**READABLE, **READABLE_ON_HOST, **UNREADABLE})
def test_measuring_changes_nothing(kind: str) -> None:
    tensor = {**READABLE, **READABLE_ON_HOST, **UNREADABLE}[kind][0]()
    before = (torch.get_rng_state(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _state(tensor))
    for full in (False, True):
        row(tensor, full)
        tensor_stats(tensor, "full" if full else "range")
    after = (torch.get_rng_state(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _state(tensor))
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def _state(tensor: torch.Tensor) -> tuple[Any, ...]:
    with torch._C.DisableTorchFunction():
        version = None if tensor.is_inference() else tensor._version
        lazy = (tensor.is_conj(), tensor.is_neg()) if tensor.layout is torch.strided and not tensor.is_nested else None
        coalesced = tensor.is_coalesced() if tensor.layout is torch.sparse_coo else None
        return version, tensor.requires_grad, tensor.grad_fn, lazy, coalesced, type(tensor), tensor._backward_hooks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_measuring_changes_no_bit(dtype: torch.dtype) -> None:
    tensor = fill(dtype, "all kinds", 240)
    bits = (torch.view_as_real(tensor) if dtype.is_complex else tensor).view(torch.uint8)
    before, version = bits.clone(), tensor._version
    for layout in LAYOUTS.values():
        row(layout(tensor))
        row(layout(tensor), full=True)
    assert torch.equal(bits, before) and tensor._version == version


def test_no_graph_grows_from_a_tensor_that_was_measured() -> None:
    tensor = torch.ones(3, requires_grad=True) * 2
    row(tensor)
    row(tensor, full=True)
    tensor.sum().backward()
    assert torch.is_grad_enabled() and tensor._backward_hooks is None


def test_denormals_are_counted_where_the_processor_takes_them_for_zero() -> None:
    tensor = torch.tensor([1e-40, 0.0, -1e-41, math.inf])
    expected = reference_row(tensor)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        got = row(tensor, full=True)
    finally:
        torch.set_flush_denormal(False)
    assert got[7:] == expected[7:] and got[:5] == expected[:5]


def test_counts_of_a_huge_expanded_tensor_are_exact_and_optional_ones_stop_at_their_limit() -> None:
    tensor = torch.tensor([0.0, math.nan]).expand(2**33, 2)
    numbers = row(tensor, full=True)
    assert numbers[:5] == (2**34, 2**33, 2**33, 0, 0)
    assert numbers[8:10] == (1, 2**32 - 1)


def test_threads_share_outputs_without_mixing_them() -> None:
    def extremes(i: int) -> tuple[float, ...]:
        return row(torch.full((9,), float(i)))[5:7]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(extremes, range(1500))) == [(float(i), float(i)) for i in range(1500)]


def test_a_row_measured_in_inference_mode_leaves_outputs_that_work_outside_of_it() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        with torch.inference_mode():
            assert row(torch.tensor([1.0, 2.0]).to(dtype))[5:7] == (1.0, 2.0)
        assert row(torch.tensor([3.0, 4.0]).to(dtype))[5:7] == (3.0, 4.0)


def test_the_row_of_no_tensors_at_all_is_empty() -> None:
    assert same(merge([], full=False), in_range_mode(reference_row(torch.ones(0))))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.complex64], ids=str
)
def test_a_tensor_that_was_read_can_still_be_resized(dtype: torch.dtype, full: bool) -> None:
    tensor = torch.tensor([1.0, 0.0]).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        tensor = tensor / 0 if dtype != torch.float8_e5m2 else torch.tensor([float("inf"), 1.0]).to(dtype)
    row(tensor, full)
    tensor.resize_(1000)
    assert tensor.numel() == 1000
