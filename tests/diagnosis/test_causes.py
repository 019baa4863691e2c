"""Explanations of hand-made events: state before the step, messengers, missing records, wording, limits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nantrace.diagnosis.causes.dtypes import limits
from nantrace.diagnosis.causes.explain import OPS, explain
from nantrace.diagnosis.causes.gradients import NODES
from nantrace.diagnosis.causes.table import CAUSES, Explanation
from nantrace.diagnosis.causes.wording import figure
from nantrace.lineage import Lineage, Operand, OpEvent, Sink

BORN = OpEvent(1, 50, "aten.mm", "inf", "forward", "block.3.wo", None, "model.py:41 in forward", 1, "float16", (2, 3))
BIG = Operand("self", "float16", (2, 32), 0, 0, 0, -80.0, 80.0)
WEIGHT = Operand("mat2", "float16", (32, 3), 0, 0, 0, -100.0, 90.0, tensor="block.3.wo.weight")


def event(**changes: Any) -> OpEvent:
    return dataclasses.replace(BORN, **{"posinf": 6, "operands": (BIG, WEIGHT), **changes})


def explained(found: OpEvent, **lineage: Any) -> Explanation:
    explanation = explain(Lineage(events=[found], **lineage), found)
    assert explanation.cause in CAUSES and len(explanation.advice) <= 3
    return explanation


def external(category: str, tensor: str | None, **changes: Any) -> OpEvent:
    fields: dict[str, Any] = dict(
        id=1, time=0, op=None, kind="external", phase=None, module=None, node=None, where=None
    )
    fields |= dict(iteration=1, dtype="float32", shape=(3, 6), nan=6, first_bad=6, category=category, tensor=tensor)
    return OpEvent(**{**fields, **changes})


# ------------------------------------------------------------------------------------------------ the dtypes
@pytest.mark.parametrize("name", [n for n in dir(torch) if isinstance(getattr(torch, n), torch.dtype)])
def test_the_limits_are_those_of_torch(name: str) -> None:
    dtype = getattr(torch, name)
    found = limits(str(dtype))
    if found is None:
        assert not (dtype.is_floating_point or dtype.is_complex) or "float8_e8m0" in name or "float4" in name
        return
    info = torch.finfo(dtype)
    assert found == (info.max, info.tiny, info.smallest_normal and _smallest_subnormal(dtype))


def _smallest_subnormal(dtype: torch.dtype) -> float:
    part = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
    real = part.get(dtype, dtype)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.ones(1, dtype=integers[real.itemsize]).view(real).double().item()


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (65504.0, "65,504"),
        (512000.0, "512,000"),
        (1234.6, "1,235"),
        (3.4028e38, "3.4e+38"),
        (0.69314, "0.693"),
        (5.9605e-8, "5.96e-08"),
        (0.0, "0"),
        (-2.0, "-2"),
        (math.inf, "+inf"),
        (math.nan, "NaN"),
    ],
)
def test_numbers_have_three_digits_and_limits_are_written_out(value: float, written: str) -> None:
    assert figure(value) == written


# ------------------------------------------------------------------------------------------------ overflow
def test_an_overflow_states_the_bound_and_names_the_weight() -> None:
    found = explained(event())
    assert found.cause == "overflow"
    assert found.evidence == (
        "Each element sums 32 products of up to 80 x 100, which may reach 256,000, against 65,504, the largest float16 "
        "value.",
        "The left matrix (float16, 2x32) was finite, from -80 to 80.",
        "block.3.wo.weight (float16, 32x3) was finite, from -100 to 90.",
        "aten.mm put out 6 +inf among 6 elements (float16).",
    )
    assert found.advice[0] == "Run block.3.wo in float32 and compare its largest magnitude with 65,504."
    assert "block.3.wo.weight" in found.advice[2]


def test_ranges_that_cannot_overflow_leave_the_cause_unknown() -> None:
    small = dataclasses.replace(BIG, min=-1.0, max=1.0)
    found = explained(event(operands=(small, WEIGHT)))
    assert found.cause == "unknown"
    assert found.evidence[-1].startswith("These numbers do not tell why aten.mm in block.3.wo")


@pytest.mark.parametrize(
    ("op", "kind", "cause"),
    [
        ("aten.mm", "inf", "overflow"),  # out of finite factors nothing else makes an infinity
        ("aten.exp", "inf", "overflow"),
        ("aten.log", "inf", "log_of_zero"),  # no other finite input has an infinite logarithm
        ("aten.sqrt", "nan", "sqrt_of_negative"),
        ("aten.atanh", "inf", "domain_edge"),
        ("aten.div", "inf", "unknown"),  # 1 / 0, or 1 / 1e-39
        ("aten.reciprocal", "inf", "unknown"),
        ("aten.pow", "inf", "unknown"),
        ("aten.div", "nan", "unknown"),  # 0 / 0, or inf / inf
        ("aten._softmax", "nan", "unknown"),
        ("mylib.fused", "nan", "unknown"),
    ],
)
def test_without_recorded_operands_only_what_the_op_itself_proves_is_said(op: str, kind: str, cause: str) -> None:
    found = explained(event(op=op, kind=kind, operands=(), neginf=1))
    assert found.cause == cause
    if cause == "unknown":
        assert f"The operands of {op} in block.3.wo were not recorded, so the cause is not known." in found.evidence


def test_a_mean_without_recorded_input_says_what_is_left() -> None:
    found = explained(event(op="aten.mean", kind="nan", operands=(), posinf=0, nan=1))
    assert found.cause == "unknown" and "runs over no elements, or when its partial sums overflow" in found.evidence[0]


def test_scores_without_weight_or_recorded_targets_average_over_nothing() -> None:
    scores = Operand("self", "float32", (3, 5), 0, 0, 0, -2.0, 0.0)
    found = explained(event(op="aten.nll_loss_forward", kind="nan", nan=1, posinf=0, operands=(scores,)))
    assert found.cause == "nothing_to_average" and "finite scores without a weight" in found.evidence[0]


def test_a_zero_that_was_not_counted_is_read_off_the_range_or_left_open() -> None:
    one = Operand("self", "float32", (2,), 0, 0, 0, 1.0, 1.0)
    touching = Operand("other", "float32", (2,), 0, 0, 0, 0.0, 3.0)
    straddling = dataclasses.replace(touching, min=-1.0)
    division = event(op="aten.div", dtype="float32", shape=(2,))
    assert explained(dataclasses.replace(division, operands=(one, touching))).cause == "division_by_zero"
    assert explained(dataclasses.replace(division, operands=(one, straddling))).cause == "unknown"


def test_a_deviation_of_two_elements_is_not_blamed_on_their_number() -> None:
    pair = Operand("self", "float32", (2,), 0, 1, 0, 1.0, 1.0, zero=0)
    found = explained(event(op="aten.std", kind="nan", nan=1, posinf=0, shape=(), operands=(pair,)))
    assert found.cause == "inf_minus_inf" and "held 1 +inf" in " ".join(found.evidence)


def test_an_inplace_list_op_is_explained_like_the_op_itself() -> None:
    top = Operand("self[3]", "float32", (2,), 0, 0, 0, 1.0, 1.0)
    bottom = Operand("other[3]", "float32", (2,), 0, 0, 0, 0.0, 3.0, zero=1)
    found = explained(event(op="aten._foreach_div_", dtype="float32", operands=(top, bottom)))
    assert (
        found.cause == "division_by_zero"
        and "its divisor (tensor 3 of the list) held 1 zero among 2 elements" in found.evidence[0]
    )


# ------------------------------------------------------------------------------------------------ before the step
@pytest.mark.parametrize(
    ("category", "tensor", "cause"),
    [
        ("batch", "batch.wav", "bad_input"),
        ("param", "head.bias", "bad_param"),
        ("buffer", "bn.running_var", "bad_buffer"),
        ("moment", "exp_avg_sq of head.bias", "bad_moment"),
        ("constant", None, "bad_constant"),
    ],
)
def test_a_tensor_bad_before_the_step_is_named_with_its_first_index(category: str, tensor: str, cause: str) -> None:
    found = explained(external(category, tensor, samples=(1,)))
    assert found.cause == cause
    held = "(float32, 3x6) held 6 NaN among 18 elements before the step, the first at [1, 0]."
    assert found.evidence[0].endswith(held)
    assert ("Sample 1 along dimension 0 is concerned." in found.evidence) == (category == "batch")
    assert tensor is None or found.evidence[0].startswith(tensor)
    assert tensor is None or tensor in found.advice[0]


def test_where_every_sample_is_concerned_none_is_counted_out() -> None:
    found = explained(external("batch", "batch.x", samples=(0, 1, 2)))
    assert "Every sample along dimension 0 (all 3) is concerned." in found.evidence


def test_a_batch_is_repeated_without_its_bad_samples() -> None:
    assert "without samples 1, 2 of the batch" in explained(external("batch", "batch.x", samples=(1, 2))).advice[1]


def test_what_an_unrecorded_op_wrote_has_no_known_cause() -> None:
    found = explained(external("unobserved", None, op="aten.log"))
    assert found.cause == "unknown" and "aten.log, which ran where nothing was recorded" in found.evidence[0]


def test_uninitialised_memory_is_told_by_the_op() -> None:
    found = explained(event(op="aten.empty", kind="uninit", operands=(), posinf=0, nan=4))
    assert found.cause == "uninitialised_memory" and "it held 4 NaN" in found.evidence[0]


def test_an_inserted_infinity_that_is_the_origin_has_escaped() -> None:
    found = explained(event(op="aten.masked_fill", kind="inserted", operands=(), posinf=0, neginf=1))
    assert found.cause == "sentinel_escaped" and "inserted 1 -inf from a literal" in found.evidence[0]


def test_a_loss_that_turns_a_sentinel_around_has_let_it_escape() -> None:
    scores = Operand("self", "float32", (3, 5), 0, 0, 1, -2.0, 0.0)
    found = explained(event(op="aten.nll_loss_forward", kind="propagated", operands=(scores,), posinf=1))
    assert found.cause == "sentinel_escaped"


def test_a_nan_out_of_a_mask_names_where_the_infinities_came_from() -> None:
    mask = OpEvent(1, 3, "aten.masked_fill", "inserted", "forward", "attn", None, "attn.py:12 in forward", 1, "float32")
    mask.neginf = 4
    passed = OpEvent(2, 4, "aten.add", "propagated", "forward", "attn", None, None, 1, "float32", inf_parents=(1,))
    scores = Operand("self", "float32", (2, 4), 0, 0, 4, -1.0, 1.0)
    born = event(id=3, op="aten._softmax", kind="nan", nan=4, posinf=0, operands=(scores,), inf_parents=(2,))
    found = explain(Lineage(events=[mask, passed, born]), born)
    assert found.cause == "all_masked_row"
    assert found.evidence[-1] == (
        "The infinities came from a literal in aten.masked_fill in attn (attn.py:12 in forward), which put out 4 -inf."
    )


# ------------------------------------------------------------------------------------------------ messengers
def test_steady_growth_makes_the_overflowing_module_the_messenger() -> None:
    grown = [(time, f"block.{time}.wo", 20.0**time) for time in range(3)]
    found = explained(event(), magnitudes=grown)
    assert found.cause == "overflow"
    assert "growing by a factor of about 20 from module to module since block.0.wo" in found.evidence[0]
    assert "messenger" in found.evidence[0] and "block.0.wo" in found.advice[0]


@pytest.mark.parametrize("sizes", [(1.0, 1.2, 1.3), (1.0, 800.0, 900.0), (64.0, 8.0, 512.0)])
def test_growth_that_is_not_steady_is_not_mentioned(sizes: tuple[float, ...]) -> None:
    grown = [(time, f"block.{time}.wo", size) for time, size in enumerate(sizes)]
    assert "messenger" not in " ".join(explained(event(), magnitudes=grown).evidence)


def test_a_parameter_that_was_huge_before_the_step_comes_first() -> None:
    found = explained(event(), huge_params=[("wi.weight", 10.0), ("bg", 3.0873e26)])
    assert found.evidence[0] == "Parameter bg reached 3.09e+26 in magnitude before the step."
    assert "wi.weight" not in " ".join(found.evidence)
    assert "Print the magnitude of bg" in found.advice[0]
    assert "If bg grew over the updates before, repeat them with a learning rate 100 times smaller" in found.advice[1]


def test_exploding_updates_are_the_cause_of_the_overflow_behind_them() -> None:
    found = explained(event(iteration=3), growth=[(1, 1.0, 30.0, 20), (2, 30.0, 636.0, 40), (3, 636.0, 1e9, 60)])
    assert found.cause == "exploding_update"
    assert "from 1 to 636, a factor of 636, up to 30 in one update" in found.evidence[0]


def test_ordinary_updates_are_not_mentioned() -> None:
    assert explained(event(iteration=3), growth=[(1, 1.0, 1.02, 20), (2, 1.02, 1.04, 40)]).cause == "overflow"


CAST = event(
    op="aten._to_copy",
    phase="backward",
    node="ToCopyBackward0",
    module=None,
    operands=(Operand("self", "float32", (2, 3), 0, 0, 0, 1048576.0, 1048576.0),),
)


def test_a_gradient_that_overflows_in_a_skipped_iteration_is_the_scale_s() -> None:
    found = explained(CAST, skipped_iterations=[1])
    assert found.cause == "scaled_gradient_overflow"
    assert "GradScaler skipped the update, the only one in this step." in found.evidence[0]
    later = explained(CAST, skipped_iterations=[1], growth=[(2, 1.0, 1.0, 90)])
    assert "GradScaler skipped this iteration (1 iteration skipped in this step)." in later.evidence[0]
    assert explained(CAST).cause == "cast_overflow"


def test_an_update_in_a_skipped_iteration_went_round_the_scaler() -> None:
    sink = Sink("param", "body.weight", ((1, "inf"),), 1, 90)
    found = explained(CAST, skipped_iterations=[1], sinks=[sink])
    assert found.evidence[0] == "body.weight was updated all the same: an optimizer stepped outside the scaler."
    assert found.advice[0].startswith("Call scaler.step(optimizer)")


def test_a_forward_overflow_is_not_blamed_on_the_loss_scale() -> None:
    found = explained(event(), skipped_iterations=[1])
    assert found.cause == "overflow" and "no scale makes it finite" in found.evidence[1]


def test_a_buffer_that_outlived_the_skipped_step_is_named() -> None:
    sink = Sink("buffer", "bn.running_mean", ((1, "inf"),), 1, 90)
    found = explained(event(), skipped_iterations=[1], sinks=[sink])
    assert "The optimizer step was skipped, but buffer bn.running_mean kept nonfinite values" in found.evidence[0]


def test_an_infinite_second_moment_freezes_its_weight() -> None:
    moment = Operand("self", "float32", (2,), 0, 0, 0, 0.0, 0.0)
    gradients = [Operand(name, "float32", (2,), 0, 0, 0, 1e20, 1e20) for name in ("tensor1", "tensor2")]
    found = explained(
        event(op="aten._foreach_addcmul_", phase="optimizer", dtype="float32", operands=(moment, *gradients))
    )
    assert found.cause == "overflow" and "the weight is frozen" in " ".join(found.evidence)


def test_an_overflowing_clip_norm_erases_the_update() -> None:
    gradient = Operand("self[0]", "float32", (2,), 0, 0, 0, 1e30, 1e30)
    found = explained(event(op="aten._foreach_norm", phase="post_backward", dtype="float32", operands=(gradient,)))
    assert found.cause == "norm_overflow"
    assert "multiplies every gradient by 0" in " ".join(found.evidence)


def test_a_masked_fused_attention_is_explained_by_its_mask() -> None:
    query, key = (Operand(name, "float32", (1, 1, 2, 4), 0, 0, 0, -1.0, 1.0) for name in ("query", "key"))
    mask = Operand("attn_bias", "float32", (1, 1, 2, 2), 0, 0, 2, 0.0, 0.0)
    op = "aten._scaled_dot_product_efficient_attention"
    found = explained(event(op=op, kind="nan", nan=4, posinf=0, operands=(query, key, mask)))
    assert found.cause == "all_masked_row" and "a mask with 2 -inf" in found.evidence[0]


# ------------------------------------------------------------------------------------------------ any event
NUMBERS = st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, -1.0, 1.0, 65504.0])
COUNTS = st.sampled_from([0, 0, 1, 7])
ARGUMENTS = ["self", "other", "mat1", "mat2", "tensor1", "tensor2", "input", "weight", "exponent", "query", "key"]
ARGUMENTS += ["self[0]", "self[1]", "other[2]", "target", "log_probs", "rstd", "attn_mask", "vec", "A", "unheard_of"]
DTYPES = ["float16", "bfloat16", "float32", "complex64", "float8_e4m3fn", "int64", "torch.float32", ""]
SHAPES = st.lists(st.sampled_from([0, 1, 2, 7, 10**6]), max_size=4).map(tuple)
SCALARS = st.dictionaries(
    st.sampled_from(
        ["eps", "exponent", "other", "dim", "ord", "correction", "scale", "ignore_index", "alpha", "value"]
    ),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
)


@st.composite
def operands(draw: st.DrawFn) -> Operand:
    ends = sorted((draw(NUMBERS) or 0.0, draw(NUMBERS) or 0.0))
    low, high = ends if draw(st.booleans()) else (None, None)
    name, dtype = draw(st.sampled_from(ARGUMENTS)), draw(st.sampled_from(DTYPES))
    absmin, zero = draw(st.none() | st.just(1e-30)), draw(st.none() | COUNTS)
    return Operand(name, dtype, draw(SHAPES), draw(COUNTS), draw(COUNTS), draw(COUNTS), low, high, absmin, zero)


@st.composite
def lineages(draw: st.DrawFn) -> Lineage:
    ids = st.lists(st.integers(0, 4), max_size=2).map(tuple)
    events = []
    for id in range(1, draw(st.integers(2, 4))):
        op = draw(st.none() | st.sampled_from(sorted(OPS)).map(lambda name: f"aten.{name}") | st.just("lib::f_"))
        node = draw(st.none() | st.sampled_from(sorted(NODES)).map(lambda name: f"{name}Backward0"))
        kind = draw(st.sampled_from(["nan", "inf", "inserted", "uninit", "external", "propagated"]))
        category = draw(st.sampled_from([None, "batch", "param", "buffer", "moment", "constant", "unobserved"]))
        phase, dtype = draw(st.sampled_from([None, "forward", "backward", "optimizer"])), draw(st.sampled_from(DTYPES))
        found = OpEvent(id, id, op, kind, phase, None, node, None, 1, dtype)
        found.nan, found.posinf, found.neginf = draw(COUNTS), draw(COUNTS), draw(COUNTS)
        found.shape, found.first_bad, found.category = draw(SHAPES), draw(st.integers(-1, 20)), category
        found.nan_parents, found.inf_parents, found.scalars = draw(ids), draw(ids), draw(SCALARS)
        found.operands = tuple(draw(st.lists(operands(), max_size=3)))
        found.module = draw(st.sampled_from([None, "", "block.3.wo", "<Loss>"]))
        events.append(found)
    size = st.floats() | st.just(0.0)
    growth = draw(st.lists(st.tuples(st.just(1), size, size, st.just(0)), max_size=2))
    magnitudes = draw(st.lists(st.tuples(st.just(0), st.sampled_from(["block.1.wo", "block.2.wo", "x"]), size)))
    skipped = draw(st.lists(st.just(1), max_size=1))
    sinks = [Sink("param", "w", tuple((id, "nan") for id in draw(ids)), 1, 9)]
    huge = draw(st.lists(st.tuples(st.just("w"), size), max_size=1))
    return Lineage(events, sinks, growth, skipped, huge_params=huge, magnitudes=magnitudes)


@settings(deadline=None, max_examples=300)
@given(lineages())
def test_any_event_gets_a_known_cause_and_at_most_three_checks(lineage: Lineage) -> None:
    for found in lineage.events:
        explanation = explain(lineage, found)
        assert explanation.cause in CAUSES
        assert explanation.evidence and all(text.endswith(".") for text in explanation.evidence)
        assert 1 <= len(explanation.advice) <= 3


@settings(deadline=None, max_examples=150)
@given(lineages())
def test_an_explanation_depends_on_nothing_but_its_arguments(lineage: Lineage) -> None:
    first = [explain(lineage, found) for found in lineage.events]
    assert first == [explain(lineage, found) for found in lineage.events]
