"""Who is blamed, for what status and stage: one small lineage for each rule."""

from __future__ import annotations

import json

import pytest

from nantrace.diagnosis.blame import Finding, Frozen, Neutral, blame
from nantrace.diagnosis.verdict import Verdict
from nantrace.lineage import Lineage
from tests.diagnosis.flows import Flow


def judged(flow: Flow) -> Verdict:
    return blame(flow.lineage).verdict


def answer(verdict: Verdict) -> tuple[str, str | None, str | None]:
    """(status, stage, op or tensor)."""
    origin = verdict.origin
    return verdict.status, verdict.stage, origin and (origin.op or origin.tensor)


# ---------------------------------------------------------------------------------------------------- nothing to blame
def test_a_run_without_any_event_is_clean() -> None:
    assert judged(Flow()).status == "clean"


def test_a_mask_that_softmax_digests_is_expected() -> None:
    flow = Flow()
    flow.op("aten.masked_fill", "inserted", neginf=1)
    assert answer(judged(flow)) == ("expected", None, None)


def test_unused_bad_state_is_expected() -> None:
    flow = Flow()
    flow.sink("buffer", "observer.min_val", inf=(flow.given("buffer", "observer.min_val", posinf=1),))
    assert judged(flow).status == "expected"


def test_a_parameter_s_own_bad_row_that_an_update_rewrites_is_no_damage() -> None:
    flow = Flow()
    row = flow.given("param", "emb.weight", nan=1)
    flow.sink("param", "emb.weight", nan=(flow.op("aten.add_", "propagated", nan=1, of_nan=(row,), phase="optimizer"),))
    assert judged(flow).status == "expected"


# ---------------------------------------------------------------------------------------------------- roots
def test_the_op_that_made_the_infinity_is_blamed_for_the_nan_made_of_it() -> None:
    flow = Flow()
    log = flow.op("aten.log", "inf", neginf=1)
    mul = flow.op("aten.mul", "nan", nan=1, of_inf=(log,))
    flow.sink("loss", nan=(mul,))
    verdict = judged(flow)
    assert answer(verdict) == ("fault", "forward", "aten.log")
    assert [origin.op for origin in verdict.also] == ["aten.mul"]


def test_an_op_that_makes_nan_of_a_mark_is_blamed_itself() -> None:
    flow = Flow()
    mask = flow.op("aten.masked_fill", "inserted", neginf=1)
    flow.sink("loss", nan=(flow.op("aten._softmax", "nan", nan=1, of_inf=(mask,)),))
    assert answer(judged(flow)) == ("fault", "forward", "aten._softmax")


def test_a_nan_that_came_in_explains_a_nan_and_infinities_beside_it_do_not() -> None:
    flow = Flow()
    log = flow.op("aten.log", "inf", neginf=1)
    sqrt = flow.op("aten.sqrt", "nan", nan=1)
    flow.sink("loss", nan=(flow.op("aten.add", "propagated", nan=1, of_nan=(sqrt,), of_inf=(log,)),))
    assert answer(judged(flow)) == ("fault", "forward", "aten.sqrt")


def test_what_autograd_keeps_for_itself_is_no_birth_and_no_explanation() -> None:
    flow = Flow()
    rstd = flow.op("aten.native_layer_norm", "inf", posinf=1, outputs=3, read_by_forward=False)
    back = flow.op("aten.native_layer_norm_backward", "nan", nan=1, of_inf=(rstd,), phase="backward")
    flow.sink("grad", "w", nan=(back,))
    assert answer(judged(flow)) == ("fault", "backward", "aten.native_layer_norm_backward")


def test_one_output_of_several_that_forward_reads_is_a_birth() -> None:
    flow = Flow()
    flow.sink("loss", inf=(flow.op("aten.linalg_slogdet", "inf", neginf=1, outputs=4),))
    assert answer(judged(flow)) == ("fault", "forward", "aten.linalg_slogdet")


def test_unwritten_memory_that_reaches_the_loss_is_blamed() -> None:
    flow = Flow()
    flow.sink("loss", nan=(flow.op("aten.empty", "uninit", nan=1),))
    assert answer(judged(flow)) == ("fault", "forward", "aten.empty")


