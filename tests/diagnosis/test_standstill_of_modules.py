"""The rule of a standstill on traces of modules, whole ones and while they go on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import nantrace
from nantrace.diagnosis.standstill import standstill


def loop(bad: Sequence[bool], overflow: bool = False, **options: Any) -> Any:
    """A traced loop under a scaler; the loss of a step is 0 * log(0) where `bad` says so."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127 if overflow else 2.0**16)
    x = torch.linspace(-1, 1, 12).reshape(4, 3)
    with nantrace.trace(model, optimizer=optimizer, **options) as tracer:
        for broken in bad:
            optimizer.zero_grad()
            output = model(x).pow(2).mean() + 1.0
            loss = torch.log(output * 0.0) * 0.0 if broken else output * (1e3 if overflow else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return tracer


def judged(bad: Sequence[bool], **options: Any) -> Any:
    return nantrace.diagnose(loop(bad, on_nonfinite="ignore", **options).trace)


def test_a_bad_loss_in_every_step_is_a_fault_without_ops() -> None:
    verdict = judged([True] * 4)
    assert (verdict.status, verdict.stage, verdict.origin.step) == ("fault", "loss", 0)
    assert "In steps 0 to 3 the loss was nonfinite before it was scaled" in " ".join(verdict.evidence)


@pytest.mark.parametrize("bad", ([True], [True, True, False], [True, False, True]))
def test_skips_that_did_not_go_on_stay_contained(bad: Sequence[bool]) -> None:
    assert judged(bad).status == "contained"


def test_an_overflow_of_the_scale_stays_contained() -> None:
    assert judged([False] * 3, overflow=True).status == "contained"


def test_a_running_trace_warns_at_the_second_stuck_step_and_not_before() -> None:
    with pytest.warns(nantrace.NantraceWarning, match=r"step 1: .*first nonfinite tensor: loss"):
        loop([True, True])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop([True, False, True])


@pytest.mark.parametrize(
    ("options", "origin", "warned"),
    (
        ({"stats": "none"}, 1, "The loss of step 1 was nan"),
        ({"every": 5}, 2, r"step 2: .*first nonfinite tensor: loss"),  # the step after a bad one is recorded in detail
    ),
)
def test_a_ledger_without_tensors_stands_still_as_well(options: dict[str, Any], origin: int, warned: str) -> None:
    verdict = judged([False, *[True] * 4], **options)
    assert (verdict.status, verdict.origin.step, verdict.origin.tensor) == ("fault", origin, "loss")
    assert "In steps 1 to 4 the loss was nonfinite before it was scaled" in " ".join(verdict.evidence)
    assert judged([False, True, True, False], **options).status == "contained"
    with pytest.warns(nantrace.NantraceWarning, match=warned):
        loop([False, True, True], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop([False, True, False, True], **options)


def test_a_stuck_step_is_raised_where_it_was_asked_for() -> None:
    with pytest.raises(nantrace.NonfiniteError, match="step 2"):
        loop([False, True, True, True], on_nonfinite="raise")


def test_optimizers_that_take_turns_stand_still_when_one_of_them_skips_again() -> None:
    def turn(step: int, name: str) -> dict[str, Any]:
        return {"step": step, "loss": float("nan"), "skipped": 1, "committed": 0, "skipped_by": [name]}

    assert standstill([turn(0, "d.weight"), turn(1, "g.weight")]) == ()
    assert standstill([turn(0, "d.weight"), turn(1, "g.weight"), turn(2, "d.weight")]) == (0, 1, 2)
