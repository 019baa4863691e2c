"""What two traces of the same step differ in: nonfinite values first, then ranges. Pure.

Compares the statistics that traces hold, never elements: two tensors with equal counts, first positions, minimum and
maximum may still differ. Knows no rendering; the sentences are in `difference_words`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nantrace.diagnosis import tolerance
from nantrace.diagnosis.alignment import Alignment, Rows, align
from nantrace.diagnosis.seen import Seen
from nantrace.diagnosis.verdict import plain
from nantrace.events import Columns, Site, TensorStats, Trace
from nantrace.narrowing import nonfinite_rows

_KEPT = 100  # differences of each kind that are kept whole; the others are counted

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SiteDifference:
    """One tensor that two traces saw differently.

    Attributes:
        kind: "nonfinite" counts or positions of nonfinite elements, "range" minimum or maximum, "shape" the sizes.
        step: its number in trace A.
        phase, module, role, slot, op: of the site.
        call: which call of the module within the step, from 1; 0 outside calls.
        occurrence: which of several such rows, from 1.
        seq_a, seq_b: the events.
        a, b: what each trace saw; A is the reference.
        error: the larger of the distances between the minima and between the maxima; None unless kind is "range".
        relative: error by the largest magnitude in A; None where that is no larger than what is allowed.
        allowed: the largest error that counts as rounding.
    """

    kind: Literal["nonfinite", "range", "shape"]
    step: int
    phase: str
    module: str | None
    role: str
    slot: str
    op: str | None
    call: int
    occurrence: int
    seq_a: int
    seq_b: int
    a: TensorStats
    b: TensorStats
    error: float | None = None
    relative: float | None = None
    allowed: float | None = None


@dataclass(frozen=True)
class Side:
    """One of the two traces.

    Attributes:
        path: where it was loaded from; None for a trace in memory.
        facts: of its `meta`: torch, device, rank, whether the user ran it compiled.
        events: how many it holds.
        only: how many of them have no counterpart.
        only_nonfinite: how many of those hold nonfinite values.
        only_by: how many of those there are, by phase and role: {"forward output": 3}.
        first_only: the first of them, as phase, module and slot; None if there is none.
    """

    path: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    events: int = 0
    only: int = 0
    only_nonfinite: int = 0
    only_by: Mapping[str, int] = field(default_factory=dict)
    first_only: str | None = None


@dataclass(frozen=True)
class Difference:
    """What two traces differ in. `str()` says it, `to_dict()` is strict JSON.

    Attributes:
        a, b: the two traces; A is the reference.
        common: events with a counterpart.
        nonfinite, ranges, shapes: the first hundred differences of each kind, in the order in which A executed.
        counts: how many there are of each kind: "nonfinite", "range", "shape"; "dtype" (a fact, no difference);
            "nonfinite_alike", nonfinite in both with equal counts; "position_unknown", of these, where a first position
            was not recorded; "unreadable", of which no values were read.
        steps: the one step of each trace, where their numbers differ.
        rtol, atol: as given; None where the dtypes decide.
        dtype: the coarsest dtype of both traces, whose rounding the tolerance allows; None if none rounds.
    """

    a: Side
    b: Side
    common: int = 0
    nonfinite: tuple[SiteDifference, ...] = ()
    ranges: tuple[SiteDifference, ...] = ()
    shapes: tuple[SiteDifference, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    steps: tuple[int, int] | None = None
    rtol: float | None = None
    atol: float | None = None
    dtype: str | None = None

    @property
    def first(self) -> SiteDifference | None:
        """The first difference in nonfinite values, or else in ranges, or else in shapes."""
        return next(iter((*self.nonfinite, *self.ranges, *self.shapes)), None)

    @property
    def same(self) -> bool:
        """Whether nothing differs: there are common events, and no nonfinite one lacks its counterpart."""
        return self.common > 0 and self.first is None and not (self.a.only_nonfinite or self.b.only_nonfinite)

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON types only; a nonfinite float becomes {"finite": false, "value": "nan" | "inf" | "-inf"}."""
        found: dict[str, Any] = plain(self)
        return {"same": self.same, **found}

    def __str__(self) -> str:
        from nantrace.diagnosis.difference_words import as_text

        return as_text(self)


