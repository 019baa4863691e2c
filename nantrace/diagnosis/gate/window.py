"""What a gate looks at: thresholds, the steps after the warm-up, and which skipped updates were explained. Pure.

Knows the ledger's words; judges nothing.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from nantrace.diagnosis.causes.wording import plural
from nantrace.errors import NantraceError
from nantrace.events import Trace

Row = Mapping[str, Any]

RuleName = Literal[
    "updates",
    "inputs",
    "losses",
    "gradients",
    "parameters",
    "buffers",
    "optimizer_state",
    "skips",
    "loss_distribution",
    "norm_distribution",
    "step_time",
]
#: A note of this kind says where a checkpoint lies, not why an update was skipped.
_NO_REASON = "checkpoint"


@dataclass(frozen=True)
class Thresholds:
    """What a run has to keep to. Tolerances and the coverage are percentages.

    Attributes:
        updates: committed updates that the window must hold, at least. An update is one optimizer's.
        warm_up: attempted updates at the beginning of the trace that are left out.
        loss_tolerance, norm_tolerance: how far median and upper quantile of losses, and of gradient norms, may lie from
            those of the reference.
        time_tolerance: by how much the median step may take longer than that of the reference.
        quantile: which upper quantile is compared, between 0.5 and 1.
        coverage: share of the steps that must have been looked at for a rule on finite values to pass.
        fewest: values on each side that make a distribution.
        allow: names, or globs on names, of tensors and losses that may be nonfinite: "batch.mask".
        explained_by: kinds of notes that explain a skipped update; none given: every kind but "checkpoint".
        without: rules that are not asked.
    """

    updates: int = 100
    warm_up: int = 0
    loss_tolerance: float = 10.0
    norm_tolerance: float = 25.0
    time_tolerance: float = 10.0
    quantile: float = 0.95
    coverage: float = 100.0
    fewest: int = 8
    allow: tuple[str, ...] = ()
    explained_by: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def allows(self, name: str) -> bool:
        return any(name == given or fnmatch.fnmatchcase(name, given) for given in self.allow)


@dataclass(frozen=True)
class Window:
    """The steps that a gate looks at.

    Attributes:
        rows: of the ledger, in order.
        positions: how many updates had been committed when each of them had ended, counted from the run's first update
            where the ledger knows it, else from the trace's.
        totals: the same of each optimizer by its name, of those that are told apart.
        resumed: names of optimizers whose own state had counted updates before the trace. The others' updates are
            counted from the beginning of the trace, wherever in the run that was.
        counts_the_run: an optimizer's state told how many updates had been committed before the trace.
        explained: numbers of steps of which a note says why they did not go as others.
        has_ledger: False where only the numbers of the steps are known.
    """

    rows: tuple[Row, ...]
    positions: tuple[int, ...]
    explained: frozenset[int]
    has_ledger: bool = True
    totals: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    resumed: frozenset[str] = frozenset()
    counts_the_run: bool = False

    @cached_property
    def steps(self) -> tuple[int, ...]:
        return tuple(number(row) for row in self.rows)

    def count(self, name: str) -> int:
        return sum(_whole(row.get(name)) for row in self.rows)

    def counted_by(self, optimizers: Iterable[str]) -> Window:
        """The same with positions that count the updates of these optimizers alone."""
        chosen = [self.totals[name] for name in optimizers]
        return replace(self, positions=tuple(map(sum, zip(*chosen, strict=True))))

    @cached_property
    def taken_up(self) -> list[tuple[Row, int]]:
        """The rows of which no update was skipped, or left out with a reason; each with its position.

        A scaler skips because of nonfinite gradients: what such a step held is no second failure.
        """
        return [(row, at) for row, at in zip(self.rows, self.positions, strict=True) if not self._is_left_out(row)]

    @cached_property
    def committed(self) -> list[tuple[Row, int]]:
        """The rows of `taken_up` in which an update was committed."""
        return [(row, at) for row, at in self.taken_up if row.get("committed")]

    def _is_left_out(self, row: Row) -> bool:
        return bool(row.get("skipped")) or (not row.get("committed") and number(row) in self.explained)


def window_of(trace: Trace, thresholds: Thresholds) -> Window:
    """The steps after the warm-up.

    Raises:
        NantraceError: there are none, or no update was attempted in them, or nothing tells where the warm-up ends.
    """
    rows, where = tuple(trace.steps), trace.path or "the trace in memory"
    if not rows:
        return _without_ledger(trace, thresholds, where)
    attempted = list(itertools.accumulate(_whole(row.get("attempted")) for row in rows))
    begin = next((at for at, before in enumerate([0, *attempted]) if before >= thresholds.warm_up), len(rows))
    if begin >= len(rows) or attempted[-1] == (attempted[begin - 1] if begin else 0):
        raise NantraceError(_empty(where, len(rows), attempted[-1], thresholds.warm_up))
    explained = _explained(rows, thresholds.explained_by)
    places = [at for at in range(begin, len(rows)) if _happened(rows[at])]
    counted = list(itertools.accumulate(_whole(row.get("committed")) for row in rows))
    positions, told = _positions(rows, counted), _told_apart(rows)
    totals = {name: _between(of, counted) for name, of in told.items()}
    return Window(
        tuple(rows[at] for at in places),
        tuple(positions[at] for at in places),
        explained,
        totals={name: tuple(found[at] for at in places) for name, found in totals.items()},
        counts_the_run=any("totals_from" in row for row in rows),
        resumed=frozenset(
            name for name, of in told.items() if any("committed_before" in share for share in of.values())
        ),
    )


def number(row: Row) -> int:
    return int(row.get("step", 0))


def _happened(row: Row) -> bool:
    """Whether a row stands for a step; one may be there only for what was noted after the last of them."""
    work = ("attempted", "backwards", "events", "not_kept")
    return row.get("detailed") is False or told_loss(row) or any(row.get(name) for name in work)


def told_loss(row: Row) -> bool:
    """Whether a loss of this step is on record, finite or not."""
    return any(map(is_number, (row.get("loss"), *(row.get("losses") or {}).values())))


def lost(row: Row) -> int:
    """Updates of a step that were begun and not committed: skipped, or broken off by an exception."""
    return max(_whole(row.get("attempted")) - _whole(row.get("committed")), _whole(row.get("skipped")))


def is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool))


def _without_ledger(trace: Trace, thresholds: Thresholds, where: str) -> Window:
    if not len(trace):
        raise NantraceError(f"The gate window is empty: {where} holds no steps; trace the run that is to be promoted.")
    if thresholds.warm_up:
        raise NantraceError(
            f"{where} has no ledger, so nothing tells where a warm-up of {thresholds.warm_up:,} updates ends: "
            "set the warm-up to 0, or trace the run with nantrace.trace."
        )
    rows = tuple({"step": int(step)} for step in np.unique(trace.events["step"]))
    return Window(rows, (0,) * len(rows), frozenset(), has_ledger=False)


def _empty(where: str, steps: int, attempted: int, warm_up: int) -> str:
    if not attempted:
        return (
            f"The gate window is empty: no update was attempted in the {plural(steps, 'step')} of {where}; "
            "trace a run with an optimizer."
        )
    return (
        f"The gate window is empty: {where} holds {plural(attempted, 'attempted update')}, all within the warm-up of "
        f"{warm_up:,}; lower the warm-up or trace more steps."
    )


def _positions(rows: Sequence[Row], counted: Sequence[int]) -> list[int]:
    """Totals from the beginning of the run: a row of numbers alone does not say them, another one may."""
    known = next((at for at, row in enumerate(rows) if isinstance(row.get("committed_total"), int)), None)
    before = 0 if known is None else int(rows[known]["committed_total"]) - counted[known]
    return [before + count for count in counted]


def _told_apart(rows: Sequence[Row]) -> dict[str, dict[int, Row]]:
    """What the ledger says of each of several optimizers, by name and by the place of the row."""
    found: dict[str, dict[int, Row]] = {}
    for at, row in enumerate(rows):
        for share in row.get("optimizers") or ():
            found.setdefault(str(share.get("name")), {})[at] = share
    return found


def _between(told: Mapping[int, Row], counted: Sequence[int]) -> list[int]:
    """An optimizer's committed updates at every row, out of those rows that tell them.

    In between, and after the last of them, it is taken to have its even part of all optimizers' updates.
    """
    places = sorted(told)
    before = _whole(told[places[0]].get("committed_before"))
    at = [0, *(counted[place] for place in places)]
    totals = [before, *(_whole(told[place].get("committed_total")) for place in places)]
    part = (totals[-1] - before) / at[-1] if at[-1] else 1.0
    left = counted[-1] - at[-1]
    return [round(each) for each in np.interp(counted, [*at, at[-1] + left], [*totals, totals[-1] + part * left])]


def _explained(rows: Sequence[Row], kinds: Sequence[str]) -> frozenset[int]:
    """Steps in whose row a note stands, or which a note names as its `step`."""
    found = set()
    for row in rows:
        for said in row.get("decisions") or ():
            kind = str(said.get("kind", ""))
            if kind in kinds or (not kinds and kind != _NO_REASON):
                named = said.get("step")
                found.add(named if isinstance(named, int) else number(row))
    return frozenset(found)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else int(value) if is_number(value) else 0
