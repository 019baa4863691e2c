"""Objectives that differentiate the model by its input: forces, residuals of differential equations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.case import Batch, Program, case
from tests.zoo.cases.parts import INF, training
from tests.zoo.further.parts import HARMLESS, fault


class _Field(nn.Module):
    """A small smooth network with one output."""

    def __init__(self, inputs: int = 1) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(inputs, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


def _slope(value: Tensor, at: Tensor) -> Tensor:
    return torch.autograd.grad(value.sum(), at, create_graph=True)[0]


@case(
    "the second derivative of x**1.5 at 0",
    fault("backward", op="aten.pow", module="", node="PowBackward0", kind="inf"),
)
def second_derivative_of_a_power() -> Program:
    class Ansatz(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = _Field()

        def forward(self, x: Tensor) -> Tensor:
            return x**1.5 * self.field(x)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        return (_slope(_slope(model(x), x), x) - 1).square().mean()

    torch.manual_seed(0)
    return (model := Ansatz()), {"x": torch.linspace(0, 1, 5)[:, None]}, training(model, loss_of)


@case("the Laplacian in polar coordinates on the axis", fault("loss", op="aten.div", kind="inf"))
def laplacian_on_the_axis() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        r = batch["r"].clone().requires_grad_()
        slope = _slope(model(r), r)
        return (_slope(slope, r) + slope / r).square().mean()

    torch.manual_seed(0)
    return (model := _Field()), {"r": torch.linspace(0, 1, 5)[:, None]}, training(model, loss_of)


def _forces(model: nn.Module, batch: Batch) -> Tensor:
    at = batch["at"].clone().requires_grad_()
    return (_slope(model(at), at) - batch["force"]).square().mean()


def _atoms(model: nn.Module) -> Program:
    torch.manual_seed(0)
    return model, {"at": torch.rand(4, 3), "force": torch.rand(4, 3)}, training(model, _forces)


class _Energy(nn.Module):
    """A sum over pairs of a learnt function of 1 / distance, which `inverse` computes."""

    def __init__(self, inverse: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inverse, self.field = inverse, _Field()

    def forward(self, at: Tensor) -> Tensor:
        return self.field(self.inverse(at).sum(-1, keepdim=True)).sum()


@case(
    "the distance of an atom to itself is masked after the root: 0 / 0 in the forces",
    fault("backward", op="aten.div", module="inverse", node="SqrtBackward0", kind="nan"),
)
def own_distance_masked_after_the_root() -> Program:
    class Inverse(nn.Module):
        def forward(self, at: Tensor) -> Tensor:
            distance = torch.sqrt((at[:, None] - at).square().sum(-1))
            return 1 / distance.masked_fill(torch.eye(len(at), dtype=torch.bool), INF)

    return _atoms(_Energy(Inverse()))


@case("the distance of an atom to itself is set to inf before the root, and forces are trained on", HARMLESS)
def own_distance_masked_before_the_root() -> Program:
    class Inverse(nn.Module):
        def forward(self, at: Tensor) -> Tensor:
            square = (at[:, None] - at).square().sum(-1).masked_fill(torch.eye(len(at), dtype=torch.bool), INF)
            return torch.rsqrt(square)

    return _atoms(_Energy(Inverse()))


@case("two atoms at the same place repel without bound", fault("forward", op="aten.rsqrt", module="inverse"))
def two_atoms_at_one_place() -> Program:
    class Inverse(nn.Module):
        def forward(self, at: Tensor) -> Tensor:
            square = (at[:, None] - at).square().sum(-1).masked_fill(torch.eye(len(at), dtype=torch.bool), INF)
            return torch.rsqrt(square)

    model, batch, step = _atoms(_Energy(Inverse()))
    batch["at"][2] = batch["at"][0]
    return model, batch, step
