"""Finiteness of any plane, and who wrote which element, against plain references."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nantrace.flow import marked
from nantrace.flow.links import Line, Link, Links
from nantrace.flow.ops import OpFacts
from nantrace.flow.values import Scanner, is_all_nan, masks, planes, readable, summarize, tensors_in
from nantrace.flow.writers import Writers
from tests.flow.steps import recorded

INF, NAN = math.inf, math.nan
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2, torch.complex64]
_elements = st.one_of(st.floats(width=16), st.sampled_from([0.0, -0.0, INF, -INF, NAN, 1e-30]))


def _layout(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The values of a 2-d tensor (some of them, perhaps repeated) in another layout."""
    if kind == "transposed":
        return x.t()
    if kind == "sliced":
        return x[:, ::2]
    if kind == "expanded":
        return x[:1].expand(3, -1)
    return x


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(_elements, min_size=4, max_size=4), min_size=1, max_size=4),
    st.sampled_from(DTYPES),
    st.sampled_from(["contiguous", "transposed", "sliced", "expanded"]),
)
def test_a_plane_is_finite_if_each_of_its_elements_is(rows: list[list[float]], dtype: torch.dtype, kind: str) -> None:
    plane = _layout(torch.tensor(rows, dtype=torch.float32).to(dtype), kind)
    wide = plane.to(torch.complex128 if dtype.is_complex else torch.float64)
    expected = wide.isfinite()
    assert Scanner().is_finite(plane) == bool(expected.all())
    assert torch.equal(masks(plane).bad, ~expected)
    found = masks(plane)
    assert found.nan + found.posinf + found.neginf == int((~expected).sum())


@pytest.mark.parametrize("position", [0, 9_999, 20_000, 29_999])
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_one_bad_element_of_a_large_plane_is_found(position: int, value: float, dtype: torch.dtype) -> None:
    plane = torch.ones(30_000, dtype=dtype)
    assert Scanner().is_finite(plane)
    plane[position] = value
    assert not Scanner().is_finite(plane)


def test_a_large_plane_whose_sum_overflows_is_still_finite() -> None:
    assert Scanner().is_finite(torch.full((30_000,), 3e38))
    assert Scanner().is_finite(torch.full((30_000,), 6e4, dtype=torch.float16))


def test_opposite_infinities_do_not_cancel() -> None:
    plane = torch.zeros(30_000)
    plane[0], plane[1] = INF, -INF
    assert not Scanner().is_finite(plane)


_SIGNED = [NAN, -NAN, INF, -INF, 1.0]


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.sampled_from([*_SIGNED, NAN, NAN]), min_size=6, max_size=6),
    st.sampled_from(DTYPES[:4]),
    st.sampled_from(["contiguous", "transposed", "sliced", "expanded"]),
)
def test_what_is_nonfinite_is_told_by_bits_as_by_values(values: list[float], dtype: torch.dtype, kind: str) -> None:
    plane = _layout(torch.tensor(values).to(dtype).reshape(2, 3), kind)
    found = Scanner().nonfinite(plane)
    assert is_all_nan(plane) <= bool(plane.isnan().all())
    assert (found is None) == bool(plane.isfinite().all())
    if found is not None:
        assert torch.equal(found.nan_mask, plane.isnan()) and torch.equal(found.inf_mask, plane.isinf())
        assert (found.nan, found.posinf) == (int(plane.isnan().sum()), int((plane == INF).sum()))
        assert found.neginf == int((plane == -INF).sum()) and torch.equal(found.bad, ~plane.isfinite())


@pytest.mark.parametrize("dtype", DTYPES[:4])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_plane_of_nan_of_either_sign_is_known_without_a_mask_for_each_element(
    dtype: torch.dtype, sign: float
) -> None:
    plane = torch.full((3, 4), NAN, dtype=dtype).copysign(torch.tensor(sign, dtype=dtype))
    assert is_all_nan(plane) and is_all_nan(plane.t()[:, 1:])
    found = masks(plane)
    assert found.nan == 12 and found.nan_mask.shape == (3, 4) and found.nan_mask.untyped_storage().nbytes() == 1
    plane[2, 3] = INF
    assert not is_all_nan(plane) and found.nan_mask.all()


