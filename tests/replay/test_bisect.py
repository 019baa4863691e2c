"""Bisect: what it says of steps that behave, of steps that don't, and that it leaves everything as it was."""

from __future__ import annotations

import dataclasses
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nantrace
from nantrace.diagnosis.verdict import Verdict
from nantrace.errors import NantraceError, ReplayError, TraceExistsError
from nantrace.replay import bisect as bisect_module
from nantrace.replay.afford import Cost, in_words, is_affordable
from nantrace.replay.bisect import bisect
from nantrace.replay.coarse.forward import as_called, tree_of
from nantrace.replay.replays import Replays
from nantrace.replay.snapshot import Snapshot
from nantrace.replay.step import Step


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.detach().amin()).log()


class Overflow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 1e30).pow(2)


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 0).sqrt()


def model_with(layer: nn.Module, depth: int = 2) -> nn.Module:
    torch.manual_seed(0)
    before = [nn.Linear(4, 4) for _ in range(depth)]
    return nn.Sequential(*before, layer, nn.Dropout(0.1), nn.BatchNorm1d(4))


def step_of(model: nn.Module, batch: Any = None, wrap: Any = None) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def run(m: nn.Module, b: Any) -> Tensor:
        optimizer.zero_grad()
        loss = m(b["x"]).mean()
        loss.backward()
        optimizer.step()
        if wrap is not None:
            wrap()
        return loss.detach()

    return Step(run, model, batch or {"x": torch.randn(6, 4)}, optimizer=optimizer)


def said(verdict: Verdict) -> str:
    return " ".join(verdict.evidence)


def unchanged(step: Step, do: Any) -> Any:
    """What `do` gives; it may not change anything of the step's, nor of torch's."""
    snapshot = Snapshot(step)
    try:
        return do()
    finally:
        assert snapshot.differences() == ()


def test_a_forward_fault_is_found_confirmed_and_nothing_is_changed() -> None:
    step = step_of(model_with(Log()))
    lines: list[str] = []
    verdict = unchanged(step, lambda: bisect(step, progress=lines.append))
    assert (verdict.status, verdict.stage, verdict.cause) == ("fault", "forward", "log_of_zero")
    assert verdict.origin is not None and (verdict.origin.op, verdict.origin.module) == ("aten.log", "2")
    assert "ended in the same way, with as many nonfinite elements at each end" in said(verdict)
    assert verdict.replays == 3 == len(lines)
    assert lines[0].startswith("replay 1: the ends only: loss ") and "gradients nonfinite" in lines[0]


def test_a_backward_fault_is_found_though_every_value_of_forward_is_finite() -> None:
    verdict = bisect(step_of(model_with(Root())))
    assert verdict.origin is not None
    assert (verdict.status, verdict.stage, verdict.origin.node) == ("fault", "backward", "SqrtBackward0")
    assert "ended in the same way, with the same bits of the loss" in said(verdict)


def test_a_finite_step_is_clean_and_needs_no_confirmation() -> None:
    step = step_of(model_with(nn.Tanh()))
    verdict = unchanged(step, lambda: bisect(step))
    assert (verdict.status, verdict.replays) == ("clean", 2)


def test_a_step_that_only_fails_the_first_time_is_not_reproduced_and_the_counter_is_named() -> None:
    calls = 0
    model = model_with(nn.Tanh())

    def run(m: nn.Module, b: Tensor) -> None:
        nonlocal calls
        calls += 1
        (m(b).pow(2).mean() * (float("inf") if calls == 1 else 1.0)).backward()

    verdict = bisect(Step(run, model, torch.randn(6, 4)))
    assert verdict.status == "not_reproduced"
    assert "loss inf" in verdict.evidence[0] and "all finite" in verdict.evidence[0]
    assert "variable calls of run" in said(verdict)


def test_a_step_that_fails_elsewhere_each_time_is_inconclusive() -> None:
    calls = 0

    def run(m: nn.Module, b: Tensor) -> None:
        nonlocal calls
        calls += 1
        loss = m(b).mean()
        loss.backward()
        parameters = list(m.parameters())
        parameters[calls % len(parameters)].grad.fill_(float("nan"))

    verdict = bisect(Step(run, model_with(nn.Tanh()), torch.randn(6, 4)))
    assert verdict.status in ("inconclusive", "not_reproduced")
    assert "ended differently" in said(verdict)


