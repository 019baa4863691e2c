"""What a trace with ops warns of while training runs: the op and its line, as its report says afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import nantrace
from nantrace.errors import NantraceWarning


def warned(batches: list[Tensor]) -> str:
    """What is said of training on `batches`, whose loss takes a logarithm outside of all modules."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(NantraceWarning) as told, nantrace.trace(model, optimizer=optimizer, ops=True):
        for x in batches:
            optimizer.zero_grad()
            (model(torch.ones(3, 2)).pow(2).sum() - torch.log(x * 2).mean()).backward()
            optimizer.step()
    assert len(told) == 1
    return str(told[0].message)


def test_the_op_and_its_line_are_named() -> None:
    said = warned([torch.ones(3), torch.ones(3), torch.tensor([1.0, 0.0, 1.0]), torch.zeros(3)])
    assert said.startswith("step 2: first nonfinite tensor: loss, aten.log, float32 [3], 1 -inf, at test_warning.py:")
    assert "(log of zero)" in said


def test_a_tensor_that_no_op_made_was_there_before_the_step() -> None:
    said = warned([torch.ones(3), torch.tensor([1.0, torch.nan, 2.0])])
    assert "first nonfinite tensor: before the step, a tensor from outside the step, float32 [3], 1 nan" in said
    assert "unknown" not in said
