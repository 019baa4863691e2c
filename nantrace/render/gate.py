"""What a gate found as text for a terminal: whether it lets the run pass, then each rule with its numbers."""

from __future__ import annotations

import shlex

from nantrace.diagnosis.gate.rule import Gate, Rule
from nantrace.render.cells import harmless, pad, wrap
from nantrace.render.wording import plural

_WORDS = {"passed": "passed", "failed": "FAILED", "not_checked": "not checked"}
_STATUS, _NAME = max(map(len, _WORDS.values())), len("loss_distribution")
_NARROW = 72  # below, a sentence stands under its rule


def text(gate: Gate, *, width: int = 80, ascii: bool = False) -> str:
    """The lines that `nantrace gate` prints, joined by newlines.

    Args:
        gate: what `nantrace.gate` found.
        width: columns of the terminal, at least 40.
        ascii: no character beyond ASCII.
    """
    width = max(width, 40)
    lines = wrap(harmless(_headline(gate), ascii), width, 4, "")
    lines += wrap(harmless(_window(gate), ascii), width, 4, "    ") + [""]
    for rule in gate.rules:
        lines += _rule(rule, width, ascii)
    if gate.notes:
        lines.append("")
    for note in gate.notes:
        lines += wrap(harmless(note, ascii), width, 4, "")
    return "\n".join(lines)


def next_command(gate: Gate) -> str | None:
    """The command to type next: the report of a run that did not pass; None for one that did, or in memory."""
    if not gate.failed or gate.trace is None:
        return None
    return shlex.join(["nantrace", "report", gate.trace])


def _headline(gate: Gate) -> str:
    failed, left = len(gate.failed), len(gate.not_checked)
    word = "PASSES" if gate.passed else "FAILS"
    parts = [f"{plural(failed, 'rule')} of {len(gate.rules)} failed" if failed else ""]
    parts.append(f"{left} not checked{', which fails a strict gate' if gate.strict else ''}" if left else "")
    told = "; ".join(part for part in parts if part)
    return f"{word}   {gate.trace or 'trace in memory'}" + (f"   {told}" if told else "")


def _window(gate: Gate) -> str:
    first, last = gate.steps
    after = f", after a warm-up of {plural(gate.warm_up, 'update')}" if gate.warm_up else ""
    beside = f" Beside {gate.reference}." if gate.reference else ""
    return (
        f"Steps {first} to {last}{after}: {plural(gate.attempted, 'update')} attempted, {gate.committed:,} committed, "
        f"{gate.skipped:,} skipped.{beside}"
    )


def _rule(rule: Rule, width: int, ascii: bool) -> list[str]:
    head = f"{pad(_WORDS[rule.status], _STATUS)}  {pad(rule.name, _NAME)}"
    sentence = harmless(rule.sentence, ascii)
    if width < _NARROW:
        return [head.rstrip(), *wrap(sentence, width, 4)]
    indent = _STATUS + _NAME + 4
    return wrap(sentence, width, indent, f"{head}  ")
