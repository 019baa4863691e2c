"""A check in the loop that throws a step away: what it excuses, and what stays damaged or stands still behind it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nantrace


class Exp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


def poisoned(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    damaged: Tensor = {"param": model[0].weight, "mean": model[1].running_mean, "var": model[1].running_var}[kind]
    damaged.data.view(-1)[0] = float("nan")
    return model.train(kind == "param")


def guarded(
    model: nn.Module,
    rounds: int = 4,
    bad: Collection[int] = (),
    *,
    clear: str = "before",
    mark: bool = False,
    tell: bool = False,
    **options: Any,
) -> nantrace.Tracer:
    """A loop with the usual check; in the rounds of `bad` the batch is far too large for `Exp`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with nantrace.trace(model, optimizer=optimizer, **{"on_nonfinite": "ignore", **options}) as tracer:
        for number in range(rounds):
            x = torch.linspace(-1, 1, 32).reshape(8, 4)
            if clear == "before":
                optimizer.zero_grad()
            loss = model(x * 1e6 if number in bad else x).pow(2).mean()
            if torch.isfinite(loss):
                loss.backward()
                optimizer.step()
            if clear == "after" or (clear == "in guard" and not torch.isfinite(loss)):
                optimizer.zero_grad()
            if mark:
                tracer.mark_step(**({"loss": loss} if tell else {}))
    return tracer


def exponential() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Exp(), nn.Linear(4, 2))


def said(verdict: nantrace.Verdict) -> str:
    return " ".join(verdict.evidence)


@pytest.mark.parametrize("ops", (False, True))
@pytest.mark.parametrize("mark", (False, True))
@pytest.mark.parametrize("clear", ("before", "in guard", "never"))
@pytest.mark.parametrize(("kind", "cause"), (("param", "bad_param"), ("mean", "bad_buffer"), ("var", "bad_buffer")))
def test_a_check_in_the_loop_does_not_excuse_damage_in_what_training_keeps(
    kind: str, cause: str, clear: str, mark: bool, ops: bool
) -> None:
    verdict = nantrace.diagnose(guarded(poisoned(kind), clear=clear, mark=mark, ops=ops).trace)
    assert (verdict.status, verdict.stage, verdict.cause) == ("fault", "state", cause)
    assert "No output" not in said(verdict)


def test_damage_behind_a_check_warns_raises_and_is_captured(tmp_path: Any) -> None:
    with pytest.warns(nantrace.NantraceWarning, match=r"0\.weight"):
        guarded(poisoned("param"), on_nonfinite="warn")
    with pytest.raises(nantrace.NonfiniteError, match=r"0\.weight"):
        guarded(poisoned("param"), on_nonfinite="raise")
    guarded(poisoned("param"), capture=tmp_path / "step.cap")
    assert (tmp_path / "step.cap").exists()


