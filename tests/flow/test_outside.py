"""Values that no op of the step wrote: they are inputs, found where the user's code first computed with them."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from nantrace.diagnosis.blame import blame
from nantrace.diagnosis.verdict import Origin
from tests.flow.steps import recorded

ROWS = 16


class Rows(Dataset[Tensor]):
    """Row 9 is NaN from the beginning."""

    def __init__(self) -> None:
        self.x = torch.linspace(-1, 1, ROWS * 3).reshape(ROWS, 3)
        self.x[9] = torch.nan

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index]


def trained(batches: Callable[[], Any]) -> Origin:
    """Trains on what `batches()` yields; the origin that is blamed, which must be an input."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        for x in batches():
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()

    verdict = blame(recorded(run, model)).verdict
    assert (verdict.status, verdict.stage) == ("fault", "input"), verdict
    assert verdict.origin is not None and verdict.origin.op is None
    return verdict.origin


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_row_of_a_dataset_is_an_input_however_it_is_loaded(workers: int) -> None:
    rows = Rows()
    origin = trained(lambda: DataLoader(rows, batch_size=4, num_workers=workers))
    assert origin.where is not None and origin.where.startswith("test_outside.py:")
    assert origin.step == 2 and origin.kind == "nan" and origin.tensor


def test_memory_that_a_tensor_adopts_is_no_birth() -> None:
    bad = torch.full((2, 3), torch.nan).untyped_storage()
    assert trained(lambda: [torch.empty(0).set_(bad, 0, (2, 3), (3, 1))]).tensor


def test_what_a_closure_brings_along_is_an_input_with_the_line_that_read_it() -> None:
    bad = torch.full((2, 3), torch.nan)
    origin = trained(lambda: [bad * 2])
    assert origin.tensor == "a tensor from outside the step"
    assert origin.where is not None and origin.where.startswith("test_outside.py:")


def test_a_line_of_python_s_own_library_is_nobody_s_code() -> None:
    class Items(queue.Queue[Tensor]):
        def _get(self) -> Tensor:
            return torch.log(super()._get())

    items: Items = Items()
    items.put(torch.zeros(2))
    lineage = recorded(lambda: items.get().sum())
    assert "test_outside.py" in str(lineage.events[0].where)
