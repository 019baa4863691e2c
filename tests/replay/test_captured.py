"""Captured steps: what is kept, when it is written, how it is replayed, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nantrace
from nantrace.errors import CaptureError, NantraceWarning
from nantrace.replay.captured import read, recovery
from nantrace.replay.snapshot import Snapshot
from nantrace.replay.step import Step


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.detach().amin()).log()


def build(layer: nn.Module | None = None, width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), layer or Log(), nn.Dropout(), nn.BatchNorm1d(width))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss = model(batch["x"]).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.fixture
def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(3))}


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Step:
    return Step(lambda m, b: train(m, b, optimizer), model, batch, optimizer=optimizer)


@pytest.fixture
def captured(tmp_path: Path, batch: dict[str, Tensor]) -> Path:
    """A step whose batch and Adam state are those of the failing step, captured in training."""
    model, optimizer = build()
    path = tmp_path / "step.capture"
    with nantrace.trace(model, optimizer=optimizer, batch=batch, capture=path, on_nonfinite="ignore"):
        train(model, batch, optimizer)
    return path


def test_the_state_before_the_step_is_in_the_file(captured: Path, batch: dict[str, Tensor]) -> None:
    kept = read(captured).kept
    model, _ = build()
    assert torch.equal(kept["parameters"]["0.weight"], model[0].weight)
    assert kept["buffers"]["3.num_batches_tracked"].item() == 0
    assert torch.equal(kept["batch"]["x"], batch["x"])
    assert "log" in kept["manifest"]["fault"] or "nonfinite" in kept["manifest"]["fault"]
    assert not list(captured.parent.glob("*.partial"))


def test_a_finite_step_writes_no_file(tmp_path: Path, batch: dict[str, Tensor]) -> None:
    model, optimizer = build(nn.Tanh())
    path = tmp_path / "step.capture"
    with nantrace.trace(model, optimizer=optimizer, batch=batch, capture=path):
        train(model, batch, optimizer)
    assert not path.exists()


def test_a_capture_is_replayed_in_place_of_the_present_state(captured: Path, batch: dict[str, Tensor]) -> None:
    model, optimizer = build()
    train(model, {"x": torch.full((6, 4), torch.nan)}, optimizer)  # the present state is ruined, differently
    step = step_of(model, optimizer, {"x": torch.zeros(2, 4)})
    before = Snapshot(step)
    verdict = nantrace.bisect(step, capture=captured)
    assert before.differences() == ()
    assert verdict.origin is not None and not any("raised" in sentence for sentence in verdict.evidence)
    assert (verdict.status, verdict.origin.op, verdict.origin.output.shape) == ("fault", "aten.log", (6, 4))


def test_a_capture_that_does_not_fail_again_is_not_reproduced(captured: Path, batch: dict[str, Tensor]) -> None:
    model, optimizer = build(nn.Tanh())
    verdict = nantrace.bisect(step_of(model, optimizer, batch), capture=captured)
    assert verdict.status == "not_reproduced"
    assert "The captured step failed" in verdict.evidence[0] and "stayed finite" in verdict.evidence[0]


def test_the_capture_of_another_model_is_refused_with_what_does_not_match(
    captured: Path, batch: dict[str, Tensor]
) -> None:
    model, optimizer = build(width=5)
    with pytest.raises(
        CaptureError, match=r"another model: 0\.weight is float32 \[4, 4\], in the model float32 \[5, 4\]"
    ):
        nantrace.bisect(step_of(model, optimizer, batch), capture=captured)
    other = nn.Sequential(*[nn.Linear(1, 1) for _ in range(20)])
    with pytest.raises(CaptureError, match=r"and \d+ more\. Give the model"):
        nantrace.bisect(lambda m, b: None, other, batch, capture=captured)


class Hostile:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return (exec, ("raise SystemExit('ran')",))


def _hostile(path: Path) -> None:
    torch.save({"format": "nantrace capture", "version": 1, "manifest": Hostile()}, path)


def _pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps(Hostile()))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (_hostile, "not a captured step that can be read safely"),
        (_pickled, "not a captured step that can be read safely"),
        (lambda path: path.write_bytes(b"\x00garbage"), "not a captured step that can be read safely"),
        (lambda path: path.write_bytes(b""), "not a captured step that can be read safely"),
        (lambda path: torch.save({"x": 1}, path), "is no captured step of nantrace"),
        (lambda path: torch.save(torch.ones(1), path), "is no captured step of nantrace"),
        (lambda path: torch.save({"format": "nantrace capture", "version": 9}, path), "has version 9"),
        (
            lambda path: torch.save({"format": "nantrace capture", "version": 1}, path),
            "is damaged: parameters, buffers",
        ),
        (lambda path: None, "There is no file"),
    ],
)
def test_a_hostile_or_foreign_file_is_refused_in_one_sentence(
    tmp_path: Path, write: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "bad.capture"
    write(path)
    with pytest.raises(CaptureError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_a_damaged_state_is_refused_and_the_present_one_stays(captured: Path, batch: dict[str, Tensor]) -> None:
    kept = dict(read(captured).kept)
    model, optimizer = build()
    step = step_of(model, optimizer, batch)
    for table, value in [
        ("optimizers", [{"state": 3, "param_groups": []}]),
        ("random", {"torch's CPU generator": torch.ones(3)}),
        ("settings", {"number of threads": 10**9}),
    ]:
        torch.save({**kept, table: value}, captured)
        before = Snapshot(step)
        with pytest.raises(CaptureError):
            nantrace.bisect(step, capture=captured)
        assert before.differences() == ()


def test_the_four_goals_say_what_is_present_and_what_is_missing(tmp_path: Path, captured: Path) -> None:
    forward, backward, update, trajectory = recovery(captured)
    assert "missing" not in forward + backward + update
    assert (
        trajectory
        == "The trajectory before it: present are nothing of earlier steps; missing: earlier states and batches."
    )
    model, optimizer = build()
    bare = tmp_path / "bare.capture"
    with nantrace.trace(model, capture=bare, on_nonfinite="ignore"):
        train(model, {"x": torch.ones(6, 4)}, optimizer)
    assert "missing: the batch, the state of AdamW, which was not handed over" in recovery(bare)[2]
    with nantrace.trace(model, capture=bare, on_nonfinite="ignore", overwrite=True):
        model(torch.ones(6, 4)).mean().backward()
    assert "missing: the batch, the optimizer's state" in recovery(bare)[2]


def test_a_file_that_can_no_longer_be_written_is_said_once_and_training_goes_on(
    tmp_path: Path, batch: dict[str, Tensor]
) -> None:
    model, optimizer = build()
    path = tmp_path / "folder" / "step.capture"
    path.parent.mkdir()
    with (
        pytest.warns(NantraceWarning, match="the step at fault was not captured"),
        nantrace.trace(model, batch=batch, capture=path, on_nonfinite="ignore"),
    ):
        path.parent.rmdir()
        train(model, batch, optimizer)


def test_an_optimizer_that_was_not_handed_over_is_captured_from_the_second_step_on(
    tmp_path: Path, batch: dict[str, Tensor]
) -> None:
    model, optimizer = build(nn.Tanh())
    path = tmp_path / "step.capture"
    with nantrace.trace(model, batch=batch, capture=path, on_nonfinite="ignore"):
        train(model, batch, optimizer)
        moments = optimizer.state[model[0].weight]["exp_avg"].clone()
        batch["x"][0, 0] = torch.nan
        train(model, batch, optimizer)
    kept = read(path).kept
    assert kept["manifest"]["optimizers"] == ["AdamW"] and kept["manifest"]["unkept"] == []
    assert torch.equal(kept["optimizers"][0]["state"][0]["exp_avg"], moments)
    assert "missing" not in "".join(recovery(path)[:3])

    other_model, other = build(nn.Tanh())

    def run(m: nn.Module, b: dict[str, Tensor]) -> Tensor:  # names its optimizer in its closure alone
        torch.save(other.state[m[0].weight]["exp_avg"], tmp_path / "seen.pt")  # whatever it holds is put back
        return train(m, b, other)

    verdict = nantrace.bisect(run, other_model, {"x": torch.zeros(6, 4)}, capture=path)
    assert (verdict.status, verdict.stage) == ("fault", "input") and not other.state
    assert torch.equal(torch.load(tmp_path / "seen.pt"), moments)
    assert "The capture" not in " ".join(verdict.evidence)


def test_what_a_capture_of_the_first_step_lacks_is_in_the_file_and_in_the_verdict(
    tmp_path: Path, batch: dict[str, Tensor]
) -> None:
    model, optimizer = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    path = tmp_path / "step.capture"
    with nantrace.trace(model, batch=batch, capture=path, on_nonfinite="ignore"):
        scaler.scale(model(batch["x"]).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert read(path).kept["manifest"]["unkept"] == ["GradScaler"]  # it skipped, so nobody met an optimizer
    missing = "missing: the optimizer's state, the state of GradScaler, which was not handed over and first seen"
    assert missing in recovery(path)[2]
    verdict = nantrace.bisect(step_of(model, optimizer, batch), capture=path)
    assert any(each.startswith("The capture lacks the state of GradScaler: pass ") for each in verdict.evidence)


def test_a_captured_optimizer_that_the_step_does_not_name_is_said(captured: Path, batch: dict[str, Tensor]) -> None:
    model, _ = build()
    verdict = nantrace.bisect(lambda m, b: m(b["x"]).mean().backward(), model, batch, capture=captured)
    assert any("holds the state of AdamW, and the step names no such optimizer" in each for each in verdict.evidence)


def test_a_step_in_which_training_stands_still_is_told_from_where_it_began(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    batch = torch.randn(8, 4)

    def run(model: nn.Module, x: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    path = tmp_path / "stuck.capture"
    tracing = nantrace.trace(model, optimizer=optimizer, scaler=scaler, batch=batch, capture=path)
    with pytest.warns(NantraceWarning, match="step 2: training stands still since step 1 ") as told, tracing:
        run(model, batch)
        model[0].weight.data.mul_(1e6)
        for _ in range(3):
            run(model, batch)
    assert len(told) == 1
    verdict = nantrace.bisect(Step(run, model, batch, optimizer=optimizer, scaler=scaler), capture=path)
    assert verdict.status == "fault"  # of the run: the step by itself is contained
    assert "step 2 of its run, does no harm by itself" in verdict.evidence[1]
    said = [sentence for sentence in verdict.evidence if "One step alone cannot show" in sentence]
    assert len(said) == 1 and "training stands still since step 1 " in said[0] and "See:" not in said[0]


class Noise(nn.Module):
    """A step's own arithmetic: 1 / t with a t that was drawn before the model ran."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def diffuse(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    level = torch.randint(0, 20, ())
    loss = (model(x) / level).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def noisy() -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    torch.manual_seed(1)
    model = Noise()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, optimizer, Step(lambda m, x: diffuse(m, x, optimizer), model, torch.ones(2, 2), optimizer=optimizer)


