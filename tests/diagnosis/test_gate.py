"""The promotion rule: what passes, what fails at which step, and what is said not to have been checked."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nantrace
from nantrace.diagnosis.gate.rule import Gate
from nantrace.events import EVENT, Phase, Trace
from nantrace.render.gate import next_command, text
from tests.diagnosis.written import Written

ALL = [
    "updates",
    "inputs",
    "losses",
    "gradients",
    "parameters",
    "buffers",
    "optimizer_state",
    "skips",
    "loss_distribution",
    "norm_distribution",
    "step_time",
]
BESIDE = ("loss_distribution", "norm_distribution", "step_time")
SKIPPED = {"committed": 0, "skipped": 1, "gradient_norm": math.nan, "skipped_by": ("head.weight",)}


def run(
    steps: int = 20,
    change: Callable[[Written, int], dict[str, Any] | None] = lambda written, step: None,
    **meta: Any,
) -> Trace:
    """A healthy run of one parameter, buffer and moment; `change` adds rows to a step, and alters its ledger."""
    written = Written()
    for step in range(steps):
        written.batch("x")
        written.param("head.weight")
        written.buffer("norm.running_var")
        written.run("")
        written.loss()
        written.grad("head.weight", Phase.OPTIMIZER)
        written.param("head.weight", Phase.UPDATE)
        written.moment("head.weight", phase=Phase.UPDATE)
        ledger = {"loss": 1.0, "gradient_norm": 2.0, "scale_before": 1024.0, "seconds": 0.5, "backwards": 1}
        written.end(events=8, **{**ledger, **(change(written, step) or {})})
    written.step -= 1  # the last one has ended already
    trace = written.trace()
    return dataclasses.replace(trace, meta={**trace.meta, **meta})


def ledger(rows: Sequence[dict[str, Any]], **meta: Any) -> Trace:
    """A trace with a ledger alone."""
    healthy = {"attempted": 1, "committed": 1, "skipped": 0, "loss": 1.0, "gradient_norm": 2.0, "seconds": 0.5}
    steps = tuple({"step": number, **healthy, **row} for number, row in enumerate(rows))
    return Trace(np.zeros(0, EVENT), (), steps=steps, meta={"stats": "none", **meta})


def at(number: int, **changed: Any) -> Callable[[Written, int], dict[str, Any] | None]:
    return lambda written, step: changed if step == number else None


def rows(number: int, write: Callable[[Written], Any]) -> Callable[[Written, int], None]:
    def change(written: Written, step: int) -> None:
        if step == number:
            write(written)

    return change


def gate(trace: Trace, **options: Any) -> Gate:
    return nantrace.gate(trace, **{"updates": 10, **options})


def status(found: Gate) -> dict[str, str]:
    return {rule.name: rule.status for rule in found.rules}


def test_a_healthy_run_passes_and_only_the_missing_reference_is_not_checked() -> None:
    found = gate(run())
    assert status(found) == {name: "not_checked" if name in BESIDE else "passed" for name in ALL}
    assert found.passed and not gate(run(), strict=True).passed


def test_a_healthy_run_beside_itself_passes_a_strict_gate() -> None:
    found = gate(run(), reference=run(), strict=True)
    assert found.passed and not found.not_checked


def test_too_few_committed_updates_fail_with_both_numbers() -> None:
    rule = gate(run(steps=9)).rule("updates")
    assert (rule.status, rule.steps) == ("failed", (8,))
    assert rule.sentence == "9 committed by step 8, where the trace ends; 10 are asked."


@pytest.mark.parametrize(
    ("name", "write", "said"),
    [
        ("inputs", lambda w: w.batch("x", posinf=2), "Step 7: batch.x was 2 inf of 8."),
        ("losses", lambda w: w.loss(nan=1), "Step 7: loss was 1 nan of 8."),
        ("gradients", lambda w: w.grad("head.weight", Phase.OPTIMIZER, nan=3), "Step 7: head.weight was 3 nan of 8."),
        ("parameters", lambda w: w.param("head.weight", nan=8), "Step 7: head.weight was 8 nan of 8."),
        ("buffers", lambda w: w.buffer("norm.running_var", nan=1), "Step 7: norm.running_var was 1 nan of 8."),
        (
            "optimizer_state",
            lambda w: w.moment("head.weight", posinf=1),
            "Step 7: optimizer.state.head.weight.exp_avg_sq was 1 inf of 8.",
        ),
    ],
)
def test_a_nonfinite_tensor_fails_its_own_rule_at_its_step(name: str, write: Any, said: str) -> None:
    found = gate(run(change=rows(7, write)))
    assert [(rule.name, rule.steps, rule.sentence) for rule in found.failed] == [(name, (7,), said)]


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("losses", {"loss": math.nan}, "Step 7: loss was nan."),
        ("losses", {"losses": {"kl": math.inf}}, "Step 7: losses.kl was inf."),
        ("gradients", {"gradient_norm": math.inf}, "Step 7: gradient norm was inf."),
        (
            "inputs",
            {"batch_check": ({"tensor": "batch.x", "finding": "holds nonfinite values"},)},
            "Step 7: batch.x was nonfinite values.",
        ),
    ],
)
def test_a_nonfinite_number_of_the_ledger_fails_its_own_rule(name: str, changed: Any, said: str) -> None:
    found = gate(run(change=at(7, **changed)))
    assert [(rule.name, rule.steps, rule.sentence) for rule in found.failed] == [(name, (7,), said)]


@pytest.mark.parametrize("alone", [True, False], ids=["ledger", "rows"])
def test_a_loss_for_which_the_user_skipped_the_step_fails_unless_a_note_explains_it(alone: bool) -> None:
    left_out: dict[str, Any] = {"attempted": 0, "committed": 0, "backwards": 0, "loss": math.nan}
    noted = {**left_out, "decisions": [{"kind": "quarantine", "reason": "the batch holds NaN"}]}

    def of(changed: dict[str, Any]) -> Trace:
        return ledger([changed if step == 12 else {} for step in range(20)]) if alone else run(change=at(12, **changed))

    found = nantrace.gate(of(left_out), updates=10)
    assert found.rule("losses").status == "failed" and found.rule("losses").steps == (12,)
    assert found.rule("losses").sentence == (
        "Step 12: loss was nan. No update was attempted in step 12: if that was decided, tracer.note(kind, reason) "
        "explains it."
    )
    explained = nantrace.gate(of(noted), updates=10)
    assert explained.rule("losses").sentence == "Finite in all 19 steps." and explained.passed


def test_several_failing_steps_are_counted_and_the_last_named() -> None:
    found = gate(run(change=lambda w, step: {"loss": math.nan} if step in (3, 4, 9) else None))
    assert found.rule("losses").sentence == "Step 3: loss was nan; nonfinite in 3 steps, the last of them 9."
    assert found.rule("losses").steps == (3, 4, 9)


def test_what_happened_within_the_warm_up_does_not_count() -> None:
    trace = run(change=at(2, loss=math.nan, **SKIPPED))
    assert [rule.name for rule in gate(trace).failed] == ["skips"]
    assert gate(trace, warm_up=3).passed
    assert not gate(trace, warm_up=2).passed


def test_a_skip_without_a_reason_fails_and_is_named_with_its_parameter() -> None:
    rule = gate(run(change=at(5, **SKIPPED))).rule("skips")
    assert rule.steps == (5,)
    assert rule.sentence == (
        "1 not committed, without a reason on record, at step 5: that of step 5 was skipped, by head.weight."
    )


def test_a_skipped_step_fails_by_its_skip_alone_and_not_by_what_made_it_skip() -> None:
    def change(written: Written, step: int) -> dict[str, Any] | None:
        if step != 5:
            return None
        written.batch("x", nan=1)
        written.loss(nan=1)
        written.grad("head.weight", Phase.POST_BACKWARD, nan=1)
        return {"loss": math.nan, **SKIPPED}

    assert [rule.name for rule in gate(run(change=change)).failed] == ["skips"]


def test_state_that_a_skipped_step_left_nonfinite_fails_all_the_same() -> None:
    def change(written: Written, step: int) -> dict[str, Any] | None:
        if step != 5:
            return None
        written.buffer("norm.running_var", Phase.UPDATE, nan=1)
        return {"decisions": ({"kind": "quarantine"},), **SKIPPED}

    assert [rule.name for rule in gate(run(change=change)).failed] == ["buffers"]


@pytest.mark.parametrize(
    ("said", "options", "explained"),
    [
        ({"kind": "quarantine", "reason": "batch 17 holds NaN"}, {}, True),
        ({"kind": "checkpoint", "path": "last.pt"}, {}, False),
        ({"kind": "quarantine"}, {"explained_by": ["warm_restart"]}, False),
        ({"kind": "warm_restart"}, {"explained_by": ["warm_restart"]}, True),
    ],
)
def test_a_note_of_the_right_kind_explains_a_skip(said: Any, options: Any, explained: bool) -> None:
    found = gate(run(change=at(5, decisions=(said,), **SKIPPED)), **options)
    assert found.passed is explained
    if explained:
        assert found.rule("skips").sentence == "1 skipped, each with a reason on record."


def test_a_note_explains_its_own_step_or_the_one_that_it_names_and_no_other() -> None:
    def change(step_named: int | None) -> Any:
        said = {"kind": "quarantine"} if step_named is None else {"kind": "quarantine", "step": step_named}
        return lambda w, step: SKIPPED if step == 5 else {"decisions": (said,)} if step == 6 else None

    assert not gate(run(change=change(None))).passed
    assert gate(run(change=change(5))).passed


def test_an_update_that_was_begun_and_not_committed_is_no_commit() -> None:
    rule = gate(run(change=at(5, committed=0))).rule("skips")
    assert rule.status == "failed" and "that of step 5 was begun and not committed." in rule.sentence


def test_without_a_scaler_the_rule_on_skips_is_not_checked() -> None:
    rule = gate(run(change=lambda w, step: {"scale_before": None})).rule("skips")
    assert (rule.status, rule.sentence) == ("not_checked", "No gradient scaler was seen, so none could skip an update.")


def test_a_ledger_alone_checks_losses_and_gradients_and_says_what_it_cannot() -> None:
    found = gate(ledger([{}] * 12))
    assert status(found) == {
        "updates": "passed",
        "inputs": "not_checked",
        "losses": "passed",
        "gradients": "passed",
        "parameters": "not_checked",
        "buffers": "not_checked",
        "optimizer_state": "not_checked",
        "skips": "not_checked",
        **dict.fromkeys(BESIDE, "not_checked"),
    }
    assert found.rule("parameters").sentence == "The trace holds no rows of tensors."


def test_steps_outside_a_sample_are_not_called_finite() -> None:
    trace = run()
    kept = np.isin(trace.events["step"], [0, 10])
    sampled = [dict(row) if row["step"] % 10 == 0 else {**row, "events": 0, "detailed": False} for row in trace.steps]
    trace = dataclasses.replace(trace, events=trace.events[kept], steps=tuple(sampled))
    found = gate(trace)
    assert found.rule("parameters").sentence == (
        "Finite in the 2 of 20 steps that were looked at; of the others nothing is known (a coverage of 100% is asked)."
    )
    assert found.rule("parameters").status == found.rule("optimizer_state").status == "not_checked"
    assert found.rule("losses").status == found.rule("gradients").status == "passed"
    assert gate(trace, coverage=10).rule("parameters").status == "passed"
    assert gate(trace, coverage=11).rule("parameters").status == "not_checked"


def test_rows_that_were_dropped_count_as_looked_at_only_if_none_of_them_was_nonfinite() -> None:
    trace = run()
    dropped = [{**row, "not_kept": row["events"], "events": 0} if row["step"] < 15 else row for row in trace.steps]
    trace = dataclasses.replace(trace, events=trace.events[trace.events["step"] >= 15], steps=tuple(dropped))
    assert gate(trace).rule("parameters").sentence == "Finite in all 20 steps."
    dropped[3] = {**dropped[3], "nonfinite": 2}
    found = gate(dataclasses.replace(trace, steps=tuple(dropped)))
    assert found.rule("parameters").status == "not_checked"
    assert "the 19 of 20 steps" in found.rule("parameters").sentence


def test_a_row_of_notes_after_the_last_step_is_no_step_that_was_missed() -> None:
    trace = run()
    last = {"step": 20, "events": 0, "attempted": 0, "committed": 0, "skipped": 0, "backwards": 0}
    found = gate(dataclasses.replace(trace, steps=(*trace.steps, {**last, "decisions": ({"kind": "end"},)})))
    assert found.rule("parameters").status == "passed" and found.steps == (0, 19)


def test_an_additive_mask_and_an_observer_that_never_ran_are_no_faults() -> None:
    def change(written: Written, step: int) -> None:
        written.batch("mask", neginf=2, low=0.0, high=0.0)
        written.buffer("observer.min_val", posinf=8)

    assert gate(run(change=change)).passed


def test_a_buffer_that_turns_infinite_fails() -> None:
    found = gate(run(change=rows(7, lambda w: w.buffer("norm.running_var", posinf=1))))
    assert [rule.name for rule in found.failed] == ["buffers"]


def test_a_model_without_buffers_is_not_asked_for_them() -> None:
    trace = run()
    sites = tuple(site for site in trace.sites if site.slot != "running_var")
    keep = [trace.sites[int(site)] in sites for site in trace.events["site"]]
    events = trace.events[np.array(keep)].copy()
    events["site"] = [sites.index(trace.sites[int(site)]) for site in events["site"]]
    found = gate(dataclasses.replace(trace, events=events, sites=sites), reference=run(), strict=True)
    assert found.passed and "buffers" not in status(found)


@pytest.mark.parametrize("allowed", ["batch.x", "batch.*"])
def test_a_tensor_that_is_allowed_may_be_nonfinite(allowed: str) -> None:
    trace = run(change=rows(7, lambda w: w.batch("x", nan=1)))
    assert not gate(trace).passed and gate(trace, allow=[allowed]).passed


def test_a_loss_that_is_allowed_may_be_infinite() -> None:
    trace = run(change=at(7, losses={"perplexity": math.inf}))
    assert not gate(trace).passed and gate(trace, allow=["losses.perplexity"]).passed


def test_a_rule_can_be_left_out() -> None:
    found = gate(run(change=at(7, loss=math.nan)), without=["losses"])
    assert found.passed and "losses" not in status(found)


def curve(values: Sequence[float], name: str = "loss", **more: Any) -> Trace:
    return ledger([{name: value, **more} for value in values])


def test_losses_apart_from_the_reference_fail_with_both_numbers_and_the_step() -> None:
    mine = [1.0] * 18 + [1.2, 9.0]
    found = gate(curve(mine), reference=curve([1.0] * 20), loss_tolerance=10, quantile=1.0)
    rule = found.rule("loss_distribution")
    assert (rule.status, rule.steps) == ("failed", (18, 19))
    assert rule.sentence == (
        "Over committed updates 1 to 20 of each trace: median 1 where the reference has 1 (+0%), 100% quantile 9 where "
        "the reference has 1 (+800%); 10% either way is allowed. Beyond that at steps 18, 19; the largest is 9 at step "
        "19."
    )
    assert rule.numbers["upper"] == 9.0 and rule.numbers["median_percent"] == 0.0


@pytest.mark.parametrize(("factor", "passed"), [(1.09, True), (1.11, False), (0.91, True), (0.89, False)])
def test_the_tolerance_holds_to_either_side(factor: float, passed: bool) -> None:
    found = gate(curve([2.0 * factor] * 20), reference=curve([2.0] * 20), loss_tolerance=10)
    assert (found.rule("loss_distribution").status == "passed") is passed


def test_gradient_norms_have_a_tolerance_of_their_own() -> None:
    pair = curve([1.2] * 20, "gradient_norm"), curve([1.0] * 20, "gradient_norm")
    assert gate(pair[0], reference=pair[1]).rule("norm_distribution").status == "passed"
    assert gate(pair[0], reference=pair[1], norm_tolerance=19).rule("norm_distribution").status == "failed"


def test_only_updates_that_both_hold_are_compared() -> None:
    falling = [10.0 / (step + 1) for step in range(40)]
    resumed = ledger([{"loss": falling[n], "committed_total": n + 1} for n in range(20, 40)])
    assert gate(resumed, reference=curve(falling)).rule("loss_distribution").numbers["median_percent"] == 0.0
    rule = gate(resumed, reference=curve(falling[:10])).rule("loss_distribution")
    assert rule.status == "not_checked"
    assert rule.sentence == (
        "0 losses of committed updates 21 to 40 and 0 of the reference's 1 to 10 belong to the same updates; 8 are "
        "asked."
    )


def two_optimizers(
    kinds: tuple[Any, Any], steps: range, begin: Any = None, every_second: int = 1, **options: Any
) -> tuple[Trace, Any]:
    """A run of two optimizers, the second of which steps in some steps only, and where it can be resumed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    x, y = torch.randn(16, 4), torch.randn(16, 1)
    optimizers = [kind(model[at].parameters(), lr=0.05) for at, kind in zip((0, 2), kinds, strict=True)]
    for part, state in zip((model, *optimizers), begin or (), strict=False):
        part.load_state_dict(state)
    with nantrace.trace(model, on_nonfinite="ignore", **options) as tracer:
        for step in steps:
            for optimizer in optimizers:
                optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            for optimizer in optimizers[: 1 if step % every_second else 2]:
                optimizer.step()
    return tracer.trace, copy.deepcopy([part.state_dict() for part in (model, *optimizers)])