def test_a_weight_behind_a_scalers_single_skip_is_damage_as_well() -> None:
    model = poisoned("param")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu")
    with nantrace.trace(model, optimizer=optimizer, scaler=scaler, on_nonfinite="ignore") as tracer:
        scaler.scale(model(torch.ones(3, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    verdict = nantrace.diagnose(tracer.trace)
    assert (verdict.status, verdict.cause) == ("fault", "bad_param")


@pytest.mark.parametrize("ops", (False, True))
@pytest.mark.parametrize("clears", (False, True))
def test_an_evaluation_out_of_bad_statistics_is_a_fault_whether_or_not_gradients_are_cleared(
    clears: bool, ops: bool
) -> None:
    model = poisoned("mean")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with nantrace.trace(model, on_nonfinite="ignore", ops=ops) as tracer:
        model.train()(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        model.eval()(torch.randn(8, 4))
        if clears:
            optimizer.zero_grad()
    verdict = nantrace.diagnose(tracer.trace)
    assert (verdict.status, verdict.stage, verdict.cause) == ("fault", "state", "bad_buffer")


class Padded(nn.Module):
    """Row 0 of the embedding is padding: NaN, and left out of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 2)
        self.rows.weight.data[0] = float("nan")

    def forward(self, index: Tensor) -> Tensor:
        found: Tensor = self.rows(index)
        return found


def test_outputs_that_a_finite_loss_leaves_out_are_no_fault_in_an_evaluation() -> None:
    model, index = Padded(), torch.tensor([0, 1, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with nantrace.trace(model, optimizer=optimizer, on_nonfinite="ignore") as tracer:
        for _ in range(2):
            optimizer.zero_grad()
            model(index)[1:].pow(2).sum().backward()
            optimizer.step()
        for _ in range(3):
            model(index)
    verdict = nantrace.diagnose(tracer.trace)
    assert verdict.status != "fault"
    assert "No output" not in said(verdict)


@pytest.mark.parametrize("ops", (False, True))
@pytest.mark.parametrize("mark", (False, True))
@pytest.mark.parametrize("clear", ("before", "in guard", "after"))
@pytest.mark.parametrize(
    ("bad", "status"), (([3], "contained"), ([1, 2], "contained"), ([2, 3], "fault"), (range(1, 4), "fault"))
)
def test_only_a_check_that_leaves_out_every_step_up_to_the_end_stands_still(
    bad: Collection[int], status: str, clear: str, mark: bool, ops: bool
) -> None:
    verdict = nantrace.diagnose(guarded(exponential(), bad=bad, clear=clear, mark=mark, ops=ops).trace)
    assert (verdict.status, verdict.stage) == (status, "forward")
    assert ("stands still" in said(verdict)) is (status == "fault")


@pytest.mark.parametrize("options", ({}, {"keep_steps": 1}, {"every": 2}, {"stats": "none"}))
def test_a_running_trace_warns_when_the_second_step_in_a_row_is_left_out(options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guarded(exponential(), 6, [1, 4], mark=True, tell=True, on_nonfinite="warn", **options)
    with pytest.warns(nantrace.NantraceWarning):
        tracer = guarded(exponential(), 6, [4, 5], mark=True, tell=True, on_nonfinite="warn", **options)
    assert nantrace.diagnose(tracer.trace).status == "fault"


def two_views(bad: Callable[[int], bool]) -> nantrace.Tracer:
    """Each round calls the model twice."""
    model = exponential()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with nantrace.trace(model, optimizer=optimizer, on_nonfinite="ignore") as tracer:
        for number in range(4):
            x = torch.ones(2, 4) * (1e6 if bad(number) else 0.1)
            loss = (model(x) - model(-x)).pow(2).mean()
            if torch.isfinite(loss):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return tracer


def test_two_calls_of_one_round_are_one_failure() -> None:
    assert nantrace.diagnose(two_views(lambda number: number == 3).trace).status == "contained"
    assert nantrace.diagnose(two_views(lambda number: number >= 2).trace).status == "fault"


@pytest.mark.parametrize("clear", ("before", "in guard"))
@pytest.mark.parametrize("mark", (False, True))
def test_a_ledger_alone_is_not_clean_where_every_late_step_was_left_out_unread(clear: str, mark: bool) -> None:
    verdict = nantrace.diagnose(guarded(exponential(), 6, range(2, 6), clear=clear, mark=mark, stats="none").trace)
    assert verdict.status == "inconclusive"
    assert "4 rounds without a backward or an update" in said(verdict)
    assert "Whether the loss was finite there was not seen" in said(verdict)


def test_a_ledger_alone_names_steps_that_were_left_out_once() -> None:
    verdict = nantrace.diagnose(guarded(exponential(), 6, [2], mark=True, stats="none").trace)
    assert verdict.status == "clean"
    assert "1 round without a backward or an update in step 2" in said(verdict)


def test_a_ledger_alone_of_no_backward_at_all_is_not_clean() -> None:
    tracer = guarded(exponential(), 4, range(4), clear="never", stats="none")
    assert nantrace.diagnose(tracer.trace).status == "inconclusive"


def test_a_ledger_alone_of_training_that_ends_with_an_evaluation_is_clean() -> None:
    model = exponential()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with nantrace.trace(model, optimizer=optimizer, stats="none") as tracer:
        for _ in range(2):
            model(torch.zeros(2, 4)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for _ in range(3):
            model(torch.zeros(2, 4))
    verdict = nantrace.diagnose(tracer.trace)
    assert (verdict.status, len(verdict.evidence)) == ("clean", 1)


@pytest.mark.parametrize(("bad", "status"), (([2], "contained"), ([4, 5], "fault")))
def test_a_loss_that_mark_step_tells_counts_without_a_backward(bad: list[int], status: str) -> None:
    verdict = nantrace.diagnose(guarded(exponential(), 6, bad, mark=True, tell=True, stats="none").trace)
    assert verdict.status == status
    assert verdict.origin is not None and verdict.origin.step == bad[0]


def skipping(scale: float = 2.0**22, **options: Any) -> nantrace.Tracer:
    """A scaler that begins too high, and finds its level."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=scale)
    with nantrace.trace(model, optimizer=optimizer, scaler=scaler, on_nonfinite="ignore", **options) as tracer:
        for _ in range(8):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.ones(8, 8)).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return tracer


@pytest.mark.parametrize("options", ({"keep_steps": 2}, {"every": 7}, {"stats": "none"}, {}))
def test_steps_without_rows_that_were_skipped_are_contained_not_clean(options: dict[str, Any]) -> None:
    tracer = skipping(**options)
    assert tracer.trace.steps[1]["skipped"] and not tracer.trace.steps[-1]["skipped"]
    assert nantrace.diagnose(tracer.trace).status == "contained"


@pytest.mark.parametrize("mark", (False, True))
def test_a_dropped_step_that_a_check_left_out_is_contained_not_clean(mark: bool) -> None:
    verdict = nantrace.diagnose(guarded(exponential(), 6, [1], mark=mark, keep_steps=2).trace)
    assert verdict.status == "contained"
    assert "rows were not kept (keep_steps)" in said(verdict)


def test_marks_in_a_dropped_step_are_expected() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return nn.functional.softmax(self.score(x) + mask, -1)

    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with nantrace.trace(model, optimizer=optimizer, keep_steps=1) as tracer:
        for number in range(4):
            optimizer.zero_grad()
            mask = torch.zeros(4)
            mask[0] = float("-inf") if number == 1 else 0.0
            model(torch.ones(2, 4), mask).pow(2).sum().backward()
            optimizer.step()
    assert nantrace.diagnose(tracer.trace).status == "expected"


def test_a_weight_written_after_steps_with_finite_losses_was_not_initialised_so() -> None:
    model = exponential()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with nantrace.trace(model, optimizer=optimizer, keep_steps=1, on_nonfinite="ignore") as tracer:
        for number in range(5):
            if number == 3:
                model[0].weight.data.fill_(float("nan"))
            optimizer.zero_grad()
            model(torch.zeros(2, 4)).pow(2).mean().backward()
            optimizer.step()
    verdict = nantrace.diagnose(tracer.trace)
    assert (verdict.status, verdict.cause) == ("fault", "bad_param")
    assert "The loss of step 2 was still finite: something wrote it since." in said(verdict)
    assert not any("initialised" in text for text in verdict.advice)
    assert "after step 2, whose loss was finite" in verdict.advice[0]
