"""A trace and its verdict as text for a terminal: at most `width` columns, whatever the names hold."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from nantrace.diagnosis.ranks import other_rank_command
from nantrace.diagnosis.recipe import recipe
from nantrace.diagnosis.verdict import Origin, Verdict
from nantrace.events import Trace
from nantrace.render import ledger
from nantrace.render.around import rows_around
from nantrace.render.cells import columns, harmless, shorten, table, wrap
from nantrace.render.wording import (
    evidence,
    facts_of,
    header_words,
    headline,
    place_of,
    place_words,
    plural,
    way_of,
)

_STYLES = {"fault": "1;31", "contained": "1;33", "inconclusive": "1;33", "not_reproduced": "1;33"}
_ADVICE = "Check next: "
_READABLE = 100  # columns of a sentence on a wider page
_BISECT = "nantrace bisect FILE.py:step"
_HOW = "Which op made it, on which line: let step() in FILE.py return nantrace.Step(run, model, batch), then bisect it."

#: Of a table: which columns stand at the right, which give way where the page is narrow, which are left out then.
_Form = tuple[tuple[bool, ...], tuple[int, ...], tuple[int, ...]]
_ROWS: _Form = ((False, True, True, False, False, False, False, True, True, True), (3, 5, 4), (6, 4, 1, 7))


def text(trace: Trace | None, verdict: Verdict, *, width: int = 80, colour: bool = False, ascii: bool = False) -> str:
    """The report that `nantrace report` prints.

    Args:
        trace: adds the header line and the rows around the failure; None shows the verdict alone.
        verdict: what `diagnose` or `bisect` said.
        width: columns of the terminal; names give way, numbers do not.
        colour: ANSI styles for the headline and the culprit.
        ascii: no character beyond ASCII.

    Returns:
        Lines joined by newlines, without one at the end; the last may be a command, which is never broken. Control
        characters in names are written as escapes.
    """
    page = _Page(max(width, 40), colour, ascii)
    if trace is not None:
        page.words(header_words(trace))
        page.gap()
    if verdict.origin is not None:
        _first_nonfinite(page, verdict, verdict.origin)
    page.paragraph(headline(verdict), indent=4, first="", style=_STYLES.get(verdict.status, "1;32"))
    for sentence in evidence(verdict):
        page.paragraph(sentence, indent=4)
    way = way_of(verdict)
    if way:
        page.paragraph(f"Way: {way}.", indent=4)
    if verdict.replays:
        page.paragraph(f"{plural(verdict.replays, 'replay')}.", indent=4)
    for other in verdict.also:
        page.paragraph(f"Also: {place_of(other)}.", indent=4)
    if verdict.region:
        page.paragraph(f"Left under suspicion: {', '.join(verdict.region)}.", indent=4, whole=True)
    if trace is not None:
        _rows(page, trace, verdict)
        _ledger(page, trace, verdict)
        _observations(page, trace, verdict)
        _recipe(page, trace)
    _what_next(page, trace, verdict)
    return "\n".join(page.lines).rstrip("\n")


class _Page:
    """Collects lines; the one place where text meets width, colour and ASCII."""

    def __init__(self, width: int, colour: bool, ascii_only: bool) -> None:
        self.width, self.colour, self.ascii = width, colour, ascii_only
        self.lines: list[str] = []

    def paragraph(
        self, content: str, indent: int = 0, first: str | None = None, style: str | None = None, whole: bool = False
    ) -> None:
        """A sentence; names that would fill a line are cut in the middle, unless they have to be `whole`."""
        clean = harmless(content, self.ascii)
        longest = 3 * min(self.width, _READABLE) // 4
        if not whole:
            clean = " ".join(shorten(word, longest, self.ascii) for word in clean.split(" "))
        for line in wrap(clean, min(self.width, _READABLE), indent, first):
            self._put(line, style)

    def words(self, parts: Sequence[str], style: str | None = None) -> None:
        """Parts with wide gaps between them, of which none is broken at a blank that fits on a line."""
        lines = [harmless(parts[0], self.ascii)]
        for part in (harmless(part, self.ascii) for part in parts[1:]):
            longer = f"{lines[-1]}   {part}"
            if columns(longer) <= self.width - 4:
                lines[-1] = longer
            else:
                lines.append(part)
        for number, line in enumerate(lines):
            for broken in wrap(line, self.width, 4, "" if number == 0 else None):
                self._put(broken, style)

    def command(self, content: str) -> None:
        """A command to copy: never broken nor shortened, the one thing that may be wider than the page."""
        self._put(f"Next: {harmless(content, self.ascii)}", None)

    def gap(self) -> None:
        if self.lines and self.lines[-1]:
            self.lines.append("")

    def table(self, rows: Sequence[Sequence[str]], marked: int, form: _Form = _ROWS) -> None:
        """Rows under their head; row `marked` is the culprit."""
        right, shrink, drop = form
        clean = [[harmless(cell, self.ascii) for cell in row] for row in rows]
        for number, line in enumerate(table(clean, right, self.width, shrink, self.ascii, drop)):
            self._put(line, "1;31" if number == marked else None)

    def _put(self, line: str, style: str | None) -> None:
        self.lines.append(f"\x1b[{style}m{line}\x1b[0m" if style and self.colour and line else line)


def _first_nonfinite(page: _Page, verdict: Verdict, origin: Origin) -> None:
    page.words(["FIRST NONFINITE", *place_words(origin, verdict.stage)], style="1")
    for sentence in facts_of(origin):
        page.paragraph(sentence, indent=4)
    page.gap()


def _rows(page: _Page, trace: Trace, verdict: Verdict) -> None:
    rows, marked = rows_around(trace, verdict)
    if rows:
        page.gap()
        page.table(rows, marked)


def _ledger(page: _Page, trace: Trace, verdict: Verdict) -> None:
    if not ledger.has_table(trace):
        return
    rows, hidden = ledger.ledger_rows(trace, verdict)
    page.gap()
    page.table(rows, -1, (ledger.RIGHT, ledger.SHRINK, ledger.DROP))
    if hidden:
        page.paragraph(f"and {plural(hidden, 'more step')}", indent=4)
    for sentence in ledger.decisions(trace):
        page.paragraph(sentence, indent=4)


def _recipe(page: _Page, trace: Trace) -> None:
    """Which rules of mixed precision were broken, if any were."""
    found = recipe(trace)
    if not found:
        return
    page.gap()
    page.words(["RECIPE", f"{plural(len(found), 'rule')} of mixed precision broken"], style="1")
    for departure in found:
        often = f" ({departure.steps:,} steps)" if departure.steps > 1 else ""
        page.paragraph(f"{departure.rule}: step {departure.step}{often}: {departure.evidence}.", indent=4)
        page.paragraph(f"{departure.advice[:1].upper()}{departure.advice[1:]}.", indent=8)


def _observations(page: _Page, trace: Trace, verdict: Verdict) -> None:
    """What stands out over the steps."""
    found = ledger.observations(trace, verdict)
    if found:
        page.gap()
        page.words(["OVER THE STEPS"], style="1")
    for sentence in found:
        page.paragraph(sentence, indent=4, first="  - ")


def _what_next(page: _Page, trace: Trace | None, verdict: Verdict) -> None:
    advice, command = what_next(trace, verdict)
    if advice:
        page.gap()
    for number, sentence in enumerate(advice):
        page.paragraph(sentence, indent=len(_ADVICE), first=_ADVICE if number == 0 else None)
    if command is not None:
        page.command(command)


def what_next(trace: Trace | None, verdict: Verdict) -> tuple[list[str], str | None]:
    """The next checks, and the command to type; a check that is that command is not said twice."""
    command = next_command(trace, verdict)
    unnamed = command is not None and command.startswith(_BISECT) and "--reproducer" not in command
    said = f"`{_BISECT if unnamed else command}`"
    advice = [sentence for sentence in verdict.advice if command is None or said not in sentence]
    return advice + ([_HOW] if unnamed else []), command


def next_command(trace: Trace | None, verdict: Verdict) -> str | None:
    """The command to type after a trace was judged; None where none would tell more.

    A verdict of replays has no command here: who ran them knows with what.
    """
    origin = verdict.origin
    if trace is None or origin is None or verdict.status not in ("fault", "contained", "inconclusive"):
        return None
    elsewhere = other_rank_command(trace, verdict)
    if elsewhere is not None or verdict.cause == "other_rank":
        return elsewhere
    if verdict.stage in ("input", "state") and origin.op is None:  # bad from the start: it needs no search
        return None
    capture = trace.meta.get("capture")
    bisect = _BISECT if capture is None else f"{_BISECT} --capture {shlex.quote(str(capture))}"
    return bisect if origin.op is None else f"{bisect} --reproducer reproducer"
