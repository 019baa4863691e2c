"""Long runs: which steps are recorded in detail, what the others leave, and that the step is the same in all."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nantrace
from nantrace.capture.sample import Sample
from nantrace.capture.tracer import Tracer
from nantrace.errors import NantraceWarning
from nantrace.events import Trace
from tests.capture.conftest import hooks_of


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))


def _train(
    model: torch.nn.Module, steps: int, before: Callable[[int], Any] = lambda step: None, **options: Any
) -> Trace:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with nantrace.trace(model, optimizer=optimizer, **options) as tracer:
        for step in range(steps):
            before(step)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(torch.ones(2, 3)), torch.zeros(2, 1)).backward()
            optimizer.step()
    return tracer.trace


def _in_detail(trace: Trace) -> list[int]:
    return [step["step"] for step in trace.steps if step.get("detailed") is not False]


@pytest.mark.parametrize("filed", [True, False])
def test_every_nth_step_is_recorded_in_detail_and_the_ledger_of_each(filed: bool, tmp_path: Path) -> None:
    whole = _train(_model(), 8)
    trace = _train(_model(), 8, every=3, path=tmp_path / "step.h5" if filed else None)
    assert len(trace.steps) == 8 and _in_detail(trace) == [0, 3, 6]
    assert trace.step(3).events["max"].tolist() == pytest.approx(whole.step(3).events["max"].tolist(), nan_ok=True)
    assert len(trace) == sum(len(whole.step(step)) for step in (0, 3, 6))
    for step, same in zip(trace.steps, whole.steps, strict=True):
        for name in ("step", "loss", "gradient_norm", "attempted", "committed", "skipped"):
            assert step[name] == same[name]
        assert step["lr"] in (0.1, [0.1], (0.1,))
        assert step["seconds"] > 0
        if step["step"] in (0, 3, 6):
            assert step["events"] == same["events"] and "notes" not in step
            assert trace.events["step"][step["first_seq"] - 1] == step["step"]
        else:
            assert (step["events"], step["first_seq"], step["detailed"]) == (0, 0, False)


def test_sampling_changes_no_bit_and_leaves_nothing() -> None:
    bare = _model()
    optimizer = torch.optim.Adam(bare.parameters(), lr=0.1)
    for _ in range(7):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(bare(torch.ones(2, 3)), torch.zeros(2, 1)).backward()
        optimizer.step()
    traced = _model()
    _train(traced, 7, every=3)
    assert all(torch.equal(one, other) for one, other in zip(bare.parameters(), traced.parameters(), strict=True))
    assert hooks_of(traced) == 0
    assert all(parameter._post_accumulate_grad_hooks is None for parameter in traced.parameters())


def test_between_two_samples_hooks_stay_only_where_a_step_may_begin() -> None:
    model = _model()
    found = []
    _train(model, 5, before=lambda step: found.append(hooks_of(model)), every=3)
    # 4 parameters, and two hooks on each of 4 modules. Before a step that is recorded all are there again but for
    # those on parameters, which are placed when it begins.
    assert found == [12, 12, 2, 8, 12]


class Pair(torch.nn.Module):
    """Never called as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = _model(), _model()


def test_a_model_whose_parts_are_called_one_by_one_is_recorded_from_their_first_call_on() -> None:
    def run(every: int) -> Trace:
        model = Pair()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with nantrace.trace(model, optimizer=optimizer, every=every) as tracer:
            for _ in range(5):
                optimizer.zero_grad()
                (model.one(torch.ones(2, 3)) + model.two(torch.ones(2, 3))).sum().backward()
                optimizer.step()
        return tracer.trace

    whole, trace = run(1), run(2)
    assert _in_detail(trace) == [0, 2, 4]
    assert [step["loss"] for step in trace.steps] == [step["loss"] for step in whole.steps]
    assert len(trace.step(4)) == len(whole.step(4))


def _poison(model: torch.nn.Module, at: int) -> Callable[[int], None]:
    def before(step: int) -> None:
        if step == at:
            with torch.no_grad():
                next(model.parameters()).fill_(math.nan)

    return before


