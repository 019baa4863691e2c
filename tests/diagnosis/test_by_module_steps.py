"""Module-level blame on traces of real steps, each with its answer known in advance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nantrace
from nantrace.diagnosis.verdict import Verdict


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def judged(model: nn.Module, step: Callable[[], Any], **options: Any) -> Verdict:
    with nantrace.trace(model, on_nonfinite="ignore", **options) as tracer:
        step()
    return nantrace.diagnose(tracer.trace)


def said(verdict: Verdict) -> str:
    return " ".join(verdict.evidence)


class Around(nn.Module):
    """`code` between two layers, in the forward of the module around them."""

    def __init__(self, code: Callable[[Tensor], Tensor], after: nn.Module) -> None:
        super().__init__()
        self.code, self.before, self.after = code, nn.Linear(4, 4), after

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.code(self.before(x)))
        return out


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.amax(0)


def trained(model: nn.Module, batch: Tensor, loss_of: Callable[[Tensor], Tensor] = Tensor.mean) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        optimizer.step()

    return step


def log_of_relu(x: Tensor) -> Tensor:
    return torch.log(torch.relu(x))


@pytest.mark.parametrize("after", [nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Identity(), Unknown()])
def test_minus_infinity_that_code_between_submodules_made_is_that_codes_not_the_next_modules(after: nn.Module) -> None:
    model = Around(log_of_relu, after)
    verdict = judged(model, trained(model, torch.randn(8, 4)))
    assert (verdict.status, verdict.stage) == ("fault", "forward")
    assert verdict.origin is not None
    assert (verdict.origin.module, verdict.origin.tensor) == ("", "after args[0]")


def test_a_softmax_over_a_row_that_is_all_masked_is_named_itself() -> None:
    model = Around(lambda x: x.masked_fill(torch.eye(8, 4)[:, :1] > 0, -torch.inf), nn.Softmax(-1))
    verdict = judged(model, trained(model, torch.randn(8, 4)))
    assert verdict.status == "fault" and verdict.origin is not None
    assert verdict.origin.module == "after"
