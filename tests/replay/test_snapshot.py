"""A snapshot restores what a step changed, bit for bit, and names what it cannot."""

from __future__ import annotations

import math
import random
import warnings
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nantrace.capture.lifecycle import Lifecycle
from nantrace.errors import ReplayError
from nantrace.replay.snapshot import Snapshot, available_bytes, refuse_if_too_large, snapshot_bytes
from nantrace.replay.step import Step


def run_once(step: Step) -> Snapshot:
    """Take a snapshot and run the step, as a replay does, without restoring."""
    snapshot = Snapshot(step)
    with Lifecycle(snapshot.listener()):
        step()
    return snapshot


def comes_back(step: Step, *named: str) -> None:
    """The step changes something (each of `named` among it) and the snapshot brings it all back."""
    snapshot = run_once(step)
    changed = snapshot.differences()
    assert changed
    for name in named:
        assert any(name in change for change in changed), (name, changed)
    snapshot.restore()
    assert snapshot.differences() == ()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.bn, self.drop = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout()
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.register_buffer("replaced", torch.zeros(2))
        self.calls, self.history = 0, []
        self.generator = torch.Generator().manual_seed(1)
        self.cached = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(self.calls)
        self.hidden.add_(1)
        self.replaced = torch.ones(2) * self.calls
        self.cached = x.sum()  # a non-leaf tensor as an attribute: nothing that deepcopy could take
        noise = torch.rand(3, generator=self.generator)
        return self.drop(self.bn(self.lin(x))) + noise


def train(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(batch).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss


def test_parameters_buffers_attributes_and_generators_of_the_model_come_back():
    model = Noisy()
    optimizer = torch.optim.AdamW(model.parameters())
    step = Step(lambda m, b: train(m, b, optimizer), model, torch.randn(4, 3), optimizer=optimizer)
    weight, buffer, cached = model.lin.weight, model.replaced, model.cached
    comes_back(step, "lin.weight: other values", "bn.running_mean: other values", "hidden: other values", "calls: 1")
    assert model.lin.weight is weight and weight.grad is None
    assert model.replaced is buffer and model.cached is cached
    assert (model.calls, model.history, len(optimizer.state)) == (0, [], 0)


def test_every_replay_gives_the_same_bits():
    model = Noisy()
    optimizer = torch.optim.AdamW(model.parameters())
    step = Step(lambda m, b: train(m, b, optimizer), model, torch.randn(4, 3))
    snapshot = Snapshot(step)
    losses = []
    for _ in range(3):
        losses.append(step().item())
        snapshot.restore()
    assert losses[0] == losses[1] == losses[2]


def test_moments_groups_and_schedules_found_in_a_closure_come_back():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, torch.ones(1, 2), optimizer)
    before = (optimizer.state[model.weight]["exp_avg"], optimizer.param_groups[0]["lr"], schedule.last_epoch)

    def run(m: nn.Module, b: torch.Tensor) -> None:
        train(m, b, optimizer)
        schedule.step()

    comes_back(Step(run, model, torch.ones(1, 2)), "optimizer.state[weight].exp_avg", "optimizer.param_groups[0]: lr")
    after = (optimizer.state[model.weight]["exp_avg"], optimizer.param_groups[0]["lr"], schedule.last_epoch)
    assert after[0] is before[0] and after[1:] == before[1:]


HIDDEN: dict[str, Any] = {}


def test_an_optimizer_that_is_only_met_in_the_step_is_kept_before_it_changes():
    model = nn.Linear(2, 1)
    HIDDEN["made"] = lambda: optimizer  # not looked into: a function in a table
    optimizer = torch.optim.Adam(model.parameters())
    step = Step(lambda m, b: train(m, b, HIDDEN["made"]()), model, torch.ones(1, 2))
    snapshot = run_once(step)
    assert len(optimizer.state) == 2
    snapshot.restore()
    assert len(optimizer.state) == 0 and snapshot.differences() == ()


def test_a_scaler_comes_back_from_a_skipped_step():
    model = nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def run(m: nn.Module, b: torch.Tensor) -> None:
        scaler.scale(m(b).sum() * math.inf).backward()
        scaler.step(optimizer)
        scaler.update()

    snapshot = run_once(Step(run, model, torch.ones(1, 2), scaler=scaler))
    assert scaler.get_scale() == 512.0
    snapshot.restore()
    assert scaler.get_scale() == 1024.0 and model.weight.grad is None and snapshot.differences() == ()