def test_a_nonfinite_loss_outside_the_sample_is_told_and_the_next_step_is_recorded() -> None:
    model = _model()
    with pytest.warns(NantraceWarning, match="loss of step 12 was nan"):
        trace = _train(model, 30, before=_poison(model, 12), every=10)
    assert math.isnan(trace.steps[12]["loss"]) and trace.steps[12]["detailed"] is False
    assert math.isfinite(trace.steps[11]["loss"])
    assert _in_detail(trace) == [0, 10, 13, 20, 23]  # it stays bad, and is looked at once in ten steps
    verdict = nantrace.diagnose(trace)
    assert verdict.status == "fault"
    assert any("step 12" in sentence for sentence in verdict.evidence)


def test_a_loss_that_was_nonfinite_once_outside_the_sample_is_not_called_clean() -> None:
    model = torch.nn.Linear(3, 1)
    with nantrace.trace(model, every=10, on_nonfinite="ignore") as tracer:
        for step in range(6):
            loss = model(torch.ones(2, 3)).sum() * (math.inf if step == 3 else 1.0)
            tracer.mark_step(loss=loss)
    verdict = nantrace.diagnose(tracer.trace)
    assert verdict.status == "fault" and verdict.origin is not None and verdict.origin.step == 3


def test_raise_comes_out_of_the_step_outside_the_sample() -> None:
    model = _model()
    reached = []
    poison = _poison(model, 2)
    with pytest.raises(nantrace.NonfiniteError, match="loss of step 2"):
        _train(model, 5, before=lambda step: (reached.append(step), poison(step)), every=10, on_nonfinite="raise")
    assert reached == [0, 1, 2]


def test_a_skipped_update_outside_the_sample_has_the_next_step_recorded() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    with nantrace.trace(model, optimizer=optimizer, scaler=scaler, every=100) as tracer:
        for step in range(8):
            optimizer.zero_grad()
            scale = 1e6 if step == 4 else 1e-6
            scaler.scale(model(torch.ones(2, 3)).sum() * scale).backward()
            scaler.step(optimizer)
            scaler.update()
    steps = tracer.trace.steps
    assert [step["skipped"] for step in steps] == [0, 0, 0, 0, 1, 0, 0, 0]
    assert steps[4]["scale_before"] == 2 * steps[4]["scale_after"] == 2.0**126
    assert steps[4]["skipped_by"] and "skipped_by" not in steps[3]
    assert _in_detail(tracer.trace) == [0, 5]


def test_the_flight_recorder_counts_steps_in_detail(tmp_path: Path) -> None:
    model = _model()
    with pytest.warns(NantraceWarning):
        trace = _train(model, 45, before=_poison(model, 32), every=5, keep_steps=2, path=tmp_path / "step.h5")
    assert sorted(set(trace.events["step"].tolist())) == [25, 30, 40, 43]
    assert [step["events"] > 0 for step in trace.steps] == [n in (25, 30, 40, 43) for n in range(45)]
    assert trace.steps[5]["not_kept"] == trace.steps[25]["events"]
    for step in trace.steps:
        if step["events"]:
            assert trace.events["step"][step["first_seq"] - 1] == step["step"]


def test_steps_that_were_dropped_do_not_make_the_file_grow(tmp_path: Path) -> None:
    def size(steps: int) -> int:
        path = tmp_path / f"{steps}.h5"
        with Tracer(_model(), path=path, keep_steps=2) as tracer:
            for _ in range(steps):
                tracer._model(torch.ones(1, 3))
                tracer.mark_step(loss=1.0)
        return path.stat().st_size

    assert size(640) - size(128) == 512 * 85  # four chunks


def test_in_memory_a_step_outside_the_sample_leaves_its_numbers_alone() -> None:
    with Tracer(_model(), every=50) as tracer:
        for _ in range(200):
            tracer._model(torch.ones(1, 3))
            tracer.mark_step(loss=1.0)
        steps = tracer.trace.steps
    assert len(steps) == 200 and len(steps.said) == 4  # type: ignore[attr-defined]


