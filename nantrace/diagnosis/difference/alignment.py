"""Which event of one trace is the counterpart of which event of another. Pure; knows names and order, no numbers.

Two events correspond if they lie in the same step, at the same module, phase, role and slot, in the same call of that
module counted within the step, and are the same of several such rows. dtype, shape and source line do not matter: they
are what two runs of one step may differ in. What one side did not record leaves the rest aligned.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nantrace.events import Role, Site, Trace
from nantrace.narrowing import steps_of

_WINDOW = 65_536  # rows of one trace aligned at once, if its steps are not longer

Rows = npt.NDArray[np.int64]
Events = npt.NDArray[np.void]


@dataclass(frozen=True)
class Alignment:
    """Rows of two traces that correspond.

    Attributes:
        a, b: rows of the events, pair by pair, in the order in which trace A executed.
        only_a, only_b: rows without a counterpart.
        call: for each pair the number of the call of its module within the step, from 1; 0 outside calls.
        occurrence: for each pair which of several such rows it is, from 1.
    """

    a: Rows
    b: Rows
    only_a: Rows
    only_b: Rows
    call: Rows
    occurrence: Rows


@dataclass(frozen=True)
class Ground:
    """What two traces are aligned by, whichever of their events are looked at.

    Attributes:
        names: for each site of each trace a number, the same for sites that correspond.
        places: for each site of each trace a number, the same for sites of one module in one phase.
        steps: the number of the step of each trace if they have one each: these correspond whatever the number.
    """

    names: tuple[Rows, Rows]
    places: tuple[Rows, Rows]
    steps: tuple[int, int] | None


def ground(a: Trace, b: Trace) -> Ground:
    """What any events of these two traces are aligned by."""
    names = _numbers([*map(_name, a.sites), *map(_name, b.sites)])
    places = [_numbers([(site.module, site.phase) for site in trace.sites]) for trace in (a, b)]
    return Ground((names[: len(a.sites)], names[len(a.sites) :]), (places[0], places[1]), _single_steps(a, b))


def windows(a: Trace, b: Trace, shared: Ground) -> list[tuple[slice, slice]]:
    """Rows of both traces, some whole steps at a time, which can be aligned by themselves; in order of steps.

    What is worked out for each row of a long trace takes more memory than the trace, unless it is for some of them.
    """
    whole = [(slice(0, len(a)), slice(0, len(b)))]
    steps = a.events["step"], b.events["step"]
    if shared.steps is not None or not all((column[1:] >= column[:-1]).all() for column in steps):
        return whole
    numbers = np.union1d(*(column[np.flatnonzero(np.diff(column, append=~column[-1:]))] for column in steps))
    ends = np.stack([np.searchsorted(column, numbers, "right") for column in steps], axis=1)
    made, begin = [], (0, 0)
    for end in map(tuple, ends.tolist()):
        if max(end[0] - begin[0], end[1] - begin[1]) >= _WINDOW or end == (len(a), len(b)):
            made.append((slice(begin[0], end[0]), slice(begin[1], end[1])))
            begin = end
    return made


def align(a: Trace, b: Trace) -> Alignment:
    """Pair the events of two traces. Two traces of one step each are aligned whatever number their step has."""
    return align_events(ground(a, b), a.events, b.events)


def align_events(shared: Ground, a: Events, b: Events) -> Alignment:
    """Pair events of two traces, of each those of whole steps."""
    parts = [
        [_of_sites(events, names), _step(events, shared.steps is not None), _calls(events, places)]
        for events, names, places in zip((a, b), shared.names, shared.places, strict=True)
    ]
    split = len(a)
    if all(np.array_equal(of_a, of_b) for of_a, of_b in zip(*parts, strict=True)):
        rows, none = np.arange(split), np.zeros(0, np.int64)
        return Alignment(rows, rows, none, none, parts[0][2], _count_within(_combined(parts[0])) + 1)
    keys = _combined([np.concatenate([parts[0][n], parts[1][n]]) for n in range(3)])
    occurrence = np.concatenate([_count_within(keys[:split]), _count_within(keys[split:])])
    keys = _combined([keys, occurrence])
    _, at, bt = np.intersect1d(keys[:split], keys[split:], assume_unique=True, return_indices=True)
    order = np.argsort(at)
    rows_a, rows_b = at[order].astype(np.int64), bt[order].astype(np.int64)
    return Alignment(
        a=rows_a,
        b=rows_b,
        only_a=_others(rows_a, split),
        only_b=_others(rows_b, len(b)),
        call=parts[0][2][rows_a],
        occurrence=occurrence[rows_a] + 1,
    )


def _others(rows: Rows, count: int) -> Rows:
    left = np.ones(count, np.bool_)
    left[rows] = False
    return np.flatnonzero(left)


def _single_steps(a: Trace, b: Trace) -> tuple[int, int] | None:
    of_a, of_b = steps_of(a), steps_of(b)
    return (of_a[0], of_b[0]) if len(of_a) == len(of_b) == 1 else None


def _name(site: Site) -> Hashable:
    op = (site.op, site.node) if site.role == Role.OP else ()
    return (site.module, site.phase, site.role, site.slot, *op)


def _numbers(keys: list[Hashable]) -> Rows:
    """The same number for equal keys."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys], np.int64)


def _of_sites(events: Events, numbers: Rows) -> Rows:
    return numbers[events["site"]] if len(numbers) else np.zeros(0, np.int64)


def _step(events: Events, one: bool) -> Rows:
    return np.zeros(len(events), np.int64) if one else events["step"].astype(np.int64)


def _calls(events: Events, places: Rows) -> Rows:
    """The call of each row, counted within its step among the calls of its module that began in the same phase.

    Numbers of calls in the trace will not do: a module that one side did not record shifts all that follow. By the
    phase where they begin, calls that checkpointing repeats are counted apart from the first ones, so that gradients
    meet whether or not the other side checkpoints.
    """
    found = np.zeros(len(events), np.int64)
    rows = np.flatnonzero(events["call"])
    if not rows.size:
        return found
    _, first, inverse = np.unique(events["call"][rows], return_index=True, return_inverse=True)
    begin = rows[first]
    place = places[events["site"][begin]]
    order = np.argsort(begin)
    number = np.empty(len(begin), np.int64)
    number[order] = _count_within(_combined([place[order], events["step"][begin[order]].astype(np.int64)])) + 1
    found[rows] = number[inverse]
    return found


def _combined(columns: list[Rows]) -> Rows:
    """One number a row, equal where all columns are equal. Each column stays below 2**32."""
    code = np.unique(columns[0], return_inverse=True)[1].astype(np.uint64)
    for column in columns[1:]:
        code = np.unique(code << np.uint64(32) | column.astype(np.uint64), return_inverse=True)[1].astype(np.uint64)
    return code.astype(np.int64)


def _count_within(codes: Rows) -> Rows:
    """For each row how many earlier rows have the same code."""
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    lengths = np.diff(begins, append=len(codes))
    counted = np.empty(len(codes), np.int64)
    counted[order] = np.arange(len(codes)) - np.repeat(begins, lengths)
    return counted
