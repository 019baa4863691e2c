"""The judge of verdicts is judged: right answers pass, each kind of wrong one is told apart."""

from __future__ import annotations

import dataclasses

import pytest

from nantrace.diagnosis.verdict import Origin, Verdict
from tests.zoo.answers import matches
from tests.zoo.case import ANY, Case
from tests.zoo.cases import CASES

_BY_NAME = {case.name: case for case in CASES}


def _right(case: Case) -> Verdict:
    expect = case.expect
    if expect.harmless:
        return Verdict(expect.verdict)
    names = {"input": expect.batch_bad, "state": expect.param_bad + expect.buffers_bad + expect.state_bad}
    tensor = next(iter(names.get(expect.stage or "", ())), None)
    origin = Origin(
        module="anywhere" if expect.module is ANY else expect.module,
        op="aten.any" if expect.op is ANY else expect.op,
        node=expect.node,
        tensor=f"batch.{tensor}" if expect.stage == "input" else tensor,
    )
    return Verdict(expect.verdict, expect.stage, origin=origin)


def _but(verdict: Verdict, **changes: object) -> Verdict:
    assert verdict.origin is not None
    return dataclasses.replace(verdict, origin=dataclasses.replace(verdict.origin, **changes))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_expected_answer_is_right(case: Case) -> None:
    assert matches(case, _right(case)) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("status", ["inconclusive", "not_reproduced"])
def test_giving_up_is_never_right(case: Case, status: str) -> None:
    assert matches(case, Verdict(status)) != []  # type: ignore[arg-type]


@pytest.mark.parametrize("case", [c for c in CASES if c.expect.verdict == "fault"], ids=lambda case: case.name)
def test_silence_on_a_fault_is_wrong(case: Case) -> None:
    assert matches(case, Verdict("clean"))[0] == "status: 'clean', expected 'fault'"


@pytest.mark.parametrize("case", [c for c in CASES if c.expect.harmless], ids=lambda case: case.name)
def test_an_alarm_on_a_harmless_step_is_wrong(case: Case) -> None:
    assert matches(case, Verdict("fault", "loss", origin=Origin(op="aten.log"))) == ["status: fault, expected no fault"]


def test_a_harmless_step_may_be_called_contained() -> None:
    assert matches(_BY_NAME["legit_causal_mask"], Verdict("contained", "forward")) == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"op": "aten.mul"}, "op: 'aten.mul', expected 'aten.div'"),
        ({"module": ""}, "module: '', expected 'unit'"),
        ({"module": None}, "module: None, expected 'unit'"),
        ({"node": "PowBackward0"}, "node: 'PowBackward0', expected 'SqrtBackward0'"),
        ({"node": None}, "node: None, expected 'SqrtBackward0'"),
    ],
)
def test_one_wrong_field_is_named(changes: dict[str, object], complaint: str) -> None:
    case = _BY_NAME["sqrt_zero_backward"]
    assert matches(case, _but(_right(case), **changes)) == [complaint]


def test_another_stage_is_wrong() -> None:
    case = _BY_NAME["sqrt_zero_backward"]
    verdict = dataclasses.replace(_right(case), stage="forward")
    assert matches(case, verdict) == ["stage: 'forward', expected 'backward'"]


def test_outside_any_module_is_an_answer_that_the_model_is_not() -> None:
    case = _BY_NAME["bce_by_hand_saturated"]
    assert matches(case, _but(_right(case), module="")) == ["module: '', expected None"]


def test_a_node_is_asked_for_only_where_one_is_expected() -> None:
    case = _BY_NAME["cmvn_single_frame"]
    assert matches(case, _but(_right(case), node="StdBackward0")) == []


def test_a_contained_value_called_a_fault_is_wrong() -> None:
    case = _BY_NAME["rmsnorm_fp16_square_overflow_absorbed"]
    verdict = dataclasses.replace(_right(case), status="fault")
    assert matches(case, verdict) == ["status: 'fault', expected 'contained'"]


def test_a_bad_batch_must_be_named() -> None:
    case = _BY_NAME["silent_wav_peak_norm"]
    assert matches(case, _but(_right(case), tensor="batch.mel")) == ["tensor: 'batch.mel', expected 'wav'"]
    assert matches(case, _but(_right(case), tensor=None)) == ["tensor: None, expected 'wav'"]


def test_no_name_is_asked_of_a_tensor_that_has_none() -> None:
    assert matches(_BY_NAME["loader_in_closure_corrupt"], Verdict("fault", "input")) == []


def test_op_and_module_are_not_asked_of_the_messenger() -> None:
    assert matches(_BY_NAME["sgd_huge_lr"], Verdict("fault", "update", origin=Origin(op="aten.mse_loss"))) == []


def test_a_second_answer_is_as_good_and_is_held_to_its_own_fields() -> None:
    case = _BY_NAME["alibi_mask_in_batch_empty_row"]
    assert matches(case, Verdict("fault", "input", origin=Origin(tensor="batch.bias"))) == []
    assert matches(case, Verdict("fault", "input", origin=Origin(tensor="batch.ids"))) != []