def test_what_a_running_trace_shows_holds_every_step(tmp_path: Path) -> None:
    with Tracer(_model(), path=tmp_path / "step.h5", every=50) as tracer:
        for step in range(20):
            tracer._model(torch.ones(1, 3))
            tracer.mark_step(loss=float(step))
            assert [one["loss"] for one in tracer.trace.steps] == list(range(step + 1))


def test_a_run_that_stays_bad_keeps_a_bounded_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nantrace.capture.finished._NOTABLE", 5)
    with Tracer(_model(), every=1000, on_nonfinite="ignore") as tracer:
        for _ in range(30):
            tracer._model(torch.ones(1, 3))
            tracer.mark_step(loss=math.nan)
    steps = tracer.trace.steps
    assert len(steps.said) < 10  # type: ignore[attr-defined]
    assert all(math.isnan(step["loss"]) for step in steps)


def test_decisions_stand_in_steps_outside_the_sample() -> None:
    with Tracer(_model(), every=10) as tracer:
        for step in range(5):
            tracer._model(torch.ones(1, 3))
            if step == 3:
                tracer.note("quarantine", reason="batch 3")
            tracer.mark_step(loss=1.0)
    assert [len(step.get("decisions", ())) for step in tracer.trace.steps] == [0, 0, 0, 1, 0]


def test_autocast_between_samples_raises_no_false_alarm_of_the_recipe() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with nantrace.trace(model, optimizer=optimizer, scaler=scaler, every=4) as tracer:
            for _ in range(13):
                optimizer.zero_grad(set_to_none=False)
                with torch.autocast("cpu", torch.float16):
                    loss = torch.nn.functional.mse_loss(model(torch.ones(2, 3)), torch.zeros(2, 1))
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
    conduct = [step["conduct"]["calls"] for step in tracer.trace.steps if "conduct" in step]
    assert len(conduct) == 4 and all(calls == conduct[0] for calls in conduct)


@pytest.mark.parametrize("every", [0, -1, 1.5, None, True])
def test_an_every_that_is_no_positive_integer_is_refused(every: Any) -> None:
    with pytest.raises(ValueError, match=f"every is {every}: pass 1"):
        nantrace.trace(_model(), every=every)


def test_ops_are_not_sampled() -> None:
    with pytest.raises(ValueError, match="every is 2 with ops"):
        nantrace.trace(_model(), every=2, ops=True)


def test_the_sample_looks_beside_itself_once_in_its_interval_for_each_kind_of_trouble() -> None:
    sample = Sample(10)
    taken = []
    for number in range(40):
        detailed = sample.takes(number)
        taken += [number] if detailed else []
        step = {"step": number, "skipped": int(number in (3, 5)), "loss": math.nan if number > 13 else 1.0}
        sample.ended(step if detailed else {**step, "detailed": False})
    assert taken == [0, 4, 10, 15, 20, 25, 30, 35]


@pytest.mark.parametrize("path", [None, "trace.h5"])
@pytest.mark.parametrize("notable", [None, 0])
def test_a_nonfinite_step_outside_the_sample_is_told_where_rows_are_let_go(
    path: str | None, notable: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when so many steps were notable that its numbers alone are kept."""
    if notable is not None:
        monkeypatch.setattr("nantrace.capture.finished._NOTABLE", notable)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    file = None if path is None else tmp_path / path
    with nantrace.trace(model, file, every=4, keep_steps=1, on_nonfinite="ignore") as tracer:
        for step in range(20):
            (model(torch.ones(1, 2)).sum() + (math.inf if step == 6 else 0.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    row = tracer.trace.steps[6]
    assert (row["detailed"], row["loss"]) == (False, math.inf)
    verdict = nantrace.diagnose(tracer.trace)
    assert verdict.status == "fault"
    assert verdict.origin is not None and (verdict.origin.step, verdict.origin.tensor) == (6, "loss")
    assert verdict.evidence[0] == "The loss of step 6 was inf."
