"""The training step of the healthy models: a loss, a backward pass, an update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Batch, Program


@dataclass(frozen=True)
class ZooModel:
    """A healthy model with a batch and a step that trains it; `build()` makes them anew and always the same."""

    name: str
    build: Callable[[], Program]


@dataclass(frozen=True)
class TrainingStep:
    """`step(model, batch)`: zero_grad, forward and loss, backward, update. Returns the loss.

    The optimizer can be asked for, to hand it to a tracer.
    """

    optimizer: torch.optim.Optimizer
    loss_of: Callable[[Any, Batch], Tensor]

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss_of(model, batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def cross_entropy_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def mean_square_of(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).pow(2).mean()
