"""Nonfinite numbers that the code holds: a NaN that is put in, an eps that makes every update 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nantrace.diagnosis.blame import blame
from nantrace.diagnosis.verdict import Verdict
from nantrace.render.sentence import sentence
from tests.flow.steps import recorded


def judged(optimizer_of: Any, loss_of: Any = torch.mean) -> Verdict:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = optimizer_of(model.parameters())

    def run() -> None:
        optimizer.zero_grad()
        loss_of(model(torch.ones(2, 3))).backward()
        optimizer.step()

    return blame(recorded(run, model)).verdict


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_a_nan_in_the_code_is_not_called_an_infinity(value: float) -> None:
    verdict = judged(lambda p: torch.optim.SGD(p, 0.1), lambda out: out.masked_fill(out > -1e9, value).mean())
    said = " ".join(verdict.evidence)
    assert (verdict.status, verdict.cause) == ("fault", "sentinel_escaped")
    assert ("A NaN that the code put in reached the loss" in said) == (value != value)
    assert ("infinity" in said) == (value == value)


@pytest.mark.parametrize("foreach", (False, True))
@pytest.mark.parametrize("kind", (torch.optim.Adam, torch.optim.RMSprop))
def test_an_infinite_eps_is_a_fault_though_nothing_turns_nonfinite(kind: Any, foreach: bool) -> None:
    verdict = judged(lambda p: kind(p, 0.1, eps=float("inf"), foreach=foreach))
    assert (verdict.status, verdict.stage, verdict.cause) == ("fault", "optimizer", "nonfinite_hyperparameter")
    assert verdict.origin is not None and verdict.origin.tensor == f"{kind.__name__}.param_groups[0].eps"
    assert "was exactly 0, so nothing is learnt" in verdict.evidence[1]
    assert f"{kind.__name__}.param_groups[0].eps" in sentence(verdict)


def test_a_bound_that_is_infinite_is_no_fault() -> None:
    verdict = judged(lambda p: torch.optim.Rprop(p, 0.1, step_sizes=(1e-6, float("inf"))))
    assert verdict.status in ("expected", "clean")