def test_noise_that_was_drawn_before_the_model_ran_is_drawn_again(tmp_path: Path) -> None:
    model, optimizer, step = noisy()
    path = tmp_path / "step.capture"
    with nantrace.trace(
        model, optimizer=optimizer, batch=step.batch, capture=path, on_nonfinite="ignore", keep_steps=5
    ) as tracer:
        while not tracer.faults:
            diffuse(model, step.batch, optimizer)
            assert len(tracer.trace.steps) < 200
    assert read(path).kept["manifest"]["when"] == "after the update before it"
    said: list[str] = []
    verdict = nantrace.bisect(step, capture=path, progress=said.append)
    assert (verdict.status, verdict.cause) == ("fault", "division_by_zero")
    assert said[0].startswith("replay with the random streams as they were after the update before it: loss inf")
    assert verdict.replays == len(said)


def test_what_the_loop_drew_between_two_steps_is_tried_second(tmp_path: Path) -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) / torch.randint(0, 20, ())

    def run(model: nn.Module, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    torch.manual_seed(0)
    model = Drops()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    path = tmp_path / "step.capture"
    batch = torch.ones(2, 2)
    with nantrace.trace(model, optimizer=optimizer, batch=batch, capture=path, on_nonfinite="ignore") as tracer:
        while not tracer.faults:
            torch.rand(7)  # an augmentation, say
            run(model, batch)
            assert len(tracer.trace.steps) < 200
    verdict = nantrace.bisect(Step(run, model, batch, optimizer=optimizer), capture=path)
    assert (verdict.status, verdict.cause) == ("fault", "division_by_zero")
    assert any(
        "It was replayed with the random streams as they were at its first call; with the random streams as they were "
        "after the update before it: all finite." in sentence
        for sentence in verdict.evidence
    )


def test_the_random_streams_of_a_batch_that_was_handed_over_are_those_of_that_moment(tmp_path: Path) -> None:
    model, optimizer, step = noisy()
    path, batches = tmp_path / "step.capture", list[Tensor]()
    with nantrace.trace(model, optimizer=optimizer, capture=path, on_nonfinite="ignore") as tracer:
        while not tracer.faults:
            batches.append(torch.randn(2, 2))  # drawn between the steps
            tracer.batch(batches[-1])
            diffuse(model, batches[-1], optimizer)
            assert len(tracer.trace.steps) < 200
    kept = read(path).kept
    assert (kept["manifest"]["when"], kept["others"]) == ("when tracer.batch was called", [])
    assert torch.equal(kept["batch"], batches[-2])  # the step after it was open when it was judged
    assert nantrace.bisect(step, capture=path).cause == "division_by_zero"


def test_the_batch_is_that_of_the_first_call_in_the_first_step_too(tmp_path: Path) -> None:
    model, optimizer = build()
    path = tmp_path / "step.capture"
    holder: dict[str, Tensor] = {}
    with nantrace.trace(model, optimizer=optimizer, batch=holder, capture=path, on_nonfinite="ignore"):
        holder["x"] = torch.ones(6, 4)
        train(model, holder, optimizer)
    assert torch.equal(read(path).kept["batch"]["x"], torch.ones(6, 4))


def test_each_batch_of_accumulated_gradients_is_replayed_until_one_fails(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).sub(model(x).detach().amin()).add(x.amin()).log().mean()
        loss.backward()
        return loss.detach()

    path = tmp_path / "step.capture"
    with nantrace.trace(model, optimizer=optimizer, capture=path, on_nonfinite="ignore") as tracer:
        for value in (1.0, 2.0, 0.0, 3.0):
            tracer.batch(torch.full((2, 2), value))
            run(model, torch.full((2, 2), value))
        optimizer.step()
    verdict = nantrace.bisect(Step(run, model, torch.ones(2, 2), optimizer=optimizer), capture=path)
    assert (verdict.status, verdict.cause) == ("fault", "log_of_zero")
    assert any("It was replayed with batch 3 of the step; with batch 1 of" in sentence for sentence in verdict.evidence)
    assert any("The step read 4 batches one after the other" in sentence for sentence in verdict.evidence)


def over_a_loader(path: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.randn(3, 4) for _ in range(4)]
    data[2][1, 1] = torch.nan

    def run(model: nn.Module, x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()

    given = {"batch": data[0]} if options.pop("static", False) else {}
    with nantrace.trace(model, optimizer=optimizer, capture=path, on_nonfinite="ignore", **given):
        for x in data:
            run(model, x)
    return nantrace.bisect(Step(run, model, data[0], optimizer=optimizer), capture=path)


def test_without_a_batch_in_the_capture_the_way_to_one_is_said(tmp_path: Path) -> None:
    verdict = over_a_loader(tmp_path / "step.capture")
    assert verdict.status == "not_reproduced"
    assert "holds no batch" in verdict.advice[0] and "tracer.batch(batch) at the top of the loop" in verdict.advice[0]


def test_a_captured_batch_that_the_step_did_not_read_is_said(tmp_path: Path) -> None:
    verdict = over_a_loader(tmp_path / "step.capture", static=True)
    assert verdict.status == "not_reproduced"
    assert any(
        "The captured batch is not what the step read: (model) read a tensor, float32 [3, 4], 1 nonfinite of 12"
        in sentence
        for sentence in verdict.evidence
    )
    assert "another batch than the one handed over as batch=" in verdict.advice[0]


def test_the_report_of_a_trace_names_the_capture_beside_it(tmp_path: Path, batch: dict[str, Tensor]) -> None:
    model, optimizer = build()
    given = {"optimizer": optimizer, "batch": batch, "capture": tmp_path / "my step.capture"}
    with nantrace.trace(model, tmp_path / "step.h5", on_nonfinite="ignore", **given):
        train(model, batch, optimizer)
    trace = nantrace.load(tmp_path / "step.h5")
    said = str(nantrace.report(trace)).splitlines()[-1]
    assert said == "Next: nantrace bisect FILE.py:step --capture 'my step.capture'"
    assert str(tmp_path).encode() not in (tmp_path / "step.h5").read_bytes()  # no absolute path goes into the file
