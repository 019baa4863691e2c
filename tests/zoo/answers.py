"""Whether a verdict is the right answer to a case. Knows the vocabulary of `case` and that of `Verdict`.

A fault or a contained value is answered rightly when status, stage, module and op agree, and the node where the
expected op runs in one; with the stage `input` or `state`, when status and stage agree and the bad tensor is named.
A harmless step is answered rightly when nothing is blamed: by "expected", by "clean", or by "contained". Any of a
case's `alts` is as good.
"""

from __future__ import annotations

from collections.abc import Iterator

from nantrace.diagnosis.verdict import Origin, Verdict
from tests.zoo.case import ANY, Answer, Case, Expectation

_BLAMELESS = ("expected", "clean", "contained")


def matches(case: Case, verdict: Verdict) -> list[str]:
    """What differs between a verdict and the case's first answer; empty if the verdict is right.

    Each entry reads like "op: 'aten.log', expected 'aten.div'".
    """
    complaints = [_differences(answer, verdict) for answer in (*_answers(case.expect), *case.expect.alts)]
    return min(complaints, key=bool)


def _answers(expect: Expectation) -> Iterator[Answer]:
    """The expectation as answers, one for each tensor that may be named."""
    if expect.harmless:
        yield Answer("expected")
    elif expect.stage in ("input", "state"):
        names = (
            expect.batch_bad if expect.stage == "input" else expect.param_bad + expect.buffers_bad + expect.state_bad
        )
        for name in names:
            yield Answer(expect.verdict, expect.stage, tensor=ANY if expect.any_tensor or not name else name)
    else:
        node = ANY if expect.node is None else expect.node
        yield Answer(expect.verdict, expect.stage, op=expect.op, module=expect.module, node=node)


def _differences(answer: Answer, verdict: Verdict) -> list[str]:
    if answer.verdict in ("expected", "clean"):
        return [] if verdict.status in _BLAMELESS else [f"status: {verdict.status}, expected no fault"]
    origin = verdict.origin or Origin()
    pairs = [
        ("status", verdict.status, answer.verdict),
        ("stage", verdict.stage, answer.stage),
        ("module", origin.module, answer.module),
        ("op", origin.op, answer.op),
        ("node", origin.node, answer.node),
    ]
    found = [f"{what}: {got!r}, expected {want!r}" for what, got, want in pairs if want is not ANY and got != want]
    if answer.tensor is not ANY and answer.tensor not in (origin.tensor or ""):
        found.append(f"tensor: {origin.tensor!r}, expected {answer.tensor!r}")
    return found