def test_statistics_cover_the_finite_elements_alone() -> None:
    summary = summarize(torch.tensor([NAN, INF, -INF, -INF, 0.0, -2.0, 0.5]))
    counts = (summary.nan, summary.posinf, summary.neginf, summary.zero)
    assert counts == (1, 1, 2, 1)
    assert (summary.min, summary.max, summary.absmin) == (-2.0, 0.5, 0.5)
    empty = summarize(torch.tensor([NAN]))
    assert (empty.min, empty.max, empty.absmin) == (None, None, None)


def test_a_complex_element_is_bad_if_either_part_is() -> None:
    found = masks(torch.tensor([complex(NAN, INF), complex(1, -INF), complex(1, 1)]))
    assert (found.nan, found.posinf, found.neginf) == (1, 1, 0)


def test_tensors_without_readable_values_have_no_planes() -> None:
    unread: dict[str, int] = {}
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    zero = torch._efficientzerotensor((2,))
    for tensor in (torch.empty(0), torch.ones(2).int(), freed, zero, torch.empty(2, device="meta")):
        assert planes(tensor, unread) == ()
    assert unread == {"meta": 1}


def test_an_expanded_plane_is_read_once() -> None:
    assert readable(torch.ones(1).expand(1_000_000)).numel() == 1


def test_a_dense_plane_is_read_in_the_order_of_its_memory() -> None:
    plane = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)
    assert readable(plane).is_contiguous() and torch.equal(readable(plane), torch.arange(24.0))


def test_tensors_are_found_in_any_nesting_and_named_by_their_path() -> None:
    class Plain:
        def __init__(self) -> None:
            self.y = torch.zeros(1)

    a = torch.zeros(1)
    nested = {"x": [a, (a, {"k": a})], "p": Plain(), "n": 3, "s": "text"}
    assert [path for path, _ in tensors_in(nested, "batch")] == [
        "batch.x[0]",
        "batch.x[1][0]",
        "batch.x[1][1].k",
        "batch.p.y",
    ]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_writers_agree_with_a_map_from_element_to_writer(data: Any) -> None:
    """Random writes through random views of one storage, against an array of ids kept by hand."""
    storage = torch.zeros(12)
    writers, expected = Writers(), np.zeros(12, dtype=int)
    for writer in data.draw(st.lists(st.integers(-3, 6).filter(bool), min_size=1, max_size=6)):
        view, index = _some_view(data, storage)
        mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=view.numel(), max_size=view.numel())))
        writers.write(view, mask.reshape(view.shape), writer)
        expected[index.reshape(-1)[mask.numpy()]] = writer
    view, index = _some_view(data, storage)
    everything = torch.ones(view.shape, dtype=torch.bool)
    assert writers.of(view, everything) == set(expected[index.reshape(-1)].tolist())
    assert writers.of(view, marked.all_of(view.shape)) == writers.of(view, everything)
    some = everything.reshape(-1).clone()
    some[data.draw(st.integers(0, len(some) - 1)) :] = False
    some[data.draw(st.integers(0, len(some) - 1))] = True
    chosen = set(expected[index.reshape(-1)[some.numpy()]].tolist())
    assert writers.of(view, some.reshape(view.shape)) == chosen
    for writer in chosen:
        mine = writers.by(view, writer)
        assert mine is not None and mine.numpy().tolist() == (expected[index] == writer).tolist()


def _some_view(data: Any, storage: torch.Tensor) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    index = np.arange(12)
    kind = data.draw(st.sampled_from(["all", "slice", "matrix", "strided"]))
    if kind == "slice":
        start = data.draw(st.integers(0, 11))
        return storage[start:], index[start:]
    if kind == "matrix":
        return storage.view(3, 4).t(), index.reshape(3, 4).T
    if kind == "strided":
        return storage[1::3], index[1::3]
    return storage, index


