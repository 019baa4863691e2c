"""Bits left before overflow, by module and step: which modules come near the limit, and when.

Of a trace of one step by module and part of it: a step that failed is nonfinite nearly everywhere, and what counts is
where that began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nantrace.diagnosis.verdict import Verdict
from nantrace.events import Trace, nonfinite_rows
from nantrace.render.figures.births import births
from nantrace.render.figures.numbers import CHUNK, Flags, Floats, Rows, cut, headroom, steps_of
from nantrace.render.figures.ranges import PARTS, part_of_site
from nantrace.render.wording import OUTSIDE, plural

MOST_MODULES, MOST_STEPS = 40, 120
_TOO_FEW = 10  # groups of modules: then the next level is cut into bands instead
_APART = 4  # rows kept for what is no module of the tree: the model itself, code outside it


@dataclass(frozen=True)
class Headroom:
    """A map of modules x steps, or x parts of the only step.

    Attributes:
        modules: name of each row; of a group its common name and how many it joins.
        steps: first and last step of each column.
        parts: name of each column if they are parts of one step: "forward", "backward", ...; else empty.
        bits: (rows, columns), the fewest bits left; NaN where nothing finite was seen.
        bad: whether anything nonfinite was seen there.
        births: (row, column) of each birth.
        note: what was joined, as a sentence; empty if nothing.
    """

    modules: tuple[str, ...]
    steps: tuple[tuple[int, int], ...]
    bits: Floats
    bad: Flags
    births: tuple[tuple[int, int], ...]
    note: str
    parts: tuple[str, ...] = ()

    @property
    def axis(self) -> str:
        """What the columns are."""
        return f"part of step {self.steps[0][0]}" if self.parts else "step"

    @property
    def columns(self) -> list[str]:
        """A short name for each column."""
        return list(self.parts) or [str(first) for first, _ in self.steps]

    def when(self, column: int, count: int = 1) -> str:
        """What some neighbouring columns stand for: "steps 4 to 9"."""
        first, last = self.steps[column][0], self.steps[column + count - 1][1]
        if self.parts:
            return " to ".join(dict.fromkeys((self.parts[column], self.parts[column + count - 1])))
        return f"step {first}" if first == last else f"steps {first} to {last}"


def headroom_map(trace: Trace, verdict: Verdict | None = None) -> Headroom:
    """The map of a whole trace; each cell is the worst of what it joins."""
    modules = _modules(trace)
    labels, group_of_site = _rows(trace, modules)
    steps = steps_of(trace)
    begins = cut(len(steps), MOST_STEPS)
    spans = tuple((int(part[0]), int(part[-1])) for part in np.split(steps, begins[1:])) if len(steps) else ()
    part = part_of_site(trace)
    parts = np.unique(part[trace.events["site"]]) if len(steps) == 1 else part[:0]

    def columns(events: npt.NDArray[np.void]) -> Rows:
        if len(parts):
            return np.asarray(np.searchsorted(parts, part[events["site"]]))
        return np.asarray(np.searchsorted(steps[begins], events["step"], "right") - 1)

    shape = (len(labels), len(parts) or len(spans))
    bits, bad = np.full(shape, np.nan), np.zeros(shape, dtype=bool)
    for start in range(0, len(trace), CHUNK):
        rows = slice(start, start + CHUNK)
        events = trace.events[rows]
        cells = (group_of_site[events["site"]], columns(events))
        np.fmin.at(bits, cells, headroom(trace, rows))
        np.logical_or.at(bad, cells, nonfinite_rows(events))
    events = trace.events[births(trace, verdict)] if len(trace) else trace.events
    born = zip(group_of_site[events["site"]].tolist(), columns(events).tolist(), strict=True) if len(events) else ()
    return Headroom(
        modules=labels,
        steps=spans * (len(parts) or 1),
        bits=bits,
        bad=bad,
        births=tuple(dict.fromkeys(born)),
        note=_note(len(modules), labels, steps, begins),
        parts=tuple(PARTS[number] for number in parts),
    )


def _note(count: int, labels: Sequence[str], steps: Rows, begins: Rows) -> str:
    parts = [f"{plural(count, 'module')} in {plural(len(labels), 'row')}"] if count > len(labels) else []
    parts += [f"{plural(len(steps), 'step')} in {plural(len(begins), 'column')}"] if len(begins) < len(steps) else []
    return f"{' and '.join(parts)}: each cell is the worst of what it joins." if parts else ""


def _modules(trace: Trace) -> list[str]:
    """The modules at whose sites something was seen, in the model's order; others after them."""
    seen = dict.fromkeys(_name(site.module) for site in trace.sites)
    ordered = [_name(entry.fqn) for entry in trace.modules]
    return [name for name in dict.fromkeys([*ordered, *seen]) if name in seen]


def _name(module: str | None) -> str:
    return OUTSIDE if module is None else module or "(model)"


def _rows(trace: Trace, modules: Sequence[str]) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    """Names of the map's rows, and the row of each site."""
    apart = [module for module in modules if module.startswith(("(", "<"))][:_APART]
    groups = grouped([module for module in modules if module not in apart], MOST_MODULES - len(apart))
    groups = [*((name, [name]) for name in apart if name == "(model)"), *groups]
    groups += [(name, [name]) for name in apart if name != "(model)"]
    row_of = {module: row for row, (_, members) in enumerate(groups) for module in members}
    rows = np.array([row_of[_name(site.module)] for site in trace.sites] or [0], dtype=np.int64)
    return tuple(label for label, _ in groups), rows


def grouped(modules: Sequence[str], most: int) -> list[tuple[str, list[str]]]:
    """At most `most` groups of modules, in order: (name, members).

    As deep a level of the tree as fits; where that leaves too few, the next level in bands of neighbours.
    """
    if len(modules) <= most:
        return [(module, [module]) for module in modules]
    levels = range(1, 2 + max(module.count(".") for module in modules))
    by_level = [_at_level(modules, level) for level in levels]
    fitting = [groups for groups in by_level if len(groups) <= most]
    best = fitting[-1] if fitting else {}
    if len(best) >= _TOO_FEW or len(fitting) == len(by_level):
        return [_labelled([name], members) for name, members in best.items()]
    return _bands(by_level[len(fitting)], most)


def _at_level(modules: Sequence[str], level: int) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for module in modules:
        groups.setdefault(".".join(module.split(".")[:level]), []).append(module)
    return groups


def _bands(groups: dict[str, list[str]], most: int) -> list[tuple[str, list[str]]]:
    names = list(groups)
    size = -(-len(names) // most)
    bands = [names[start : start + size] for start in range(0, len(names), size)]
    return [_labelled(band, [module for name in band for module in groups[name]]) for band in bands]


def _labelled(names: Sequence[str], members: list[str]) -> tuple[str, list[str]]:
    name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return (f"{name} ({plural(len(members), 'module')})" if len(members) > 1 else members[0]), members
