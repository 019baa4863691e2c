"""`DeviceTable` against the slow reference, on a table in host memory."""

from __future__ import annotations

import concurrent.futures

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from nantrace.events import Columns
from nantrace.stats import deferred
from nantrace.stats.deferred import DeviceTable
from nantrace.stats.reference import reference_row
from tests.stats.kinds import READABLE, READABLE_ON_HOST, UNREADABLE
from tests.stats.tensors import DTYPES, LAYOUTS, PATTERNS, fill, in_range_mode, same

#: Operations whose result the host must wait for.
WAITING = {"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::bincount"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_drained_row_says_what_the_reference_says(dtype: torch.dtype, layout: str) -> None:
    table = DeviceTable("cpu")
    expected = []
    for pattern in PATTERNS:
        tensor = LAYOUTS[layout](fill(dtype, pattern, 240))
        full = reference_row(tensor)
        for want, columns in ((full, True), (in_range_mode(full), False)):
            assert table.add(tensor, columns) == len(expected)
            expected.append((pattern, want))
    for (pattern, want), got in zip(expected, table.drain(), strict=True):
        assert same(got, want), (pattern, got, want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_read_in_many_pieces_gives_the_same_row(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "PIECE", 7)
    for dtype in (torch.float32, torch.complex64, torch.float8_e5m2, torch.int16):
        table = DeviceTable("cpu")
        tensors = [LAYOUTS[layout](fill(dtype, pattern, 240)) for pattern in PATTERNS]
        for tensor in tensors:
            table.add(tensor, full=True)
        for tensor, got in zip(tensors, table.drain(), strict=True):
            assert same(got, reference_row(tensor)), (dtype, got, reference_row(tensor))


def test_the_table_grows_and_starts_again_after_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "_BLOCK", 16)
    table = DeviceTable("cpu")
    for step in range(2):
        assert [table.add(torch.tensor([float(i), step]), full=False) for i in range(100)] == list(range(100))
        assert [got[6] for got in table.drain()] == [float(max(i, step)) for i in range(100)]
    assert table.drain() == []


def test_a_row_is_that_of_the_values_when_it_was_added() -> None:
    table, tensor = DeviceTable("cpu"), torch.tensor([1.0, float("nan")])
    table.add(tensor, full=True)
    tensor.fill_(3.0)
    assert same(table.drain()[0], reference_row(torch.tensor([1.0, float("nan")])))


def test_a_tensor_that_was_added_is_not_kept_alive() -> None:
    table, tensor = DeviceTable("cpu"), torch.randn(4, 6).t()
    memory = tensor.untyped_storage()._weak_ref()
    expected = in_range_mode(reference_row(tensor))
    table.add(tensor, full=False)
    del tensor
    assert torch.UntypedStorage._expired(memory)
    assert same(table.drain()[0], expected)


def test_adding_asks_the_device_for_nothing() -> None:
    table = DeviceTable("cpu")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for dtype in DTYPES:
            for layout in ("transposed", "expanded"):
                table.add(LAYOUTS[layout](fill(dtype, "all kinds", 240)).detach(), full=True)
    seen = {event.key for event in profiler.key_averages()}
    assert "aten::stack" in seen and not seen & WAITING
    assert all(Columns(columns) == Columns.full() | Columns.PASSES for *_, columns in table.drain())


@pytest.mark.parametrize("kind", {**UNREADABLE, **READABLE_ON_HOST})
def test_a_tensor_that_cannot_be_read_has_a_row_without_columns(kind: str) -> None:
    table = DeviceTable("cpu")
    make, numel = UNREADABLE[kind][:2] if kind in UNREADABLE else (READABLE_ON_HOST[kind][0], None)
    tensor = make()
    table.add(tensor, full=True)
    table.add(torch.ones(2), full=True)
    got, after = table.drain()
    nothing = (tensor.numel() if numel is None else numel, 0, 0, 0, 0, *[float("nan")] * 3, -1, 0, 0, 0, 0)
    assert same(got, nothing) and same(after, reference_row(torch.ones(2)))


@pytest.mark.parametrize("kind", READABLE)
def test_wrapped_values_are_read(kind: str) -> None:
    table, (make, plain) = DeviceTable("cpu"), READABLE[kind]
    tensor = make()
    table.add(tensor, full=True)
    table.add(tensor, full=False)
    full, short = table.drain()
    assert same(full, reference_row(plain)) and same(short, in_range_mode(reference_row(plain)))


def test_threads_get_rows_of_their_own() -> None:
    table = DeviceTable("cpu")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        slots = list(pool.map(lambda i: table.add(torch.full((3,), float(i)), True), range(400)))
    rows = table.drain()
    assert [rows[slot][5:7] for slot in slots] == [(float(i), float(i)) for i in range(400)]


def test_a_table_begun_in_inference_mode_goes_on_outside_of_it() -> None:
    table = DeviceTable("cpu")
    for dtype in (torch.float32, torch.float8_e5m2):
        with torch.inference_mode():
            table.add(fill(dtype, "plain", 6), full=True)
        table.add(fill(dtype, "plain", 6), full=True)
    expected = [reference_row(fill(dtype, "plain", 6)) for dtype in (torch.float32, torch.float8_e5m2)]
    assert all(same(got, expected[index // 2]) for index, got in enumerate(table.drain()))
