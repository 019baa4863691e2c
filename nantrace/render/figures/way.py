"""The way of a nonfinite value from its birth to its sink, over the tree of the modules that it crossed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nantrace.diagnosis.verdict import Origin, Verdict
from nantrace.events import Trace
from nantrace.render.wording import OUTSIDE, plural, sink_name

MOST_STOPS = 24
_Kind = Literal["birth", "way", "sink"]


@dataclass(frozen=True)
class Lane:
    """One module that the way touches or that holds one, or the name of what the value ended in."""

    name: str
    depth: int


@dataclass(frozen=True)
class Stop:
    """Consecutive steps of the way in one lane."""

    lane: int
    what: str
    kind: _Kind


@dataclass(frozen=True)
class Way:
    """Lanes from top to bottom, stops from left to right; `note` says what was left out."""

    lanes: tuple[Lane, ...]
    stops: tuple[Stop, ...]
    note: str

    def rises(self, number: int, before: bool = False) -> bool:
        """Whether the line from a stop to the next, or to the one before, goes up: words there stand below it."""
        other = number - 1 if before else number + 1
        return 0 <= other < len(self.stops) and self.stops[other].lane < self.stops[number].lane


def way(trace: Trace | None, verdict: Verdict) -> Way:
    """The way that a verdict tells; one without a path gives its origin alone, one without an origin nothing."""
    steps: list[Mapping[str, Any]] = list(verdict.path)
    if not steps and verdict.origin is not None:
        steps = [_of_origin(verdict.origin)]
    visits = _visits(steps)
    note = ""
    if len(visits) > MOST_STOPS:
        head = MOST_STOPS // 2
        note = f"{plural(len(visits) - MOST_STOPS, 'stop')} in the middle of the way are not shown."
        visits = [*visits[:head], *visits[head - MOST_STOPS :]]
    lanes = _lanes(trace, [place for place, _ in visits])
    row_of = {key: row for row, key in enumerate(lanes)}
    stops = tuple(Stop(row_of[place], _what(said), _kind(n, len(visits))) for n, (place, said) in enumerate(visits))
    return Way(tuple(_lane(place) for place in lanes), stops, note)


def _kind(number: int, count: int) -> _Kind:
    return "birth" if number == 0 else "sink" if number == count - 1 else "way"


#: A lane's key: a module, or None and a name.
_Place = tuple[str | None, str]


def _visits(steps: Iterable[Mapping[str, Any]]) -> list[tuple[_Place, list[str]]]:
    visits: list[tuple[_Place, list[str]]] = []
    for step in steps:
        place = _place(step)
        if not visits or visits[-1][0] != place:
            visits.append((place, []))
        visits[-1][1].append(_said(step))
    return visits


def _place(step: Mapping[str, Any]) -> _Place:
    if "sink" in step:
        return None, sink_name(step)
    module = step.get("module")
    if module is not None and step.get("role") not in ("grad", "param", "buffer", "state"):
        return str(module), ""
    slot, role = step.get("slot"), step.get("role")
    if slot is None:
        return None, str(step.get("tensor") or OUTSIDE)
    inner = f"{module}.{slot}" if module and role in ("param", "buffer") else str(slot)
    return None, inner if role in (None, "loss", "state", "input") else f"{role} {inner}"


def _said(step: Mapping[str, Any]) -> str:
    word = str(step.get("op") or step.get("role") or "")
    phase = str(step.get("phase") or "")
    return " ".join(part for part in dict.fromkeys((phase, word)) if part)


def _what(said: list[str]) -> str:
    """The first and the last of what happened in one lane."""
    told = [word for word in dict.fromkeys(said) if word]
    if len(told) < 2:
        return "".join(told)
    first, last = told[0], told[-1]
    phase = first.partition(" ")[0]
    return f"{first} … {last.removeprefix(f'{phase} ')}"


def _of_origin(origin: Origin) -> Mapping[str, Any]:
    return {"op": origin.op, "module": origin.module, "phase": origin.phase, "tensor": origin.tensor}


def _lanes(trace: Trace | None, places: Iterable[_Place]) -> list[_Place]:
    """Touched modules with those that hold them, in the model's order; then what is no module, in order of the way.

    Where that makes too many lanes, those that only hold others are left out.
    """
    touched = list(dict.fromkeys(places))
    named = [module for module, _ in touched if module is not None]
    modules = {name for module in named for name in _with_parents(module)}
    if len(modules) > MOST_STOPS:
        modules = set(named)
    order = {entry.fqn: n for n, entry in enumerate(trace.modules)} if trace is not None else {}
    ranked = sorted(modules, key=lambda name: [(order.get(up, len(order)), *_natural(up)) for up in _ups(name)])
    return [*((name, "") for name in ranked), *(place for place in touched if place[0] is None)]


def _ups(name: str) -> list[str]:
    """A module and those that hold it, outermost first; sorting by these puts each before what it holds."""
    parts = name.split(".") if name else []
    return ["", *(".".join(parts[: end + 1]) for end in range(len(parts)))]


def _natural(name: str) -> tuple[int, str]:
    last = name.rpartition(".")[2]
    return (int(last), "") if last.isdecimal() and len(last) < 10 else (-1, last)


def _with_parents(module: str) -> list[str]:
    """The module, the three next to it that hold it, and the model."""
    if not module or module.startswith("<"):
        return [module]
    model, *held = _ups(module)
    return [model, *held[-4:]]


def _lane(place: _Place) -> Lane:
    module, name = place
    if module is None:
        return Lane(name, 0)
    return Lane(module or "(model)", 0 if not module or module.startswith("<") else module.count(".") + 1)
