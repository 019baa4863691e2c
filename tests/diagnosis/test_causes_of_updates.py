"""Nonfinite learning rates and other settings: the update that used them is blamed, and the setting is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import nantrace
from nantrace.diagnosis.blame import blame
from nantrace.diagnosis.verdict import Verdict
from nantrace.lineage import Lineage
from tests.flow.steps import recorded

INF, NAN = math.inf, math.nan


def training(
    model: nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[], Any] = lambda: None, steps: int = 1
) -> Callable[[], None]:
    """A loop of updates on finite data; `after` runs after each."""
    x = torch.linspace(-1, 1, 12).reshape(4, 3)

    def run() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
            after()

    return run


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def judged(model: nn.Module, run: Callable[[], Any]) -> Verdict:
    return blame(recorded(run, model)).verdict


@pytest.mark.parametrize("rate", [INF, NAN])
@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_nonfinite_learning_rate_is_named_in_every_form_of_an_optimizer(make: Any, how: Any, rate: float) -> None:
    model = linear()
    optimizer = make(model.parameters(), lr=0.1, **how)
    optimizer.param_groups[0]["lr"] = rate
    verdict = judged(model, training(model, optimizer))
    assert (verdict.status, verdict.stage, verdict.cause) == ("fault", "optimizer", "nonfinite_learning_rate")
    shown = "NaN" if rate != rate else "+inf"
    assert verdict.evidence[0] == f"lr of {make.__name__}, param_groups[0], was {shown} when the update began."
    assert "optimizer.param_groups[0]['lr']" in verdict.advice[0] and "scheduler" in verdict.advice[0]
    assert "finfo" not in " ".join(verdict.advice)


@pytest.mark.parametrize(
    ("setting", "value", "name"),
    [("weight_decay", INF, "weight_decay"), ("betas", (NAN, 0.9), "betas[0]"), ("eps", NAN, "eps")],
)
def test_any_other_nonfinite_setting_is_named_by_its_key(setting: str, value: Any, name: str) -> None:
    model = linear()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer.param_groups[0][setting] = value
    verdict = judged(model, training(model, optimizer))
    assert (verdict.status, verdict.stage, verdict.cause) == ("fault", "optimizer", "nonfinite_hyperparameter")
    assert verdict.evidence[0].startswith(f"{name} of Adam, param_groups[0], was ")


def test_the_update_that_used_the_rate_is_blamed_and_not_the_forward_after_it() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: INF if epoch == 3 else 1.0)
    run = training(model, optimizer, scheduler.step, steps=6)
    verdict = nantrace.bisect(run, model, optimizer=optimizer)
    assert (verdict.status, verdict.stage, verdict.cause) == ("fault", "optimizer", "nonfinite_learning_rate")
    assert verdict.origin is not None and (verdict.origin.step, verdict.origin.op) == (3, "aten.add_")


def test_a_learning_rate_that_is_a_tensor_is_named_too() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(NAN), foreach=False)
    verdict = judged(model, training(model, optimizer))
    assert (verdict.status, verdict.stage, verdict.cause) == ("fault", "optimizer", "nonfinite_learning_rate")
    assert verdict.origin is not None and verdict.origin.tensor == "SGD.param_groups[0].lr"


def test_a_tensor_rate_that_a_scheduler_fills_is_blamed_on_the_line_of_the_scheduler() -> None:
    model = linear()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: INF if epoch == 1 else 1.0)
    verdict = judged(model, training(model, optimizer, scheduler.step, steps=3))
    assert (verdict.status, verdict.stage, verdict.cause) == ("fault", "optimizer", "nonfinite_learning_rate")
    assert verdict.origin is not None and str(verdict.origin.where).startswith("test_causes_of_updates.py")
    assert "made the value that was written into it" in verdict.evidence[1]


def test_an_update_written_by_hand_with_a_nonfinite_number_is_not_called_a_sentinel() -> None:
    model = linear()

    def run() -> None:
        model(torch.ones(2, 3)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=INF)

    verdict = judged(model, run)
    assert (verdict.status, verdict.cause) == ("fault", "nonfinite_hyperparameter")
    assert "alpha = +inf" in verdict.evidence[0]


class _Largest(torch.optim.Optimizer):
    """Moves only the largest weight: the others are masked with -inf before the maximum is sought."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"clip": INF})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            with torch.no_grad():
                scores = parameter.grad.masked_fill(parameter < 0, -INF)
                parameter.add_((scores == scores.max()).float().clamp(max=self.param_groups[0]["clip"]), alpha=-0.1)


def test_marks_and_open_bounds_inside_an_optimizer_are_no_fault() -> None:
    model = linear()
    assert judged(model, training(model, _Largest(model.parameters()))).status == "expected"


def test_settings_survive_being_written_to_a_file() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = INF
    lineage = recorded(training(model, optimizer), model)
    assert len(lineage.hyperparameters) == 1 and lineage.hyperparameters[0].value == INF
    assert Lineage.from_json(lineage.to_json()).hyperparameters == lineage.hyperparameters


def test_a_trace_of_modules_names_the_learning_rate_as_well() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = INF
    with nantrace.trace(model, optimizer=optimizer, on_nonfinite="ignore") as tracer:
        training(model, optimizer)()
    verdict = nantrace.diagnose(tracer.trace)
    assert (verdict.stage, verdict.cause) == ("optimizer", "nonfinite_learning_rate")
