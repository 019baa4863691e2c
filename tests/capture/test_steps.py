"""Where steps begin and end, and what is read of optimizers and gradient scalers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from nantrace.capture.tracer import Tracer

from .conftest import Rows, is_bad


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, value: float = 1.0) -> torch.Tensor:
    optimizer.zero_grad()
    loss = (model(torch.tensor([[1.0, 2.0], [3.0, 5.0]]) * value) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_a_step_ends_with_its_update() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with Tracer(model) as tracer:
        losses = [float(_train(model, optimizer)) for _ in range(3)]
    steps = tracer.trace.steps
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert [step["loss"] for step in steps] == losses
    assert [step["lr"] for step in steps] == [[0.25]] * 3
    assert [(step["attempted"], step["committed"], step["skipped"]) for step in steps] == [(1, 1, 0)] * 3
    assert [step["first_seq"] for step in steps] == [
        1,
        1 + steps[0]["events"],
        1 + steps[0]["events"] + steps[1]["events"],
    ]
    assert (tracer.trace.events["seq"] == range(1, len(tracer.trace) + 1)).all()


def test_state_is_read_before_and_after(rows: Rows) -> None:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters())
    with Tracer(model, optimizer=optimizer, batch={"x": torch.ones(2), "deep": [torch.zeros(1)]}) as tracer:
        _train(model, optimizer)
        _train(model, optimizer)
    trace = tracer.trace
    assert [(m, s) for m, s, _ in rows(trace, phase="forward", role="input")][:2] == [
        (None, "batch.x"),
        (None, "batch.deep[0]"),
    ]
    for role, phase, slot in [
        ("param", "forward", "weight"),
        ("param", "update", "weight"),
        ("buffer", "forward", "running_mean"),
        ("buffer", "update", "running_mean"),
        ("grad", "optimizer", "0.weight"),
        ("state", "update", "optimizer.state.0.weight.exp_avg"),
    ]:
        assert {int(e["step"]) for _, _, e in rows(trace, role=role, phase=phase, slot=slot)} == {0, 1}
    assert {int(e["step"]) for _, _, e in rows(trace, role="state", phase="forward")} == {1}


def test_state_that_changed_between_steps_is_read_again(rows: Rows) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    with Tracer(model, optimizer=optimizer, on_nonfinite="ignore") as tracer:
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.state[model.weight]["exp_avg"].fill_(float("inf"))
        model(torch.ones(1, 1))
    event = rows(tracer.trace, role="state", phase="forward", slot="optimizer.state.weight.exp_avg")[-1][2]
    assert event["posinf"] == 1


def test_an_optimizer_that_was_not_handed_over_is_found(rows: Rows) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()  # its state exists before anybody watches
    with Tracer(model) as tracer:
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        model(torch.ones(1, 1))
    states = rows(tracer.trace, role="state", slot="optimizer.state.weight.exp_avg")
    phases = [tracer.trace.site(event).phase.label for _, _, event in states]
    assert phases == ["optimizer", "update", "forward"]


def test_an_optimizer_of_another_model_is_none_of_its_business() -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with Tracer(model) as tracer:
        model(torch.ones(1, 1))
        other(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        model(torch.ones(1, 1))
    assert len(tracer.trace.steps) == 1
    assert tracer.trace.steps[0]["attempted"] == 0


def test_accumulation_over_several_backwards_is_one_step(rows: Rows) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Tracer(model) as tracer:
        for _ in range(3):
            model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    assert len(tracer.trace.steps) == 1
    assert [e["max"] for _, _, e in rows(tracer.trace, role="grad", phase="backward", slot="bias")] == [1, 2, 3]


def test_two_optimizers_after_one_backward_are_one_step() -> None:
    model = _model()
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    with Tracer(model) as tracer:
        for _ in range(2):
            model(torch.randn(3, 2)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert [step["attempted"] for step in tracer.trace.steps] == [2, 2]


def test_two_optimizers_under_one_scaler_are_one_step_until_it_updates() -> None:
    model = _model()
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with Tracer(model) as tracer:
        for _ in range(2):
            for optimizer in optimizers:  # a forward each, as in a GAN
                optimizer.zero_grad()
                scaler.scale(model(torch.randn(3, 2)).sum()).backward()
                scaler.step(optimizer)
            scaler.update()
    assert [step["attempted"] for step in tracer.trace.steps] == [2, 2]


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_the_scaler_skipped_is_not_committed(fused: bool, rows: Rows) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with Tracer(model, on_nonfinite="ignore", scaler=scaler) as tracer:
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale((model(torch.ones(1, 2)) * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    steps = tracer.trace.steps
    assert [(step["attempted"], step["committed"], step["skipped"]) for step in steps] == [
        (1, 1, 0),
        (1, 0, 1),
        (1, 1, 0),
    ]
    assert [(step["scale_before"], step["scale_after"]) for step in steps] == [(8, 8), (8, 4), (4, 4)]
    skipped = [event for _, _, event in rows(tracer.trace, role="grad", phase="post_backward")]
    assert [int(event["step"]) for event in skipped] == [1, 1]
    assert all(is_bad(event) for event in skipped)
    assert {int(e["step"]) for _, _, e in rows(tracer.trace, role="grad", phase="optimizer")} == {0, 2}


def test_of_two_optimizers_only_the_one_that_the_scaler_skipped_counts_as_skipped(rows: Rows) -> None:
    model = nn.ModuleDict({"good": nn.Linear(2, 1), "bad": nn.Linear(2, 1)})
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model.values()]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with Tracer(model, on_nonfinite="ignore") as tracer:
        for part, factor in zip(model.values(), (1.0, torch.inf), strict=True):
            scaler.scale(part(torch.ones(1, 2)).sum() * factor).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    (step,) = tracer.trace.steps
    assert (step["attempted"], step["committed"], step["skipped"]) == (2, 1, 1)
    assert {slot for _, slot, _ in rows(tracer.trace, role="grad", phase="optimizer")} == {"good.weight", "good.bias"}


def test_a_disabled_scaler_changes_nothing() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with Tracer(model, scaler=scaler) as tracer:
        for _ in range(2):
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [(step["committed"], "scale_before" in step) for step in tracer.trace.steps] == [(1, False)] * 2


def test_the_loss_is_seen_outside_the_model(rows: Rows) -> None:
    model = nn.Linear(1, 1)
    with Tracer(model, on_nonfinite="ignore") as tracer:
        (model(torch.ones(1, 1)).sum() * float("nan")).backward()
    ((module, slot, event),) = rows(tracer.trace, role="loss", phase="loss")
    assert (module, slot, int(event["nan"])) == (None, "loss", 1)
    loss: Any = tracer.trace.steps[0]["loss"]
    assert loss != loss


def test_buffers_poisoned_by_forward_are_seen_without_an_update(rows: Rows) -> None:
    model = _model()
    with Tracer(model, on_nonfinite="ignore") as tracer:
        model(torch.full((2, 2), float("nan")))
    assert rows(tracer.trace, role="buffer", phase="update", slot="running_mean")[0][2]["nan"] == 2


def test_mark_step_ends_a_step_and_names_it() -> None:
    model = nn.Linear(1, 1)
    with Tracer(model) as tracer:
        for number in range(2):
            model(torch.ones(1, 1))
            tracer.mark_step(batch_id=f"b{number}", lr=0.5, loss=torch.tensor(2.0))
    assert [(s["batch_id"], s["lr"], s["loss"]) for s in tracer.trace.steps] == [("b0", 0.5, 2.0), ("b1", 0.5, 2.0)]


def test_a_forward_in_another_thread_neither_ends_nor_opens_a_step() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Tracer(model) as tracer:
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        thread = threading.Thread(target=lambda: model(torch.ones(1, 1)))
        thread.start()
        thread.join()
        tracer.mark_step(batch_id="first")
    assert [step["batch_id"] for step in tracer.trace.steps] == ["first"]


def test_parameters_replaced_between_steps_are_the_ones_read(rows: Rows) -> None:
    model = nn.Linear(1, 1)
    with Tracer(model) as tracer:
        model(torch.ones(1, 1)).sum().backward()
        tracer.mark_step()
        model.weight = nn.Parameter(torch.full((1, 1), 9.0))
        model(torch.ones(1, 1)).sum().backward()
    assert rows(tracer.trace, role="param", slot="weight")[-1][2]["max"] == 9
    gradients = rows(tracer.trace, role="grad", phase="backward", slot="weight")
    assert [int(event["step"]) for _, _, event in gradients] == [0, 1]
