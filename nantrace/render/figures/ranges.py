"""The range of every tensor of one step, in order of execution: what fits into one picture, and what was joined."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from nantrace.diagnosis.modules.seen import LARGEST
from nantrace.diagnosis.verdict import Verdict
from nantrace.events import Phase, Role, Trace, nonfinite_rows
from nantrace.render.figures.births import births
from nantrace.render.figures.numbers import (
    SMALLEST_NORMAL,
    Flags,
    Floats,
    bounds,
    first_nonfinite,
    largest,
    smallest,
    steps_of,
)
from nantrace.render.wording import module_of

MOST_BARS = 200
_MOST_SIDES = 12  # alternations of forward and backward, as gradient accumulation makes; beyond, sides are not told
#: Parts of a step, in order; the first is what was looked at before the model ran.
PARTS = ("before", "forward", "backward", "after")


@dataclass(frozen=True)
class Side:
    """Consecutive bars of one part of the step: "before", "forward", "backward" or "after"."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Ranges:
    """One bar for one event, or for several consecutive ones.

    Attributes:
        step: number of the step that is shown; None if the trace is empty.
        low, high: smallest and largest finite magnitude; NaN where there is none, `low` also where it is unknown.
        nan, inf, birth: what each bar holds.
        names: of each bar, the site of its largest or its nonfinite event.
        sides: parts of the step, in bars.
        dtypes: of the events that are shown, those with known limits.
        joined: how many events a bar stands for at most; 1 none were joined.
    """

    step: int | None
    low: Floats
    high: Floats
    nan: Flags
    inf: Flags
    birth: Flags
    names: tuple[str, ...]
    sides: tuple[Side, ...]
    dtypes: tuple[str, ...]
    joined: int

    @property
    def note(self) -> str:
        """What was left out or joined, as a sentence; empty if nothing."""
        bottom, top = self.window()
        far = [told for value, told in self.limits() if not bottom <= value <= top]
        joined = f"Each bar spans up to {self.joined:,} consecutive events. " if self.joined > 1 else ""
        return f"{joined}Off the axis: {', '.join(far)}." if far else joined.rstrip()

    def limits(self) -> list[tuple[float, str]]:
        """Lines to draw: the largest and the smallest normal magnitude of each dtype."""
        lines = [(LARGEST[dtype], f"{dtype} largest {LARGEST[dtype]:.3g}") for dtype in self.dtypes]
        return lines + [
            (SMALLEST_NORMAL[dtype], f"{dtype} smallest normal {SMALLEST_NORMAL[dtype]:.2g}") for dtype in self.dtypes
        ]

    def window(self) -> tuple[float, float]:
        """Limits of a logarithmic axis: the data with a decade around, and the limits of dtypes that lie near it."""
        with np.errstate(invalid="ignore"):
            values = np.concatenate([self.low[self.low > 0], self.high[self.high > 0]])
        bottom, top = (float(values.min()), float(values.max())) if values.size else (1e-3, 1e3)
        bottom, top = max(bottom, top * 1e-12), top
        for value, _ in self.limits():
            if top < value <= top * 1e10:
                top = value
            if bottom * 1e-6 <= value < bottom:
                bottom = value
        return max(bottom / 10, 1e-307), min(top * 10, 1e307)


def ranges(trace: Trace, verdict: Verdict | None = None, step: int | None = None) -> Ranges:
    """The ranges of one step.

    Args:
        trace: any trace; an empty one gives no bars.
        verdict: marks births, and chooses the step if none is given.
        step: number of a step; by default that of the first birth, else of the first nonfinite event, else the last.

    Raises:
        ValueError: the trace holds no such step.
    """
    marked = births(trace, verdict)
    number = _step(trace, marked, step)
    rows = bounds(trace, number) if number is not None else slice(0, 0)
    events = trace.events[rows]
    side, starts = _starts(trace, events)
    bad = nonfinite_rows(events)
    high, low = largest(events), smallest(events)
    born = np.zeros(len(events), dtype=bool)
    born[[row - rows.start for row in marked if rows.start <= row < rows.stop]] = True
    sites = {int(site) for site in np.unique(events["site"])}
    dtypes = dict.fromkeys(trace.sites[site].dtype for site in sorted(sites))
    if not len(events):
        none, never = np.array([]), np.array([], dtype=bool)
        return Ranges(number, none, none, never, never, never, (), (), (), 1)
    stops = np.append(starts[1:], len(events))
    return Ranges(
        step=number,
        low=np.fmin.reduceat(low, starts),
        high=np.fmax.reduceat(high, starts),
        nan=np.logical_or.reduceat(events["nan"] > 0, starts),
        inf=np.logical_or.reduceat((events["posinf"] > 0) | (events["neginf"] > 0), starts),
        birth=np.logical_or.reduceat(born, starts),
        names=tuple(_name(trace, events, born, bad, high, a, b) for a, b in zip(starts, stops, strict=True)),
        sides=_sides(side[starts]),
        dtypes=tuple(dtype for dtype in dtypes if dtype in LARGEST),
        joined=int((stops - starts).max()),
    )


def _step(trace: Trace, marked: list[int], step: int | None) -> int | None:
    if step is not None:
        if step not in steps_of(trace):
            held = steps_of(trace)
            said = f"{int(held[0])} to {int(held[-1])}" if len(held) else "none"
            raise ValueError(f"step {step} is not in the trace: it holds steps {said}.")
        return step
    if not len(trace):
        return None
    row = marked[0] if marked else first_nonfinite(trace)
    return int(trace.events["step"][-1 if row is None else row])


def _starts(trace: Trace, events: npt.NDArray[np.void]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The side of every event, and where bars begin: none spans two sides unless these alternate too often."""
    side = part_of_site(trace)[events["site"]]
    turns = np.flatnonzero(np.diff(side)) + 1
    if len(turns) >= _MOST_SIDES:
        side, turns = np.ones_like(side), turns[:0]
    size = max(-(-len(events) // MOST_BARS), 1)
    begins = [0, *turns.tolist()]
    ends = [*turns.tolist(), len(events)]
    return side, np.concatenate([np.arange(a, b, size) for a, b in zip(begins, ends, strict=True)])


def part_of_site(trace: Trace) -> npt.NDArray[np.int64]:
    """For each site the number of its part in `PARTS`; one entry if there are no sites."""
    return np.array([_side(site.phase, site.role) for site in trace.sites] or [0], dtype=np.int64)


def _side(phase: Phase, role: Role) -> int:
    if phase is Phase.FORWARD and role in (Role.PARAM, Role.BUFFER, Role.STATE):
        return 0
    if phase in (Phase.FORWARD, Phase.LOSS):
        return 1
    return 2 if phase in (Phase.BACKWARD, Phase.RECOMPUTE) else 3


def _sides(side: npt.NDArray[np.int64]) -> tuple[Side, ...]:
    turns = [0, *(np.flatnonzero(np.diff(side)) + 1).tolist(), len(side)]
    return tuple(Side(PARTS[side[a]], a, b) for a, b in pairwise(turns))


def _name(
    trace: Trace, events: npt.NDArray[np.void], born: Flags, bad: Flags, high: Floats, start: int, stop: int
) -> str:
    """The event of a bar that a reader asks for: a birth, else a nonfinite one, else the largest."""
    part = slice(start, stop)
    for flags in (born[part], bad[part]):
        if flags.any():
            place = int(np.argmax(flags))
            break
    else:
        place = int(np.argmax(np.nan_to_num(high[part], nan=-1.0)))
    site = trace.site(events[start + place])
    return f"{module_of(site)} {site.op or site.role.label}"