@pytest.mark.parametrize("options", [{}, {"every": 5}, {"every": 4, "keep_steps": 1}], ids=str)
@pytest.mark.parametrize(
    ("kinds", "every_second"),
    [(("Adam", "SGD"), 1), (("Adam", "SGD"), 2), (("SGD", "Adam"), 1), (("Adam", "Adam"), 1), (("Adam", "Adam"), 2)],
)
def test_a_resumed_run_is_compared_by_the_updates_of_optimizers_that_count_them(
    kinds: tuple[str, str], every_second: int, options: Any
) -> None:
    """Adam's state counts its updates and SGD has none: their sum counts neither the run's updates nor the trace's."""
    classes = tuple(getattr(torch.optim, kind) for kind in kinds)
    reference, _ = two_optimizers(classes, range(50), every_second=every_second)
    _, saved = two_optimizers(classes, range(31), every_second=every_second)
    resumed, _ = two_optimizers(classes, range(31, 50), saved, every_second, **options)
    rule = gate(resumed, reference=reference).rule("loss_distribution")
    assert rule.status == "passed"
    assert rule.numbers["median_percent"] == pytest.approx(0.0, abs=0.1)
    assert "of each trace" not in rule.sentence


def test_runs_whose_updates_nothing_counts_alike_are_not_compared() -> None:
    kinds = (torch.optim.Adam, torch.optim.SGD)
    _, saved = two_optimizers(kinds, range(10))
    resumed, _ = two_optimizers(kinds, range(10, 30), saved)
    reference, _ = two_optimizers((torch.optim.RMSprop, torch.optim.SGD), range(30))
    rule = gate(resumed, reference=reference).rule("loss_distribution")
    assert rule.status == "not_checked"
    assert rule.sentence == (
        "Nothing counts the updates of both runs alike (the optimizers are Adam, SGD and RMSprop, SGD)."
    )


