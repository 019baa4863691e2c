"""What a module trace alone, without ops and without replays, answers to the further cases, one by one.

An op is not asked of it. What it cannot tell it may leave open; a wrong place or stage is listed here by name.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

import nantrace
from nantrace.diagnosis.verdict import Origin, Verdict
from tests.zoo.answers import _answers
from tests.zoo.case import ANY, Answer, Case
from tests.zoo.further import CASES

#: Nothing nonfinite shows in a row of a module, or the stage stays open.
_LEFT_OPEN = {
    "attack_along_a_zero_gradient",
    "average_corrected_too_early",
    "categorical_without_an_action",
    "custom_backward_in_half",
    "custom_backward_takes_exp",
    "feature_does_not_fit_float",
    "func_grad_of_a_length",
    "func_gradient_is_written_by_hand",
    "gradient_was_never_cleared",
    "hook_cleans_the_gradient_of_a_root",
    "inner_loop_learning_rate",
    "length_through_data",
    "low_rank_update_is_merged",
    "masked_row_is_made_zero",
    "master_weights_leave_the_range",
    "mixing_weight_is_nan",
    "numpy_makes_a_feature",
    "one_member_of_an_ensemble",
    "padding_row_is_projected",
    "per_sample_gradients",
    "rate_of_step_zero",
    "ratio_clamped_after_exp",
    "rotary_base_becomes_infinite",
    "row_of_zeros_becomes_integers",
    "sequences_are_padded_with_nan",
    "sigma_turns_negative",
    "sigmoid_written_out",
    "softplus_by_hand_in_where",
    "teacher_is_nan",
    "thread_prepares_the_data",
    "two_impossible_paths_erased_by_their_mask",
}
_WRONG = {
    # A NaN of forward, replaced before anybody saw it: only its gradient shows.
    "cleaned_inside_a_checkpoint",
    "empty_neighbourhood_replaced_after_softmax",
    "library_divergence_of_masked_policies",
    "masked_row_is_made_zero_too_late",
    # -inf among other values may be a mask that the module which makes NaN of it was meant to read.
    "noise_level_of_zero_is_embedded",
    # What a loss reads beside the model's output is seen in the batch alone, and the step has a loader of its own.
    "loader_yields_a_bad_target",
    # A method that is called by its name, without the module, is code of whoever calls it.
    "log_cosh_in_a_method",
    # Parameters are looked at where an optimizer updates them.
    "hand_written_update_beside_a_skip",
    # Rows of padding and rows that fail stand in the same tensors.
    "padding_is_dropped_beside_a_fault",
    # Behind a gradient that was asked for, code of the model and code outside it look the same.
    "second_derivative_of_a_power",
}


def _traced(case: Case) -> Verdict:
    model, batch, step = case.build()
    optimizer = getattr(step, "optimizer", None)
    tracer = nantrace.trace(model, on_nonfinite="ignore", optimizer=optimizer, batch=batch)
    with contextlib.suppress(Exception), tracer:  # some cases raise: that is what they are about
        step(model, batch)
    return nantrace.diagnose(tracer.trace)


def _fits(answer: Answer, verdict: Verdict) -> bool:
    if answer.verdict in ("expected", "clean"):
        return verdict.status in ("expected", "clean", "contained")
    origin = verdict.origin or Origin()
    pairs = [(verdict.status, answer.verdict), (verdict.stage, answer.stage), (origin.module, answer.module)]
    named = answer.tensor is ANY or str(answer.tensor) in (origin.tensor or "")
    return named and all(want is ANY or got == want for got, want in pairs)


def test_no_further_case_is_answered_wrongly_but_those_listed() -> None:
    open_, wrong = set(), set()
    for case in CASES:
        verdict = _traced(case)
        if not any(_fits(answer, verdict) for answer in (*_answers(case.expect), *case.expect.alts)):
            unsure = verdict.status in ("clean", "expected", "inconclusive") or verdict.stage is None
            (open_ if unsure and not case.expect.harmless else wrong).add(case.name)
    assert (open_, wrong) == (_LEFT_OPEN, _WRONG)


def test_a_step_that_a_check_leaves_out_is_contained_where_an_optimizer_is_known() -> None:
    case = next(case for case in CASES if case.name == "nan_loss_returns_early")
    model, batch, step = case.build()
    tracer = nantrace.trace(model, on_nonfinite="ignore", optimizer=torch.optim.SGD(model.parameters()), batch=batch)
    with tracer:
        step(model, batch)
    verdict = nantrace.diagnose(tracer.trace)
    assert (verdict.status, verdict.stage) == ("contained", "forward")


@pytest.mark.parametrize(
    ("name", "said"),
    (
        ("func_grad_of_a_length", "no backward was seen to write it"),
        ("guard_too_late_for_batch_norm", "No backward followed that forward"),
        ("one_member_of_an_ensemble", "inside a functorch transform"),
        ("numpy_makes_a_feature", "read from elsewhere, such as a file, numpy or an attribute"),
        ("hand_written_update_beside_a_skip", "The gradient of scale is nonfinite too, and no optimizer read it"),
        ("loader_yields_a_bad_target", "Not seen: whether a target was nonfinite already"),
        ("ratio_clamped_after_exp", "Forward read values up to 348, of which exp is infinite"),
        ("sigma_turns_negative", "sigma, positive in every step before, is -0.98 since the last update"),
        ("softplus_by_hand_in_where", "Forward read values up to 150, of which exp is infinite"),
        ("teacher_is_nan", "its own weights were not looked at"),
        ("padding_row_is_projected", "Not seen: a value that dies inside a module, settings of the optimizer"),
        ("rate_of_step_zero", "code after backward."),
    ),
)
def test_what_a_module_trace_cannot_know_is_said(name: str, said: str) -> None:
    case = next(case for case in CASES if case.name == name)
    assert said in " ".join(_traced(case).evidence)
