"""The batch is looked at in each step: what a loop puts into it has the name that it has there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, MutableMapping

import pytest
import torch
from torch import Tensor, nn

import nantrace
from nantrace.diagnosis.verdict import Origin

Step = Callable[[nn.Linear, MutableMapping[str, Tensor]], Tensor]


def blamed(step: Step, held: dict[str, Tensor]) -> Origin | None:
    """Of three steps on a dict that the loop refills, the last of them with a NaN in y."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [{"x": torch.randn(5, 4), "y": torch.randn(5, 3)} for _ in range(3)]
    data[2]["y"][1, 1] = torch.nan
    with nantrace.trace(model, optimizer=optimizer, batch=held, ops=True, on_nonfinite="ignore") as tracer:
        for each in data:
            held.update(each)
            optimizer.zero_grad()
            step(model, held).backward()
            optimizer.step()
    return nantrace.diagnose(tracer.trace).origin


def in_the_loss(model: nn.Linear, batch: MutableMapping[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).pow(2).mean()


def before_the_model(model: nn.Linear, batch: MutableMapping[str, Tensor]) -> Tensor:
    target = batch["y"] * 2
    return (model(batch["x"]) - target).pow(2).mean()


@pytest.mark.parametrize("step", [in_the_loss, before_the_model])
@pytest.mark.parametrize("held", [{}, {"x": torch.ones(5, 4), "y": torch.ones(5, 3)}])
def test_what_a_loop_puts_into_the_batch_is_named(step: Step, held: dict[str, Tensor]) -> None:
    origin = blamed(step, dict(held))
    assert origin is not None
    assert (origin.tensor, origin.step, origin.samples) == ("batch.y", 2, (1,))


def test_the_batch_of_a_step_that_is_over_is_let_go() -> None:
    model, held = nn.Linear(2, 2), {"x": torch.ones(2, 2)}
    first = weakref.ref(held["x"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nantrace.trace(model, optimizer=optimizer, batch=held, ops=True):
        for _ in range(3):
            optimizer.zero_grad()
            model(held["x"]).sum().backward()
            optimizer.step()
            held["x"] = torch.zeros(2, 2)
        gc.collect()
        assert first() is None