def test_updates_that_no_optimizer_counts_are_said_to_be_those_of_each_trace() -> None:
    runs = [two_optimizers((torch.optim.SGD, torch.optim.SGD), range(20))[0] for _ in range(2)]
    rule = gate(runs[0], reference=runs[1]).rule("loss_distribution")
    assert rule.sentence.startswith("Over committed updates 2 to 40 of each trace: median")


def test_a_loss_that_passes_through_zero_is_compared_by_its_spread() -> None:
    reference = curve([-1.0, 0.0, 1.0] * 7)
    assert gate(curve([-1.0, 0.05, 1.0] * 7), reference=reference).rule("loss_distribution").status == "passed"
    assert gate(curve([-1.0, 0.5, 1.0] * 7), reference=reference).rule("loss_distribution").status == "failed"


def test_skipped_steps_are_no_part_of_a_distribution() -> None:
    mine = ledger([{"loss": 1.0} if n % 2 else {"loss": 99.0, **SKIPPED} for n in range(40)])
    assert gate(mine, reference=curve([1.0] * 40)).rule("loss_distribution").status == "passed"


def test_norms_after_clipping_are_not_compared_with_norms_without() -> None:
    read = {"gradient_read": "by the optimizer, after clipping", "clip": {"max_norm": 1.0}}
    clipped = curve([1.0] * 20, "gradient_norm", gradient_norm_before_clipping=5.0, **read)
    plain = curve([5.0] * 20, "gradient_norm", gradient_read="by the optimizer")
    assert gate(clipped, reference=plain).rule("norm_distribution").numbers["median"] == 5.0
    unknown = curve([5.0] * 20, "gradient_norm")
    rule = gate(clipped, reference=unknown).rule("norm_distribution")
    assert rule.status == "not_checked" and "only one of the two runs clipped" in rule.sentence.lower()


