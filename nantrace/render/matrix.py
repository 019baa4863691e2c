"""A step under one change after the other as text for a terminal: the table, its reading, the fewest modules."""

from __future__ import annotations

from nantrace.diagnosis.contrast.rows import AXES, Contrast, Reading, Row, number
from nantrace.render.cells import harmless, table, wrap

_HEAD = ("axis", "finite", "begins at", "loss", "grad norm", "skipped")
_RIGHT = (False, False, False, True, True, True)
_SHRINK, _DROP = (2, 0), (5,)
_READABLE = 100
_SAID = {
    "finite": "yes",
    "nonfinite": "NO",
    "raised": "raised",
    "not_applicable": "n/a",
    "cannot_tell": "can't tell",
    "not_run": "not run",
}


def text(contrast: Contrast, *, width: int = 80, ascii: bool = False) -> str:
    """The lines that `nantrace matrix` prints, joined by newlines.

    Args:
        contrast: what `nantrace.matrix` found.
        width: columns of the terminal, at least 40.
        ascii: no character beyond ASCII.
    """
    width = max(width, 40)
    head = _HEAD if any(row.skipped for row in contrast.rows) else (*_HEAD[:-1], "")
    rows = [head, *(_cells(row) for row in contrast.rows)]
    lines = table([[harmless(cell, ascii) for cell in row] for row in rows], _RIGHT, width, _SHRINK, ascii, _DROP)
    for title, sentences in _parts(contrast):
        if sentences:
            lines += ["", title] if title else [""]
            for sentence in sentences:
                lines += wrap(harmless(sentence, ascii), min(width, _READABLE), 4, "  ")
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    skipped = f"{row.skipped:,}" if row.skipped else ""
    if not row.ran:
        return (row.title, _SAID[row.outcome], "", "", "", "")
    place = (row.place or row.ends.partition(",")[0]) if row.outcome == "nonfinite" else ""
    return (row.title, _SAID[row.outcome], place, number(row.loss), number(row.gradient_norm), skipped)


def _parts(contrast: Contrast) -> list[tuple[str, list[str]]]:
    return [
        ("What was changed:", [f"{row.title}: {row.changed}." for row in contrast.rows[1:] if row.ran]),
        ("Not told by a row:", [f"{row.title}: {row.reason}." for row in contrast.rows if not row.ran]),
        ("What each pair of rows shows, and what it does not:", [_reading(each) for each in contrast.readings]),
        ("", [str(contrast.smallest)] if contrast.smallest is not None else []),
        ("", [f"{note}." for note in contrast.notes]),
        ("", [f"{contrast.replays:,} replays; everything was put back as it was."]),
    ]


def _reading(reading: Reading) -> str:
    changed, other = (AXES.get(axis, axis) for axis in reading.rows)
    return f"{changed} / {other}: {reading.establishes} {reading.leaves_open}".rstrip()
