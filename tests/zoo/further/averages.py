"""Work on weights by hand: moving averages, master weights, perturbed weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from tests.zoo.case import Batch, Program, case
from tests.zoo.cases.parts import ReluPerceptron, sgd
from tests.zoo.further.parts import Exponential, fault, good_rows, hot_rows


@case(
    "an average of the weights follows them into NaN",
    fault("forward", op="aten.exp", module="act", kind="inf"),
)
def average_follows_the_weights() -> Program:
    torch.manual_seed(0)
    model = Exponential()
    average = copy.deepcopy(model)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch["x"]).mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.01)
        return loss

    return model, {"x": hot_rows()}, step


@case(
    "the bias correction of a moving average divides by 1 - decay**0",
    fault("update", op="aten.div", kind="naninf"),
)
def average_corrected_too_early() -> Program:
    torch.manual_seed(0)
    model = ReluPerceptron(3, 4, 1)
    shadow = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch["x"]).pow(2).mean()
        loss.backward()
        optimizer.step()
        updates = 0  # counted up only afterwards
        with torch.no_grad():
            for name, p in model.named_parameters():
                shadow[name].mul_(0.9).add_(p, alpha=0.1)
                p.copy_(shadow[name] / (1 - 0.9**updates))
        return loss

    return model, {"x": good_rows()}, step


@case(
    "float32 master weights do not fit the float16 model",
    fault("update", op="aten.copy_", kind="inf", dtype="float16"),
)
def master_weights_leave_the_range() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False).half()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e6)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        loss = model(batch["x"]).float().mean()
        loss.backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        return loss

    return model, {"x": torch.ones(2, 3).half()}, step


@case(
    "sharpness-aware minimization divides its radius by a gradient norm of zero",
    fault("gradients", "post_backward", op="aten.reciprocal", kind="inf"),
)
def perturbation_without_a_gradient() -> Program:
    torch.manual_seed(0)
    model = ReluPerceptron(3, 4, 1)
    with torch.no_grad():
        model.net[0].weight.zero_()
        model.net[0].bias.fill_(-1.0)  # every unit is dead
        model.net[2].bias.zero_()
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        model(batch["x"]).pow(2).mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            norm = torch.stack([g.pow(2).sum() for g in gradients]).sum().sqrt()
            scale = 0.05 / norm
            moves = [g * scale for g in gradients]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        loss = model(batch["x"]).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        return loss

    return model, {"x": good_rows()}, step