@pytest.mark.parametrize(("seconds", "status_"), [(0.54, "passed"), (0.56, "failed"), (0.1, "passed")])
def test_a_median_step_that_takes_longer_fails_and_a_faster_one_does_not(seconds: float, status_: str) -> None:
    rule = gate(curve([seconds] * 20, "seconds"), reference=curve([0.5] * 20, "seconds")).rule("step_time")
    assert rule.status == status_
    assert f"The median step took {seconds:g} s, that of the reference 0.5 s" in rule.sentence


def test_steps_recorded_in_different_detail_are_not_timed_against_each_other() -> None:
    rule = gate(run(), reference=ledger([{}] * 20)).rule("step_time")
    assert (
        rule.status == "not_checked" and "too few steps recorded alike (20 in detail, 0 not and 0 in" in rule.sentence
    )
    rule = gate(run(stats="full"), reference=run(stats="range")).rule("step_time")
    assert rule.status == "not_checked" and "(stats full and range)" in rule.sentence


def test_steps_outside_the_samples_are_timed_with_their_like() -> None:
    def sampled(slow: float) -> Trace:
        return ledger(
            [{"seconds": slow} if n % 2 else {"seconds": 0.5, "detailed": False} for n in range(40)], stats="a"
        )

    rule = gate(sampled(9.0), reference=sampled(1.0)).rule("step_time")
    assert rule.status == "passed" and rule.numbers["median"] == 0.5


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=8, max_size=40),
    st.sampled_from([0.5, 2.0, 1024.0]),
)
def test_a_run_is_like_itself_and_a_unit_changes_no_percentage(values: list[float], unit: float) -> None:
    other = [value + 1.0 for value in values]
    here = gate(curve(values), reference=curve(other), updates=1).rule("loss_distribution").numbers
    there = (
        gate(curve([unit * value for value in values]), reference=curve([unit * value for value in other]), updates=1)
        .rule("loss_distribution")
        .numbers
    )
    assert here["median_percent"] == pytest.approx(there["median_percent"])
    assert here["upper_percent"] == pytest.approx(there["upper_percent"])
    same = gate(curve(values), reference=curve(values), updates=1, loss_tolerance=0, norm_tolerance=0, time_tolerance=0)
    assert not same.failed


