"""Samples are named where dimension 0 is the batch, and nowhere else: not where a size is the same by chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from nantrace.lineage import OpEvent
from tests.flow.steps import recorded

SIZE = 4  # of the batch and of everything else


def samples(run: Callable[[nn.Linear, Tensor], Any], op: str) -> tuple[int, ...]:
    """Of the first event of `op`, in a step on a batch of four rows whose row 2 holds a zero at its end."""
    torch.manual_seed(0)
    model = nn.Linear(SIZE, SIZE)
    x = torch.rand(SIZE, SIZE) + 1
    x[2, 3] = 0
    events: list[OpEvent] = recorded(lambda: run(model, x), model, {"x": x}).events
    return next(event.samples for event in events if event.op == op)


@pytest.mark.parametrize(
    "rows",
    [
        lambda model, x: x,
        lambda model, x: x * 2 + torch.zeros(SIZE),
        lambda model, x: x.unsqueeze(1).transpose(1, 2).contiguous(),
        lambda model, x: (x.reshape(SIZE * 2, 2) * 1).reshape(SIZE, SIZE),
        lambda model, x: torch.cat([x, x], dim=1),
        lambda model, x: x.clone().mul_(model.weight.detach()[0] * 0),
        lambda model, x: x.amin(1),
        lambda model, x: x @ torch.eye(SIZE),
        lambda model, x: functional.embedding((x[:, 3] > 0).long(), torch.tensor([[0.0], [1.0]])),
    ],
)
def test_rows_of_what_is_computed_from_the_batch_are_samples(rows: Callable[[nn.Linear, Tensor], Tensor]) -> None:
    found = samples(lambda model, x: torch.log(rows(model, x)), "aten.log")
    assert found in ((2,), (0, 1, 2, 3)) and 2 in found


@pytest.mark.parametrize(
    "other",
    [
        lambda model, x: model.weight.detach() * 0,
        lambda model, x: torch.zeros(SIZE, SIZE),
        lambda model, x: x.t().contiguous(),
        lambda model, x: x.amin(0),
        lambda model, x: x.t() @ x * 0,
        lambda model, x: torch.eye(SIZE) @ x * 0,
        lambda model, x: torch.zeros(SIZE).lerp_(x.mean(0), 0.0),
        lambda model, x: x[torch.tensor([2, 0, 1, 3])],
        lambda model, x: torch.stack([x[0], x[1], x[2], x[3]], dim=0) * 0,
    ],
)
def test_rows_of_anything_else_of_the_same_size_are_not(other: Callable[[nn.Linear, Tensor], Tensor]) -> None:
    assert samples(lambda model, x: torch.log(other(model, x)), "aten.log") == ()


def test_rows_of_a_gradient_are_samples_only_if_it_is_that_of_an_activation() -> None:
    def run(model: nn.Linear, x: Tensor) -> None:
        (model(x) * torch.tensor([1.0, 0.0, 1.0, 1.0])).sum().backward()
        assert model.weight.grad is not None
        model.weight.grad /= model.weight.grad.norm(dim=-1, keepdim=True)

    assert samples(run, "aten.div_") == ()

    def through(model: nn.Linear, x: Tensor) -> None:
        (x.requires_grad_().sqrt() * 1.0).pow(2).sum().backward()
        assert x.grad is not None

    assert samples(through, "aten.div") == (2,)


def test_the_rows_of_a_ctc_loss_are_the_samples_although_its_input_goes_by_time() -> None:
    scores = torch.zeros(2, 5, 3).log_softmax(-1)
    batch = {"y": torch.ones(2, 3, dtype=torch.int64), "x": scores}

    def run() -> Tensor:
        lengths = torch.tensor([5, 2]), torch.tensor([3, 3])
        return functional.ctc_loss(batch["x"].transpose(0, 1), batch["y"], *lengths, reduction="none")

    events = recorded(run, nn.Identity(), batch).events
    assert next(event.samples for event in events if event.op == "aten._ctc_loss" and event.shape == (2,)) == (1,)


def test_what_the_model_is_called_with_is_a_batch_that_nobody_handed_over() -> None:
    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x)

    model = Log()
    events = recorded(lambda: model(torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 1.0]])), model).events
    assert [event.samples for event in events] == [(1,)]
