"""What a verdict says of values made where the usual checks cannot help: in updates, schedules and shared labels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nantrace
from nantrace.diagnosis.blame import blame
from nantrace.diagnosis.causes.checks import ANOTHER_BATCH
from nantrace.diagnosis.verdict import Verdict
from nantrace.lineage import Lineage, Sink
from tests.flow.steps import recorded

INF = math.inf
X = torch.linspace(-1, 1, 12).reshape(4, 3)
HIDDEN = torch.tensor([False, False, False, True])
#: A parameter that left its range long ago.
FAR = 6.7e28


def linear(width: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, width)


def judged(run: Callable[[], Any], model: nn.Module, **changes: Any) -> Verdict:
    return blame(dataclasses.replace(recorded(run, model), **changes)).verdict


def update(model: nn.Module, optimizer: torch.optim.Optimizer, before: Callable[[], Any] = lambda: None) -> None:
    optimizer.zero_grad()
    model(X).pow(2).mean().backward()
    before()
    optimizer.step()


# ------------------------------------------------------------------------------------------------ a beta of 1
@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("one", [1.0, 1], ids=str)
def test_a_second_beta_of_one_is_named_in_every_form_of_an_optimizer(make: Any, how: Any, one: float) -> None:
    model = linear()
    optimizer = make(model.parameters(), **how)
    optimizer.param_groups[0]["betas"] = (0.9, one)
    verdict = judged(lambda: update(model, optimizer), model)
    assert (verdict.stage, verdict.cause) == ("optimizer", "zero_over_zero")
    assert "betas[1]" in verdict.evidence[0] and "1 - betas[1] ** step is 0" in verdict.evidence[0]
    assert verdict.advice[0].startswith("Set betas[1] below 1") and "'betas'" in verdict.advice[1]
    assert not [text for text in verdict.advice if "1e-6" in text or "batch" in text]


@pytest.mark.parametrize("foreach", [False, True])
def test_a_divisor_of_zero_is_put_down_to_no_beta_that_was_not_recorded(foreach: bool) -> None:
    model = linear()
    optimizer = torch.optim.Adam(model.parameters(), foreach=foreach)
    optimizer.param_groups[0]["betas"] = (0.9, 1.0)
    verdict = judged(lambda: update(model, optimizer), model, unit_betas=[])
    assert verdict.cause == "zero_over_zero"
    assert "beta" not in " ".join((*verdict.evidence, *verdict.advice))
    assert verdict.advice[0].startswith("Print optimizer.param_groups just before aten.")


def test_a_beta_of_one_explains_no_other_zero() -> None:
    class Normalized(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad / p.grad.abs())

    model = linear()
    optimizer = Normalized(model.parameters(), {"betas": (0.9, 1.0)})
    verdict = judged(lambda: update(model, optimizer, before=lambda: model.weight.grad.zero_()), model)
    assert verdict.cause == "zero_over_zero" and "beta" not in " ".join(verdict.evidence)
    assert verdict.advice[-1].startswith("Print the gradients, moments and settings that ")


# ------------------------------------------------------------------------------------------------ a rate below 0
def _tensor_rate(optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        optimizer.param_groups[0]["lr"].copy_(1e-3 * torch.tensor(-0.5).sqrt())


def _plain_rate(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = float(1e-3 * torch.tensor(-0.5).sqrt())


@pytest.mark.parametrize(
    ("rate", "change", "said"),
    [
        (torch.tensor(1e-3), _tensor_rate, "It became lr of Adam, param_groups[0], which was NaN"),
        (1e-3, _plain_rate, "lr of Adam, param_groups[0], was NaN"),
    ],
    ids=["tensor", "number"],
)
def test_a_root_of_a_negative_number_says_what_the_learning_rate_was(rate: Any, change: Any, said: str) -> None:
    model = linear()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, foreach=False)
    verdict = judged(lambda: update(model, optimizer, before=lambda: change(optimizer)), model)
    assert verdict.cause == "sqrt_of_negative"
    assert f"{said} when the update began." in verdict.evidence
    assert verdict.advice[1].startswith("Print optimizer.param_groups[0]['lr'] after each change to it")
    assert ANOTHER_BATCH not in verdict.advice


def test_a_root_beside_a_bad_rate_is_not_said_to_have_become_it() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def spoil() -> None:
        model.weight.grad.copy_(torch.tensor(-1.0).sqrt())
        optimizer.param_groups[0]["lr"] = math.nan

    lineage = recorded(lambda: update(model, optimizer, before=spoil), model)
    root = next(event for event in lineage.events if event.op == "aten.sqrt")
    lineage.sinks[:] = [Sink("param", "weight", ((root.id, "nan"),), 1, 99)]
    verdict = blame(lineage).verdict
    assert verdict.cause == "sqrt_of_negative" and "became" not in " ".join(verdict.evidence)


# ------------------------------------------------------------------------------------------------ shares of -inf
def _smoothed(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(X).masked_fill(HIDDEN, -INF), torch.tensor([0, 1, 2, 0]), label_smoothing=0.1)


def _soft(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(X).masked_fill(HIDDEN, -INF), torch.full((4, 4), 0.25))


def _divergence(model: nn.Module) -> Tensor:
    return F.kl_div(F.log_softmax(model(X).masked_fill(HIDDEN, -INF), -1), torch.full((4, 4), 0.25), reduction="sum")


def _by_hand(model: nn.Module) -> Tensor:
    return -(F.log_softmax(model(X).masked_fill(HIDDEN, -INF), -1) * 0.25).sum(-1).mean()


def _hard(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(X).masked_fill(HIDDEN, -INF), torch.tensor([0, 1, 3, 0]))


def _gathered(model: nn.Module) -> Tensor:
    return (
        (-F.log_softmax(model(X).masked_fill(HIDDEN, -INF), -1) * 2)
        .gather(-1, torch.tensor([[0], [1], [3], [0]]))
        .mean()
    )


@pytest.mark.parametrize(
    ("loss", "shared"),
    [(_smoothed, True), (_soft, True), (_divergence, True), (_by_hand, True), (_hard, False), (_gathered, False)],
)
def test_a_mask_escapes_through_shares_or_through_a_target(loss: Callable[[nn.Module], Tensor], shared: bool) -> None:
    model = linear(4)
    verdict = judged(lambda: loss(model).backward(), model)
    assert verdict.cause == "sentinel_escaped"
    said = " ".join((*verdict.evidence, *verdict.advice))
    assert ("label smoothing and soft targets give each class a share" in said) is shared
    assert ("lies under the mask" in said) is not shared
    assert sum("reached the loss" in text for text in verdict.evidence) == 1


# ------------------------------------------------------------------------------------------------ overflows
def test_a_power_that_overflows_beside_an_infinity_is_an_overflow_with_its_huge_parameter() -> None:
    model = linear()
    with torch.no_grad():
        model.weight.fill_(FAR)
    x = torch.ones(4, 3)
    x[0] = 1e38  # its product is infinite by itself
    verdict = judged(lambda: model(x)[:, 0].pow(2).mean().backward(), model)
    lineage = recorded(lambda: model(x)[:, 0].pow(2).mean().backward(), model)
    power = next(event for event in lineage.events if event.op == "aten.pow" and event.kind == "inf")
    assert power.operands[0].posinf == 1 and verdict.status == "fault"
    lineage.sinks[:] = [Sink("loss", "loss", ((power.id, "inf"),), 1, 99)]
    verdict = blame(lineage).verdict
    assert (verdict.origin and verdict.origin.op, verdict.cause) == ("aten.pow", "overflow")
    assert verdict.evidence[0].startswith("Parameter weight reached 6.7e+28")
    assert "to the power 2 reach" in verdict.evidence[1]


def test_before_the_forward_nobody_is_sent_to_the_model_s_output() -> None:
    model = linear().half()

    def merged(ahead: int) -> None:
        for _ in range(ahead):
            model(X.half())
        with torch.no_grad():
            model.weight.add_(torch.full((1, 3), 200.0).half() * 512.0)
        model(X.half()).sum().backward()

    def advice(ahead: int) -> str:
        nn.init.zeros_(model.weight)
        model.zero_grad()
        return " ".join(judged(lambda: merged(ahead), model).advice)

    assert "each tensor that the code before the forward makes" in advice(0) and "model's output" not in advice(0)
    assert "model's output" in advice(1)


def test_a_mask_of_the_lowest_number_that_is_added_is_named() -> None:
    low = torch.finfo(torch.float32).min
    model = linear(4)
    mask = torch.where(HIDDEN, low, 0.0)
    verdict = judged(lambda: ((model(X) + mask) + mask).sum().backward(), model)
    assert (verdict.origin and verdict.origin.op, verdict.cause) == ("aten.add", "overflow")
    assert "as masks do" in " ".join(verdict.evidence) and "masked_fill" in verdict.advice[0]


def test_a_factor_that_a_setting_made_is_named_before_the_gradients() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-40, weight_decay=1e38, foreach=False)
    with torch.no_grad():
        model.weight.fill_(10.0)
    verdict = judged(lambda: update(model, optimizer), model)
    assert "weight counts 1e+38 times." in verdict.evidence and "optimizer.param_groups" in verdict.advice[0]


def test_the_second_argument_of_xlogy_is_the_one_to_replace() -> None:
    model = linear()
    verdict = judged(lambda: torch.xlogy(X.abs() + 1, model(X) * 0).sum().backward(), model)
    assert verdict.cause == "log_of_zero"
    assert "Replace y in xlogy(x, y)" in " ".join(verdict.advice) and "torch.where(y > 0, y, 1)" in verdict.advice[-1]


# ------------------------------------------------------------------------------------------------ rounds
def _bad_round(model: nn.Module, rounds: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number in range(rounds):
        optimizer.zero_grad()
        (model(X).mean() / (0.0 if number == rounds - 1 else 1.0)).backward()
        optimizer.step()


def _reached(verdict: Verdict) -> str:
    return next(text for text in verdict.evidence if text.startswith("It reached"))


def test_a_single_iteration_is_not_counted() -> None:
    model = linear()
    assert _reached(judged(lambda: _bad_round(model, 1), model)).startswith("It reached the loss; ")


def test_one_of_several_iterations_is_counted_from_zero() -> None:
    model = linear()
    assert _reached(judged(lambda: _bad_round(model, 3), model)).startswith("It reached the loss in iteration 2; ")


def test_ops_that_were_watched_live_count_the_steps_of_the_trace() -> None:
    model = linear()
    with nantrace.trace(model, ops=True, on_nonfinite="ignore") as tracer:
        _bad_round(model, 3)
    assert _reached(nantrace.diagnose(tracer.trace)).startswith("It reached the loss in step 2; ")


def test_live_iterations_that_are_not_the_trace_s_steps_are_not_called_so() -> None:
    model = linear()
    with nantrace.trace(model, ops=True, on_nonfinite="ignore") as tracer:
        for _ in range(2):  # steps without an update
            model(X).mean().backward()
            tracer.mark_step()
        _bad_round(model, 2)
    assert " in iteration 1; " in _reached(nantrace.diagnose(tracer.trace))


def test_what_a_lineage_holds_of_betas_comes_back_from_json() -> None:
    model = linear()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.param_groups[0]["betas"] = (0.9, 1.0)
    lineage = recorded(lambda: update(model, optimizer), model)
    assert [beta.name for beta in lineage.unit_betas] == ["betas[1]"]
    assert Lineage.from_json(lineage.to_json()).unit_betas == lineage.unit_betas
