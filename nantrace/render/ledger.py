"""The ledger of a trace as a table of words: one row a step, and what was decided beside the steps.

Shows the step that a verdict names and its neighbours, then the steps that did not go as they should before those that
did; the whole of it stands in the trace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nantrace.diagnosis.symptom import symptoms
from nantrace.diagnosis.verdict import Verdict
from nantrace.events import Trace
from nantrace.steps import had_nonfinite_numbers, likely_places, numbers_of, told, was_skipped

HEAD = ("step", "update", "committed", "loss", "lr", "|grad|", "scale", "")
#: Which columns stand at the right; which give way where the page is narrow; which are left out then.
RIGHT, SHRINK, DROP = (*7 * (True,), False), (7,), (4, 5)
_SHOWN = 8
_AROUND = 2  # steps before and after the one that the verdict names
_DECISIONS = 12


def has_table(trace: Trace) -> bool:
    """Whether the steps are worth a table: there are several, or one that was skipped or decided upon."""
    return len(trace.steps) > 1 or any(step.get("skipped") or step.get("decisions") for step in trace.steps)


def ledger_rows(trace: Trace, verdict: Verdict, most: int = _SHOWN) -> tuple[list[list[str]], int]:
    """The head and at most `most` steps, in order, and how many are not shown.

    The step that the verdict names comes first and the steps around it, then those that did not go as they should, the
    latest before the others.
    """
    steps = trace.steps
    near = _around(trace, verdict)
    # Of those that went as they should none but the last can be among the first in the order.
    last = range(max(0, len(steps) - most - len(near)), len(steps))
    order = sorted(
        {*near, *last, *likely_places(steps, _did_not_go_as_it_should)},
        key=lambda place: (near.get(place, _AROUND + 1), is_plain(steps[place]), place < len(steps) - 2, -place),
    )
    chosen = sorted(order[:most])
    return [list(HEAD), *([*cells(steps[place])] for place in chosen)], len(steps) - len(chosen)


def _around(trace: Trace, verdict: Verdict) -> dict[int, int]:
    """How far the places of steps next to the one that a verdict names lie from it."""
    numbers = numbers_of(trace.steps)
    if verdict.origin is None or verdict.origin.step not in numbers:
        return {}
    named = numbers.index(verdict.origin.step)
    around = range(max(0, named - _AROUND), min(named + _AROUND + 1, len(numbers)))
    return {place: abs(place - named) for place in around}


def is_plain(step: Mapping[str, Any]) -> bool:
    """Whether a step went as steps should: nothing skipped, nothing nonfinite, nothing decided."""
    numbers = [step.get("loss"), step.get("gradient_norm")]
    finite = all(not isinstance(value, float) or math.isfinite(value) for value in numbers)
    return finite and not step.get("skipped") and not step.get("batch_check")


def _did_not_go_as_it_should(rows: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    return had_nonfinite_numbers(rows) | was_skipped(rows)


def cells(step: Mapping[str, Any]) -> list[str]:
    """One step, a cell for each word of `HEAD`."""
    committed = step.get("committed_total")
    return [
        str(step.get("step", "")),
        _update(step),
        f"{committed:,}" if isinstance(committed, int) else ".",
        _number(step.get("loss")),
        _number(step.get("lr")),
        _number(step.get("gradient_norm")),
        _number(step.get("scale_before")),
        "; ".join(_remarks(step)),
    ]


def _update(step: Mapping[str, Any]) -> str:
    """The number of the last attempted update, or a point where none was attempted."""
    attempted = step.get("attempted_total")
    return f"{attempted:,}" if step.get("attempted") and isinstance(attempted, int) else "."


def _remarks(step: Mapping[str, Any]) -> list[str]:
    remarks = []
    if step.get("skipped"):
        names = [str(name) for name in step.get("skipped_by") or ()]
        others = f" +{len(names) - 1}" if len(names) > 1 else ""
        by = f": {names[0]}{others}" if names else ""
        remarks.append(f"{'partly skipped' if step.get('committed') else 'skipped'}{by}")
    elif step.get("attempted") and not step.get("committed"):
        remarks.append("not committed")
    elif not step.get("attempted") and step.get("backwards"):
        remarks.append("no update")
    if (step.get("backwards") or 0) > 1:
        remarks.append(f"{step['backwards']} backward passes")
    before, after = step.get("gradient_norm_before_clipping"), step.get("gradient_norm")
    if isinstance(before, float) and isinstance(after, float) and before > 1.001 * after:
        remarks.append(f"clipped from {_number(before)}")
    if step.get("batch_id") is not None and not is_plain(step):
        remarks.append(f"batch {step['batch_id']}")
    return remarks


def decisions(trace: Trace) -> list[str]:
    """What was put on record, as sentences: "Step 6, quarantine: batch 17 holds NaN." The latest, in order."""
    found = []
    for step in told(trace.steps):
        for said in step.get("decisions") or ():
            reason = said.get("reason") or said.get("path")
            kind = str(said.get("kind", "")).replace("_", " ")
            found.append(f"Step {step.get('step')}, {kind}" + (f": {str(reason).rstrip('.')}." if reason else "."))
    return found[-_DECISIONS:]


def observations(trace: Trace, verdict: Verdict) -> list[str]:
    """What stands out over the steps, each with what it proves and leaves open; of one step the verdict has said it."""
    found = symptoms(trace, verdict.status) if has_table(trace) else ()
    return [" ".join((each.sentence, *each.evidence, each.proves, each.leaves_open)) for each in found]


def _number(value: Any) -> str:
    if value is None:
        return "."
    if isinstance(value, (list, tuple)):
        distinct = list(dict.fromkeys(_number(part) for part in value))
        return ", ".join(distinct[:2]) + (", ..." if len(distinct) > 2 else "")
    if isinstance(value, (int, float)):
        whole = math.isfinite(value) and float(value).is_integer() and 1 < abs(value) < 1e9
        return f"{int(value):,}" if whole else f"{value:.4g}"
    return str(value)
