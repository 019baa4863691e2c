"""What a trace cannot show because it was cut short: by SIGKILL, by an exception, or because it is still being written.

A trace that ends in the middle of a step may have missed the very tensor that went nonfinite, so that it is never
called clean. Gives no blame.
"""

from __future__ import annotations

import dataclasses

from nantrace.diagnosis.verdict import Verdict
from nantrace.events import Raised, Trace
from nantrace.steps import numbers_of

_MARK_STEPS = "Call tracer.mark_step() at the end of each step, or pass optimizer=: a step is whole once it has ended."
_AGAIN = "Trace it again up to the end of the step that is missing."


def limited(verdict: Verdict, trace: Trace) -> Verdict:
    """The verdict with what was not seen; `clean` and `expected` are `inconclusive` if a step was cut short."""
    sentence = _not_seen(trace)
    if sentence is None:
        return verdict
    cut = not trace.complete or (trace.raised is not None and trace.raised.step is not None)
    if verdict.status not in ("clean", "expected") or not cut:
        return dataclasses.replace(verdict, evidence=(*verdict.evidence, sentence))
    advice = _AGAIN if trace.steps else _MARK_STEPS
    seen = verdict.evidence if len(trace) else ()
    return dataclasses.replace(
        verdict, status="inconclusive", evidence=(sentence, *seen), advice=(advice, *verdict.advice)[:3]
    )


def _not_seen(trace: Trace) -> str | None:
    if trace.narrowed is not None and not _reaches_the_end(trace, trace.narrowed.steps):
        return None
    if trace.raised is not None:
        return _ended_by(trace.raised)
    return None if trace.complete else _not_closed(trace)


def _reaches_the_end(trace: Trace, steps: tuple[int, ...]) -> bool:
    """Whether a narrowed trace holds the step in which the whole one was cut short."""
    if trace.raised is not None:
        return trace.raised.step in steps
    return not set(numbers_of(trace.steps)).issuperset(steps)


def _ended_by(raised: Raised) -> str:
    if raised.step is None:
        return f"The block ended with {raised.said}, between two steps."
    return f"The block ended with {raised.said}, in step {raised.step}; what would have come after it was not seen."


def _not_closed(trace: Trace) -> str:
    why = "its process was killed, or its block goes on"
    finished = numbers_of(trace.steps)
    last = max(finished, default=-1)
    more = int((trace.events["step"] > last).sum()) if len(trace) else 0
    seen = f"only the first {more:,} tensors of step {last + 1}" if more else f"nothing of step {last + 1}"
    if not finished:
        return f"No step ended in this trace, which was not closed ({why}): it holds {seen}."
    return f"The trace was not closed ({why}): it ends with step {last} and holds {seen}."