# ---------------------------------------------------------------------------------------------------- state and input
@pytest.mark.parametrize(
    ("category", "stage"),
    [("batch", "input"), ("constant", "input"), ("param", "state"), ("buffer", "state"), ("moment", "state")],
)
def test_nan_that_was_there_before_is_blamed_by_name(category: str, stage: str) -> None:
    flow = Flow()
    given = flow.given(category, "its.name", nan=1)
    flow.sink("loss", nan=(flow.op("aten.mul", "propagated", nan=1, of_nan=(given,)),))
    assert answer(judged(flow)) == ("fault", stage, "its.name")


def test_bad_data_comes_before_a_birth_that_reaches_the_same_sink() -> None:
    flow = Flow()
    log = flow.op("aten.log", "inf", posinf=1)
    given = flow.given("batch", "batch.x", posinf=1)
    flow.sink("loss", inf=(flow.op("aten.add", "propagated", posinf=1, of_inf=(log, given)),))
    assert answer(judged(flow)) == ("fault", "input", "batch.x")


@pytest.mark.parametrize(
    ("fields", "op", "expected"),
    [
        ({"neginf": 1, "datalike": False}, "aten.mm", "aten.mm"),
        ({"neginf": 1, "datalike": True}, "aten.mm", "batch.x"),
        ({"neginf": 1, "datalike": True}, "aten._softmax", "aten._softmax"),
        ({"posinf": 1, "datalike": False}, "aten.mm", "batch.x"),
    ],
)
def test_a_mark_in_the_batch_is_told_from_data(fields: dict[str, bool], op: str, expected: str) -> None:
    flow = Flow()
    given = flow.given("batch", "batch.x", **fields)
    flow.sink("loss", nan=(flow.op(op, "nan", nan=1, of_inf=(given,)),))
    assert answer(judged(flow))[2] == expected


def test_an_infinite_constant_without_varied_values_is_a_mark() -> None:
    flow = Flow()
    given = flow.given("constant", posinf=1)
    flow.sink("loss", nan=(flow.op("aten.mul", "nan", nan=1, of_inf=(given,)),))
    assert answer(judged(flow)) == ("fault", "forward", "aten.mul")


def test_bad_state_that_arithmetic_swallows_is_contained() -> None:
    flow = Flow()
    flow.given("buffer", "bn.running_var", posinf=1, absorbed_by=("aten.native_batch_norm",))
    assert answer(judged(flow)) == ("contained", "state", "bn.running_var")


@pytest.mark.parametrize("op", ["aten.lt", "aten.minimum", "aten.where", "aten.index", "aten.clamp", "aten.topk"])
def test_bad_state_that_is_only_compared_or_selected_is_expected(op: str) -> None:
    flow = Flow()
    flow.given("buffer", "cutoff", posinf=1, absorbed_by=(op,))
    assert judged(flow).status == "expected"


def test_what_an_unrecorded_op_wrote_is_blamed_on_it() -> None:
    flow = Flow()
    id = flow.given("unobserved", nan=1, phase="forward", module="outside")
    flow.lineage.event(id).op = "aten.log"
    flow.sink("loss", nan=(id,))
    assert answer(judged(flow)) == ("fault", "forward", "aten.log")


# ---------------------------------------------------------------------------------------------------- sinks
def test_a_birth_that_no_sink_holds_is_contained() -> None:
    flow = Flow()
    flow.op("aten.pow", "inf", posinf=1)
    assert answer(judged(flow)) == ("contained", "forward", "aten.pow")


def test_among_contained_births_those_that_carry_gradient_are_news() -> None:
    flow = Flow()
    flow.op("aten.log", "inf", neginf=1, carries_grad=False)
    flow.op("aten.addmm", "inf", posinf=1)
    verdict = judged(flow)
    assert answer(verdict) == ("contained", "forward", "aten.addmm")
    assert [origin.op for origin in verdict.also] == ["aten.log"]


def test_a_formula_s_inner_value_that_its_node_masks_is_expected() -> None:
    flow = Flow()
    id = flow.op("aten.div", "nan", nan=1, phase="backward")
    event = flow.lineage.event(id)
    event.readers = (event.node_key,)
    assert judged(flow).status == "expected"


