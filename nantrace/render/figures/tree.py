"""The modules of a trace as a tree, with what was seen at their sites over all steps, and where it failed.

Joins events of one site over steps, and sites of one phase and role where there are too many to read; says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nantrace.diagnosis.verdict import Verdict
from nantrace.events import Role, Trace, nonfinite_rows
from nantrace.render.figures.births import births
from nantrace.render.figures.numbers import CHUNK, first_nonfinite, headroom
from nantrace.render.wording import OUTSIDE, plural

MOST_LINES, MOST_MODULES = 4000, 2500
_DEEPEST = 40  # levels of nesting; deeper names stay whole


@dataclass(frozen=True)
class Line:
    """What was seen at one site over all steps, or at several of one phase and role.

    Attributes:
        what: phase, role and slot.
        dtype, shape: as words; empty if the joined sites differ.
        events, bad: how many, and how many of them nonfinite.
        low, high: finite range; NaN if there is none.
        nan, inf: elements, over all events.
        bits: fewest bits left before overflow; NaN where that says nothing.
        culprit: a birth is among them.
    """

    what: str
    dtype: str
    shape: str
    events: int
    bad: int
    low: float
    high: float
    nan: int
    inf: int
    bits: float
    culprit: bool


@dataclass
class Branch:
    """A module: its lines, the modules in it, and the sums over all below it. Built once, then only read.

    Attributes:
        name: FQN, or a word in parentheses for what is no module.
        cls: class; empty if unknown.
        events, bad, bits: as of a line, over this module and everything in it.
        failed: a birth lies in it.
        hidden: modules in it that are not shown.
    """

    name: str
    cls: str = ""
    lines: list[Line] = field(default_factory=list)
    inside: list[Branch] = field(default_factory=list)
    events: int = 0
    bad: int = 0
    bits: float = float("nan")
    failed: bool = False
    hidden: int = 0


@dataclass(frozen=True)
class Tree:
    """The outermost branches, how many modules they hold, and what was joined or left out, as a sentence."""

    branches: tuple[Branch, ...]
    modules: int
    note: str


@dataclass(frozen=True)
class _Sums:
    """Columns by site."""

    events: npt.NDArray[np.int64]
    bad: npt.NDArray[np.int64]
    nan: npt.NDArray[np.int64]
    inf: npt.NDArray[np.int64]
    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]
    bits: npt.NDArray[np.float64]
    culprit: npt.NDArray[np.bool_]


def tree(trace: Trace, verdict: Verdict | None, most_lines: int = MOST_LINES, most_modules: int = MOST_MODULES) -> Tree:
    """The tree of a trace; without a verdict it has failed where the first nonfinite event was seen."""
    sums = _sums(trace, _culprits(trace, verdict))
    sites_of: dict[str, list[int]] = {}
    for number, site in enumerate(trace.sites):
        if sums.events[number]:
            sites_of.setdefault(_name(site.module), []).append(number)
    branches = _branches(trace, sites_of)
    kinds = {name: _groups(trace, sites) for name, sites in sites_of.items()}
    joined = sum(len(sites) for sites in sites_of.values()) > most_lines
    bare = sum(len(groups) for groups in kinds.values()) > most_lines
    for name, sites in sites_of.items():
        branch = branches[name]
        failed = bool(sums.culprit[sites].any())
        groups = ([] if bare else kinds[name]) if joined and not failed else [[site] for site in sites]
        branch.lines.extend(_line(trace, sums, group) for group in groups)
        _add([branches[above] for above in _above(name)], sums, sites, failed)
    roots = _nest(branches)
    hidden = sum(_prune(roots, len(branches) - most_modules))
    what = "all sites of a module are joined" if bare else "sites of one module, phase and role are joined"
    said = [f"Of {plural(len(trace.sites), 'site')}, {what}, but for the modules that failed."] if joined else []
    said += [f"Of {plural(len(branches), 'module')}, {hidden:,} are not shown."] if hidden else []
    return Tree(tuple(roots), len(branches), " ".join(said))


def _culprits(trace: Trace, verdict: Verdict | None) -> list[int]:
    born = births(trace, verdict)
    if born or verdict is not None:
        return born
    first = first_nonfinite(trace)
    return [] if first is None else [first]


def _sums(trace: Trace, culprits: Sequence[int]) -> _Sums:
    count = max(len(trace.sites), 1)
    counted = [np.zeros(count, dtype=np.int64) for _ in range(4)]
    events, bad, nan, inf = counted
    low, high, bits = (np.full(count, np.nan) for _ in range(3))
    for start in range(0, len(trace), CHUNK):
        rows = slice(start, start + CHUNK)
        part = trace.events[rows]
        site = part["site"].astype(np.int64)
        events += np.bincount(site, minlength=count)
        bad += np.bincount(site[nonfinite_rows(part)], minlength=count)
        for total, column in ((nan, part["nan"]), (inf, part["posinf"] + part["neginf"])):
            some = np.flatnonzero(column)
            np.add.at(total, site[some], column[some].astype(np.int64))
        np.fmin.at(low, site, part["min"])
        np.fmax.at(high, site, part["max"])
        np.fmin.at(bits, site, headroom(trace, rows))
    culprit = np.zeros(count, dtype=bool)
    culprit[[int(trace.events["site"][row]) for row in culprits]] = True
    return _Sums(events, bad, nan, inf, low, high, bits, culprit)


def _name(module: str | None) -> str:
    return OUTSIDE if module is None else module


def _branches(trace: Trace, sites_of: Iterable[str]) -> dict[str, Branch]:
    """A branch for each module of the table and each that was seen, and for what holds them; parents first."""
    classes = {entry.fqn: entry.cls for entry in trace.modules}
    branches: dict[str, Branch] = {}
    for name in (*classes, *sites_of):
        for above in reversed(_above(name)):
            branches.setdefault(above, Branch(above, classes.get(above, "")))
    return branches


def _above(name: str) -> list[str]:
    """A module and all that hold it, itself first, the model last."""
    if name.startswith(("(", "<")):
        return [name]
    if not name:
        return [""]
    parts = name.split(".")
    ends = range(min(len(parts), _DEEPEST) - 1, 0, -1)
    return [name, *(".".join(parts[:end]) for end in ends), ""]


def _nest(branches: dict[str, Branch]) -> list[Branch]:
    roots = []
    for name, branch in branches.items():
        above = _above(name)
        if len(above) > 1:
            branches[above[1]].inside.append(branch)
        else:
            roots.append(branch)
    return roots


def _add(branches: Iterable[Branch], sums: _Sums, sites: list[int], failed: bool) -> None:
    events, bad = int(sums.events[sites].sum()), int(sums.bad[sites].sum())
    bits = float(np.fmin.reduce(sums.bits[sites]))
    for branch in branches:
        branch.events += events
        branch.bad += bad
        branch.bits = bits if math.isnan(branch.bits) or bits < branch.bits else branch.bits
        branch.failed |= failed


def _groups(trace: Trace, sites: list[int]) -> list[list[int]]:
    groups: dict[tuple[Any, Role], list[int]] = {}
    for number in sites:
        site = trace.sites[number]
        groups.setdefault((site.phase, site.role), []).append(number)
    return list(groups.values())


def _line(trace: Trace, sums: _Sums, sites: list[int]) -> Line:
    first = trace.sites[sites[0]]
    dtypes, shapes = ({str(trace.sites[n].dtype) for n in sites}, {trace.sites[n].shape for n in sites})
    slot = f"{len(sites):,} sites" if len(sites) > 1 else first.op or _slot(first.module, first.slot)
    return Line(
        what=" ".join(dict.fromkeys((first.phase.label, first.role.label, slot))),
        dtype=dtypes.pop() if len(dtypes) == 1 else "",
        shape=str(list(shapes.pop())) if len(shapes) == 1 else "",
        events=int(sums.events[sites].sum()),
        bad=int(sums.bad[sites].sum()),
        low=float(np.fmin.reduce(sums.low[sites])),
        high=float(np.fmax.reduce(sums.high[sites])),
        nan=int(sums.nan[sites].sum()),
        inf=int(sums.inf[sites].sum()),
        bits=float(np.fmin.reduce(sums.bits[sites])),
        culprit=bool(sums.culprit[sites].any()),
    )


def _slot(module: str | None, slot: str) -> str:
    """A slot without the name of the module that it stands under."""
    return slot.removeprefix(f"{module}.") if module else slot


def _prune(roots: list[Branch], excess: int) -> Iterator[int]:
    """Leave out `excess` modules at most, from the last on: first finite ones, then any that did not fail.

    Yields:
        How many each round left out.
    """
    order = list(roots)
    for branch in order:  # it grows: parents before children
        order.extend(branch.inside)
    for finite in (True, False):
        hidden = 0
        for branch in reversed(order):
            kept = []
            for child in reversed(branch.inside):
                if hidden < excess and not child.inside and not child.failed and not (finite and child.bad):
                    hidden += 1
                    branch.hidden += 1 + child.hidden
                else:
                    kept.append(child)
            branch.inside[:] = reversed(kept)
        excess -= hidden
        yield hidden
