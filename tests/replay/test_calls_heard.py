"""What a run was called with is compared only where both runs were listened to: no fault is lost to how one ran."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nantrace.replay.bisect import bisect
from nantrace.replay.replays import Replays
from nantrace.replay.step import Step

_FRESH = """
import sys, torch, nantrace
assert "torch._dynamo" not in sys.modules
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)

def run(model, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e18)  # loads the compiler in the middle of the first run
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
    return loss

verdict = nantrace.bisect(run, model, torch.ones(2, 4))
assert "torch._dynamo" in sys.modules
print(verdict.status, verdict.stage)
"""


def four_iterations(call: Any, optimizer: torch.optim.Optimizer, raises: bool = False) -> Any:
    def run(model: nn.Module, batch: Tensor) -> Tensor:
        for _ in range(4):
            optimizer.zero_grad()
            loss: Tensor = call(batch).pow(2).mean()
            loss.backward()
            optimizer.step()
            if raises and not loss.isfinite():
                raise ArithmeticError("the loss is bad")
        return loss

    return run


@pytest.mark.parametrize("way", ("called", "forward", "compiled", "compiled outside", "raises"))
def test_a_fault_in_several_iterations_is_found_however_the_model_is_called(way: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e18)
    model = torch.compile(model, backend="eager") if way == "compiled" else model
    outside = torch.compile(model, backend="eager", fullgraph=True) if way == "compiled outside" else None
    call = model.forward if way == "forward" else outside or model
    step = Step(four_iterations(call, optimizer, way == "raises"), model, torch.ones(2, 4), optimizer=optimizer)
    verdict = bisect(step)
    assert (verdict.status, verdict.stage) == ("fault", "update"), verdict.evidence


def test_calls_of_a_model_are_heard_while_nothing_is_compiled() -> None:
    torch._dynamo.reset()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = Step(four_iterations(model, optimizer), model, torch.ones(2, 4), optimizer=optimizer)
    with Replays(step, 2) as replays:
        heard = replays.plain("a run").inputs
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        assert heard is not None and len(heard) == 4 and len(set(heard)) == 1
        assert replays.plain("a run after something was compiled").inputs is None
    torch._dynamo.reset()


def test_a_fault_is_found_though_the_compiler_is_loaded_in_the_first_run() -> None:
    done = subprocess.run([sys.executable, "-c", _FRESH], capture_output=True, text=True)
    assert done.stdout.split() == ["fault", "update"], done.stderr


def test_a_call_within_a_transform_is_not_heard_and_fails_nothing() -> None:
    torch._dynamo.reset()
    model = nn.Linear(4, 1)

    def run(m: nn.Module, batch: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda x: m(x).sum()))(batch)

    with Replays(Step(run, model, torch.ones(2, 4)), 1) as replays:
        assert replays.plain("a run").inputs is None