def test_a_step_that_is_finite_only_while_its_ops_are_watched_is_not_explained_away_by_kernels() -> None:
    calls = [0]

    def run(m: nn.Module, b: Tensor) -> None:
        calls[0] += 1
        ((m(b).mean() * 0.0).abs() * (1.0 if calls[0] == 2 else float("inf"))).backward()

    verdict = bisect(Step(run, model_with(nn.Tanh()), torch.randn(6, 4)))
    assert verdict.status == "inconclusive"
    assert "under the op recorder otherwise (all finite): the loss was nan, then 0.0. It depends" in verdict.evidence[0]
    assert "calls" in verdict.evidence[0] and "kernels" not in verdict.evidence[0]


def test_a_step_that_trains_on_another_thread_is_inconclusive_as_its_ops_cannot_be_watched() -> None:
    def train(m: nn.Module, b: Tensor) -> None:
        m(b).mean().backward()

    def run(m: nn.Module, b: Tensor) -> None:
        thread = threading.Thread(target=train, args=(m, b))
        thread.start()
        thread.join()

    verdict = bisect(Step(run, model_with(Log()), torch.randn(6, 4)))
    assert verdict.status == "inconclusive"
    assert verdict.evidence[0].startswith("Gradients went nonfinite, but no backward pass ran on the step's own thread")


def test_a_step_that_raises_over_a_nonfinite_value_shows_its_error_first_and_then_the_birth() -> None:
    def run(m: nn.Module, b: Tensor) -> None:
        loss = m(b).mean()
        if not torch.isfinite(loss):
            raise FloatingPointError("loss is not finite")

    step = Step(run, model_with(Log()), torch.randn(6, 4))
    verdict = unchanged(step, lambda: bisect(step))
    assert verdict.evidence[0].startswith("The step raised FloatingPointError: loss is not finite at test_bisect.py:")
    assert verdict.origin is not None and (verdict.status, verdict.origin.op) == ("fault", "aten.log")


def test_a_step_that_raises_while_all_is_finite_is_not_called_clean() -> None:
    def run(m: nn.Module, b: Tensor) -> None:
        m(b)
        raise KeyError("label")

    verdict = bisect(Step(run, model_with(nn.Tanh()), torch.randn(6, 4)))
    assert verdict.status == "inconclusive" and verdict.evidence[0].startswith("The step raised KeyError: 'label'")


def test_an_interrupt_in_any_replay_passes_through_and_leaves_the_state_as_it_was() -> None:
    for at in (1, 2, 3):
        calls = 0

        def interrupt(at: int = at) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                raise KeyboardInterrupt

        step = step_of(model_with(Log()), wrap=interrupt)
        with pytest.raises(KeyboardInterrupt):
            unchanged(step, lambda step=step: bisect(step))


def test_switches_that_a_step_changes_are_named_and_put_back() -> None:
    step = step_of(model_with(nn.Tanh()), wrap=lambda: torch.set_default_dtype(torch.float64))
    verdict = unchanged(step, lambda: bisect(step))
    assert "default dtype: torch.float64, was torch.float32" in said(verdict)
    assert torch.get_default_dtype() == torch.float32


def test_objects_that_cannot_be_wound_back_are_named_with_whether_that_mattered() -> None:
    harmless = step_of(model_with(Log()), {"x": torch.randn(6, 4), "unused": iter([1])})
    assert "batch.unused (list_iterator); the replays came out alike without" in said(bisect(harmless))

    def run(m: nn.Module, b: Any) -> None:
        (m(b["x"]).mean() * next(b["factors"], 1.0)).backward()

    consumed = Step(run, model_with(nn.Tanh()), {"x": torch.randn(6, 4), "factors": iter([float("inf")])})
    verdict = bisect(consumed)
    assert verdict.status == "not_reproduced"
    assert "batch.factors (list_iterator); the replays did not come out alike" in said(verdict)


