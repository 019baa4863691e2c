"""Text that keeps its width on a terminal: names made harmless, columns counted, long names cut in the middle."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Sequence

#: Multiplication sign, ellipsis, arrow, minus, dashes and comparisons by their spelling.
_ASCII = {
    "\u00d7": "x",
    "\u2026": "...",
    "\u2192": "->",
    "\u2212": "-",
    "\u2013": "-",
    "\u2014": "-",
    "\u2265": ">=",
    "\u2264": "<=",
}

_NARROWEST = 8  # columns that a cell keeps when its table gives way


def harmless(text: object, ascii_only: bool = False) -> str:
    """`text` with every character that a terminal would obey or hide written as an escape."""
    return "".join(_shown(character, ascii_only) for character in str(text))


def _shown(character: str, ascii_only: bool) -> str:
    code = ord(character)
    if 32 <= code < 127:
        return character
    if ascii_only:
        return _ASCII.get(character) or _escape(code)
    # Not printable: control, format (also what turns the direction of text), surrogate, unassigned, odd blanks.
    return character if character.isprintable() else _escape(code)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


def columns(text: str) -> int:
    """How many columns a terminal gives to `text`: two for wide characters, none for combining ones."""
    return sum(_columns(character) for character in text)


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def shorten(text: str, width: int, ascii_only: bool = False) -> str:
    """`text` in at most `width` columns, cut in the middle: both ends of a module's name tell something."""
    if columns(text) <= width:
        return text
    dots = "..." if ascii_only else "…"
    room = max(width - columns(dots), 0)
    head = _take(text, room // 3)
    tail = _take(text[::-1], room - columns(head))[::-1]
    return _take(head + dots + tail, width)


def _take(text: str, width: int) -> str:
    taken, used = [], 0
    for character in text:
        used += _columns(character)
        if used > width:
            break
        taken.append(character)
    return "".join(taken)


def pad(text: str, width: int, right: bool = False) -> str:
    """`text` filled with blanks to `width` columns; `right` puts it at the right end."""
    blanks = " " * max(width - columns(text), 0)
    return blanks + text if right else text + blanks


def wrap(text: str, width: int, indent: int = 0, first: str | None = None) -> list[str]:
    """Lines of at most `width` columns; words that are longer are broken. `first` replaces the first indent."""
    room = max(width - indent, 10)
    lines: list[str] = []
    for line in textwrap.wrap(text, room, break_on_hyphens=False) or [""]:
        while columns(line) > room:  # wide characters: textwrap counts characters
            head = _take(line, room)
            lines.append(head)
            line = line[len(head) :]
        lines.append(line)
    blank = " " * indent
    return [(first if first is not None and number == 0 else blank) + line for number, line in enumerate(lines)]


def table(
    rows: Sequence[Sequence[str]], right: Sequence[bool], width: int, shrink: Sequence[int], ascii_only: bool
) -> list[str]:
    """Rows of cells as lines of aligned columns. Where `width` is not enough, columns `shrink` give way in turn."""
    widths = [max(columns(row[number]) for row in rows) for number in range(len(right))]
    for number in shrink:
        excess = sum(widths) + 2 * (len(widths) - 1) - width
        if excess > 0:
            widths[number] = max(widths[number] - excess, min(widths[number], _NARROWEST))
    lines = []
    for row in rows:
        cells = [
            pad(shorten(cell, widths[number], ascii_only), widths[number], right[number])
            for number, cell in enumerate(row)
        ]
        lines.append(shorten("  ".join(cells).rstrip(), width, ascii_only))
    return lines
