"""Loops over batches: accumulation, a bad batch among good ones, two losses, meta-learning."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.case import ANY, Batch, Program, case
from tests.zoo.cases.parts import sgd
from tests.zoo.further.parts import Exponential, Share, fault, good_rows


@case(
    "gradient accumulation, the third micro-batch takes the log of a dead unit",
    fault("loss", op="aten.log", kind="inf"),
)
def accumulation_third_micro_batch() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.zero_()
    optimizer = sgd(model)
    batch = {"x": torch.tensor([[[1.0, 2.0]], [[2.0, 1.0]], [[-1.0, -2.0]], [[1.0, 1.0]]])}

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        for x in batch["x"]:
            loss = -torch.log(F.relu(model(x))).mean() / len(batch["x"])
            loss.backward()
        optimizer.step()
        return loss

    return model, batch, step


@case(
    "an epoch in which the third batch holds a row of zeros: bad when frozen too",
    fault("forward", op="aten.div", module="norm", kind="nan"),
)
def third_batch_of_an_epoch() -> Program:
    torch.manual_seed(0)
    model = Share()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    batches = [good_rows(), good_rows(), good_rows(), good_rows()]
    batches[2][1] = 0.0

    def step(model: nn.Module, batch: Batch) -> Tensor:
        for x in batch["batches"]:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
        return loss

    return model, {"batches": batches}, step


@case("two losses, two backward passes, one graph; the second divides by zero", fault("loss", op="aten.reciprocal"))
def second_of_two_backward_passes() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        h = model(batch["x"])
        h.pow(2).mean().backward(retain_graph=True)
        aux = 1.0 / (h.sum() - h.sum())
        aux.backward()
        optimizer.step()
        return aux

    return model, {"x": torch.randn(4, 3)}, step


@case(
    "first-order-plus meta-learning with a learning rate read in the wrong unit: the outer loss overflows",
    fault("loss", op="aten.pow", kind="inf"),
)
def inner_loop_learning_rate() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        x, y = batch["x"], batch["y"]
        inner = (F.linear(x, model.weight) - y).pow(2).mean()
        (gradient,) = torch.autograd.grad(inner, [model.weight], create_graph=True)
        fast = model.weight - 1e25 * gradient
        outer = (F.linear(x, fast) - y).pow(2).mean()
        outer.backward()
        optimizer.step()
        return outer

    return model, {"x": torch.randn(4, 3), "y": torch.randn(4, 1)}, step


@case(
    "reentrant checkpointing: forward runs without a graph first, and overflows there already",
    fault("forward", op="aten.exp", module="block.act", kind="inf"),
)
def reentrant_checkpoint_overflow() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block = nn.Linear(3, 3), Exponential()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, self.stem(x) * 1000, use_reentrant=True)

    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.stem.weight.fill_(1.0)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch["x"]).mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, {"x": good_rows()}, step


@case(
    "per-sample gradients with vmap: a sample of length 0",
    fault("backward", op="aten.div", module=ANY, node="SqrtBackward0"),
)
def per_sample_gradients() -> Program:
    from torch.func import functional_call, grad, vmap

    torch.manual_seed(0)
    model = nn.Linear(3, 4, bias=False)
    optimizer = sgd(model)
    x = good_rows()
    x[2] = 0.0

    def length(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        h = functional_call(model, parameters, (row,))
        return torch.sqrt((h * h).sum())

    def step(model: nn.Module, batch: Batch) -> Tensor:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        each = vmap(grad(length), in_dims=(None, 0))(parameters, batch["x"])
        for name, parameter in model.named_parameters():
            parameter.grad = each[name].mean(0)
        optimizer.step()
        return each["weight"].norm().detach()

    return model, {"x": x}, step


@case(
    "two nonfinite loss terms; the first of them is the origin",
    fault("forward", op="aten.log", module="first", kind="nan"),
)
def two_losses_go_bad_at_once() -> Program:
    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.first, self.second = nn.Linear(3, 3), Log(), Share()

        def forward(self, x: Tensor) -> Tensor:
            h = self.lin(x)
            return self.first(-h.abs() - 1).mean() + self.second(h * 0).mean()

    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch["x"])
        loss.backward()
        optimizer.step()
        return loss

    return model, {"x": good_rows()}, step