def test_an_empty_window_is_one_sentence() -> None:
    with pytest.raises(nantrace.NantraceError) as raised:
        gate(run(steps=12), warm_up=12)
    assert str(raised.value) == (
        "The gate window is empty: the trace in memory holds 12 attempted updates, all within the warm-up of 12; "
        "lower the warm-up or trace more steps."
    )
    with pytest.raises(nantrace.NantraceError, match="holds no steps; trace the run that is to be promoted"):
        gate(ledger([]))
    with pytest.raises(nantrace.NantraceError, match="no update was attempted in the 3 steps of the trace in memory"):
        gate(ledger([{"attempted": 0, "committed": 0}] * 3))


def test_a_trace_without_a_ledger_is_judged_by_its_rows_alone() -> None:
    trace = dataclasses.replace(run(change=rows(7, lambda w: w.param("head.weight", nan=1))), steps=())
    found = gate(trace)
    assert [(rule.name, rule.steps) for rule in found.failed] == [("parameters", (7,))]
    assert found.rule("updates").status == found.rule("gradients").status == "not_checked"
    assert found.rule("inputs").status == found.rule("losses").status == "passed"
    with pytest.raises(
        nantrace.NantraceError, match="has no ledger, so nothing tells where a warm-up of 3 updates ends"
    ):
        gate(trace, warm_up=3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quantile": 0.3}, "quantile=0.3: it has to be at least 0.5 and at most 1"),
        ({"loss_tolerance": math.nan}, "loss_tolerance=nan: it has to be at least 0"),
        ({"updates": 0}, "updates=0: it has to be at least 1"),
        ({"without": ["loss"]}, "without='loss': the rules are updates, inputs, losses"),
    ],
)
def test_a_threshold_out_of_range_is_refused_with_its_value(options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gate(run(), **options)


def test_wrong_kinds_are_refused() -> None:
    with pytest.raises(TypeError, match=r"gate got a str: pass a Trace \(nantrace\.load\(path\), tracer\.trace\)"):
        nantrace.gate("run.h5")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"gate got allow='batch\.x': pass several texts"):
        gate(run(), allow="batch.x")
    with pytest.raises(ValueError, match="narrowed by nonfinite: pass the whole trace"):
        gate(run().nonfinite())


