"""Module-level blame on traces written by hand: each rule with the smallest trace that shows it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nantrace.diagnosis.diagnose import diagnose
from nantrace.diagnosis.verdict import Verdict
from nantrace.events import Phase, Role
from nantrace.lineage import Lineage
from tests.diagnosis.written import NAN, NEGINF, POSINF, Written


def judge(written: Written) -> Verdict:
    return diagnose(written.trace())


def said(verdict: Verdict) -> str:
    return " ".join(verdict.evidence)


def updated(written: Written, *names: str, **bad: int) -> None:
    """The optimizer reads the gradients of these parameters and writes them."""
    for name in names:
        written.grad(name, Phase.OPTIMIZER, **bad)
    for name in names:
        written.param(name, Phase.UPDATE, **bad)


def test_a_finite_trace_is_clean_and_says_how_much_was_seen() -> None:
    written = Written()
    written.run("")
    written.loss()
    verdict = judge(written)
    assert verdict.status == "clean" and verdict.origin is None
    assert "None of the 3 tensors" in said(verdict)
    assert "Not seen: a value that dies inside a module" in said(verdict)


def test_the_deepest_module_with_finite_inputs_and_a_nonfinite_output_is_named() -> None:
    written = Written("float16", block__1__ff__wo="Linear")
    written.param("block.1.ff.wo.weight")
    with written.call("", made=NAN), written.call("block.1", made=POSINF), written.call("block.1.ff", made=POSINF):
        written.run("block.1.ff.wi")
        written.run("block.1.ff.wo", made={"posinf": 5, "size": 64000.0})
    written.loss(nan=8)
    verdict = judge(written)
    assert (verdict.status, verdict.stage, verdict.cause) == ("fault", "forward", "overflow")
    assert verdict.origin is not None
    assert verdict.origin.module == "block.1.ff.wo" and verdict.origin.kind == "inf"
    assert verdict.origin.first_bad == (0, 3)
    assert "the result left float16's range (65,504)" in said(verdict)
    assert "97.7 % of the range" in said(verdict)
    assert "Each of the 7 tensors seen before it was finite." in said(verdict)
    assert [step["module"] for step in verdict.path] == ["block.1.ff.wo", "block.1.ff", "block.1", "", None]


def test_code_between_submodules_belongs_to_the_module_around_them() -> None:
    written = Written()
    with written.call("", made=NAN), written.call("layer", made=NAN):
        written.run("layer.first")
        written.run("layer.second", given=NAN, made=NAN)
    written.loss(nan=1)
    verdict = judge(written)
    assert verdict.origin is not None and verdict.origin.module == "layer"
    assert "between its submodules" in said(verdict)


def test_a_module_without_tensor_arguments_takes_in_the_calls_before_its_output() -> None:
    written = Written()
    with written.call("", given=None, made=NAN):
        written.run("inner", made=NAN)
    written.loss(nan=1)
    verdict = judge(written)
    assert verdict.origin is not None and verdict.origin.module == "inner"
    assert verdict.also == ()


def test_marks_that_stay_minus_infinity_are_expected() -> None:
    written = Written()
    written.buffer("attn.mask", **NEGINF)
    with written.call(""):
        written.run("attn.scores", made=NEGINF)
        written.run("attn.softmax", given=NEGINF)
    written.loss()
    updated(written, "attn.weight")
    verdict = judge(written)
    assert verdict.status == "expected" and verdict.origin is None


def test_nan_out_of_marks_is_born_where_the_nan_is() -> None:
    written = Written()
    with written.call("", made=NAN):
        written.run("scores", made=NEGINF)
        written.run("softmax", given=NEGINF, made=NAN)
    written.loss(nan=1)
    verdict = judge(written)
    assert verdict.status == "fault" and verdict.origin is not None
    assert verdict.origin.module == "softmax"


def test_minus_infinity_out_of_a_linear_map_is_an_overflow_not_a_mark() -> None:
    written = Written("float16", wo="Linear")
    with written.call("", made=NAN):
        written.run("wo", made={"neginf": 8})
        written.run("norm", given={"neginf": 8}, made=NAN)
    written.loss(nan=1)
    verdict = judge(written)
    assert verdict.origin is not None and verdict.origin.module == "wo"


def test_an_overflow_that_a_later_module_does_not_see_is_not_the_cause_of_the_next() -> None:
    written = Written(clamped="Linear", real="Linear")
    with written.call("", made=POSINF):
        written.run("clamped", made=POSINF)
        written.run("between")
        written.run("real", made=POSINF)
    written.loss(posinf=1)
    verdict = judge(written)
    assert verdict.origin is not None and verdict.origin.module == "real"


def test_an_infinity_that_reaches_nothing_is_contained() -> None:
    written = Written(wo="Linear")
    with written.call(""):
        written.run("wo", made=POSINF)
        written.run("clamp", given=POSINF)
    written.loss()
    updated(written, "wo.weight")
    verdict = judge(written)
    assert (verdict.status, verdict.stage) == ("contained", "forward")
    assert verdict.origin is not None and verdict.origin.module == "wo"
    assert "no loss, gradient, parameter or buffer" in said(verdict)


@pytest.mark.parametrize("bad", [NAN, POSINF, {"neginf": 1, "low": -3.0, "high": 2.0}])
def test_a_bad_batch_entry_that_reaches_the_loss_is_the_origin(bad: dict[str, float]) -> None:
    written = Written()
    written.batch("wav", **bad)
    with written.call("", given=bad, made=NAN):
        written.run("layer", given=bad, made=NAN)
    written.loss(nan=1)
    verdict = judge(written)
    assert (verdict.status, verdict.stage, verdict.cause) == ("fault", "input", "bad_input")
    assert verdict.origin is not None and verdict.origin.tensor == "batch.wav"
    assert verdict.origin.first_bad == (1, 3)


def test_padding_that_the_model_drops_is_expected_however_it_came() -> None:
    written = Written()
    for _ in range(3):
        with written.call("", given=NAN):
            written.run("rnn")
        written.loss()
        updated(written, "rnn.weight")
        written.end()
    verdict = judge(written)
    assert verdict.status == "expected" and verdict.origin is None
    assert "3 of 21 tensors hold nonfinite values that show in no later tensor: (model) args[0]." in said(verdict)
    assert "left them out or replaced them, as it does of padding" in said(verdict)


def test_a_scale_that_found_its_level_calls_for_no_change() -> None:
    found = []
    for after in (1, 0):
        written = Written("float16")
        model = written.run("")
        written.loss()
        written.grad_output("", model, posinf=4, low=-60000.0, high=60000.0)
        written.grad("wo.weight", posinf=1)
        written.end(skipped=1, committed=0)
        for _ in range(after):
            written.run("")
            written.loss()
            updated(written, "wo.weight")
            written.end()
        written.step -= 1  # the last one has ended already
        found.append(judge(written))
    settled, open_ = found
    assert (settled.status, settled.stage, settled.cause) == ("contained", "backward", "overflow")
    assert settled.advice == (
        "From step 1 on updates were taken again, as a scale does that finds its level: nothing has to be mended "
        "unless the share of skipped updates grows.",
    )
    assert "scaler.get_scale()" in open_.advice[0] and "without the scaler" in open_.advice[1]


def test_a_buffer_that_no_traced_step_wrote_is_looked_for_where_it_was_made() -> None:
    written = Written(bn="BatchNorm2d")
    written.buffer("bn.running_var", **NAN)
    with written.call("", made=NAN):
        written.run("bn", made=NAN)
    written.loss(nan=1)
    verdict = judge(written)
    assert (verdict.stage, verdict.cause) == ("state", "bad_buffer")
    assert "right after it is made" in verdict.advice[0] and "`nantrace checkpoint FILE`" in verdict.advice[1]


def test_missing_labels_that_are_never_read_are_expected() -> None:
    written = Written()
    written.batch("y", **NAN)
    written.run("")
    written.loss()
    updated(written, "weight")
    assert judge(written).status == "expected"


def test_data_that_was_not_handed_over_is_named_as_the_input_of_the_model() -> None:
    written = Written()
    written.run("", given=POSINF, made=NAN)
    written.loss(nan=1)
    verdict = judge(written)
    assert (verdict.stage, verdict.origin and verdict.origin.tensor) == ("input", "(model) args[0]")


def test_a_parameter_that_was_bad_before_the_step_is_named() -> None:
    written = Written()
    written.param("head.bias", **NAN)
    with written.call("", made=NAN):
        written.run("head", made=NAN)
    written.loss(nan=1)
    verdict = judge(written)
    assert (verdict.status, verdict.stage, verdict.cause) == ("fault", "state", "bad_param")
    assert verdict.origin is not None
    assert (verdict.origin.tensor, verdict.origin.module) == ("head.bias", "head")


def test_bad_state_that_nobody_reads_is_not_blamed() -> None:
    written = Written()
    written.buffer("unused.min_val", **POSINF)
    with written.call("", made=NAN):
        written.run("log", made=NAN)
    written.loss(nan=1)
    written.buffer("unused.min_val", Phase.UPDATE, **POSINF)
    verdict = judge(written)
    assert verdict.stage == "forward" and verdict.origin is not None and verdict.origin.module == "log"


def test_an_infinite_running_variance_that_is_absorbed_is_contained() -> None:
    written = Written(bn="BatchNorm1d")
    written.buffer("bn.running_var", **POSINF)
    with written.call(""):
        written.run("bn")
    written.loss()
    verdict = judge(written)
    assert (verdict.status, verdict.stage) == ("contained", "state")
    assert verdict.origin is not None and verdict.origin.tensor == "bn.running_var"


def test_a_loss_made_outside_the_model_has_no_module() -> None:
    written = Written()
    written.run("")
    written.loss(nan=1)
    verdict = judge(written)
    assert (verdict.status, verdict.stage) == ("fault", "loss")
    assert verdict.origin is not None and verdict.origin.module is None


def test_a_gradient_that_is_nonfinite_inside_alone_tells_of_a_term_from_inside_a_module() -> None:
    written = Written()
    with written.call("") as model:
        written.run("moe")
    written.loss(nan=1)
    written.grad_output("", model)
    written.grad("moe.weight", nan=1)
    verdict = judge(written)
    assert (verdict.status, verdict.stage) == ("fault", None)
    assert "a module in its forward that keeps it as an attribute (an auxiliary loss)" in verdict.evidence[0]


@pytest.mark.parametrize("gradient", [{"posinf": 1}, {"size": 0.0}, {}], ids=["nonfinite", "none", "finite"])
def test_a_loss_without_such_a_gradient_was_made_of_the_output(gradient: dict[str, float]) -> None:
    written = Written()
    model = written.run("")
    written.loss(nan=1)
    written.grad_output("", model, **gradient)
    assert judge(written).stage == "loss"
    assert "keeps it as an attribute" in said(judge(written))


def test_a_loss_module_is_named_by_its_class() -> None:
    written = Written()
    written.run("")
    with written.call("<Dice>", made=NAN, phase=Phase.LOSS):
        pass
    written.loss(nan=1)
    verdict = judge(written)
    assert verdict.stage == "loss" and verdict.origin is not None and verdict.origin.module == "<Dice>"


def test_a_nonfinite_loss_with_finite_gradients_is_a_fault() -> None:
    written = Written()
    written.run("")
    written.loss(nan=1)
    written.grad("weight")
    updated(written, "weight")
    assert judge(written).status == "fault"


def test_in_backward_the_module_between_a_finite_and_a_nonfinite_gradient_is_named() -> None:
    written = Written()
    with written.call("") as model:
        lin = written.run("lin")
        dist = written.run("dist")
    written.loss()
    written.grad_output("", model)
    written.grad_output("dist", dist)
    written.grad_input("dist", dist, nan=2)
    written.grad_output("lin", lin, nan=2)
    written.grad("lin.weight", nan=8)
    updated(written, "lin.weight", nan=8)
    verdict = judge(written)
    assert (verdict.status, verdict.stage) == ("fault", "backward")
    assert verdict.origin is not None and verdict.origin.module == "dist"
    assert "the only gradient, the only parameter after the update" in said(verdict)


def test_a_tensor_with_a_linear_and_a_wild_reader_blames_the_wild_one() -> None:
    written = Written(q="Linear")
    with written.call("") as model:
        q = written.run("q")
        norm = written.run("norm")
    written.loss()
    written.grad_output("", model)
    written.grad_output("norm", norm)
    written.grad_output("q", q, size=2.0)
    written.grad_input("norm", norm, nan=3)
    written.grad_input("q", q, nan=3)
    written.grad("q.weight")
    written.grad("norm.weight")
    written.grad("embed.weight", nan=1)
    verdict = judge(written)
    assert verdict.origin is not None and verdict.origin.module == "norm"


def test_a_parameter_gradient_alone_names_its_module() -> None:
    written = Written()
    with written.call("") as model:
        norm = written.run("norm")
    written.loss()
    written.grad_output("", model)
    written.grad_output("norm", norm)
    written.grad("norm.weight", nan=4)
    verdict = judge(written)
    assert (verdict.stage, verdict.origin and verdict.origin.module) == ("backward", "norm")


def test_code_outside_the_modules_may_have_hidden_what_backward_shows() -> None:
    written = Written()
    with written.call("") as model:
        written.run("norm")
    written.loss()
    written.grad_output("", model, nan=4)
    gap = judge(written).evidence[-1]
    assert gap.startswith("Not seen: which op outside the modules made it, nor what forward outside the modules may ")


def test_a_forward_value_that_the_loss_does_not_show_still_owns_the_gradients() -> None:
    written = Written()
    with written.call("") as model:
        attn = written.run("attn", made={"nan": 4})
    written.loss()
    written.grad_output("", model)
    written.grad_output("attn", attn)
    written.grad_input("attn", attn, nan=8)
    written.grad("attn.weight", nan=8)
    verdict = judge(written)
    assert (verdict.stage, verdict.origin and verdict.origin.phase) == ("forward", "forward")


def test_a_value_that_only_the_recomputation_makes_is_a_backward_fault() -> None:
    written = Written()
    with written.call("") as model:
        gate = written.run("gate")
    written.loss()
    written.grad_output("", model)
    with written.call("gate", made=POSINF, phase=Phase.RECOMPUTE):
        pass
    written.grad_input("gate", gate, nan=1)
    written.grad("gate.weight", nan=1)
    verdict = judge(written)
    assert verdict.stage == "backward" and verdict.origin is not None
    assert (verdict.origin.phase, verdict.origin.module) == ("recompute", "gate")


def test_clipping_that_spreads_nan_is_traced_to_the_gradients_that_were_bad_before() -> None:
    written = Written()
    with written.call(""):
        written.run("a")
        written.run("b")
    written.loss()
    written.grad("a.weight")
    written.grad("b.weight", posinf=1)
    updated(written, "a.weight", "b.weight", nan=8)
    verdict = judge(written)
    assert verdict.stage == "backward" and verdict.origin is not None
    assert verdict.origin.tensor == "gradient of b.weight"


def test_a_gradient_that_turned_nonfinite_after_backward_is_a_matter_of_the_gradients_stage() -> None:
    written = Written()
    written.run("")
    written.loss()
    written.grad("weight")
    updated(written, "weight", nan=8)
    verdict = judge(written)
    assert (verdict.stage, verdict.origin and verdict.origin.tensor) == ("gradients", "gradient of weight")


def test_gradients_that_a_norm_overflow_zeroed_are_contained() -> None:
    written = Written()
    written.run("")
    written.loss(size=1e22)
    written.grad("weight", size=1e22)
    written.grad("weight", Phase.OPTIMIZER, size=0.0)
    verdict = judge(written)
    assert (verdict.status, verdict.stage, verdict.cause) == ("contained", "gradients", "norm_overflow")


def test_the_optimizers_own_arithmetic_is_named_with_the_tensor() -> None:
    written = Written("float16")
    written.param("head.weight")
    written.run("")
    written.loss()
    written.grad("head.weight", Phase.OPTIMIZER)
    written.param("head.weight", Phase.UPDATE, nan=3)
    verdict = judge(written)
    assert (verdict.status, verdict.stage) == ("fault", "optimizer")
    assert verdict.origin is not None
    assert (verdict.origin.module, verdict.origin.tensor) == (None, "head.weight")


def test_an_infinite_moment_is_a_fault_though_the_weights_stay_finite() -> None:
    written = Written()
    written.run("")
    written.loss()
    updated(written, "head.weight")
    written.moment("head.weight", phase=Phase.UPDATE, **POSINF)
    verdict = judge(written)
    assert verdict.status == "fault" and verdict.origin is not None
    assert verdict.origin.tensor == "optimizer.state.head.weight.exp_avg_sq"


def test_an_unused_nan_row_of_a_parameter_is_no_fault_when_the_optimizer_rewrites_it() -> None:
    written = Written()
    written.param("emb.weight", **NAN)
    with written.call(""):
        written.run("emb")
    written.loss()
    written.grad("emb.weight", Phase.OPTIMIZER)
    written.param("emb.weight", Phase.UPDATE, **NAN)
    assert judge(written).status == "contained"


def skipped_step(written: Written) -> None:
    with written.call("", made=NAN):
        written.run("proj", made=POSINF)
    written.loss(nan=1)
    written.grad("proj.weight", nan=8)
    written.grad("proj.weight", Phase.POST_BACKWARD, nan=8)


def test_a_step_that_the_scaler_skipped_is_contained() -> None:
    written = Written()
    skipped_step(written)
    written.end(skipped=1, committed=0)
    verdict = judge(written)
    assert verdict.status == "contained" and verdict.origin is not None
    assert verdict.origin.module == "proj"
    assert "no loss scale can remove it" in said(verdict)


def test_buffers_that_a_skipped_step_poisoned_are_a_fault_of_the_update() -> None:
    written = Written()
    written.buffer("bn.running_mean")
    skipped_step(written)
    written.buffer("bn.running_mean", Phase.UPDATE, **POSINF)
    written.end(skipped=1, committed=0)
    verdict = judge(written)
    assert (verdict.status, verdict.stage) == ("fault", "update")
    assert "bn.running_mean" in said(verdict)


def test_an_optimizer_that_takes_the_gradients_of_a_skipped_step_is_a_fault() -> None:
    written = Written()
    skipped_step(written)
    written.grad("body.weight", Phase.OPTIMIZER, nan=8)
    written.param("body.weight", Phase.UPDATE, nan=8)
    written.end(skipped=1, committed=1)
    assert judge(written).status == "fault"


def test_weights_that_exploded_before_the_failure_make_it_a_fault_of_the_update() -> None:
    written = Written()
    written.param("net.weight", size=0.5)
    for size in (40.0, 4e5):
        written.run("")
        written.loss()
        updated(written, "net.weight")
        written.param("net.weight", Phase.UPDATE, size=size)
        written.end()
    with written.call("", made=POSINF):
        written.run("net", made=POSINF)
    written.loss(posinf=1)
    verdict = judge(written)
    assert (verdict.status, verdict.stage, verdict.cause) == ("fault", "update", "exploding_update")
    assert "0.5 before the first step and 4e+05 (net.weight)" in said(verdict)


def test_a_bad_batch_after_healthy_updates_keeps_its_stage() -> None:
    written = Written()
    for _ in range(2):
        written.param("net.weight")
        written.run("")
        written.loss()
        updated(written, "net.weight")
        written.end()
    written.batch("x", **NAN)
    written.run("", given=NAN, made=NAN)
    written.loss(nan=1)
    verdict = judge(written)
    assert verdict.stage == "input" and verdict.origin is not None and verdict.origin.step == 2


def test_growth_from_block_to_block_is_said() -> None:
    written = Written(**{f"layers__{n}": "Linear" for n in range(5)})
    with written.call("", made=POSINF):
        for number in range(4):
            written.run(f"layers.{number}", made={"size": 10.0 * 1000.0**number})
        written.run("layers.4", made=POSINF)
    written.loss(posinf=1)
    verdict = judge(written)
    assert "factor of about 1e+03 a block, from 10 in layers.0" in said(verdict)


def test_a_huge_parameter_is_said() -> None:
    written = Written()
    written.param("bg", size=3.0873e26)
    written.run("", made={"size": 1e26})
    written.loss(posinf=1)
    assert "bg was huge before the step: up to 3.09e+26" in said(judge(written))


def test_submodules_that_were_not_observed_are_left_under_suspicion() -> None:
    written = Written(block="Block", block__inner="Linear")
    with written.call("", made=NAN):
        written.run("block", made=NAN)
    written.loss(nan=1)
    verdict = judge(written)
    assert verdict.region == ("block.inner",)
    assert "Not seen: submodules of block (block.inner)" in said(verdict)


def test_a_forward_only_trace_is_judged_by_what_the_model_returned() -> None:
    written = Written()
    with written.call("", made=NAN):
        written.run("log", made=NAN)
    verdict = judge(written)
    assert (verdict.status, verdict.stage) == ("fault", "forward")


def test_every_verdict_holds_three_pieces_of_advice_at_most_and_strict_json() -> None:
    written = Written("float16", wo="Linear")
    written.param("wo.weight", size=6e4)
    with written.call("", made=NAN):
        written.run("wo", made={"posinf": 8})
    written.loss(nan=8)
    verdict = judge(written)
    assert 1 <= len(verdict.advice) <= 3
    assert any("nantrace bisect" in sentence for sentence in verdict.advice)
    assert verdict.to_dict()["origin"]["output"]["min"] is None


def test_an_empty_trace_is_clean() -> None:
    trace = Written().trace()
    empty = dataclasses.replace(trace, events=np.zeros(0, trace.events.dtype))
    assert diagnose(empty).status == "clean"


def test_an_empty_lineage_leaves_the_modules_to_judge() -> None:
    written = Written()
    written.run("", made=NAN)
    written.loss(nan=1)
    assert diagnose(dataclasses.replace(written.trace(), lineage=Lineage())).status == "fault"


def test_nonfinite_gradients_that_an_optimizer_took_are_a_fault_even_if_its_weights_stay_finite() -> None:
    written = Written()
    skipped_step(written)
    updated(written, "body.weight")
    written.grad("head.weight", Phase.OPTIMIZER, nan=8)
    written.end(skipped=1, committed=1)
    assert judge(written).status == "fault"


def test_of_several_births_the_earliest_is_named_and_the_others_stand_beside_it() -> None:
    written = Written()
    with written.call("", made=NAN):
        with written.call("left", made=NAN):
            pass
        written.run("right", made=NAN)
    written.loss(nan=1)
    verdict = judge(written)
    assert verdict.origin is not None and verdict.origin.module == "right"
    written = Written()
    written.run("a", made=NAN)
    written.run("b", given=None, made=NAN)
    written.loss(nan=1)
    verdict = judge(written)
    assert verdict.origin is not None and verdict.origin.module == "a"
    assert [other.module for other in verdict.also] == ["b"]


def test_a_loss_that_a_check_in_the_loop_threw_away_is_contained() -> None:
    written = Written()
    written.run("", made=NAN)
    written.loss(nan=1)
    written.grad("weight", nan=8)
    written.run("")
    written.loss()
    written.grad("weight")
    updated(written, "weight")
    verdict = judge(written)
    assert (verdict.status, verdict.stage) == ("contained", "forward")


def test_a_mark_that_reached_the_loss_is_a_fault_where_it_ceased_to_be_one() -> None:
    written = Written()
    with written.call("", made=NEGINF):
        written.run("mask", made=NEGINF)
    with written.call("<NLL>", given=NEGINF, made=POSINF, phase=Phase.LOSS):
        pass
    written.loss(posinf=1)
    verdict = judge(written)
    assert (verdict.status, verdict.stage) == ("fault", "loss")
    assert verdict.origin is not None and verdict.origin.module == "<NLL>"


def test_a_mark_that_stays_one_up_to_the_loss_is_named_where_it_was_put_in() -> None:
    written = Written()
    with written.call("", made=NEGINF):
        written.run("log", made=NEGINF)
    written.loss(neginf=1)
    verdict = judge(written)
    assert verdict.status == "fault" and verdict.origin is not None and verdict.origin.module == "log"


def uncalled_parameter(name: str) -> Verdict:
    written = Written()
    written.param(name, **NAN)
    with written.call("", made=NAN):
        written.run("attn", made=NAN)
        written.run("other", given=None)
    written.loss(nan=1)
    written.grad(name, nan=8)
    return judge(written)


def test_a_parameter_of_a_submodule_that_is_never_called_is_read_by_the_module_around_it() -> None:
    verdict = uncalled_parameter("attn.out_proj.weight")
    assert (verdict.stage, verdict.origin and verdict.origin.tensor) == ("state", "attn.out_proj.weight")
    assert uncalled_parameter("other.out_proj.weight").stage == "forward"


@pytest.mark.parametrize("slot", ("differentiated value", "loss"))
def test_a_gradient_that_was_asked_for_explains_a_loss_made_of_it(slot: str) -> None:
    written = Written(inner="Distance")
    with written.call("") as model:
        inner = written.run("inner")
    written.row(None, Phase.LOSS, Role.LOSS, slot)
    written.grad_output("", model)
    written.grad_output("inner", inner)
    written.grad_input("inner", inner, **NAN)
    written.loss(**NAN)
    verdict = judge(written)
    expected = ("backward", "inner") if slot == "differentiated value" else ("loss", None)
    assert verdict.origin is not None
    assert (verdict.status, verdict.stage, verdict.origin.module) == ("fault", *expected)


@pytest.mark.parametrize(
    ("size", "said"), [(0.5, "far below the largest that float32 holds"), (3e38, "88.2 % of the range")]
)
def test_an_infinity_is_set_against_the_largest_finite_value_beside_it(size: float, said: str) -> None:
    written = Written()
    with written.call("", made={"posinf": 1, "low": -size, "high": size}):
        written.run("act")
    written.loss(posinf=1)
    assert any(text.endswith(f", {said}.") for text in judge(written).evidence)


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (0.6, "put out values up to 0.6 in this step, far below the largest float16 value: they were not large"),
        (3e4, "put out values up to 3e+04 in this step, 46 % of the largest float16 value: they were large there"),
    ],
)
def test_the_like_of_a_layer_in_an_earlier_block_is_compared_with_the_range(size: float, said: str) -> None:
    written = Written("float16")
    with written.call("", made=POSINF):
        written.run("0.wo", made={"size": size})
        written.run("1.wo", made=POSINF)
    written.loss(posinf=1)
    told = " ".join(judge(written).evidence)
    assert f"For comparison, 0.wo, its like in an earlier block, {said}" in told
