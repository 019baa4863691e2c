"""A difference of two traces as text for a terminal: at most `width` columns, whatever the names hold."""

from __future__ import annotations

import shlex

from nantrace.diagnosis.difference.compare import Difference
from nantrace.diagnosis.difference.words import paragraphs
from nantrace.render.cells import harmless, wrap


def text(difference: Difference, *, width: int = 80, ascii: bool = False) -> str:
    """The lines that `nantrace diff` prints, joined by newlines; `ascii` leaves out every character beyond ASCII."""
    lines: list[str] = []
    for indent, words in paragraphs(difference):
        lines += _wrapped(harmless(words, ascii), max(width, 40), indent) if words else [""]
    return "\n".join(lines)


def _wrapped(words: str, width: int, indent: int) -> list[str]:
    """Further lines of a paragraph stand four columns in."""
    return wrap(words, width, indent + 4, " " * indent)


def next_command(difference: Difference) -> str | None:
    """The command to type next: the report of the trace that went nonfinite, else of B; None for traces in memory."""
    first = difference.first
    if first is None and not (difference.a.only_nonfinite or difference.b.only_nonfinite):
        return None
    in_a = first.a.nonfinite and not first.b.nonfinite if first else not difference.b.only_nonfinite
    path = (difference.a if in_a else difference.b).path
    return None if path is None else shlex.join(["nantrace", "report", path])