def test_one_replay_alone_ends_inconclusive_with_the_ends_it_saw() -> None:
    verdict = bisect(step_of(model_with(Log())), max_replays=1)
    assert (verdict.status, verdict.replays) == ("inconclusive", 1)
    assert "loss" in verdict.region


def test_two_replays_find_the_op_and_say_that_it_was_not_confirmed() -> None:
    verdict = bisect(step_of(model_with(Log())), max_replays=2)
    assert (verdict.status, verdict.replays) == ("fault", 2)
    assert "No replay was left to confirm" in said(verdict)


def test_depth_module_stops_at_the_module() -> None:
    verdict = bisect(step_of(model_with(Overflow())), depth="module")
    assert verdict.origin is not None
    assert (verdict.status, verdict.origin.module, verdict.origin.op) == ("fault", "2", None)


@pytest.mark.parametrize("layer", [Log(), Root()], ids=["forward", "backward"])
def test_a_model_beyond_the_bound_is_narrowed_first_and_gets_the_same_answer(
    layer: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bisect(step_of(model_with(layer, depth=8), {"x": torch.ones(6, 4)}))
    monkeypatch.setattr(bisect_module, "is_affordable", lambda cost: False)
    narrowed = bisect(step_of(model_with(layer, depth=8), {"x": torch.ones(6, 4)}))
    assert narrowed.origin == whole.origin and narrowed.status == "fault"
    assert "Not every op of the step was watched at once (about " in said(narrowed)
    assert "Every op of the step was watched at once: about " in said(whole)


def test_what_is_affordable_depends_on_the_ops_and_on_the_step() -> None:
    assert is_affordable(Cost(seconds=0.5, nodes=10_000))
    assert is_affordable(Cost(seconds=300.0, nodes=10_000))  # long, and not much longer than the step
    assert not is_affordable(Cost(seconds=3.0, nodes=1_000_000))


def test_the_estimate_says_what_it_means_for_the_search() -> None:
    few = in_words(Cost(seconds=1.0, nodes=100))
    assert few == "about 400 ops, which takes seconds, so no part of the step had to be left out"
    some = in_words(Cost(seconds=6.0, nodes=100))
    assert some.startswith("about 400 ops, estimated to take 12 s; only beyond 60 s are modules searched first")
    many = in_words(Cost(seconds=3.0, nodes=10_000_000))
    assert many == "about 40,000,000 ops would take some 1006 s in one replay, more than the 60 s allowed"


def test_modules_are_searched_in_the_order_in_which_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backwards(nn.Module):
        """Defined in one order, run in another; one child never runs."""

        def __init__(self) -> None:
            super().__init__()
            self.last, self.first, self.never = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Log()), nn.ReLU()
            self.middle = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.middle(self.first(x)))

    model = Backwards()
    step = Step(lambda m, b: m(b).mean().backward(), model, torch.randn(6, 4))
    tree = as_called(Replays(step, 1, None), tree_of(model))
    assert tree.names == ("first.0", "first.1", "first", "middle", "last", "")
    assert tree.sizes == (1, 1, 3, 1, 1, 6)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    monkeypatch.setattr(bisect_module, "is_affordable", lambda cost: False)
    verdict = bisect(step)
    assert verdict.origin is not None and (verdict.status, verdict.origin.module) == ("fault", "first.1")
    assert "only ops within first.1 were" in said(verdict)


def test_a_module_that_is_called_past_its_hooks_is_found_in_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hidden(nn.Module):
        """Last child first."""

        def __init__(self) -> None:
            super().__init__()
            self.late, self.early = nn.Linear(4, 4), Log()

        def forward(self, x: Tensor) -> Tensor:
            return self.late(self.early.forward(x))

    monkeypatch.setattr(bisect_module, "is_affordable", lambda cost: False)
    verdict = bisect(step_of(model_with(Hidden())))
    assert verdict.status == "fault" and verdict.origin is not None
    assert (verdict.origin.op, verdict.origin.module) == ("aten.log", "2.early")


