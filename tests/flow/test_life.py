"""The recorder changes nothing, leaves nothing, hides nothing, and keeps nothing alive."""

from __future__ import annotations

import gc
import warnings
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nantrace.flow.chronicle import Chronicle
from nantrace.flow.record import record
from nantrace.flow.recorder import OpRecorder
from tests.flow.steps import Net
from tests.zoo.case import Case, Program, Step
from tests.zoo.cases import CASES
from tests.zoo.identity import surroundings, untraced_equals_traced
from tests.zoo.plain_models import PLAIN_MODELS
from tests.zoo.training import TrainingStep, ZooModel, mean_square_of


def _recorder(model: nn.Module, step: Step) -> AbstractContextManager[Any]:
    return OpRecorder(model)


@pytest.mark.parametrize("zoo_model", PLAIN_MODELS, ids=lambda model: model.name)
def test_a_recorded_healthy_step_is_the_same_bit_for_bit(zoo_model: ZooModel) -> None:
    assert untraced_equals_traced(zoo_model.build, _recorder) == []


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_a_recorded_failing_step_is_the_same_bit_for_bit(case: Case) -> None:
    assert untraced_equals_traced(case.build, _recorder) == []


def _program() -> Program:
    model = Net()
    step = TrainingStep(torch.optim.Adam(model.parameters()), mean_square_of)
    return model, {"x": torch.ones(2, 2)}, step


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_nothing_is_left_behind_when_the_step_raises(error: BaseException) -> None:
    model, batch, step = _program()

    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise error

    model.log = Raises()
    before = surroundings(model, step)
    with pytest.raises(type(error)), OpRecorder(model):
        step(model, batch)
    assert surroundings(model, step) == before


def test_an_exception_of_the_step_comes_back_unchanged() -> None:
    error = ValueError("no")

    def run() -> None:
        raise error

    assert record(run, nn.Identity()).error is error


def test_an_interrupt_passes_through() -> None:
    def run() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(run, nn.Identity())
    assert _get_current_dispatch_mode_stack() == []


def test_a_failure_of_the_recorder_stops_recording_and_not_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(Chronicle, "_event", fails)
    recording = record(lambda: torch.log(torch.zeros(2)) + 1, nn.Identity())
    assert recording.returned.tolist() == [-float("inf")] * 2
    assert recording.error is None and str(recording.failure) == "broken"
    assert any("recording stopped at op" in note and "broken" in note for note in recording.lineage.notes)


def test_a_failing_hook_of_the_recorder_never_reaches_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(OpRecorder, "_module_begins", fails)
    model = Net()
    recording = record(lambda: model(torch.ones(1, 2)), model)
    assert recording.error is None and recording.failure is not None


def test_no_activation_outlives_the_step_because_it_was_recorded() -> None:
    references = []

    def run() -> None:
        x = torch.log(torch.zeros(64))
        references.append(StorageWeakRef((x * 2).untyped_storage()))
        references.append(StorageWeakRef((torch.ones(64) * 2).untyped_storage()))

    recorder = OpRecorder(nn.Identity())
    with recorder:
        run()
        gc.collect()
        assert [reference.expired() for reference in references] == [True, True]
    assert len(recorder.lineage().events) == 2


def test_the_recorder_s_own_work_draws_no_random_number_and_builds_no_graph() -> None:
    model = Net()
    torch.manual_seed(0)
    expected = torch.get_rng_state()
    recording = record(lambda: model(torch.zeros(1, 2)).sum().backward(), model)
    assert torch.equal(torch.get_rng_state(), expected) and recording.failure is None
    assert model.lin.weight.grad is not None and not model.lin.weight.grad.requires_grad


def test_a_recorded_compiled_module_warns_of_nothing() -> None:
    model = torch.compile(Net(), backend="eager")
    filters = list(warnings.filters)
    assert record(lambda: model(torch.ones(1, 2)), model).error is None
    assert list(warnings.filters) == filters


def test_steps_can_be_recorded_one_after_another_and_inside_each_other() -> None:
    model = Net()
    outer, inner = OpRecorder(model), OpRecorder(model)
    with outer, inner:
        model(torch.zeros(1, 2))
    with OpRecorder(model) as again:
        model(torch.zeros(1, 2))
    assert [e.op for e in inner.lineage().events] == [e.op for e in again.lineage().events] == ["aten.log"]


def test_autocast_is_seen_as_the_casts_it_makes() -> None:
    model = nn.Linear(2, 2, bias=False)
    nn.init.constant_(model.weight, 7e4)

    def run() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            model(torch.ones(1, 2))

    event = record(run, model).lineage.events[0]
    assert (event.op, event.dtype, event.kind, event.operands[0].tensor) == (
        "aten._to_copy",
        "float16",
        "inf",
        "weight",
    )