def test_the_value_is_strict_json_with_every_rule() -> None:
    found = gate(curve([0.0] * 19 + [1.0]), reference=curve([0.0] * 20), quantile=1.0)
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["passed"] is False and [rule["name"] for rule in told["rules"]] == ALL
    rule = told["rules"][ALL.index("loss_distribution")]
    assert rule["numbers"]["upper_percent"] == {"finite": False, "value": "inf"}


@pytest.mark.parametrize("columns", [40, 71, 80, 120])
def test_the_text_keeps_its_width_and_says_each_rule(columns: int) -> None:
    found = gate(run(change=at(7, loss=math.nan)), reference=run(steps=30))
    shown = text(found, width=columns, ascii=True)
    assert max(map(len, shown.split("\n"))) <= columns
    assert " ".join(shown.split()).startswith("FAILS trace in memory 1 rule of 11 failed")
    assert all(name in shown for name in ALL) and "FAILED" in shown
    assert next_command(found) is None
    assert next_command(dataclasses.replace(found, trace="a run.h5")) == "nantrace report 'a run.h5'"


def test_a_real_run_passes_and_its_skip_is_explained_by_its_note() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-3), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def traced(noted: bool) -> Trace:
        with nantrace.trace(model, optimizer=optimizer, scaler=scaler, on_nonfinite="ignore") as tracer:
            for step in range(12):
                loss = scaler.scale(model(torch.randn(8, 4)).square().mean())
                (loss * float("inf") if step == 4 else loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if step == 4 and noted:
                    tracer.note("quarantine", reason="the loss was blown up")
        return tracer.trace

    assert gate(traced(noted=True)).passed
    found = gate(traced(noted=False))
    assert [(rule.name, rule.steps) for rule in found.failed] == [("skips", (4,))]
