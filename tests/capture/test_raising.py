"""`on_nonfinite="raise"`: out of which call the error comes, and what goes before it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nantrace
from nantrace.capture.tracer import Tracer
from nantrace.errors import NonfiniteError

from .conftest import hooks_of

NAN = float("nan")


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def _loss(model: nn.Module, bad: bool) -> torch.Tensor:
    return model(torch.full((1, 2), NAN if bad else 1.0)).sum()  # type: ignore[no-any-return]


def test_it_comes_out_of_the_optimizers_step_once_the_step_was_taken() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    begun, done = [], []
    with pytest.raises(NonfiniteError, match="step 2 went nonfinite"), Tracer(model, on_nonfinite="raise") as tracer:
        for step in range(5):
            begun.append(step)
            _loss(model, bad=step == 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            done.append(step)
    assert (begun, done) == ([0, 1, 2], [0, 1])
    assert model[0].weight.isnan().any() and not before.isnan().any()
    assert [step["step"] for step in tracer.trace.steps] == [0, 1, 2]
    assert tracer.trace.raised is None
    assert hooks_of(model) == 0


def test_the_judge_is_asked_once_a_step() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    asked: list[int] = []

    def judge(trace: Any) -> tuple[str | None, bool]:
        asked.append(len(trace.steps))
        return None, False

    with Tracer(model, on_nonfinite="raise", judge=judge):
        for _ in range(2):
            _loss(model, bad=True).backward()
            optimizer.step()
    assert asked == [1, 1]


def test_a_step_that_is_no_fault_ends_as_it_does_without_raising() -> None:
    traces = []
    for on_nonfinite in ("ignore", "raise"):
        model = _model()
        optimizers = [torch.optim.Adam(part.parameters()) for part in model]  # type: ignore[union-attr]
        with Tracer(model, optimizer=optimizers, on_nonfinite=on_nonfinite) as tracer:  # type: ignore[arg-type]
            for _ in range(3):
                _loss(model, bad=False).backward()
                for optimizer in optimizers:
                    optimizer.step()
                tracer.mark_step(batch_id="a")
        traces.append(tracer.trace)
    assert traces[0].events.tobytes() == traces[1].events.tobytes()
    assert [step["batch_id"] for step in traces[1].steps] == ["a"] * 3


def test_with_a_scaler_it_comes_out_of_update() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    reached = []
    with (
        pytest.raises(NonfiniteError, match="step 0"),
        Tracer(model, optimizer=optimizer, scaler=scaler, on_nonfinite="raise"),
    ):
        scaler.scale(_loss(model, bad=True)).backward()
        scaler.step(optimizer)
        reached.append("after the optimizer")
        scaler.update()
        reached.append("never")
    assert reached == ["after the optimizer"]
    assert scaler.get_scale() == 2.0


def test_an_optimizer_that_steps_inside_backward_lets_backward_finish() -> None:
    model = _model()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    handles = [p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step()) for p in model.parameters()]  # type: ignore[no-untyped-call]
    reached = []
    with pytest.raises(NonfiniteError), Tracer(model, on_nonfinite="raise"):
        loss = _loss(model, bad=True)
        reached.append("after forward")
        loss.backward()
        reached.append("never")
    assert reached == ["after forward"]
    assert all(parameter.grad is not None for parameter in model.parameters())
    for handle in handles:
        handle.remove()


def test_a_loop_may_catch_it_and_go_on() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    caught = []
    with Tracer(model, on_nonfinite="raise", judge=lambda trace: (None, True)) as tracer:
        for step in range(4):
            with contextlib.suppress(NonfiniteError):
                model[0].weight.data.fill_(1.0)
                _loss(model, bad=step in (1, 3)).backward()
                optimizer.step()
                caught.append(step)
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.data.nan_to_num_()
    assert caught == [0, 2]
    assert tracer.faults == 2


def test_an_exception_of_the_users_is_never_replaced() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.warns(nantrace.NantraceWarning, match="step 0 went nonfinite"),
        pytest.raises(KeyError, match="mine"),
        Tracer(model, on_nonfinite="raise") as tracer,
    ):
        try:
            _loss(model, bad=True).backward()
            raise KeyError("mine")
        finally:
            optimizer.step()
            tracer.mark_step()


def test_a_loop_that_runs_while_an_older_exception_is_handled_is_stopped_as_any_other() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reached = []
    try:
        raise ImportError("no faster kernel")
    except ImportError:
        with pytest.raises(NonfiniteError), Tracer(model, on_nonfinite="raise"):
            _loss(model, bad=True).backward()
            optimizer.step()
            reached.append("never")
    assert reached == []


def test_every_nested_tracer_hears_of_the_step_that_raises() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(NonfiniteError),
        Tracer(model, on_nonfinite="raise"),
        Tracer(model, on_nonfinite="ignore") as inner,
    ):
        _loss(model, bad=True).backward()
        optimizer.step()
    assert any(inner.trace.site(event).phase.label == "update" for event in inner.trace.events)


def test_what_is_raised_lies_in_the_file_already(tmp_path: Path) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "step.h5"
    with nantrace.trace(model, path, on_nonfinite="raise"):
        _loss(model, bad=True).backward()
        with pytest.raises(NonfiniteError, match="bad input"):
            optimizer.step()
        trace = nantrace.load(path)
        assert len(trace.steps) == 1 and not trace.complete
        assert nantrace.diagnose(trace).status == "fault"