def test_adopting_leaves_elements_with_a_writer_alone() -> None:
    x, all_of_it = torch.zeros(3), torch.ones(3, dtype=torch.bool)
    writers = Writers()
    writers.write(x, torch.tensor([True, False, False]), 7)
    writers.adopt(x, all_of_it, 8)
    assert [set(writers.of(x[i : i + 1], all_of_it[:1])) for i in range(3)] == [{7}, {8}, {8}]


def test_a_view_of_another_width_may_have_any_writer_of_its_memory() -> None:
    x = torch.zeros(4)
    writers = Writers()
    writers.write(x, torch.tensor([True, False, False, True]), 5)
    half = x.view(torch.float16)
    assert writers.of(half, torch.ones(8, dtype=torch.bool)) == {5}


def test_the_address_of_freed_memory_is_not_mistaken_for_its_successor() -> None:
    writers = Writers()
    mask = torch.ones(4, dtype=torch.bool)
    for _ in range(300):
        x = torch.zeros(4)
        assert writers.of(x, mask) == {0}
        writers.write(x, mask, 1)
    assert len(writers.entries) < 300


def _link(op: str) -> Link:
    return Link(None, Line(_link.__code__, 1), op)


def test_numbers_of_a_clone_s_owner_go_to_the_op_that_writes_next() -> None:
    links = Links()
    links.last = 10
    links.assign(12, _link("aten.clone"), True, time=5)
    links.wrote("aten.pow_", into_view=False, number=12, time=6)
    assert [links.get(n).op for n in (11, 12)] == ["aten.pow_", "aten.clone"]  # type: ignore[union-attr]
    links.wrote("aten.zero_", into_view=False, number=12, time=9)
    assert links.get(11).op == "aten.pow_"  # type: ignore[union-attr]


def test_numbers_taken_after_writing_into_a_view_are_the_writer_s() -> None:
    links = Links()
    links.last = 10
    links.assign(11, _link("aten.sqrt_"), True, time=1)
    links.wrote("aten.sqrt_", into_view=True, number=11, time=1)
    links.assign(14, _link("aten.sum"), True, time=2)
    found = [links.get(n).op for n in (11, 12, 13, 14)]  # type: ignore[union-attr]
    assert found == ["aten.sqrt_", "aten.sqrt_", "aten.sqrt_", "aten.sum"]


@pytest.mark.parametrize(
    ("func", "expected"),
    [
        (torch.ops.aten.view.default, {"view": True}),
        (torch.ops.aten.reshape.default, {"view": False, "maybe_view": True}),
        (torch.ops.aten.add_.Tensor, {"view": False, "mutates": True, "reads": (True, True, True)}),
        (torch.ops.aten.copy_.default, {"mutates": True, "reads": (False, True, True)}),
        (torch.ops.aten.add.out, {"mutates": True, "reads": (True, True, True, False)}),
        (torch.ops.aten.empty.memory_format, {"unwritten": True}),
        (torch.ops.aten._local_scalar_dense.default, {"host_read": True}),
        (torch.ops.aten._foreach_add_.List, {"listwise": True}),
        (torch.ops.aten.native_batch_norm.default, {"announces": False}),
        (torch.ops.aten.native_layer_norm.default, {"announces": True}),
    ],
)
def test_a_schema_says_what_an_op_does(func: Any, expected: dict[str, Any]) -> None:
    facts = OpFacts(func)
    assert {name: getattr(facts, name) for name in expected} == expected


def test_an_expanded_tensor_is_read_without_a_warning() -> None:
    marks = torch.tensor([0.0, -INF, 1.0])
    lineage = recorded(lambda: marks.expand(4, 3) - 1.0)
    assert (lineage.event(1).kind, lineage.event(2).inf_parents) == ("external", (1,))
