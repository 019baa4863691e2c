"""What training keeps: found when it counts, with what would excuse it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from nantrace.flow.recorder import OpRecorder
from tests.flow.steps import Net, only, recorded, recording_of, sink, sinks

INF = math.inf


def _linear(weight: float = 1.0) -> nn.Linear:
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    return model


def test_a_bad_loss_is_followed_into_gradients_parameters_and_moments() -> None:
    model = nn.Sequential(Net(), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def run() -> None:
        model(torch.zeros(1, 2)).sum().backward()
        optimizer.step()

    found = sinks(recorded(run, model))
    for expected in [
        ("loss", "loss"),
        ("grad", "1.weight"),
        ("param", "1.weight"),
        ("state", "optimizer.state.1.weight.momentum_buffer"),
    ]:
        assert expected in found
    assert found[0] == ("loss", "loss")


def test_a_finite_step_has_no_sink_and_no_event() -> None:
    model = _linear()
    optimizer = torch.optim.AdamW(model.parameters())

    def run() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    lineage = recorded(run, model)
    assert (lineage.events, lineage.sinks, lineage.backwards, len(lineage.step_times)) == ([], [], 1, 1)


def test_a_differentiated_value_is_a_soft_sink() -> None:
    x = torch.zeros(1, requires_grad=True)
    lineage = recorded(lambda: torch.autograd.grad(torch.log(x), x))
    assert sink(lineage, "loss", "differentiated value").excuse == "soft"


def test_a_scaler_that_skips_excuses_the_round() -> None:
    model = _linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def run() -> None:
        scaler.scale((model(torch.ones(1, 2)) * 3e38).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    lineage = recorded(run, model)
    assert lineage.skipped_iterations == [1] and lineage.step_times == []
    assert {s.excuse for s in lineage.sinks} == {"skip"}


def test_a_skip_of_a_fused_optimizer_is_seen() -> None:
    model = _linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def run() -> None:
        scaler.scale((model(torch.ones(1, 2)) * 3e38).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    lineage = recorded(run, model)
    assert lineage.skipped_iterations == [1] and lineage.step_times == []
    assert {s.excuse for s in lineage.sinks} == {"skip"} and "param" not in {s.kind for s in lineage.sinks}


def test_host_reads_of_tests_and_of_values_are_told_apart() -> None:
    def run() -> None:
        bad = torch.log(torch.zeros(2))
        bool(torch.isfinite(bad).all())
        bad.sum().item()

    lineage = recorded(run)
    reads = [({lineage.event(id).op for id in ids}, raw) for _, ids, raw in lineage.guard_reads]
    assert "aten.log" in reads[0][0] and reads[0][1] is False
    assert reads[1:] == [({"aten.sum"}, True)]


def test_gradients_given_up_by_a_guard_carry_its_reads() -> None:
    model = _linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        for scale in (INF, 1.0):
            loss = (model(torch.ones(1, 2)) * scale).sum()
            loss.backward()
            if torch.isfinite(model.weight.grad).all():
                optimizer.step()
            model.weight.grad = None

    loss = sink(recorded(run, model), "loss", "loss")
    assert [raw for _, raw in loss.guards] == [False]


def test_gradients_that_a_guard_left_lying_carry_its_reads() -> None:
    model = _linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        (model(torch.ones(1, 2)) * INF).sum().backward()
        if torch.isfinite(model.weight.grad).all():
            optimizer.step()

    left = sink(recorded(run, model), "grad", "weight")
    assert left.left and [raw for _, raw in left.guards] == [False]


def test_what_the_step_returns_counts_only_without_training() -> None:
    model = _linear(0.0)
    alone = sink(recorded(lambda: torch.log(model(torch.ones(1, 2)).sum()), model), "returned", "returned")
    assert (alone.excuse, alone.returned) == (None, False)

    def run() -> dict[str, Tensor]:
        model(torch.ones(1, 2)).sum().backward()
        return {"metric": torch.zeros(0).mean()}

    after = sink(recorded(run, model), "returned", "returned.metric")
    assert (after.excuse, after.returned) == ("returned", True)


def test_an_exception_points_at_what_the_host_had_just_read() -> None:
    def run() -> None:
        loss = torch.log(torch.zeros(()))
        assert torch.isfinite(loss), "no"

    recording = recording_of(run)
    assert isinstance(recording.error, AssertionError)
    assert (1, "inf") in sink(recording.lineage, "exception", "AssertionError").starts


def test_an_exception_points_at_the_bad_inputs_of_the_op_that_raised() -> None:
    def run() -> None:
        torch.multinomial(torch.log(torch.tensor([1.0, -1.0])), 1)

    recording = recording_of(run)
    assert isinstance(recording.error, RuntimeError)
    assert sink(recording.lineage, "exception", "RuntimeError").starts == ((1, "nan"),)


def test_an_exception_over_a_code_that_a_bad_input_led_to_points_at_that_input() -> None:
    recording = recording_of(lambda: torch.linalg.cholesky(torch.log(torch.zeros(1, 1))))
    assert isinstance(recording.error, torch.linalg.LinAlgError)  # raised over an integer that tells of the failure
    assert (1, "inf") in sink(recording.lineage, "exception", type(recording.error).__name__).starts


def test_an_exception_without_any_bad_value_is_no_sink() -> None:
    recording = recording_of(lambda: torch.ones(2) @ torch.ones(3))
    assert recording.error is not None and recording.lineage.sinks == []


def test_growth_of_parameters_is_measured_around_each_update() -> None:
    model = _linear(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0)

    def run() -> None:
        (-model(torch.ones(1, 2)).sum()).backward()
        optimizer.step()

    [(iteration, before, after, _)] = recorded(run, model).growth
    assert (iteration, before, after) == (1, pytest.approx(math.sqrt(2)), pytest.approx(10 * math.sqrt(2)))


def test_huge_parameters_are_noted_before_the_step() -> None:
    assert recorded(lambda: None, _linear(1e18)).huge_params == [("weight", pytest.approx(1e18))]
    assert recorded(lambda: None, _linear(1e10)).huge_params == []


def test_frozen_updates_are_undone_but_measured() -> None:
    model = _linear(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0)

    def run() -> None:
        (-model(torch.ones(1, 2)).sum()).backward()
        optimizer.step()

    lineage = recorded(run, model, freeze=True)
    assert torch.equal(model.weight, torch.ones(1, 2))
    assert lineage.growth[0][2] > 10


def test_a_neutral_op_puts_out_finite_values() -> None:
    def run() -> Tensor:
        return torch.log(torch.tensor([0.0, 1.0, -1.0]))

    time = only(recorded(run), "aten.log").time
    recording = recording_of(run, neutral=frozenset((time,)))
    assert recording.returned.tolist() == [-1e4, 0.0, 0.0] and recording.lineage.events == []


def test_moments_that_were_bad_before_are_named() -> None:
    model = _linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["momentum_buffer"][0, 0] = math.nan
    event = only(recorded(optimizer.step, model, optimizer=optimizer), None)
    assert (event.category, event.tensor) == ("moment", "optimizer.state.weight.momentum_buffer")


def test_two_rounds_share_nothing_after_a_full_overwrite() -> None:
    model = nn.BatchNorm1d(1)
    recorder = OpRecorder(model)
    with recorder:
        bad = torch.full((2,), 1e38) * 10
        bad.copy_(torch.ones(2))
        (bad + 1).sum()
    assert [e.op for e in recorder.lineage().events] == ["aten.mul"]
