"""A step beside those before it: which tensor was the first to be far larger than ever."""

from __future__ import annotations

import torch

import nantrace
from nantrace.diagnosis.usual import UNUSUAL


class Gained(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0
        self.wi, self.wo = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wo(self.wi(x) * self.gain)


def evidence(gains: list[float], scale: float = 1.0) -> str:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Gained(), Gained(), Gained()).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    with nantrace.trace(model, on_nonfinite="ignore") as tracer:
        for number, gain in enumerate(gains):
            model[1].gain = gain
            last = number == len(gains) - 1
            loss = (model(x * (scale if last else 1.0)) * (1e308 if last else 1.0)).square().sum()
            loss.backward()
            model.zero_grad()
            tracer.mark_step()
    verdict = nantrace.diagnose(tracer.trace)
    assert verdict.status == "fault" and verdict.origin is not None and verdict.origin.step == len(gains) - 1
    return " ".join(verdict.evidence)


def test_the_first_tensor_that_is_far_larger_than_in_any_earlier_step_is_named() -> None:
    told = evidence([1.0, 1.0, 1e6])
    assert "The first tensor of the step to leave its usual range was 1.wo args[0]: up to " in told
    assert "in the 2 steps before at most " in told


def test_a_batch_that_is_far_larger_is_itself_the_first() -> None:
    assert "usual range was (model) args[0]: up to " in evidence([1.0, 1.0], scale=1e5)


def test_nothing_is_said_of_what_moves_as_training_does_or_without_a_step_before() -> None:
    assert "usual range" not in evidence([1.0, UNUSUAL / 2])
    assert "usual range" not in evidence([1e6])