def compare(a: Trace, b: Trace, *, rtol: float | None = None, atol: float | None = None) -> Difference:
    """Compare two traces of the same step, event by event. Neither is changed.

    Args:
        a: the reference.
        b: the other: the same step compiled, in another dtype, on another rank, or after a change.
        rtol, atol: an end of a range may move by `atol + rtol * (largest magnitude in A)`. None takes what rounding in
            the coarsest dtype of both traces explains, see `nantrace.diagnosis.tolerance`; 0 means exactly.

    Raises:
        ValueError: a tolerance is negative or NaN.
    """
    for name, given in (("rtol", rtol), ("atol", atol)):
        if given is not None and not given >= 0:
            raise ValueError(f"{name} is {given}: pass a number of 0 or more, or leave it out.")
    aligned = align(a, b)
    pairs = _Pairs(a, b, aligned, rtol, atol)
    flags = {"nonfinite": pairs.nonfinite, "range": pairs.range, "shape": pairs.shape}
    counts = {kind: int(flag.sum()) for kind, flag in {**flags, **pairs.facts}.items()}
    kept = {kind: pairs.differences(kind, np.flatnonzero(flag)[:_KEPT]) for kind, flag in flags.items()}
    return Difference(
        a=_side(a, aligned.only_a),
        b=_side(b, aligned.only_b),
        common=len(aligned.a),
        nonfinite=kept["nonfinite"],
        ranges=kept["range"],
        shapes=kept["shape"],
        counts=counts,
        steps=aligned.steps,
        rtol=rtol,
        atol=atol,
        dtype=pairs.dtype,
    )


class _Pairs:
    """The pairs of an alignment as columns, and what is to be said of each. Lives for one comparison."""

    def __init__(self, a: Trace, b: Trace, aligned: Alignment, rtol: float | None, atol: float | None) -> None:
        self._a, self._b, self._aligned = a, b, aligned
        self._events_a, self._events_b = a.events[aligned.a], b.events[aligned.b]
        self.dtype = tolerance.coarsest(a, b)
        bad_a, bad_b = nonfinite_rows(self._events_a), nonfinite_rows(self._events_b)
        unreadable = _unreadable(self._events_a) | _unreadable(self._events_b)
        shapes = _differ([site.shape for site in a.sites], [site.shape for site in b.sites], self._sites())
        sized = ~shapes & (self._events_a["numel"] == self._events_b["numel"])
        counted, placed, known = self._counts_and_places()
        self.nonfinite = ~unreadable & ((bad_a != bad_b) | (bad_a & bad_b & sized & (counted | placed)))
        self.shape = ~sized & ~self.nonfinite & ~unreadable
        self.error, self.size, self.allowed = self._errors(rtol, atol)
        apart = self.error > self.allowed
        if atol is None:
            apart |= self._vanished()
        self.range = sized & ~bad_a & ~bad_b & ~unreadable & apart
        alike = bad_a & bad_b & ~self.nonfinite & ~self.shape & ~unreadable
        self.facts = {
            "dtype": _differ([site.dtype for site in a.sites], [site.dtype for site in b.sites], self._sites()),
            "nonfinite_alike": alike,
            "position_unknown": alike & ~known,
            "unreadable": unreadable,
        }

    def _sites(self) -> tuple[Rows, Rows]:
        return self._events_a["site"].astype(np.int64), self._events_b["site"].astype(np.int64)

    def _counts_and_places(self) -> tuple[Flags, Flags, Flags]:
        """Where nonfinite counts differ; where known first positions do; where those are known on both sides."""
        a, b = self._events_a, self._events_b
        counted = (a["nan"] != b["nan"]) | (a["posinf"] != b["posinf"]) | (a["neginf"] != b["neginf"])
        known = (a["columns"] & b["columns"] & np.uint8(Columns.FIRST_BAD)) != 0
        return counted, known & (a["first_bad"] != b["first_bad"]), known

    def _errors(self, rtol: float | None, atol: float | None) -> tuple[tolerance.Floats, ...]:
        """The larger error of both ends, A's largest magnitude, and what is allowed."""
        a, b = self._events_a, self._events_b
        with np.errstate(over="ignore", invalid="ignore"):  # two ends may be the dtype's whole range apart
            error = np.maximum(np.abs(a["min"] - b["min"]), np.abs(a["max"] - b["max"]))
            size = tolerance.magnitudes(a)
            relative, absolute = self._tolerances()
            allowed = (relative if rtol is None else rtol) * size + (absolute if atol is None else atol)
        if rtol is None and atol is None:
            allowed = np.where(self._exact(), 0.0, allowed)
        return error, size, np.asarray(allowed)

    def _tolerances(self) -> tuple[float, tolerance.Floats]:
        if self.dtype is None:
            return 0.0, np.zeros(len(self._events_a))
        return tolerance.relative(self.dtype), self._floor(self._a, self._sites()[0], self.dtype)

    def _floor(self, trace: Trace, sites: Rows, dtype: str | None) -> tolerance.Floats:
        """For each row what rounding alone puts where zero belongs."""
        usual = tolerance.usual_magnitudes(trace)
        floors = tolerance.absolute(dtype, usual) if dtype else np.zeros_like(usual)
        return floors[sites] if len(floors) else np.zeros(0)

    def _exact(self) -> Flags:
        """Pairs of which neither tensor rounds."""
        exact = [np.array([not tolerance.epsilon(s.dtype) for s in t.sites] or [True]) for t in (self._a, self._b)]
        sites_a, sites_b = self._sites()
        return np.asarray(exact[0][sites_a] & exact[1][sites_b])

    def _vanished(self) -> Flags:
        """Where one side is all zero and the other is not, by more than its own rounding: an underflow."""
        sites_a, sites_b = self._sites()
        size_a, size_b = tolerance.magnitudes(self._events_a), tolerance.magnitudes(self._events_b)
        floor_a = self._floor(self._a, sites_a, tolerance.coarsest(self._a))
        floor_b = self._floor(self._b, sites_b, tolerance.coarsest(self._b))
        return np.asarray(((size_a == 0) & (size_b > floor_b)) | ((size_b == 0) & (size_a > floor_a)))

    def differences(self, kind: Any, pairs: Rows) -> tuple[SiteDifference, ...]:
        return tuple(self._difference(kind, int(pair)) for pair in pairs)

    def _difference(self, kind: Any, pair: int) -> SiteDifference:
        a, b = self._events_a[pair : pair + 1], self._events_b[pair : pair + 1]
        site = self._a.sites[int(a["site"][0])]
        made = SiteDifference(
            kind=kind,
            step=int(a["step"][0]),
            phase=site.phase.label,
            module=site.module,
            role=site.role.label,
            slot=site.slot,
            op=site.op,
            call=int(self._aligned.call[pair]),
            occurrence=int(self._aligned.occurrence[pair]),
            seq_a=int(a["seq"][0]),
            seq_b=int(b["seq"][0]),
            a=_stats(self._a, a),
            b=_stats(self._b, b),
        )
        if kind != "range":
            return made
        error, size, allowed = (float(column[pair]) for column in (self.error, self.size, self.allowed))
        relative = error / size if size > allowed else None
        return dataclasses.replace(made, error=error, relative=relative, allowed=allowed)


