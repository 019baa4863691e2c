"""`tracer.batch`: which step a batch belongs to, what is read of it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nantrace
from nantrace.capture.tracer import Tracer
from nantrace.events import Role, Trace


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _train(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()


def _read(trace: Trace) -> dict[int, list[float]]:
    """By step the largest element of the batch that was recorded."""
    found: dict[int, list[float]] = {}
    for row in trace.events:
        site = trace.sites[int(row["site"])]
        if site.role is Role.INPUT and site.slot == "batch":
            found.setdefault(int(row["step"]), []).append(float(row["max"]))
    return found


def _full(value: float) -> Tensor:
    return torch.full((3, 2), value)


def test_each_step_reads_the_batch_that_was_handed_over_for_it() -> None:
    model, optimizer = _model()
    with Tracer(model, batch=_full(9.0)) as tracer:
        for value in (1.0, 2.0, 3.0):
            tracer.batch(_full(value))
            _train(model, _full(value), optimizer)
    assert _read(tracer.trace) == {0: [1.0], 1: [2.0], 2: [3.0]}
    assert len(tracer.trace.steps) == 3


def test_a_batch_that_the_loop_passed_over_leaves_no_step() -> None:
    model, optimizer = _model()
    with Tracer(model, optimizer=optimizer) as tracer:
        for value in (1.0, float("nan"), 3.0):
            tracer.batch(_full(value))
            tracer.note("look", reason=str(value))
            if value == value:
                _train(model, _full(value), optimizer)
    assert _read(tracer.trace) == {0: [1.0], 1: [3.0]}
    reasons = [[each["reason"] for each in row["decisions"]] for row in tracer.trace.steps]
    assert reasons == [["1.0"], ["nan", "3.0"]]


def test_batches_of_accumulated_gradients_are_of_one_step() -> None:
    model, optimizer = _model()
    with Tracer(model, optimizer=optimizer) as tracer:
        for number, value in enumerate((1.0, 2.0, 3.0, 4.0)):
            tracer.batch(_full(value))
            model(_full(value)).mean().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert _read(tracer.trace) == {0: [1.0, 2.0], 1: [3.0, 4.0]}


def test_the_batch_check_looks_into_the_batch_of_its_own_step() -> None:
    model, optimizer = _model()
    bad = _full(1.0)
    bad[2, 0] = torch.nan
    with Tracer(model, optimizer=optimizer, on_nonfinite="ignore") as tracer:
        for batch in (_full(1.0), bad, _full(2.0)):
            tracer.batch({"x": batch})
            model(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    checked = tracer.trace.steps[1]["batch_check"]
    assert [(found["tensor"], found["samples"]) for found in checked if "nonfinite" in found["finding"]] == [
        ("batch.x", [2])
    ]


def test_ops_are_told_the_names_of_each_batch() -> None:
    model, optimizer = _model()
    bad = _full(1.0)
    bad[1, 1] = torch.nan
    with nantrace.trace(model, optimizer=optimizer, ops=True, on_nonfinite="ignore", batch={"x": _full(3.0)}) as tracer:
        for x in (_full(1.0), bad):
            tracer.batch({"x": x})
            _train(model, x, optimizer)
    verdict = nantrace.diagnose(tracer.trace)
    assert verdict.origin is not None
    assert (verdict.stage, verdict.origin.tensor, verdict.origin.step) == ("input", "batch.x", 1)


def test_the_bits_of_the_run_are_the_same() -> None:
    def weights(traced: bool) -> Tensor:
        model, optimizer = _model()
        layers = nn.Sequential(model, nn.Dropout())
        with nantrace.trace(layers, optimizer=optimizer) as tracer:
            for _ in range(3):
                x = torch.randn(3, 2)
                if traced:
                    tracer.batch(x)
                _train(layers, x, optimizer)
        return torch.cat([model.weight.detach().flatten(), torch.rand(2)])

    assert torch.equal(weights(True), weights(False))


@pytest.mark.parametrize("given", [3, iter([1]), print, nn.Linear(1, 1)])
def test_what_is_no_batch_is_refused_in_the_words_of_the_option(given: Any) -> None:
    model, _ = _model()
    with Tracer(model) as tracer, pytest.raises(TypeError, match=r"batch is .*, which is no batch: pass what the step"):
        tracer.batch(given)


def test_outside_of_the_block_there_is_no_step_for_it() -> None:
    tracer = Tracer(_model()[0])
    with pytest.raises(RuntimeError, match="batch was called outside of the block"):
        tracer.batch(_full(1.0))
    with tracer:
        pass
    with pytest.raises(RuntimeError, match="batch was called outside of the block"):
        tracer.batch(_full(1.0))
