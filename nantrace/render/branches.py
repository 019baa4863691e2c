"""The tree of modules as HTML that folds: open where it failed, closed elsewhere, readable without a script."""

from __future__ import annotations

import math

from nantrace.render.figures.tree import Branch, Line, Tree
from nantrace.render.svg.marks import escaped
from nantrace.render.wording import plural

_HEAD = (
    "<thead><tr><th>site<th>dtype<th>shape<th class=n>events<th class=n>finite range<th class=n>bits left"
    "<th class=n>nan<th class=n>inf</thead>"
)


def tree_html(tree: Tree) -> str:
    """The branches of a tree of any size as nested `details`; the outermost are open even where nothing failed."""
    parts: list[str] = []
    # A stack instead of recursion: names may nest deeper than Python calls may.
    waiting: list[tuple[Branch, int] | str] = [(branch, 0) for branch in reversed(tree.branches)]
    while waiting:
        next_one = waiting.pop()
        if isinstance(next_one, str):
            parts.append(next_one)
            continue
        branch, depth = next_one
        parts.append(_open(branch, depth == 0))
        more = f"<p class=quiet>{plural(branch.hidden, 'module')} more, not shown.</p>"
        waiting.append(f"{more if branch.hidden else ''}</details>\n")
        waiting.extend((child, depth + 1) for child in reversed(branch.inside))
    return "".join(parts)


def _open(branch: Branch, opened: bool) -> str:
    css = " class=bad" if branch.bad else ""
    state = " open" if branch.failed or (opened and len(branch.inside) <= 100) else ""
    named = branch.name or "(model)"
    leaf = named if named.startswith(("(", "<")) else named.rpartition(".")[2]
    cls = f" <i>{escaped(branch.cls, 60)}</i>" if branch.cls else ""
    head = f"<summary><b>{escaped(leaf, 100)}</b>{cls} <small>{_told(branch)}</small></summary>"
    lines = "".join(_row(line) for line in branch.lines)
    table = f"<div class=wide><table>{_HEAD}<tbody>{lines}</table></div>" if lines else ""
    return f'<details data-name="{escaped(named, 400)}"{css}{state}>{head}{table}'


def _told(branch: Branch) -> str:
    if not branch.events:
        return "nothing seen"
    parts = [plural(branch.events, "event")]
    if branch.bad:
        parts.append(f"<em>{branch.bad:,} nonfinite</em>")
    if not math.isnan(branch.bits):
        parts.append(f"{branch.bits:.1f} bits left")
    return ", ".join(parts)


def _row(line: Line) -> str:
    css = " class=culprit" if line.culprit else " class=bad" if line.bad else ""
    first = "\u25b6 " if line.culprit else ""
    cells = (line.what, line.dtype, line.shape)
    words = "".join(f"<td>{escaped(cell, 80)}" for cell in (first + cells[0], *cells[1:]))
    bits = "" if math.isnan(line.bits) else f"{line.bits:.1f}"
    numbers = (f"{line.events:,}", _span(line), bits, _count(line.nan), _count(line.inf))
    return f"<tr{css}>{words}{''.join(f'<td class=n>{cell}' for cell in numbers)}"


def _count(count: int) -> str:
    return f"<em>{count:,}</em>" if count else "."


def _span(line: Line) -> str:
    if math.isnan(line.low) or math.isnan(line.high):
        return "none"
    return f"{line.low:.3g}" if line.low == line.high else f"{line.low:.3g} to {line.high:.3g}"
