"""What is said of nonfinite values that were meant: which, where, and that nothing came of them."""

from __future__ import annotations

import re

from nantrace.diagnosis.blame import blame
from nantrace.diagnosis.modules.by_module import by_module
from tests.diagnosis.flows import Flow
from tests.diagnosis.written import NEGINF, Written


def test_an_expected_step_says_which_op_put_in_what_and_on_which_line() -> None:
    flow = Flow()
    flow.op("aten.masked_fill", "inserted", neginf=2, module="attn", where="model.py:12 in forward")
    verdict = blame(flow.lineage).verdict
    assert verdict.status == "expected"
    assert verdict.evidence[0] == (
        "aten.masked_fill in attn at model.py:12 in forward put out 2 -inf among 4 elements (float32)."
    )
    assert verdict.evidence[1] == "No loss, gradient, parameter, moment or buffer was harmed by it."


def test_one_place_is_told_once_and_many_are_counted() -> None:
    flow = Flow()
    for layer in (0, 0, 1, 2, 3):
        flow.op("aten.masked_fill", "inserted", neginf=1, module=f"layers.{layer}", where="model.py:12 in forward")
    said = blame(flow.lineage).verdict.evidence
    assert [bool(re.search(rf"layers\.{n}", said[n])) for n in range(3)] == [True] * 3
    assert said[3] == "1 more place did the same."


def test_a_clean_step_has_nothing_to_tell() -> None:
    assert blame(Flow().lineage).verdict.evidence == ()


def test_a_trace_of_modules_says_where_its_marks_are() -> None:
    written = Written()
    with written.call(""), written.call("attn", given=NEGINF):
        written.run("attn.softmax", given=NEGINF)
    written.loss()
    verdict = by_module(written.trace())
    assert verdict.status == "expected"
    assert verdict.evidence[0].startswith(
        "2 of 7 tensors hold -inf only, as masks do: attn args[0], attn.softmax args[0]."
    )