def test_gradients_come_back_as_the_same_objects_with_the_same_values():
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    grad = model.weight.grad

    def run(m: nn.Module, b: torch.Tensor) -> None:
        m(b).sum().backward()  # accumulates in place
        m.bias.grad = None
        m.weight.requires_grad_(False)
        m.eval()

    comes_back(Step(run, model, torch.ones(1, 2)), "gradient of weight", "bias: another gradient", "training: False")
    assert model.weight.grad is grad and grad.tolist() == [[1.0, 1.0]] and model.weight.requires_grad and model.training


def test_memory_that_the_step_exchanges_or_casts_comes_back():
    model = nn.Linear(2, 2)
    model.tied = model.weight
    pointer = model.weight.data_ptr()

    def run(m: nn.Module, b: torch.Tensor) -> None:
        m.half()
        m.bias.data = torch.zeros(5)

    comes_back(Step(run, model, torch.ones(1, 2)), "weight: other memory, shape or dtype")
    assert model.weight.data_ptr() == pointer and model.weight.dtype == torch.float32 and model.tied is model.weight


@dataclass
class Record:
    x: torch.Tensor
    note: str


def test_a_batch_comes_back_with_its_containers():
    base = torch.arange(1000.0)
    batch: dict[str, Any] = {
        "x": torch.ones(2),
        "slice": base[10:20],
        "wide": torch.ones(1, 3).expand(4, 3),
        "list": [torch.zeros(2), (torch.zeros(1), 3)],
        "ordered": OrderedDict(a=1, b=2),
        "counts": defaultdict(int, {"k": 1}),
        "queue": deque([1, 2]),
        "seen": {1},
        "record": Record(torch.zeros(2), "a"),
        "array": np.zeros(3),
        "sparse": torch.eye(2).to_sparse(),
        "rng": np.random.default_rng(0),
    }
    first = batch["list"]

    def run(m: nn.Module, b: dict[str, Any]) -> None:
        b.pop("x").add_(1)
        b["slice"].mul_(2)
        b["list"].append(1)
        b["list"][1][0].add_(1)
        b["ordered"].move_to_end("a")
        b["counts"]["new"] += 1
        b["queue"].append(3)
        b["seen"].add(2)
        b["record"].x.add_(1)
        b["record"].note = "b"
        b["array"] += 1
        b["sparse"]._values().mul_(2)
        b["rng"].random()

    comes_back(Step(run, nn.Linear(1, 1), batch), "batch.slice", "batch.record.x", "batch.array", "batch.rng has moved")
    assert batch["list"] is first and len(first) == 2 and first[1][0].item() == 0
    assert list(batch["ordered"]) == ["a", "b"] and batch["x"].tolist() == [1, 1] and base[10] == 10
    assert (dict(batch["counts"]), list(batch["queue"]), batch["seen"]) == ({"k": 1}, [1, 2], {1})
    assert batch["record"].note == "a" and batch["rng"].random() == np.random.default_rng(0).random()


def test_a_batch_that_becomes_part_of_the_graph_is_a_leaf_again():
    batch = torch.ones(1, 2)

    def run(m: nn.Module, b: torch.Tensor) -> None:
        b.mul_(m.weight.sum())

    comes_back(Step(run, nn.Linear(2, 1), batch), "batch")
    assert batch.is_leaf and not batch.requires_grad and batch.tolist() == [[1, 1]]


def test_random_streams_and_switches_come_back():
    def run(m: nn.Module, b: Any) -> None:
        random.random()
        np.random.rand()
        torch.rand(1)
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_autocast_enabled("cpu", True)
        torch._C._set_grad_enabled(False)
        torch.autograd.set_detect_anomaly(True)
        warnings.simplefilter("ignore")

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Anomaly")
        step = Step(run, nn.Linear(1, 1), torch.ones(1))
        snapshot = run_once(step)
        assert "default dtype: torch.float64, was torch.float32" in snapshot.settings_changed()
        snapshot.restore()
        comes_back(
            step,
            "Python's random has moved on",
            "NumPy's random has moved on",
            "torch's CPU generator has moved on",
            "deterministic algorithms: (True, True)",
            "autocast on cpu: True",
            "grad mode: False",
            "anomaly detection: (True, True)",
            "warning filters",
        )
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32


