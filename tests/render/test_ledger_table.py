"""The table of the ledger in a report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from nantrace.diagnosis.verdict import Origin, Verdict
from nantrace.events import EVENT, Trace
from nantrace.render.ledger import ledger_rows
from nantrace.render.report import Report


def _step(number: int, **other: Any) -> Mapping[str, Any]:
    return {
        "step": number,
        "first_seq": 0,
        "events": 0,
        "attempted": 1,
        "committed": 1,
        "skipped": 0,
        "attempted_total": number + 1,
        "committed_total": number + 1,
        "loss": 0.5,
        **other,
    }


def _report(*steps: Mapping[str, Any]) -> Report:
    return Report(Verdict("clean"), Trace(np.zeros(0, EVENT), (), steps=steps))


def _skip(number: int) -> Mapping[str, Any]:
    return _step(
        number,
        committed=0,
        skipped=1,
        committed_total=number,
        skipped_by=["a.w", "b.w", "c.w"],
        scale_before=65536.0,
        gradient_norm=math.inf,
    )


def test_one_plain_step_needs_no_table() -> None:
    assert "committed" not in str(_report(_step(0)))


def test_a_skipped_step_is_told_with_its_counts_and_parameters() -> None:
    lines = str(_report(_skip(4199))).splitlines()
    (head,) = [number for number, line in enumerate(lines) if line.startswith("step")]
    assert lines[head + 1].split()[:7] == ["4199", "4,200", "4,199", "0.5", ".", "inf", "65,536"]
    assert "skipped: a.w +2" in lines[head + 1]


def test_of_many_steps_those_that_went_wrong_are_shown() -> None:
    said = str(_report(*(_skip(n) if n == 7 else _step(n) for n in range(40))))
    assert "skipped: a.w +2" in said
    assert "and 32 more steps" in said


@pytest.mark.parametrize(("named", "around"), ((0, [0, 1, 2]), (12, [10, 11, 12, 13, 14]), (29, [27, 28, 29])))
def test_the_step_of_the_verdict_and_its_neighbours_are_shown(named: int, around: list[int]) -> None:
    trace = Trace(np.zeros(0, EVENT), (), steps=[_step(n, loss=math.nan if n >= named else 0.5) for n in range(30)])
    verdict = Verdict("fault", origin=Origin(step=named, phase="loss", tensor="loss", kind="nan"))
    rows, hidden = ledger_rows(trace, verdict)
    shown = [int(row[0]) for row in rows[1:]]
    assert shown == sorted(shown)
    assert (len(shown), hidden) == (8, 22)
    assert set(around) <= set(shown)
    assert "and 22 more steps" in str(Report(verdict, trace))


def test_decisions_are_told_whatever_the_steps_did() -> None:
    said = str(_report(_step(0, decisions=[{"kind": "warm_restart", "reason": "the loss rose"}])))
    assert "Step 0, warm restart: the loss rose." in said


def test_the_ledger_of_a_report_is_strict_json() -> None:
    plain = json.loads(json.dumps(_report(_skip(2)).to_dict(), allow_nan=False))
    assert plain["ledger"][0]["gradient_norm"] == {"finite": False, "value": "inf"}
    assert plain["ledger"][0]["step"] == 2


def test_a_norm_after_clipping_says_what_it_was_clipped_from() -> None:
    clipped = {"gradient_norm": 1.0, "clip": {"max_norm": 1.0}, "gradient_norm_before_clipping": 16.25}
    left = {"gradient_norm": 0.5, "clip": {"max_norm": 1.0}, "gradient_norm_before_clipping": 0.5}
    said = str(_report(_step(0, **clipped), _step(1, **left)))
    assert said.count("clipped from") == 1 and "clipped from 16.25" in said
