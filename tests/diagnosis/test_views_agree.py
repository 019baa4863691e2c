"""A trace of modules and one of ops tell the same of one run: each may know less, neither contradicts the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import nantrace
from nantrace.diagnosis.verdict import Verdict


def diverging(
    activation: type[nn.Module], depth: int, rate: float, cls: Any = torch.optim.SGD, seed: int = 0, **options: Any
) -> Verdict:
    """The verdict on 12 steps of a small network whose learning rate is far too high."""
    torch.manual_seed(seed)
    inner = [layer for _ in range(depth) for layer in (nn.Linear(8, 8), activation())]
    model = nn.Sequential(*inner, nn.Linear(8, 4))
    x, y = torch.randn(16, 8), torch.randn(16, 4)
    optimizer = cls(model.parameters(), lr=rate)
    with nantrace.trace(model, on_nonfinite="ignore", **options) as tracer:
        for _ in range(12):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    return nantrace.diagnose(tracer.trace)


@pytest.mark.parametrize(
    ("run", "module"),
    [
        ((nn.Tanh, 3, 50.0), None),  # the loss squares what the model put out
        ((nn.Tanh, 0, 50.0), None),
        ((nn.GELU, 3, 50.0), "2"),
        ((nn.ReLU, 1, 50.0), None),
        ((nn.ReLU, 6, 50.0), "8"),
        ((nn.ReLU, 3, 50.0, torch.optim.SGD, 1), "4"),
        # Before it "2" put out -inf, of which the next ReLU made zeros.
        ((nn.ReLU, 3, 1e3), "6"),
        ((nn.ReLU, 3, 1e30, torch.optim.Adam), "2"),
    ],
)
def test_an_explosion_is_told_alike_by_modules_and_by_ops(run: tuple[Any, ...], module: str | None) -> None:
    found = [diverging(*run, **options) for options in ({}, {"ops": True}, {"stats": "full"})]
    assert [(each.status, each.stage, each.cause) for each in found] == [("fault", "update", "exploding_update")] * 3
    places = [(each.origin.step, each.origin.module, each.origin.kind) for each in found if each.origin is not None]
    assert len(set(places)) == 1 and len(places) == 3
    assert places[0][1] == module


def test_an_explosion_that_overflows_asks_for_another_learning_rate_first() -> None:
    found = diverging(nn.GELU, 3, 50.0)
    assert found.evidence[0] == "Inputs and weights are finite; the result left float32's range (3.4028e+38)."
    assert found.evidence[1].startswith("The updates made the weights explode")
    assert found.advice[0].startswith("Repeat the steps with a learning rate 100 times smaller")
    assert not any("running statistics" in advice for advice in found.advice)


def test_a_ledger_alone_names_the_step_and_says_that_it_cannot_name_the_stage() -> None:
    whole, alone = (diverging(nn.ReLU, 1, 50.0, stats=stats) for stats in ("auto", "none"))
    assert whole.origin is not None and alone.origin is not None
    assert (alone.status, alone.stage, alone.cause) == ("fault", None, None)
    assert alone.origin.step == whole.origin.step
    assert any("Only the ledger was kept" in said for said in alone.evidence)
