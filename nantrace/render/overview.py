"""What a trace covers, without judging it: steps, events, modules, and what was not observed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from nantrace.events import Trace, nonfinite_rows
from nantrace.render.cells import harmless, table, wrap
from nantrace.steps import told

_SHOWN = 20  # steps
_LEDGER_HEAD = ("step", "events", "loss", "lr", "scale", "update")


def overview(trace: Trace, *, width: int = 80, ascii: bool = False) -> str:
    """The lines that `nantrace info` prints, at most `width` columns wide but for the command."""
    lines: list[str] = []
    for label, value in facts_of_trace(trace):
        lines += wrap(harmless(value, ascii), width, 14, f"{label:<14}")
    if trace.steps:
        lines += ["", *_steps(trace, width, ascii)]
    notes = notes_of(trace)
    if notes:
        lines += ["", "Not observed:"]
        for note in notes:
            lines += wrap(harmless(note, ascii), width, 4)
    lines += ["", harmless(f"Next: nantrace report {shlex.quote(trace.path or 'TRACE')}", ascii)]
    return "\n".join(lines)


def facts_of_trace(trace: Trace) -> list[tuple[str, str]]:
    """What the trace covers and what it was made with: (label, value)."""
    bad, inside = nonfinite_rows(trace.events), len({site.module for site in trace.sites if site.module})
    facts = [
        ("trace", trace.path or "in memory"),
        ("state", _state(trace)),
        ("steps", f"{len(trace.steps):,}"),
        ("events", f"{len(trace):,}, {int(bad.sum()):,} of them nonfinite"),
        ("sites", f"{len(trace.sites):,} in {inside:,} module{'' if inside == 1 else 's'}"),
        ("modules", f"{len(trace.modules):,} in the model"),
        ("ops", "recorded" if trace.lineage is not None else "not recorded"),
    ]
    facts += [(key, str(value)) for key, value in sorted(trace.meta.items()) if isinstance(value, (str, int, float))]
    return facts


def _state(trace: Trace) -> str:
    if not trace.complete:
        return "incomplete: the writer did not close it"
    if trace.raised is None:
        return "complete"
    where = "between two steps" if trace.raised.step is None else f"in step {trace.raised.step}"
    return f"ended by {trace.raised.error} {where}: {trace.raised.message}"


def _steps(trace: Trace, width: int, ascii_only: bool) -> list[str]:
    shown = trace.steps[:_SHOWN]
    rows = [[harmless(cell, ascii_only) for cell in _ledger_cells(step)] for step in shown]
    lines = table([list(_LEDGER_HEAD), *rows], [True, True, True, True, True, False], width, [3], ascii_only)
    hidden = len(trace.steps) - len(shown)
    return lines + ([f"and {hidden:,} more"] if hidden else [])


def _ledger_cells(step: Mapping[str, Any]) -> list[str]:
    """One step of the ledger, a cell for each word of `_LEDGER_HEAD`."""
    skipped, committed = step.get("skipped") or 0, step.get("committed")
    update = (
        "skipped"
        if skipped and not committed
        else "partly skipped"
        if skipped
        else "committed"
        if committed
        else "none"
    )
    return [
        str(step.get("step", "")),
        f"{step.get('events', 0):,}",
        _number(step.get("loss")),
        _number(step.get("lr")),
        _number(step.get("scale_before")),
        update,
    ]


def _number(value: Any) -> str:
    if value is None:
        return "."
    if isinstance(value, (list, tuple)):
        return ", ".join(_number(part) for part in value)
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)


def notes_of(trace: Trace) -> list[str]:
    """What was not observed, each note once."""
    notes: dict[str, None] = {}
    for step in told(trace.steps):
        for note in step.get("notes") or ():
            notes.setdefault(str(note))
    said = list(notes)
    return said[:_SHOWN] + ([f"and {len(said) - _SHOWN} more"] if len(said) > _SHOWN else [])