SEEN = 0


class Trainer:
    def __init__(self) -> None:
        self.steps = 0

    def step(self, m: nn.Module, b: Any) -> None:
        self.steps += 1


def test_plain_state_outside_of_model_and_batch_is_named_and_put_back_at_the_end():
    calls, log, stats, trainer = 0, [1], {"inner": {"n": 1}}, Trainer()

    def run(m: nn.Module, b: Any) -> None:
        global SEEN, FIRST
        nonlocal calls
        calls += 1
        log.append(calls)
        stats["inner"]["n"] += 1
        SEEN += 1
        FIRST = True
        trainer.step(m, b)

    snapshot = run_once(Step(run, nn.Linear(1, 1), torch.ones(1)))
    snapshot.restore()
    assert (calls, log, SEEN) == (1, [1, 1], 1)
    assert {
        "variable calls of run: 1, was 0",
        "log: 2 elements, was 1",
        "stats.inner: n: 2, was 1",
        f"globals of {__name__}: SEEN: 1, was 0",
        f"globals of {__name__}: FIRST: True, was absent",
        "attributes of trainer: steps: 1, was 0",
    } == set(snapshot.untouched())
    snapshot.leave()
    assert (calls, log, stats, SEEN, trainer.steps) == (0, [1], {"inner": {"n": 1}}, 0, 0)
    assert "FIRST" not in globals() and snapshot.untouched() == ()


def test_numbers_of_a_list_are_named_one_by_one():
    counts = [0, 5]

    def run(m: nn.Module, b: Any) -> None:
        counts[1] += 1

    assert run_once(Step(run, nn.Linear(1, 1), torch.ones(1))).untouched() == ("counts[1]: 6, was 5",)


def test_iterators_of_containers_and_files_that_are_read_go_on_where_they_were(tmp_path):
    (tmp_path / "data").write_text("1\n2\n3\n")
    numbers, letters = iter([1, 2, 3]), iter("abc")
    next(numbers)
    with open(tmp_path / "data") as file:
        file.readline()

        def run(m: nn.Module, b: Any) -> None:
            next(numbers), next(letters), file.readline()

        snapshot = run_once(Step(run, nn.Linear(1, 1), torch.ones(1)))
        assert set(snapshot.opaque.values()) == {"list_iterator", type(letters).__name__, "TextIOWrapper"}
        snapshot.restore()
        assert next(numbers) == 3
        snapshot.leave()
        assert (next(numbers), next(letters), file.readline()) == (2, "a", "2\n")


def test_a_second_model_in_the_closure_comes_back():
    model = nn.Linear(2, 2)
    average = torch.optim.swa_utils.AveragedModel(model)

    def run(m: nn.Module, b: Any) -> None:
        with torch.no_grad():
            m.weight.add_(1)
        average.update_parameters(m)

    comes_back(Step(run, model, torch.ones(1)), "average.module.weight: other values", "average.n_averaged")


def test_what_cannot_be_wound_back_is_named(tmp_path):
    with open(tmp_path / "labels", "w+") as file:
        batch = {"x": torch.ones(1), "more": iter([1, 2]), "file": file}
        assert Snapshot(Step(lambda m, b: None, nn.Linear(1, 1), batch)).opaque == {
            "batch.more": "list_iterator",
            "batch.file": "TextIOWrapper",
        }


def test_a_model_that_is_not_initialised_yet_is_refused():
    with pytest.raises(ReplayError, match=r"Parameter 1\.weight is not initialised yet; run one forward"):
        Snapshot(Step(print, nn.Sequential(nn.ReLU(), nn.LazyLinear(2)), torch.ones(1)))


def test_the_bytes_a_snapshot_takes_are_counted_once_for_shared_memory():
    x = torch.zeros(1000)
    assert snapshot_bytes([x, x.view(10, 100), x[:10], torch.zeros(4, device="meta")]) == {"cpu": 4000 + 40}
    model = nn.Linear(10, 10, bias=False)
    assert Snapshot(Step(print, model, torch.zeros(5))).bytes == {"cpu": 420}


def test_a_model_too_large_to_copy_is_refused_with_its_bytes():
    free = available_bytes("cpu")
    assert free is None or free > 0
    with pytest.raises(ReplayError, match=r"needs 1,000,000,000,000,000,000 bytes on cpu for a copy"):
        refuse_if_too_large({"cpu": 10**18})