def test_the_first_sink_in_time_names_the_origin() -> None:
    flow = Flow()
    first = flow.op("aten.exp", "inf", posinf=1)
    flow.sink("loss", inf=(first,))
    flow.sink("grad", "w", nan=(flow.op("aten.div", "nan", nan=1, phase="backward"),))
    assert answer(judged(flow)) == ("fault", "forward", "aten.exp")


def test_a_nonfinite_loss_is_a_fault_even_with_finite_gradients() -> None:
    flow = Flow()
    flow.sink("loss", nan=(flow.op("aten.nll_loss_forward", "nan", nan=1, phase="loss"),))
    assert answer(judged(flow)) == ("fault", "loss", "aten.nll_loss_forward")


def test_an_infinite_moment_is_damage_without_nan() -> None:
    flow = Flow()
    flow.sink("state", "exp_avg_sq", inf=(flow.op("aten.addcmul_", "inf", posinf=1, phase="optimizer"),))
    assert answer(judged(flow)) == ("fault", "optimizer", "aten.addcmul_")


@pytest.mark.parametrize("excuse", ["skip", "returned", "guard"])
def test_an_excused_sink_is_contained(excuse: str) -> None:
    flow = Flow()
    flow.sink("grad", "w", inf=(flow.op("aten._to_copy", "inf", posinf=1, phase="backward"),), excuse=excuse)
    assert answer(judged(flow)) == ("contained", "backward", "aten._to_copy")


def test_a_differentiated_value_alone_is_contained_and_witnesses_when_training_is_hit() -> None:
    flow = Flow()
    early = flow.op("aten.log", "inf", neginf=1)
    flow.sink("loss", "differentiated value", inf=(early,), excuse="soft")
    assert judged(flow).status == "contained"
    flow.sink("loss", nan=(flow.op("aten.sqrt", "nan", nan=1),))
    assert answer(judged(flow)) == ("fault", "forward", "aten.log")


def test_a_skip_excuses_what_is_left_in_grad_but_not_another_step_that_reads_it() -> None:
    flow = Flow()
    born = flow.op("aten._to_copy", "inf", posinf=1, phase="backward")
    flow.sink("grad", "w", inf=(born,), excuse="skip")
    flow.sink("grad", "w", inf=(born,), left=True)
    assert judged(flow).status == "contained"
    flow.sink("grad", "w", inf=(born,))
    assert judged(flow).status == "fault"


def test_a_guard_that_read_a_test_of_the_value_excuses_it() -> None:
    flow = Flow()
    born = flow.op("aten.exp", "inf", posinf=1)
    flow.sink("loss", inf=(born,), guards=(((born,), False),))
    assert judged(flow).status == "contained"


def test_a_guard_that_read_something_else_excuses_nothing() -> None:
    flow = Flow()
    other = flow.op("aten.log", "inf", neginf=1)
    born = flow.op("aten.exp", "inf", posinf=1)
    flow.sink("loss", inf=(born,), guards=(((other,), False),))
    assert judged(flow).status == "fault"


def test_reading_the_raw_value_is_logging_unless_another_round_did_update() -> None:
    flow = Flow()
    born = flow.op("aten.exp", "inf", posinf=1)
    flow.sink("loss", inf=(born,), guards=(((born,), True),))
    assert judged(flow).status == "fault"
    flow.lineage.step_times.append(0)
    assert judged(flow).status == "contained"


def test_a_mark_that_reaches_the_loss_has_escaped() -> None:
    flow = Flow()
    mask = flow.op("aten.masked_fill", "inserted", neginf=1)
    flow.sink("loss", inf=(flow.op("aten.nll_loss_forward", "propagated", posinf=1, of_inf=(mask,), phase="loss"),))
    verdict = judged(flow)
    assert (*answer(verdict), verdict.cause) == ("fault", "loss", "aten.nll_loss_forward", "sentinel_escaped")


def test_marks_in_buffers_and_returned_tensors_have_not_escaped() -> None:
    flow = Flow()
    mask = flow.op("aten.full", "inserted", neginf=1)
    flow.sink("buffer", "mask", inf=(mask,))
    flow.sink("returned", "returned", inf=(mask,), returned=True)
    assert judged(flow).status == "expected"


