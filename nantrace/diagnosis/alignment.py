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

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Alignment:
    """Rows of two traces that correspond.

    Attributes:
        a, b: rows of `events`, pair by pair, in the order in which trace A executed.
        only_a, only_b: rows without a counterpart.
        call: for each pair the number of the call of its module within the step, from 1; 0 outside calls.
        occurrence: for each pair which of several such rows it is, from 1.
        steps: the one step of each trace, where their numbers differ.
    """

    a: Rows
    b: Rows
    only_a: Rows
    only_b: Rows
    call: Rows
    occurrence: Rows
    steps: tuple[int, int] | None = None


def align(a: Trace, b: Trace) -> Alignment:
    """Pair the events of two traces. Two traces of one step each are aligned whatever number their step has."""
    steps = _single_steps(a, b)
    names = _numbers([*map(_name, a.sites), *map(_name, b.sites)])
    parts = [
        [_of_sites(trace, sites), _step(trace, steps is not None), _calls(trace)]
        for trace, sites in ((a, names[: len(a.sites)]), (b, names[len(a.sites) :]))
    ]
    split = len(a)
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
        steps=steps if steps is not None and steps[0] != steps[1] else None,
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


def _of_sites(trace: Trace, numbers: Rows) -> Rows:
    return numbers[trace.events["site"]] if len(numbers) else np.zeros(0, np.int64)


def _step(trace: Trace, one: bool) -> Rows:
    return np.zeros(len(trace), np.int64) if one else trace.events["step"].astype(np.int64)


def _calls(trace: Trace) -> Rows:
    """The call of each row, counted within its step among the calls of its module that began in the same phase.

    Numbers of calls in the trace will not do: a module that one side did not record shifts all that follow. By the
    phase where they begin, calls that checkpointing repeats are counted apart from the first ones, so that gradients
    meet whether or not the other side checkpoints.
    """
    found = np.zeros(len(trace), np.int64)
    rows = np.flatnonzero(trace.events["call"])
    if not rows.size:
        return found
    _, first, inverse = np.unique(trace.events["call"][rows], return_index=True, return_inverse=True)
    begin = rows[first]
    place = _numbers([(site.module, site.phase) for site in trace.sites])[trace.events["site"][begin]]
    order = np.argsort(begin)
    number = np.empty(len(begin), np.int64)
    number[order] = _count_within(_combined([place[order], trace.events["step"][begin[order]].astype(np.int64)])) + 1
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
