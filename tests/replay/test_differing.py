"""Steps that do not compute the same each time, and what a bisection leaves of the world around a step."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nantrace.diagnosis.verdict import Verdict
from nantrace.replay.bisect import bisect
from nantrace.replay.compare import difference, finer
from nantrace.replay.ends import End, Ends
from nantrace.replay.samples import smallest_failing_batch
from nantrace.replay.step import Step


@pytest.fixture(autouse=True)
def _nothing_is_compiled() -> None:
    """Where an earlier test compiled something, what the model is called with is not heard."""
    compiler = sys.modules.get("torch._dynamo")
    if compiler is not None:
        compiler.reset()


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


def train(m: nn.Module, b: Tensor) -> Tensor:
    loss = m(b).mean()
    loss.backward()
    return loss.detach()


def model() -> nn.Module:
    net = nn.Sequential(Log(), nn.Linear(2, 1))
    nn.init.ones_(net[1].weight)
    return net


def said(verdict: Verdict) -> str:
    return " ".join(verdict.evidence)


def test_a_loss_that_is_infinite_first_and_nan_later_is_no_same_failure() -> None:
    batches = iter([torch.zeros(3, 2), -torch.ones(3, 2), -torch.ones(3, 2)])
    verdict = bisect(Step(lambda: train(net, next(batches)), net := model()))
    assert verdict.status == "inconclusive"
    assert "loss -inf" in verdict.evidence[0] and "the model was called with other values" in verdict.evidence[0]
    assert "batches is a list_iterator" in verdict.evidence[0]
    assert verdict.evidence[1] == "What follows holds for the one replay that was watched: fault."


def test_data_of_a_file_that_fails_in_the_same_way_each_time_is_told_apart_by_the_models_input(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("-1\n-2\n-3\n-4\n")
    net = model()
    with open(tmp_path / "data") as file:
        verdict = bisect(Step(lambda: train(net, torch.full((3, 2), float(file.readline()))), net))
        assert verdict.status == "inconclusive" and "called with other values" in verdict.evidence[0]
        assert file.readline() == "-1\n"  # it was only read, so it goes on where it was


def test_without_a_call_of_the_model_losses_far_apart_tell_the_runs_apart() -> None:
    def run(m: nn.Linear, b: Tensor) -> None:
        (nn.functional.linear(b * random.SystemRandom().random(), m.weight) * 1e-3 + 1).sum().backward()
        m.weight.grad.div_(0)

    verdict = bisect(Step(run, nn.Linear(2, 1, bias=False), torch.full((3, 2), 1e4)))
    assert verdict.status == "inconclusive" and "the loss was" in verdict.evidence[0]


def test_finite_replays_that_differ_are_clean_and_say_what_differs() -> None:
    batches = (torch.rand(3, 2, generator=generator) + 1 for generator in [torch.Generator()] for _ in range(9))
    net = model()
    verdict = bisect(Step(lambda: train(net, next(batches)), net))
    assert verdict.status == "clean"
    assert "they did not compute the same: the model was called with other values" in said(verdict)
    assert "batches (generator); the replays did not come out alike" in said(verdict)


def test_a_step_that_raises_something_else_each_time_is_inconclusive() -> None:
    errors: Iterator[type[Exception]] = iter([KeyError, ValueError, OSError])

    def run(m: nn.Module, b: Tensor) -> None:
        train(m, b)
        raise next(errors)("x")

    verdict = bisect(Step(run, model(), torch.ones(3, 2)))
    assert verdict.status == "inconclusive" and verdict.evidence[0].startswith("The step raised KeyError")
    assert "raised KeyError, then raised OSError" in said(verdict)


def test_a_generator_of_the_users_own_is_wound_back() -> None:
    generator = torch.Generator().manual_seed(1)

    def run(m: nn.Module, b: Tensor) -> None:
        train(m, b * (torch.rand(b.shape, generator=generator) > 0.5))

    state = generator.get_state()
    verdict = bisect(Step(run, model(), torch.ones(3, 2)))
    assert verdict.origin is not None and (verdict.status, verdict.origin.op) == ("fault", "aten.log")
    assert torch.equal(generator.get_state(), state)


class Numbers(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2,), float(index))


def test_a_loader_with_workers_hands_out_the_same_each_time() -> None:
    loader = torch.utils.data.DataLoader(Numbers(), 3, shuffle=True, num_workers=1)

    def run() -> None:
        for batch in loader:
            train(net, batch)

    verdict = bisect(Step(run, net := model()))
    assert verdict.origin is not None and (verdict.status, verdict.origin.op) == ("fault", "aten.log")


COUNT = 0


class Trainer:
    def __init__(self) -> None:
        self.steps, self.log = 0, [0.0]

    def step(self, m: nn.Module, b: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        self.steps += 1
        self.log.append(1.0)
        return train(m, b)


@pytest.mark.parametrize("fill", [1.0, 0.0], ids=["clean", "fault"])
def test_counters_around_the_step_are_named_and_put_back(fill: float) -> None:
    trainer = Trainer()
    verdict = bisect(Step(trainer.step, model(), torch.full((3, 2), fill)))
    assert verdict.status == ("fault" if fill == 0 else "clean")
    assert "The step changes values outside of model and batch, put back when all replays were over" in said(verdict)
    assert "COUNT: 1, was 0" in said(verdict) and "steps: 1, was 0" in said(verdict)
    assert (COUNT, trainer.steps, trainer.log) == (0, 0, [0.0])


def test_counters_are_put_back_after_an_interrupt_and_after_a_search_for_samples() -> None:
    trainer = Trainer()

    def run(m: nn.Module, b: Tensor) -> None:
        trainer.step(m, b)
        if interrupts and trainer.steps == 2:
            raise KeyboardInterrupt

    step, interrupts = Step(run, model(), torch.zeros(4, 2)), True
    with pytest.raises(KeyboardInterrupt):
        bisect(step)
    assert trainer.steps == 0
    interrupts = False
    smallest_failing_batch(step)
    assert trainer.steps == 0


GRADIENT = End("gradient", "w", 1, 2, 0)
BASE = Ends(losses=("0x1.0p+0",), nonfinite=(GRADIENT,), inputs=("a",), gradients=(("v", "1"),), random=(("r", "1"),))


def changed(**fields: Any) -> Ends:
    return Ends(**{**{name: getattr(BASE, name) for name in Ends.__dataclass_fields__}, **fields})


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"inputs": ("b",)}, "the model was called with other values"),
        ({"inputs": ("a", "a")}, "the model was called 1 times, then 2"),
        ({"inputs": None}, ""),
        ({"losses": ("nan",)}, "the loss was 1.0, then nan"),
        ({"losses": ("0x1.8p+0",)}, "the loss was 1.0, then 1.5"),
        ({"losses": ()}, "1 backward passes, then 0"),
        ({"nonfinite": ()}, "gradient w was nonfinite only in the first"),
        ({"nonfinite": (GRADIENT, End("gradient", "v", 1, 1, 0))}, "gradient v was nonfinite only in the second"),
        ({"nonfinite": (End("gradient", "w", 1, 1, 1),)}, "gradient w held 2 NaN, then 1 NaN and 1 infinite"),
        ({"raised": "KeyError"}, "the first raised nothing, the second KeyError"),
    ],
)
def test_a_difference_that_matters_is_put_into_words(fields: dict[str, Any], what: str) -> None:
    assert difference(BASE, changed(**fields)) == what
    assert difference(BASE, BASE) == ""


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"losses": ("0x1.00001p+0",)}, "the loss was 1.0, then 1.0000009536743164"),
        ({"nonfinite": (End("gradient", "w", 1, 3, 0),)}, "gradient w held 2 NaN, then 3 NaN"),
        ({"gradients": (("v", "2"),)}, "the gradient of v had other bits"),
        ({"random": (("r", "2"),)}, "r was drawn from otherwise"),
    ],
)
def test_a_difference_in_bits_alone_does_not_matter_and_is_told(fields: dict[str, Any], what: str) -> None:
    assert difference(BASE, changed(**fields)) == ""
    assert finer(BASE, changed(**fields)) == what
    assert finer(BASE, BASE) == ""


def test_what_a_step_returned_is_named_in_words() -> None:
    ends = [End("returned", "returned", 1, 1, 0), End("returned", "returned[0]", 1, 1, 0), End("loss", "loss", 1, 1, 0)]
    assert [str(end) for end in ends] == ["what the step returned", "what the step returned[0]", "loss"]
