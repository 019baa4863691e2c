"""The count of right answers counts."""

from __future__ import annotations

from typing import Any

from nantrace.diagnosis.verdict import Verdict
from tests.zoo.cases import CASES
from tests.zoo.count import wrong_answers


def test_a_tool_that_sees_nothing_is_right_on_the_harmless_steps_only() -> None:
    wrong = {case.name for case, _ in wrong_answers(lambda step, model, batch: Verdict("clean"))}
    quiet_is_right = {case.name for case in CASES if case.expect.harmless} | {"gate_parameter_saturated"}
    assert wrong == {case.name for case in CASES} - quiet_is_right
    assert len(wrong) == 57


def test_an_exception_is_a_wrong_answer() -> None:
    def broken(step: Any, model: Any, batch: Any) -> Verdict:
        raise ValueError("no")

    wrong = list(wrong_answers(broken))
    assert len(wrong) == len(CASES)
    assert wrong[0][1] == ["ValueError: no"]