def test_a_step_that_raised_over_a_value_is_a_fault() -> None:
    flow = Flow()
    flow.sink("exception", "AssertionError", inf=(flow.op("aten.exp", "inf", posinf=1),))
    assert answer(judged(flow)) == ("fault", "forward", "aten.exp")


# ---------------------------------------------------------------------------------------------------- stages
@pytest.mark.parametrize(
    ("phase", "stage"),
    [
        *(("forward", "forward"), ("loss", "loss"), ("backward", "backward"), ("recompute", "backward")),
        *(("post_backward", "gradients"), ("optimizer", "optimizer"), ("update", "update")),
    ],
)
def test_the_phase_of_a_birth_is_its_stage(phase: str, stage: str) -> None:
    flow = Flow()
    flow.sink("param", "w", nan=(flow.op("aten.div", "nan", nan=1, phase=phase),))
    assert judged(flow).stage == stage


def test_a_buffer_that_kept_what_a_skipped_round_wrote_is_an_update_s_damage() -> None:
    flow = Flow()
    born = flow.op("aten.addmm", "inf", posinf=1)
    flow.lineage.skipped_iterations.append(1)
    flow.sink("buffer", "bn.running_mean", inf=(born,))
    assert answer(judged(flow)) == ("fault", "update", "aten.addmm")


def test_a_buffer_that_kept_what_an_abandoned_round_wrote_is_an_update_s_damage() -> None:
    flow = Flow()
    born = flow.op("aten.exp", "inf", posinf=1, time=5)
    flow.lineage.round_times += [1, 4, 10]
    flow.lineage.step_times += [3, 12]
    flow.lineage.guard_reads.append((8, (born,), False))
    flow.sink("buffer", "bn.running_mean", inf=(born,), time=20)
    assert judged(flow).stage == "update"


def test_work_on_weights_that_touches_no_parameter_itself_is_an_update() -> None:
    flow = Flow()
    born = flow.op("aten.div", "inf", posinf=1, phase="loss", carries_grad=False)
    copied = flow.op("aten.copy_", "propagated", posinf=1, of_inf=(born,), phase="update")
    flow.sink("param", "w", inf=(copied,))
    assert judged(flow).stage == "update"


# ---------------------------------------------------------------------------------------------------- replays
def _late_birth(op: str = "aten.exp") -> Flow:
    """Born in the second iteration, after an update at time 10."""
    flow = Flow()
    flow.lineage.growth.append((1, 1.0, 2.0, 10))
    flow.lineage.step_times.append(10)
    flow.sink("loss", inf=(flow.op(op, "inf", posinf=1, iteration=2, time=15),), iteration=2)
    return flow


def test_a_birth_after_updates_asks_for_a_frozen_replay_and_answers_meanwhile() -> None:
    finding: Finding = blame(_late_birth().lineage)
    assert finding.wants == Frozen()
    assert answer(finding.verdict) == ("fault", "forward", "aten.exp")
    assert any("not tested" in sentence for sentence in finding.verdict.evidence)


def test_a_birth_that_frozen_weights_do_not_show_is_the_updates_doing() -> None:
    finding = blame(_late_birth().lineage, frozen=Lineage())
    assert finding.wants is None and answer(finding.verdict) == ("fault", "update", "aten.exp")


def test_a_birth_that_frozen_weights_show_too_keeps_its_stage() -> None:
    finding = blame(_late_birth().lineage, frozen=_late_birth().lineage)
    assert finding.wants is None and answer(finding.verdict) == ("fault", "forward", "aten.exp")


def test_a_birth_of_the_first_iteration_asks_for_nothing() -> None:
    flow = Flow()
    flow.sink("loss", inf=(flow.op("aten.exp", "inf", posinf=1),))
    assert blame(flow.lineage).wants is None


def test_replays_that_differ_before_any_update_prove_nothing() -> None:
    flow, frozen = Flow(), Flow()
    flow.op("aten.masked_fill", "inserted", neginf=1)
    frozen.op("aten.masked_fill", "inserted", neginf=2)
    flow.lineage.growth.append((1, 1.0, 2.0, 10))
    flow.sink("loss", inf=(flow.op("aten.exp", "inf", posinf=1, iteration=2, time=15),), iteration=2)
    verdict = blame(flow.lineage, frozen=frozen.lineage).verdict
    assert (verdict.status, verdict.region) == ("inconclusive", ("net",))


