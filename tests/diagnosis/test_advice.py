"""What explanations advise and add: by the kind of case, on events written by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nantrace.diagnosis.causes.explain import explain
from nantrace.diagnosis.causes.table import Explanation
from nantrace.diagnosis.causes.wording import counts, described
from nantrace.lineage import Lineage, Operand, OpEvent, Sink
from tests.diagnosis.flows import Flow
from tests.diagnosis.test_causes import BIG, event, explained, external

DIVISION = event(op="aten.div", dtype="float32", shape=(2,))


def operand(name: str, low: float, high: float, shape: tuple[int, ...] = (2,), **fields: Any) -> Operand:
    return Operand(name, fields.pop("dtype", "float32"), shape, 0, 0, fields.pop("neginf", 0), low, high, **fields)


def advice(found: Explanation) -> str:
    return " ".join(found.advice)


# ------------------------------------------------------------------------------------------------ samples and names
@pytest.mark.parametrize(("samples", "named"), [((1,), True), ((0, 1), False), ((), False)])
def test_samples_are_left_out_only_where_others_remain(samples: tuple[int, ...], named: bool) -> None:
    found = explained(event(samples=samples))
    assert ("without sample 1 of the batch" in advice(found)) == named
    assert ("bfloat16" in advice(found)) == (not named)


def test_a_named_operand_is_compared_and_not_looked_for_among_outputs() -> None:
    batch = dataclasses.replace(BIG, max=1000.0, tensor="batch.x")
    found = explained(event(operands=(batch, operand("mat2", -30, 30, (32, 3)))))
    assert found.advice[-1] == "Compare the largest magnitude of batch.x, here 1,000, with that of a step that works."


def test_a_user_is_told_of_an_input_and_a_divisor_and_not_of_arguments() -> None:
    log = explained(
        event(op="aten.log", dtype="float32", neginf=1, posinf=0, operands=(operand("self", 0, 1, zero=1),))
    )
    assert "where the input is 0" in log.advice[0] and "self" not in advice(log)
    scale = operand("other", 0, 1, zero=1, tensor="batch.scale")
    division = explained(dataclasses.replace(DIVISION, operands=(operand("self", 1, 1), scale)))
    assert "where the divisor (batch.scale) is 0" in division.advice[0]


def test_a_divisor_of_one_element_is_printed_and_not_searched() -> None:
    bottom = operand("other", 0, 0, (), zero=1)
    found = explained(dataclasses.replace(DIVISION, shape=(), operands=(operand("self", 1, 1, ()), bottom)))
    assert found.advice[0] == (
        "Print the divisor just before aten.div at model.py:41 in forward, and what it is made of: why is it 0?"
    )


# ------------------------------------------------------------------------------------------------ magnitudes
def test_what_is_known_to_be_huge_or_growing_is_not_looked_for() -> None:
    assert "where does it start to grow" in advice(explained(event(dtype="float32", operands=())))
    huge = explained(event(dtype="float32", operands=()), huge_params=[("bg", 3e26)])
    grown = [(time, f"block.{time}.wo", 20.0**time) for time in range(3)]
    growing = explained(event(dtype="float32", operands=()), magnitudes=grown)
    assert "start to grow" not in advice(huge) + advice(growing)
    assert "divide their weights by 20" in growing.advice[0]


def test_a_sum_of_many_small_elements_is_not_a_matter_of_their_size() -> None:
    ones = operand("self", 1, 1, (70000,), dtype="float16")
    found = explained(event(op="aten.sum", shape=(), operands=(ones,)))
    assert found.advice[0].startswith("Sum in float32") and "Divide by 70,000" in found.advice[1]
    few = operand("self", 6e4, 6e4, (3,), dtype="float16")
    assert "Run block.3.wo in float32" in explained(event(op="aten.sum", shape=(), operands=(few,))).advice[0]


# ------------------------------------------------------------------------------------------------ masks
def test_rows_that_a_mask_hides_entirely_are_counted_by_the_nan_that_came_out() -> None:
    scores = operand("self", -1, 1, (4, 4, 4), neginf=40)
    born = event(op="aten._softmax", kind="nan", nan=32, posinf=0, shape=(4, 4, 4), operands=(scores,))
    found = explained(dataclasses.replace(born, scalars={"dim": -1}))
    assert found.evidence[0].startswith(
        "In aten._softmax in block.3.wo, 8 of 16 rows of the input held nothing but -inf"
    )
    assert "(scores == -inf).all(-1).nonzero()" in found.advice[0]


def test_the_mask_is_changed_where_it_was_inserted() -> None:
    mask = OpEvent(1, 3, "aten.masked_fill", "inserted", "forward", "attn", None, "attn.py:12 in forward", 1, "float32")
    mask.neginf = 4
    born = event(op="aten._softmax", kind="nan", nan=4, posinf=0, operands=(operand("self", 0, 0, neginf=4),))
    found = explain(Lineage(events=[mask, born]), dataclasses.replace(born, id=2, inf_parents=(1,)))
    assert "instead of -inf at attn.py:12 in forward" in found.advice[1]


# ------------------------------------------------------------------------------------------------ before the step
def test_a_batch_of_lone_minus_infinities_may_come_of_a_logarithm() -> None:
    only = external("batch", "batch.mel", nan=0, neginf=4)
    assert "made by a logarithm" in advice(explained(only))
    assert "logarithm" not in advice(explained(dataclasses.replace(only, nan=1)))


def test_an_infinite_weight_may_be_that_of_a_class_that_never_occurs() -> None:
    assert "how often each occurs" in advice(explained(external("buffer", "loss.weight", nan=0, posinf=1)))
    assert "occurs" not in advice(explained(external("buffer", "bn.running_var", nan=0, posinf=1)))
    assert "occurs" not in advice(explained(external("buffer", "loss.weight", nan=1)))


def test_only_nan_in_a_parameter_suggests_memory_that_nobody_wrote() -> None:
    assert "torch.empty" in advice(explained(external("param", "head.bias")))
    assert "torch.empty" not in advice(explained(external("param", "head.bias", nan=0, posinf=1)))


def test_a_tensor_without_a_name_is_known_by_its_first_reader() -> None:
    flow = Flow()
    given = flow.given("constant", posinf=1)
    flow.op("aten.mul", "propagated", posinf=1, of_inf=(given,), phase="loss")
    found = explain(flow.lineage, flow.lineage.event(given))
    assert found.evidence[-1] == "aten.mul at train.py:2 in step was the first to compute with its nonfinite elements."


def test_a_batch_of_a_later_iteration_was_bad_before_that_iteration() -> None:
    assert "before iteration 2 read it" in explained(external("batch", "args[0]", iteration=3)).evidence[0]


# ------------------------------------------------------------------------------------------------ the rest of the step
def test_lengths_known_as_ranges_still_show_a_target_that_does_not_fit() -> None:
    lengths = [operand("input_lengths", 4, 4, dtype="int64"), operand("target_lengths", 3, 5, dtype="int64")]
    found = explained(event(op="aten._ctc_loss", shape=(2,), first_bad=1, posinf=1, operands=tuple(lengths)))
    assert found.cause == "no_alignment"
    assert "no alignment for sample 1" in found.evidence[0]
    assert "Targets have up to 5 labels, inputs at most 4 frames." in found.evidence[0]


def test_a_recomputation_that_fails_alone_points_at_what_changed() -> None:
    bottom = operand("other", 0, 0, (), zero=1, tensor="balance.left")
    born = dataclasses.replace(DIVISION, phase="recompute", operands=(operand("self", 1, 1, ()), bottom), shape=())
    found = explained(born)
    assert "in the forward itself this op stayed finite" in found.evidence[0]
    assert found.advice[0].startswith("Print balance.left before model.py:41 in forward, in the forward and again")
    both = Lineage(events=[dataclasses.replace(born, phase="forward"), dataclasses.replace(born, id=2)])
    assert "stayed finite" not in " ".join(explain(both, both.events[1]).evidence)


def spread(own: int, clipped: int) -> Lineage:
    """Gradients that backward made nonfinite, and others that only a coefficient of them did."""
    flow = Flow()
    bad = flow.op("aten.mm", "inf", posinf=1, phase="backward")
    factor = flow.op("aten.clamp", "propagated", nan=1, of_inf=(bad,), phase="post_backward")
    for number in range(own + clipped):
        of_inf = (bad,) if number < own else ()
        scaled = flow.op("aten.mul_", "propagated", nan=1, of_nan=(factor,), of_inf=of_inf, phase="post_backward")
        flow.sink("grad", f"layer.{number}.weight", nan=(scaled,))
    return flow.lineage


def test_clipping_that_spreads_nan_is_told_from_gradients_that_were_bad_before() -> None:
    lineage = spread(own=1, clipped=3)
    said = " ".join(explain(lineage, lineage.events[0]).evidence)
    assert "Backward left 1 gradient nonfinite (layer.0.weight first); 3 more became so only afterwards" in said
    lineage = spread(own=2, clipped=0)
    assert "Backward left" not in " ".join(explain(lineage, lineage.events[0]).evidence)


def test_a_scaler_that_settled_is_called_so() -> None:
    born = event(op="aten._to_copy", phase="backward", node="ToCopyBackward0", operands=(operand("self", 1e6, 1e6),))
    growth = [(8, 1.0, 1.1, 400)]
    said = explained(born, skipped_iterations=[1, 2], growth=growth).evidence[0]
    assert said.endswith("(2 iterations skipped in this step). From iteration 7 on updates were taken again.")
    outside = Sink("param", "w", ((1, "inf"),), 1, 90)
    around = explained(born, skipped_iterations=[1, 2], growth=growth, sinks=[outside])
    assert "taken again" not in " ".join(around.evidence)


# ------------------------------------------------------------------------------------------------ wording
@pytest.mark.parametrize(
    ("given", "said"), [((4, 2, 1), "4 NaN, 2 +inf and 1 -inf"), ((4, 2, 0), "4 NaN and 2 +inf"), ((0, 0, 1), "1 -inf")]
)
def test_kinds_of_nonfinite_elements_are_listed(given: tuple[int, int, int], said: str) -> None:
    assert counts(*given) == said


def test_zeros_are_counted_where_the_range_does_not_say_them() -> None:
    assert described(operand("self", 0, 0, zero=2), None).endswith("was finite, all 0")
    assert described(operand("self", 0, 1, zero=1), None).endswith("from 0 to 1 with 1 zero")
    assert described(operand("self", 0, 1, zero=3, dtype="complex64"), None).endswith("with 3 zero parts")


def test_a_single_element_is_not_counted() -> None:
    one = explained(event(op="aten.sum", shape=(), posinf=1, operands=()))
    assert any("put out +inf, its only element" in sentence for sentence in one.evidence)


def test_advice_on_a_tensor_that_was_given_concerns_its_making_and_not_an_activation() -> None:
    given = operand("self", 0, 1, zero=1, tensor="batch.x")
    log = explained(event(op="aten.log", dtype="float32", neginf=1, posinf=0, operands=(given,)))
    assert "where it is prepared" in advice(log) and "softmax" not in advice(log)


def test_a_deviation_of_one_element_is_not_mended_by_its_correction() -> None:
    one = operand("self", 1, 1, (2, 1))
    found = explained(event(op="aten.std", kind="nan", nan=2, posinf=0, dtype="float32", operands=(one,)))
    assert found.cause == "single_element_std" and not found.advice[0].startswith("Call it with correction=0")


# ---------------------------------------------------------------------------------------------- what can be done there
def test_a_scalar_parameter_is_to_be_followed_over_the_steps_since_nothing_computed_it() -> None:
    sigma = operand("self", -0.98, -0.98, (), tensor="sigma")
    found = explained(event(op="aten.log", kind="nan", nan=1, posinf=0, shape=(), operands=(sigma,), dtype="float32"))
    assert found.advice[0] == "Print sigma in this step and in those before: since when, and why, is it below 0?"
    assert "after each update" in found.advice[1] and len(found.advice) == 2


def test_only_probabilities_are_advised_to_become_logits() -> None:
    for op, low in (("aten.log", 0.0), ("aten.log1p", -1.0)):
        born = event(op=op, posinf=0, neginf=4, shape=(4,), operands=(operand("self", low, low, (4,), zero=4),))
        assert ("log_softmax" in advice(explained(born))) is (op == "aten.log")


def test_an_update_that_overflowed_is_not_sent_to_modules_or_to_another_dtype() -> None:
    moment = event(op="aten.add_", phase="optimizer", module=None, node=None, dtype="float32", operands=())
    found = explained(moment)
    assert "gradient just before" in found.advice[0] and "Clip the gradient norm" in found.advice[1]
    assert "module" not in advice(found) and "float64" not in advice(found)


def test_a_loss_that_its_scale_made_infinite_is_finite_at_a_smaller_scale() -> None:
    loss = operand("self", 3.39e34, 3.39e34, (), dtype="float32")
    scale = operand("other", 65536.0, 65536.0, (), dtype="float32")
    born = event(op="aten.mul", phase="loss", module=None, shape=(), posinf=1, operands=(loss, scale), dtype="float32")
    found = explained(born, skipped_iterations=[1])
    assert any("a smaller scale keeps it finite" in fact for fact in found.evidence)
    assert not any("no scale makes it finite" in fact for fact in found.evidence)


def test_a_hook_that_divides_is_not_told_of_a_forward_division() -> None:
    top, bottom = operand("self", 0, 0, (4,), zero=4), operand("other", 0, 0, (), zero=1)
    hook = event(op="aten.div", kind="nan", nan=4, posinf=0, node="TanhBackward0", operands=(top, bottom), shape=(4,))
    assert "forward division" not in advice(explained(hook))
    own = dataclasses.replace(hook, node="DivBackward0")
    assert "forward division" in advice(explained(own))


def test_a_row_of_zeros_explains_a_weight_norm_of_nan() -> None:
    rows, size = operand("v", -1, 1, (2, 3), zero=3), operand("g", 0, 1, (2, 1), zero=1)
    born = event(op="aten._weight_norm_interface", kind="nan", nan=3, posinf=0, shape=(2, 3), operands=(rows, size))
    assert explained(born).cause == "zero_over_zero"
