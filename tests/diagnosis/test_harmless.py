"""What is said of nonfinite values that were meant: which, where, and that nothing came of them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import nantrace
from nantrace.diagnosis.blame import blame
from nantrace.diagnosis.contained import still_open
from nantrace.diagnosis.modules.by_module import by_module
from nantrace.render.text import text
from tests.diagnosis.flows import Flow
from tests.diagnosis.written import NEGINF, POSINF, Written


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


def measured(measure: Callable[[Tensor, Tensor], object]) -> nantrace.Trace:
    """A sound step with a number for the log: `measure` is given the output and the loss."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nantrace.trace(model, optimizer=optimizer, ops=True, on_nonfinite="raise") as tracer:
        out = model(torch.rand(8, 4))
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        measure(out, loss)
    return tracer.trace


@torch.no_grad()
def perplexity(out: Tensor, loss: Tensor) -> float:
    return (loss + 1000).exp().item()


@torch.no_grad()
def accuracy(out: Tensor, loss: Tensor) -> float:
    counted = torch.zeros_like(out)
    return ((out > 0) * counted).sum().div(counted.sum()).item()


@pytest.mark.parametrize(
    ("measure", "why"),
    [
        (perplexity, "exp(x) exceeds 3.4e+38, the largest float32 value, from x = 88.7 on; the input reached 1,000."),
        (accuracy, "aten.div divided 0 by 0: its divisor was 0."),
        (lambda out, loss: (loss + 1000).exp().item(), "from x = 88.7 on"),  # without torch.no_grad
    ],
)
def test_a_number_for_the_log_is_told_and_raises_no_alarm(
    measure: Callable[[Tensor, Tensor], object], why: str
) -> None:
    trace = measured(measure)
    verdict = nantrace.diagnose(trace)
    assert (verdict.status, verdict.origin, verdict.advice) == ("expected", None, ())
    told = " ".join(verdict.evidence)
    assert "test_harmless.py" in verdict.evidence[0] and why in told and "a number for the log" in told
    shown = text(trace, verdict)
    assert "FIRST NONFINITE" not in shown and "CONTAINED" not in shown
    assert "EXPECTED: nonfinite values that training does not feel" in shown


@pytest.mark.parametrize(
    "measure",
    [
        lambda out, loss: bool(torch.isfinite((loss + 1000).exp())),  # the step asks: something may hang on it
        lambda out, loss: (loss + 1000).exp().clamp(max=1.0),  # somebody may go on with what is finite again
    ],
)
def test_a_value_that_the_step_tests_or_mends_stays_contained(measure: Callable[[Tensor, Tensor], object]) -> None:
    assert nantrace.diagnose(measured(measure)).status == "contained"


def test_advice_on_what_was_contained_does_not_ask_whether_the_step_stays_finite() -> None:
    verdict = nantrace.diagnose(measured(lambda out, loss: (loss + 1000).exp().clamp(max=1.0)))
    assert verdict.status == "contained" and len(verdict.advice) <= 3
    assert verdict.advice[0].startswith(
        "aten.clamp keeps it out of the result. It does harm where that lets it through"
    )
    assert verdict.advice[1].startswith("To be rid of it: clamp the input below 88 at ")
    assert not [text for text in verdict.advice if "stays finite" in text or "stay finite" in text]


def test_what_mends_it_comes_before_what_compares() -> None:
    found = still_open(
        (
            "Print the indices where the input is 0.",
            "If the input is a softmax, take log_softmax and compare.",
            "Replace the input by torch.where(x > 0, x, 1): does the step stay finite?",
        )
    )
    assert found[1] == "To be rid of it: replace the input by torch.where(x > 0, x, 1)."
    assert found[0].startswith("Print") and found[2].startswith("If the input is a softmax")


def test_advice_of_modules_on_what_reached_nothing_does_not_ask_that_either() -> None:
    written = Written("float16", wo="Linear")
    with written.call(""):
        written.run("wo", made=POSINF)
        written.run("clamp", given=POSINF)
    written.loss()
    verdict = by_module(written.trace())
    assert verdict.status == "contained"
    assert "To be rid of it: run wo in float32 (or bfloat16)." in verdict.advice