def test_where_narrowing_leads_nowhere_every_op_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(m: nn.Module, b: Tensor) -> Any:
        loss = m(b).mean()
        loss.backward()
        return {"loss": loss.detach(), "accuracy": torch.empty(0).mean()}

    monkeypatch.setattr(bisect_module, "is_affordable", lambda cost: False)
    verdict = bisect(Step(run, model_with(nn.Tanh()), torch.randn(6, 4)))
    assert (verdict.status, verdict.cause) == ("contained", "empty_reduction")
    assert "Narrowing by modules led nowhere; every op of the step was watched." in said(verdict)


def test_the_module_tree_is_in_post_order_with_the_sizes_of_subtrees() -> None:
    tree = tree_of(nn.Sequential(nn.Sequential(nn.ReLU(), nn.ReLU()), nn.ReLU()))
    assert tree.names == ("0.0", "0.1", "0", "1", "")
    assert tree.sizes == (1, 1, 3, 1, 5)


def test_anomaly_mode_is_asked_after_a_finite_forward_only() -> None:
    backward = bisect(step_of(model_with(Root())), anomaly=True)
    assert "detect_anomaly stopped at SqrtBackward0, made in forward at test_bisect.py:" in said(backward)
    forward = bisect(step_of(model_with(Log())), anomaly=True)
    assert "detect_anomaly was not run: the loss was nonfinite already" in said(forward)
    assert not torch.is_anomaly_enabled()


def test_where_anomaly_mode_stops_the_step_is_evidence_and_no_end_of_a_replay() -> None:
    plain = bisect(step_of(model_with(Root())))
    verdict = bisect(step_of(model_with(Root())), anomaly=True)
    assert (verdict.status, verdict.cause, verdict.region) == ("fault", plain.cause, plain.region)
    assert set(plain.evidence[:-1]) <= {*verdict.evidence} and "raised" not in said(verdict)


def test_the_lines_told_of_anomaly_mode_are_those_of_the_step_only() -> None:
    (told,) = [each for each in bisect(step_of(model_with(Root())), anomaly=True).evidence if "detect_anomaly" in each]
    assert [each.partition(" in ")[2] for each in told.rstrip(".").split(" at ")[2].split(" < ")] == ["forward", "run"]


def test_the_trace_file_of_a_bisection_tells_the_same(tmp_path: Path) -> None:
    path = tmp_path / "step.h5"
    step = step_of(model_with(Log()))
    verdict = unchanged(step, lambda: bisect(step, path=path))
    stored = nantrace.diagnose(nantrace.load(path))
    assert dataclasses.replace(stored, evidence=stored.evidence[:-1]) == verdict
    assert stored.evidence[-1].startswith("nantrace bisect came to this verdict in 4 replays")
    assert verdict.replays == 4
    with pytest.raises(TraceExistsError, match="exists already"):
        bisect(step, path=path)


def test_a_verdict_that_rests_on_further_replays_is_told_by_the_trace_file_too(tmp_path: Path) -> None:
    def run(m: nn.Module, b: Tensor) -> None:
        for _ in range(4):
            loss = m(b).pow(2).mean() * 1e8
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
    verdict = bisect(Step(run, model, torch.ones(3, 4)), path=tmp_path / "step.h5")
    assert (verdict.status, verdict.stage) == ("fault", "update")  # told by a replay with every update undone
    stored = nantrace.diagnose(nantrace.load(tmp_path / "step.h5"))
    assert (stored.status, stored.stage, stored.cause) == (verdict.status, verdict.stage, verdict.cause)
    assert verdict.evidence == stored.evidence[:-1]


def test_a_compiled_model_is_watched_eagerly_and_its_ends_compiled() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about what it compiles
        model = torch.compile(nn.Sequential(nn.Linear(4, 4), Log()), backend="eager")
        verdict = bisect(Step(lambda m, b: m(b).mean().backward(), model, torch.randn(6, 4)))
    assert verdict.origin is not None
    assert (verdict.status, verdict.origin.op, verdict.origin.module) == ("fault", "aten.log", "1")
    assert "The model is compiled: the ops were watched in an eager run" in said(verdict)


def test_a_model_compiled_by_the_user_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bisect_module, "is_compiled", lambda model: True)
    assert "The model is compiled: the ops were watched in an eager run" in said(bisect(step_of(model_with(Log()))))