def _stats(trace: Trace, event: npt.NDArray[np.void]) -> TensorStats:
    """The statistics of a slice of one row."""
    return Seen.of(dataclasses.replace(trace, events=event)).stats(0)


def _unreadable(events: npt.NDArray[np.void]) -> Flags:
    """Rows of tensors of which no element could be read."""
    counted = (events["finite"] != 0) | nonfinite_rows(events)
    return np.asarray((events["numel"] != 0) & ~counted)


def _differ(a: list[Any], b: list[Any], sites: tuple[Rows, Rows]) -> Flags:
    """For each pair whether a property of its two sites differs."""
    numbers: dict[Any, int] = {}
    coded = [np.array([numbers.setdefault(value, len(numbers)) for value in values] or [0]) for values in (a, b)]
    return np.asarray(coded[0][sites[0]] != coded[1][sites[1]])


def _side(trace: Trace, only: Rows) -> Side:
    events = trace.events[only]
    by_site = Counter(events["site"].tolist())
    by: Counter[str] = Counter()
    for number, count in by_site.items():
        by[_kind(trace.sites[number])] += count
    known = ("torch", "device", "user_mode", "rank")
    return Side(
        path=trace.path,
        facts={key: trace.meta[key] for key in known if key in trace.meta},
        events=len(trace),
        only=len(events),
        only_nonfinite=int(nonfinite_rows(events).sum()),
        only_by=dict(by.most_common()),
        first_only=_place(trace.site(events[0])) if len(events) else None,
    )


def _kind(site: Site) -> str:
    return f"{site.phase.label} {site.role.label}"


def _place(site: Site) -> str:
    return f"{site.phase.label} {site.tensor}{f' ({site.op})' if site.op else ''}"
