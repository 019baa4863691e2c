"""What several cases share: small modules, the plain training step, and the silencing of one known warning."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.case import Batch, Step

INF, NAN = math.inf, math.nan
LossOf = Callable[[Any, Batch], Tensor]


def sgd(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def training(
    model: nn.Module, loss_of: LossOf, *, iterations: int = 1, optimizer: torch.optim.Optimizer | None = None
) -> Step:
    """A step that runs zero_grad, forward, loss, backward and update, `iterations` times; plain SGD by default."""
    updater = optimizer if optimizer is not None else sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        for _ in range(iterations):
            updater.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            updater.step()
        return loss

    return step


def silenced(step: Step, message: str) -> Step:
    """The step without the warnings whose text begins with `message` (a regular expression)."""

    def quiet_step(model: nn.Module, batch: Batch) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message)
            return step(model, batch)

    return quiet_step


def fill(module: Any, weight: float, bias: float = 0.0) -> None:
    """Sets every weight and every bias of a layer to one value."""
    with torch.no_grad():
        module.weight.fill_(weight)
        if getattr(module, "bias", None) is not None:
            module.bias.fill_(bias)


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.wi, self.act, self.wo = nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.act(self.wi(x)))


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.g, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.g * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class ReluPerceptron(nn.Module):
    def __init__(self, inputs: int = 4, hidden: int = 8, outputs: int = 2) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class TanhPerceptron(nn.Module):
    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))