def _two_births() -> Flow:
    flow = Flow()
    log = flow.op("aten.log", "inf", neginf=1)
    exp = flow.op("aten.exp", "inf", posinf=1)
    flow.sink("loss", nan=(flow.op("aten.add", "nan", nan=1, of_inf=(log, exp)),))
    return flow


def test_of_two_births_the_earliest_that_reaches_the_sink_alone_is_the_origin() -> None:
    flow = _two_births()
    first = blame(flow.lineage)
    assert first.wants == Neutral(frozenset((2,)))
    without_exp, without_log = Flow().lineage, _two_births().lineage
    second = blame(flow.lineage, neutralised={frozenset((2,)): without_exp})
    assert second.wants == Neutral(frozenset((1,)))
    third = blame(flow.lineage, neutralised={frozenset((2,)): without_exp, frozenset((1,)): without_log})
    assert third.wants is None and answer(third.verdict) == ("fault", "forward", "aten.exp")


def test_of_two_births_that_only_do_harm_together_the_earliest_is_the_origin() -> None:
    flow = _two_births()
    nothing = {frozenset((2,)): Lineage(), frozenset((1,)): Lineage()}
    finding = blame(flow.lineage, neutralised=nothing)
    assert finding.wants is None and answer(finding.verdict) == ("fault", "forward", "aten.log")
    assert any("none of them alone" in sentence for sentence in finding.verdict.evidence)


def test_excused_sinks_after_exploding_updates_are_a_fault_of_the_updates() -> None:
    flow = Flow()
    flow.lineage.growth.append((1, 1.0, 636.0, 10))
    born = flow.op("aten._to_copy", "inf", posinf=1, phase="backward", iteration=2, time=15)
    flow.sink("grad", "w", inf=(born,), excuse="skip", iteration=2)
    assert blame(flow.lineage).wants == Frozen()
    assert answer(blame(flow.lineage, frozen=Lineage()).verdict) == ("fault", "update", "aten._to_copy")


def test_excused_sinks_after_ordinary_updates_stay_contained() -> None:
    flow = Flow()
    flow.lineage.growth.append((1, 1.0, 1.02, 10))
    born = flow.op("aten._to_copy", "inf", posinf=1, phase="backward", iteration=2, time=15)
    flow.sink("grad", "w", inf=(born,), excuse="skip", iteration=2)
    assert blame(flow.lineage).verdict.status == "contained"


# ---------------------------------------------------------------------------------------------------- the answer
def test_the_path_leads_from_the_origin_to_the_sink() -> None:
    flow = Flow()
    log = flow.op("aten.log", "inf", neginf=1)
    mul = flow.op("aten.mul", "nan", nan=1, of_inf=(log,))
    flow.sink("loss", nan=(flow.op("aten.sum", "propagated", nan=1, of_nan=(mul,), phase="loss"),))
    path = judged(flow).path
    assert [step.get("op", step.get("sink")) for step in path] == ["aten.log", "aten.mul", "aten.sum", "loss"]
    assert set(path[0]) >= {"op", "module", "node", "where", "phase", "dtype", "shape", "nan", "posinf", "neginf"}


def test_a_backward_birth_names_the_forward_op_that_gave_birth_too() -> None:
    flow = Flow()
    flow.op("aten.log", "inf", neginf=1, where="net.py:3 in forward")
    back = flow.op(
        "aten.div",
        "nan",
        nan=1,
        phase="backward",
        forward_op="aten.log",
        where="net.py:3 in forward",
        node="LogBackward0",
    )
    flow.sink("grad", "w", nan=(back,))
    verdict = judged(flow)
    assert answer(verdict) == ("fault", "backward", "aten.div")
    assert [(o.op, o.phase) for o in verdict.also] == [("aten.log", "forward")]


def test_an_origin_holds_index_samples_and_the_iteration_from_zero() -> None:
    flow = Flow()
    flow.sink("loss", nan=(flow.op("aten.sqrt", "nan", nan=1, first_bad=2, samples=(2,), iteration=3),))
    origin = judged(flow).origin
    assert origin is not None
    assert (origin.step, origin.first_bad, origin.samples, origin.kind) == (2, (2,), (2,), "nan")
    assert origin.output.nan == 1 and origin.output.finite == 3


