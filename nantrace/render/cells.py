"""Text that keeps its width on a terminal: names made harmless, columns counted, long names cut in the middle."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator, Sequence

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


def shorten(text: str, width: int, ascii_only: bool = False, head_share: float = 1 / 3) -> str:
    """`text` in at most `width` columns, cut in the middle: both ends of a module's name tell something."""
    if columns(text) <= width:
        return text
    dots = "..." if ascii_only else "…"
    room = max(width - columns(dots), 0)
    head = _take(text, int(room * head_share))
    tail = _take(text[::-1], room - columns(head))[::-1]
    return _take(head + dots + tail, width)


def shorten_all(texts: Sequence[str], width: int, ascii_only: bool = False) -> list[str]:
    """Each of `texts` in at most `width` columns, cut where different ones stay different, if there is such a place."""
    best: list[str] = []
    for cut in _cuts(texts, width, ascii_only):
        if len(set(cut)) > len(set(best)):
            best = cut
        if len(set(cut)) == len(set(texts)):
            break
    return best


def _cuts(texts: Sequence[str], width: int, ascii_only: bool) -> Iterator[list[str]]:
    """Ways to cut: in the middle, both sides of where the long ones begin to differ, at the end, at the beginning."""
    yield [shorten(text, width, ascii_only) for text in texts]
    dots = "..." if ascii_only else "\u2026"
    long = [text for text in texts if columns(text) > width]
    same = _same_beginning(long)
    start = same.rfind(".", 0, max(same.rfind("."), 0)) + 1  # with the last part of a dotted name that they share
    if start > len(dots):
        rest = [dots + text[start:] if text in long else text for text in texts]
        yield [shorten(text, width, ascii_only, 1.0) for text in rest]
    yield [shorten(text, width, ascii_only, 0.0) for text in texts]
    yield [shorten(text, width, ascii_only, 1.0) for text in texts]


def _same_beginning(texts: Sequence[str]) -> str:
    if not texts:
        return ""
    first, last = min(texts), max(texts)
    length = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]


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
    rows: Sequence[Sequence[str]],
    right: Sequence[bool],
    width: int,
    shrink: Sequence[int],
    ascii_only: bool,
    drop: Sequence[int] = (),
) -> list[str]:
    """Rows of cells as lines of aligned columns. Where `width` is not enough, columns `shrink` give way in turn.

    Where that is not enough either, columns `drop` are left out one after the other. So are columns without content.
    """
    natural = [max(columns(row[number]) for row in rows) for number in range(len(right))]
    kept = [number for number, widest in enumerate(natural) if widest or not number]
    for number in (number for number in drop if number in kept):
        if _excess([min(natural[n], _NARROWEST) if n in shrink else natural[n] for n in kept], width) > 0:
            kept.remove(number)
    widths = {number: natural[number] for number in kept}
    for number in shrink:
        excess = _excess(list(widths.values()), width)
        if number in widths and excess > 0:
            widths[number] = max(widths[number] - excess, min(widths[number], _NARROWEST))
    cells = {n: shorten_all([row[n] for row in rows], widths[n], ascii_only) for n in kept}
    lines = []
    for place in range(len(rows)):
        line = "  ".join(pad(cells[n][place], widths[n], right[n]) for n in kept)
        lines.append(shorten(line.rstrip(), width, ascii_only))
    return lines


def _excess(widths: Sequence[int], width: int) -> int:
    """How many columns a table with gaps of two is too wide."""
    return sum(widths) + 2 * (len(widths) - 1) - width
