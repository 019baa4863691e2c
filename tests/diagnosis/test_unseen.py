"""What a trace that was cut short is called, and what it says of what it does not hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nantrace.diagnosis.diagnose import diagnose
from nantrace.events import Narrowed, Raised, Trace

from .written import Written


def _trace(finished: int, more_rows: int = 0, **loss: Any) -> Trace:
    """Steps of one loss each, and rows of one that has not ended."""
    written = Written()
    for _ in range(finished):
        written.loss(**loss)
        written.end()
    for _ in range(more_rows):
        written.loss(**loss)
    trace = written.trace()
    return dataclasses.replace(trace, steps=trace.steps[:finished])


def test_a_file_that_was_not_closed_and_holds_no_step_is_not_clean() -> None:
    verdict = diagnose(dataclasses.replace(_trace(0), complete=False))
    assert verdict.status == "inconclusive"
    assert verdict.evidence == (
        "No step ended in this trace, which was not closed (its process was killed, or its block goes on): it holds "
        "nothing of step 0.",
    )
    assert "mark_step()" in verdict.advice[0]


@pytest.mark.parametrize(("more", "held"), [(0, "nothing of step 3"), (5, "only the first 5 tensors of step 3")])
def test_finite_steps_before_the_kill_say_nothing_of_the_one_after_them(more: int, held: str) -> None:
    verdict = diagnose(dataclasses.replace(_trace(3, more), complete=False))
    assert verdict.status == "inconclusive"
    assert verdict.evidence[0].endswith(f"it ends with step 2 and holds {held}.")
    assert verdict.evidence[1].startswith(f"None of the {3 + more} tensors seen")


def test_a_fault_before_the_kill_stays_a_fault() -> None:
    whole = _trace(2, nan=1)
    verdict, cut = diagnose(whole), diagnose(dataclasses.replace(whole, complete=False))
    assert verdict.status == "fault"
    assert dataclasses.replace(cut, evidence=verdict.evidence) == verdict
    assert cut.evidence[:-1] == verdict.evidence
    assert "was not closed" in cut.evidence[-1]


def test_an_exception_that_broke_a_step_off_leaves_it_open_whether_the_trace_is_clean() -> None:
    verdict = diagnose(dataclasses.replace(_trace(4), raised=Raised("RuntimeError", "shapes differ", 3)))
    assert verdict.status == "inconclusive"
    assert verdict.evidence[0] == (
        "The block ended with RuntimeError: shapes differ, in step 3; what would have come after it was not seen."
    )


def test_an_exception_between_two_steps_leaves_the_steps_before_it_clean() -> None:
    verdict = diagnose(dataclasses.replace(_trace(4), raised=Raised("KeyboardInterrupt")))
    assert verdict.status == "clean"
    assert verdict.evidence[-1] == "The block ended with KeyboardInterrupt, between two steps."


def test_a_whole_trace_has_nothing_to_add() -> None:
    verdict = diagnose(_trace(2))
    assert verdict.status == "clean" and not any("closed" in sentence for sentence in verdict.evidence)


@pytest.mark.parametrize(("step", "status"), [(1, "clean"), (2, "inconclusive")])
def test_one_step_of_a_cut_trace_is_judged_by_whether_it_ended(step: int, status: str) -> None:
    whole = _trace(2, 1)
    rows = whole.events[whole.events["step"] == step]
    one = dataclasses.replace(whole, events=rows, narrowed=Narrowed((f"step {step}",), (step,)))
    assert diagnose(dataclasses.replace(one, complete=False)).status == status


def test_what_is_no_trace_is_refused_in_a_sentence() -> None:
    with pytest.raises(
        TypeError, match=r"diagnose got a str: pass a Trace \(nantrace\.load\(path\), tracer\.trace\)\."
    ):
        diagnose("step.h5")  # type: ignore[arg-type]