def test_notes_of_the_recorder_are_part_of_the_evidence() -> None:
    flow = Flow()
    flow.lineage.notes.append("recording stopped at op 3")
    flow.sink("loss", nan=(flow.op("aten.sqrt", "nan", nan=1),))
    assert "recording stopped at op 3" in judged(flow).evidence


def test_a_lineage_read_back_from_json_is_judged_the_same() -> None:
    for flow in (_two_births(), _late_birth()):
        assert blame(Lineage.from_json(flow.lineage.to_json())) == blame(flow.lineage)


def test_a_verdict_is_strict_json() -> None:
    json.dumps(judged(_two_births()).to_dict(), allow_nan=False)


def test_a_long_chain_of_events_is_followed_without_recursion() -> None:
    flow = Flow()
    last = flow.op("aten.log", "inf", neginf=1)
    for _ in range(3000):
        last = flow.op("aten.neg", "propagated", posinf=1, of_inf=(last,))
    flow.sink("loss", inf=(last,))
    verdict = judged(flow)
    assert answer(verdict) == ("fault", "forward", "aten.log") and len(verdict.path) <= 50


# ---------------------------------------------------------------------------------------------------- what is said
def test_a_contained_value_says_which_op_made_it_finite_and_what_that_leaves() -> None:
    flow = Flow()
    born = flow.op("aten.pow", "inf", posinf=1)
    flow.op("aten.add", "propagated", posinf=1, of_inf=(born,), absorbed_by=("aten.rsqrt",))
    assert judged(flow).evidence[-1] == (
        "No loss, gradient, parameter or buffer holds it: aten.rsqrt made finite values of it. 1 / inf is 0, so what "
        "this scales is silently 0."
    )
    flow.lineage.events[-1].absorbed_by = ("aten.hardtanh", "aten.hardtanh_backward")
    assert judged(flow).evidence[-1].endswith("holds it: aten.hardtanh made finite values of it.")


def test_damage_behind_a_finite_loss_is_called_so() -> None:
    flow = Flow()
    flow.sink("grad", "w", nan=(flow.op("aten.div", "nan", nan=1, phase="backward"),))
    assert judged(flow).evidence[-1].endswith("nonfinite in all: 1 gradient. No loss came out nonfinite.")
    flow.sink("loss", nan=(1,), excuse="soft")
    assert "No loss" not in judged(flow).evidence[-1]


def test_a_second_birth_at_the_same_place_is_not_named_again() -> None:
    flow = Flow()
    first = flow.op("aten.sum", "inf", posinf=1, where="dice.py:3 in forward")
    second = flow.op("aten.sum", "inf", posinf=1, where="dice.py:3 in forward")
    other = flow.op("aten.exp", "inf", posinf=1, where="dice.py:4 in forward")
    again = flow.op("aten.exp", "inf", posinf=1, where="dice.py:4 in forward")
    flow.sink("loss", inf=(first, second, other, again))
    assert [origin.op for origin in judged(flow).also] == ["aten.exp"]


def test_rows_of_a_parameter_are_not_samples_of_the_batch() -> None:
    flow = Flow()
    flow.sink("loss", nan=(flow.given("param", "head.bias", nan=1, samples=(1,)),))
    parameter = judged(flow).origin
    assert parameter is not None and parameter.tensor == "head.bias" and parameter.samples is None
    flow = Flow()
    flow.sink("loss", nan=(flow.given("batch", "batch.x", nan=1, samples=(1,)),))
    batch = judged(flow).origin
    assert batch is not None and batch.samples == (1,)


def test_what_was_reached_is_counted_over_the_iterations_that_are_named() -> None:
    flow = Flow()
    born = flow.op("aten.sqrt", "nan", nan=1, iteration=3)
    flow.sink("loss", nan=(born,), iteration=3)
    flow.sink("param", "a", nan=(born,), iteration=4)
    reached = [each for each in judged(flow).evidence if "nonfinite in all" in each]
    assert len(reached) == 1 and "nonfinite in all over iterations 2 to 3: the loss, 1 parameter" in reached[0]
