"""Small modules that several of these steps share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.case import Expectation


class Code(nn.Module):
    """A function as a module, so that it has a name in the model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def chain(**modules: nn.Module) -> Any:
    """A `Sequential` of named modules."""
    return nn.Sequential(OrderedDict(modules))


class Exp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x)


class Exponential(nn.Module):
    """Linear, then exp in a submodule `act`: inputs around 1000 overflow it."""

    def __init__(self, inputs: int = 3, outputs: int = 2, normalized: bool = False) -> None:
        super().__init__()
        self.lin, self.act = nn.Linear(inputs, outputs), Exp()
        self.bn: nn.Module = nn.BatchNorm1d(outputs) if normalized else nn.Identity()
        with torch.no_grad():
            self.lin.weight.fill_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.act(self.lin(x)))


class Length(nn.Module):
    """Euclidean length of each row, by hand: its gradient at 0 is 0/0 or 1/0."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt((x * x).sum(-1))


class RowShare(nn.Module):
    """Each row divided by its sum: 0/0 for a row of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.sum(-1, keepdim=True)


class Share(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.norm, self.head = RowShare(), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


class Distance(nn.Module):
    """Linear without bias, then `dist`: a row of zeros has length 0."""

    def __init__(self, inputs: int = 3) -> None:
        super().__init__()
        self.lin, self.dist = nn.Linear(inputs, 4, bias=False), Length()

    def forward(self, x: Tensor) -> Tensor:
        return self.dist(self.lin(x))


def good_rows(rows: int = 4, width: int = 3) -> Tensor:
    return torch.rand(rows, width) + 0.5


def hot_rows(rows: int = 4, width: int = 3) -> Tensor:
    """Rows that overflow `Exponential`."""
    return torch.full((rows, width), 1000.0)


def fault(stage: Any, phase: Any = None, **fields: Any) -> Expectation:
    return Expectation("fault", stage, phase or stage, **fields)


def contained(stage: Any, phase: Any = None, **fields: Any) -> Expectation:
    return Expectation("contained", stage, phase or stage, **fields)


HARMLESS = Expectation("expected")
