"""A verdict and its trace as one self-contained HTML page, or as a piece for a notebook's cell.

The page needs no network, no script to be read, and no library to be made. A policy in its head lets only its own
style and its own short script run, so that no name in a trace can do anything but be read.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from string import Template

from nantrace.diagnosis.verdict import Verdict
from nantrace.events import Trace
from nantrace.render import sections
from nantrace.render.branches import tree_html
from nantrace.render.figures.tree import tree
from nantrace.render.sections import section
from nantrace.render.svg.marks import escaped
from nantrace.render.wording import plural

_CELL_LINES, _CELL_MODULES = 300, 300  # of a tree in a notebook, which keeps every output it shows


def page(trace: Trace | None, verdict: Verdict) -> str:
    """The whole page.

    Args:
        trace: adds pictures, the tree of modules, the ledger and the environment; of a large one what was joined is
            said where it was. None shows the verdict alone.
        verdict: what `diagnose` or `bisect` said.

    Returns:
        HTML: under 5 MB for any trace.
    """
    script = _file("filter.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = [
        section("verdict", "Verdict", sections.verdict_html(trace, verdict)),
        section("evidence", "Evidence", sections.evidence_html(trace, verdict)),
        section("next", "Check next", sections.advice_html(trace, verdict)),
        section("path", "Path", sections.way_html(trace, verdict)),
    ]
    if trace is not None:
        parts += [
            section("pictures", "Pictures", sections.pictures_html(trace, verdict)),
            section("modules", "Modules", _modules(trace, verdict)),
            section("ledger", "Ledger", sections.ledger_html(trace, verdict)),
            section("steps", "Over the steps", sections.observations_html(trace, verdict)),
            section("recipe", "Recipe of mixed precision", sections.recipe_html(trace)),
            section("environment", "Environment", sections.environment_html(trace)),
        ]
    return Template(_file("template.html")).substitute(
        title=sections.title(trace, verdict),
        script=script,
        digest=digest,
        style=_file("style.css"),
        links="".join(_link(part) for part in parts if part),
        body="".join(parts),
    )


def cell(trace: Trace | None, verdict: Verdict) -> str:
    """A report for a notebook's cell: verdict, evidence, next checks, and the tree folded open at the failure."""
    parts = [
        sections.verdict_html(trace, verdict),
        sections.evidence_html(None, verdict),
        sections.advice_html(trace, verdict),
    ]
    if trace is not None and len(trace):
        parts.append(_small_tree(trace, verdict))
    elif len(verdict.path) > 1:
        parts.append(sections.way_html(None, verdict))
    return _cell("".join(parts))


def trace_cell(trace: Trace) -> str:
    """A trace for a notebook's cell: what it covers, and the tree folded open at its first nonfinite event.

    Judges nothing, so that showing a long trace costs little.
    """
    return _cell(sections.facts_html(trace, 200) + (_small_tree(trace, None) if len(trace) else ""))


def _cell(content: str) -> str:
    return f'<div class="nantrace cell"><style>{_file("style.css")}</style>{content}</div>'


def _small_tree(trace: Trace, verdict: Verdict | None) -> str:
    shown = tree(trace, verdict, _CELL_LINES, _CELL_MODULES)
    return tree_html(shown) + (f"<p class=quiet>{escaped(shown.note)}</p>" if shown.note else "")


def _modules(trace: Trace, verdict: Verdict) -> str:
    shown = tree(trace, verdict)
    if not shown.modules:
        return ""
    note = f" {escaped(shown.note)}" if shown.note else ""
    steps = plural(len(trace.steps), "step")
    told = f"<p class=quiet>Over {steps}, folded open where it failed (\u25b6).{note}</p>"
    tools = (
        '<p id="tools" hidden><label>Filter by name <input type="search"></label> '
        '<label><input type="checkbox"> only nonfinite</label> '
        '<button type="button">Unfold all</button> <button type="button">Fold all</button> <output></output></p>'
    )
    return f'{told}{tools}<div id="tree">{tree_html(shown)}</div>'


def _link(part: str) -> str:
    name = part.split('"', 2)[1]
    return f'<a href="#{name}">{name}</a> '


def _file(name: str) -> str:
    return files("nantrace.render").joinpath(name).read_text(encoding="utf-8")
