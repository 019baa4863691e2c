"""Steps that look at their own values: guards that skip, asserts that stop, logging that only looks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tests.zoo.case import Batch, Program, case
from tests.zoo.cases.parts import sgd
from tests.zoo.further.parts import HARMLESS, Distance, Exponential, contained, fault, good_rows, hot_rows


def _three_batches() -> dict[str, list[Tensor]]:
    return {"batches": [good_rows(), hot_rows(), good_rows()]}


@case(
    "`if not torch.isfinite(loss): continue`",
    contained("forward", op="aten.exp", module="act", kind="inf"),
)
def guard_skips_the_batch() -> Program:
    torch.manual_seed(0)
    model = Exponential()
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        for x in batch["batches"]:
            loss = model(x).mean()
            if not torch.isfinite(loss):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.detach()

    return model, _three_batches(), step


@case(
    "`if math.isnan(loss.item()) or math.isinf(...)`: the guard reads the number itself",
    contained("forward", op="aten.exp", module="act", kind="inf"),
)
def guard_reads_the_number() -> Program:
    torch.manual_seed(0)
    model = Exponential()
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> float:
        total = 0.0
        for x in batch["batches"]:
            loss = model(x).mean()
            value = loss.item()
            if math.isnan(value) or math.isinf(value):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += value
        return total

    return model, _three_batches(), step


@case(
    "the guard tests the gradient norm after clipping, and drops the gradients",
    contained("backward", op="aten.div", module="dist", node="SqrtBackward0"),
)
def guard_on_the_gradient_norm() -> Program:
    torch.manual_seed(0)
    model = Distance()
    optimizer = sgd(model)
    batches = [good_rows(), good_rows(), good_rows()]
    batches[1][0] = 0.0

    def step(model: nn.Module, batch: Batch) -> Tensor:
        for x in batch["batches"]:
            loss = model(x).mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if torch.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return model, {"batches": batches}, step


@case(
    "the guard saves the weights, but batch norm has averaged the infinite batch already",
    fault("update", "forward", op="aten.exp", module="act", kind="inf", buffers_bad=("bn.running_mean",)),
)
def guard_too_late_for_batch_norm() -> Program:
    torch.manual_seed(0)
    model = Exponential(normalized=True)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        for x in batch["batches"]:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            if not torch.isfinite(loss):
                continue
            loss.backward()
            optimizer.step()
        return loss.detach()

    return model, _three_batches(), step


@case("`assert torch.isfinite(loss)` stops the step", fault("forward", op="aten.exp", module="act", kind="inf"))
def assertion_stops_the_step() -> Program:
    torch.manual_seed(0)
    model = Exponential()
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        loss = model(batch["x"]).mean()
        assert torch.isfinite(loss), "loss is not finite"
        loss.backward()
        optimizer.step()
        return loss

    return model, {"x": hot_rows()}, step


@case("the accuracy of a class that is not in the batch is logged", HARMLESS)
def logged_metric_over_nothing() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> float:
        log = {}
        logits = model(batch["x"])
        loss = nn.functional.cross_entropy(logits, batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            hit = logits.argmax(1) == batch["y"]
            log["accuracy of 3"] = (hit[batch["y"] == 3].sum() / (batch["y"] == 3).sum()).item()
        return loss.item()

    return model, {"x": torch.randn(4, 3), "y": torch.tensor([0, 1, 2, 0])}, step


@case("a bad loss is only logged, and trained on", fault("forward", op="aten.exp", module="act", kind="inf"))
def bad_loss_is_logged_and_used() -> Program:
    torch.manual_seed(0)
    model = Exponential()
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> float:
        value = 0.0
        for x in batch["batches"]:
            optimizer.zero_grad()
            loss = model(x).mean()
            value = loss.item()
            if math.isnan(value):  # it is infinite
                continue
            loss.backward()
            optimizer.step()
        return value

    return model, {"batches": [good_rows(), hot_rows()]}, step
