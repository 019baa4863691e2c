"""The parts of a page, each a piece of HTML: verdict, evidence, next checks, way, pictures, ledger and the rest.

Every name goes through `escaped`; nothing else from a trace reaches the markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nantrace.diagnosis.recipe import recipe
from nantrace.diagnosis.verdict import Verdict
from nantrace.events import Trace
from nantrace.render import ledger
from nantrace.render.around import rows_around
from nantrace.render.overview import facts_of_trace, notes_of
from nantrace.render.svg.headroom import headroom_svg
from nantrace.render.svg.ledger import ledger_svg
from nantrace.render.svg.marks import escaped
from nantrace.render.svg.path import path_svg
from nantrace.render.svg.ranges import ranges_svg
from nantrace.render.text import what_next
from nantrace.render.wording import evidence, facts_of, header, headline, place_of, place_words, plural, way_of

_STEPS_SHOWN = 200  # rows of the ledger's table; those that are not as they should be come first
_STEPS_OPEN = 12
_PATH_SHOWN = 40


def section(name: str, title: str, content: str) -> str:
    """A part of the page under its heading; nothing without content."""
    return f'<section id="{name}"><h2>{title}</h2>{content}</section>\n' if content else ""


def title(trace: Trace | None, verdict: Verdict) -> str:
    """The name of the page, as it stands in a tab."""
    of = trace.path if trace is not None and trace.path else ""
    return escaped(" ".join(part for part in ("nantrace:", verdict.status.replace("_", " "), of) if part))


def verdict_html(trace: Trace | None, verdict: Verdict) -> str:
    """Status and place, what the first nonfinite tensor held, and the sentence that names the cause."""
    origin = verdict.origin
    parts = [f'<p class="status {verdict.status}">{escaped(headline(verdict))}</p>']
    if origin is not None:
        place = "".join(f"<span>{escaped(word)}</span> " for word in place_words(origin, verdict.stage))
        parts.append(f"<p class=place><b>First nonfinite</b> {place}</p>{_list(facts_of(origin))}")
    if trace is not None:
        parts.append(f"<p class=quiet>{escaped(header(trace))}</p>")
    return "".join(parts)


def evidence_html(trace: Trace | None, verdict: Verdict) -> str:
    """The sentences that prove it, the rows around the culprit, other places."""
    said = list(evidence(verdict))
    said += [f"{plural(verdict.replays, 'replay')}."] if verdict.replays else []
    said += [f"Also: {place_of(other)}." for other in verdict.also]
    said += [f"Left under suspicion: {', '.join(verdict.region)}."] if verdict.region else []
    return _list(said) + (_around(trace, verdict) if trace is not None else "")


def advice_html(trace: Trace | None, verdict: Verdict) -> str:
    """The next controlled checks, and the command to type."""
    advice, command = what_next(trace, verdict)
    typed = f"<p>Next: <code>{escaped(command)}</code></p>" if command else ""
    return _list(advice, ordered=True) + typed


def way_html(trace: Trace | None, verdict: Verdict) -> str:
    """From the origin to the sink: in a sentence, as a picture, as a table."""
    picture, note = path_svg(trace, verdict)
    way = way_of(verdict)
    sentence = f"<p>{escaped(way)}.</p>" if way else ""
    return sentence + _figure("", picture, note) + _path_table(verdict)


def pictures_html(trace: Trace, verdict: Verdict | None) -> str:
    """Ranges, headroom and ledger."""
    pictures = (
        ("Range along the step: smallest to largest finite magnitude of each event", *ranges_svg(trace, verdict)),
        ("Headroom: bits left before overflow, by module", *headroom_svg(trace, verdict)),
        ("Ledger: loss, gradient, scale and updates by step", *ledger_svg(trace)),
    )
    return "".join(_figure(*picture) for picture in pictures)


def ledger_html(trace: Trace, verdict: Verdict) -> str:
    """The steps as a table, with what was decided beside them.

    Of a long trace those around the step of the verdict, those that went wrong and the last.
    """
    if not len(trace.steps):
        return ""
    (head, *rows), hidden = ledger.ledger_rows(trace, verdict, _STEPS_SHOWN)
    note = f"<p class=quiet>and {plural(hidden, 'more step')}</p>" if hidden else ""
    state = " open" if len(rows) <= _STEPS_OPEN else ""
    table = f"<summary>{plural(len(trace.steps), 'step')}</summary>{_table(head, rows, ledger.RIGHT)}{note}"
    return f"<details{state}>{table}</details>{_list(ledger.decisions(trace))}"


def observations_html(trace: Trace, verdict: Verdict) -> str:
    """What stands out over the steps, each with what it proves and what it leaves open."""
    return _list(ledger.observations(trace, verdict))


def recipe_html(trace: Trace) -> str:
    """Which rules of mixed precision were broken, and what to do instead."""
    return _list(f"{each.rule}: {each.sentence}" for each in recipe(trace))


def environment_html(trace: Trace) -> str:
    """What the trace was made with, and what it does not cover."""
    notes = notes_of(trace)
    unseen = f"<h3>Not observed</h3>{_list(notes)}" if notes else ""
    return f"{facts_html(trace, 600)}{unseen}"


def facts_html(trace: Trace, longest: int) -> str:
    """What the trace covers and was made with; a value wider than `longest` columns is cut in the middle."""
    facts = "".join(f"<dt>{escaped(label)}<dd>{escaped(value, longest)}" for label, value in facts_of_trace(trace))
    return f"<dl>{facts}</dl>"


def _list(sentences: Iterable[str], ordered: bool = False) -> str:
    items = "".join(f"<li>{escaped(sentence)}" for sentence in sentences)
    tag = "ol" if ordered else "ul"
    return f"<{tag}>{items}</{tag}>" if items else ""


def _figure(caption: str, picture: str, note: str) -> str:
    if not picture:
        return ""
    told = f"<figcaption>{escaped(caption)}</figcaption>" if caption else ""
    below = f"<p class=quiet>{escaped(note)}</p>" if note else ""
    # A region that scrolls sideways is reached by keyboard only if it can hold the focus.
    return f'<figure>{told}<div class=wide tabindex=0 role=group aria-label="picture">{picture}</div>{below}</figure>\n'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], marked: int | None = None) -> str:
    css = [" class=n" if each else "" for each in right]
    names = "".join(f"<th{how}>{escaped(name)}" for how, name in zip(css, head, strict=True))
    body = []
    for number, row in enumerate(rows):
        cells = "".join(f"<td{how}>{escaped(cell, 120)}" for how, cell in zip(css, row, strict=True))
        body.append(f"<tr{' class=culprit' if number == marked else ''}>{cells}")
    return f"<div class=wide tabindex=0><table><thead><tr>{names}</thead><tbody>{''.join(body)}</table></div>"


def _around(trace: Trace, verdict: Verdict) -> str:
    rows, marked = rows_around(trace, verdict)
    if not rows:
        return ""
    right = [name in ("step", "#", "absmax", "nan", "inf") for name in rows[0]]
    return _table(rows[0], rows[1:], right, marked - 1)


def _path_table(verdict: Verdict) -> str:
    if len(verdict.path) < 2:
        return ""
    rows = [_path_row(number, step) for number, step in enumerate(verdict.path, 1)]
    hidden = len(rows) - _PATH_SHOWN
    if hidden > 0:
        half = _PATH_SHOWN // 2
        gap = ["", f"{plural(hidden, 'step')} not shown", "", "", "", "", ""]
        rows = [*rows[:half], gap, *rows[-half:]]
    table = _table(
        ("#", "module or tensor", "phase", "what", "dtype", "nan", "inf"), rows, (True, *4 * (False,), True, True)
    )
    return f"<details><summary>All {plural(len(verdict.path), 'step')} of the way</summary>{table}</details>"


def _path_row(number: int, held: Mapping[str, Any]) -> list[str]:
    if "sink" in held:
        return [str(number), str(held["name"]), "", str(held["sink"]), "", "", ""]
    module = held.get("module")
    place = held.get("tensor") or ("(model)" if module == "" else module) or held.get("slot") or ""
    infinite = int(held.get("posinf") or 0) + int(held.get("neginf") or 0)
    what = held.get("op") or held.get("role") or ""
    counts = [f"{int(held.get('nan') or 0):,}", f"{infinite:,}"]
    return [str(number), str(place), str(held.get("phase") or ""), str(what), str(held.get("dtype") or ""), *counts]