def test_a_state_too_large_to_copy_is_refused_with_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nantrace.replay.snapshot.available_bytes", lambda device: 10)
    with pytest.raises(ReplayError, match=r"needs [\d,]+ bytes on cpu for a copy of its state, and 10 are available"):
        bisect(step_of(model_with(Log())))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"depth": "layer"}, "depth is 'layer'"), ({"max_replays": 0}, "max_replays is 0")],
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bisect(step_of(model_with(nn.Tanh())), **options)


def test_the_users_warnings_pass_through() -> None:
    step = step_of(model_with(nn.Tanh()), wrap=lambda: warnings.warn("mine", UserWarning, stacklevel=1))
    with pytest.warns(UserWarning, match="mine"):
        bisect(step)


def _optimizer_that_raises(kind: type[torch.optim.Optimizer], **settings: Any) -> nantrace.Step:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    optimizer.param_groups[0].update(settings)  # as a scheduler or a loaded state does: the constructor would refuse

    def run(net: nn.Module, batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(batch).mean().backward()
        optimizer.step()

    return nantrace.Step(run, model, torch.randn(4, 3), optimizer=optimizer)


@pytest.mark.parametrize(
    ("kind", "betas", "name"),
    [(torch.optim.Adam, (1.0, 0.999), "betas[0]"), (torch.optim.RAdam, (0.9, 1.0), "betas[1]")],
)
def test_an_option_that_makes_the_optimizer_raise_is_named_with_the_place(kind: Any, betas: Any, name: str) -> None:
    step = _optimizer_that_raises(kind, betas=betas)
    with pytest.raises(ZeroDivisionError):
        step()  # the user's exception stays the user's
    verdict = nantrace.bisect(step)
    assert (verdict.status, verdict.stage, verdict.origin) == ("inconclusive", "optimizer", None)
    assert verdict.region == (f"{kind.__name__}.step",)
    assert re.fullmatch(
        r"The step raised ZeroDivisionError: .* at test_bisect.py:\d+ in run, inside \w+.step.", verdict.evidence[0]
    )
    assert verdict.evidence[1] == "Nothing nonfinite was seen before it raised; what comes after did not run."
    assert verdict.evidence[2].startswith(f"{name} of {kind.__name__}, param_groups[0], was exactly 1 when the update")
    assert verdict.advice[0].startswith(f"Set {name} below 1")


def test_a_step_that_raises_elsewhere_blames_no_setting_of_its_optimizer() -> None:
    step = _optimizer_that_raises(torch.optim.SGD)

    def run(net: nn.Module, batch: torch.Tensor) -> None:
        step.run(net, batch)
        raise ZeroDivisionError("of the user's own")

    verdict = nantrace.bisect(nantrace.Step(run, step.model, step.batch, optimizer=step.optimizer))
    assert verdict.region == ("the step",) and verdict.advice == ("Mend what raised, then bisect again.",)
    assert verdict.evidence[0].startswith("The step raised ZeroDivisionError: of the user's own at test_bisect.py:")
    assert verdict.evidence[0].endswith("in run.")


def test_a_trace_that_cannot_be_written_is_refused_before_the_step_runs(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(NantraceError, match="cannot be created, there is no folder"):
        nantrace.bisect(lambda model, x: pytest.fail("it ran"), model, torch.ones(1, 2), path=tmp_path / "no" / "x.h5")


def test_a_trace_that_fails_while_it_is_written_costs_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise NantraceError("No space left on device")

    model = nn.Linear(2, 1)
    for name, said in (("traced", "No trace was written: No space"), ("keep_verdict", "could not be stored in")):
        with monkeypatch.context() as patch:
            patch.setattr(f"nantrace.replay.bisect.{name}", full)
            verdict = nantrace.bisect(
                lambda m, x: (m(x) * 0).log().sum(), model, torch.ones(1, 2), path=tmp_path / f"{name}.h5"
            )
        assert (verdict.status, verdict.cause) == ("fault", "log_of_zero")
        assert any(said in sentence for sentence in verdict.evidence)
