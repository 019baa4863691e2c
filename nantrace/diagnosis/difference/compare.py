"""What two traces of the same step differ in: nonfinite values first, then ranges. Pure.

Compares the statistics that traces hold, never elements: two tensors with equal counts, first positions, minimum and
maximum may still differ. Knows no rendering; the sentences are in `words`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from nantrace.diagnosis.difference import tolerance
from nantrace.diagnosis.difference.alignment import Alignment, Rows, align_events, ground, windows
from nantrace.diagnosis.difference.scale import Unscaled, without_scale
from nantrace.diagnosis.modules.seen import Seen
from nantrace.diagnosis.verdict import plain
from nantrace.events import Columns, Site, TensorStats, Trace, nonfinite_rows

_KEPT = 100  # differences of each kind that are kept whole; the others are counted
_BLOCK = 65_536  # pairs compared at once

Kind = Literal["nonfinite", "range", "shape"]
_KINDS: tuple[Kind, ...] = get_args(Kind)
_FACTS = ("dtype", "nonfinite_alike", "position_unknown", "unreadable")

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
        a, b: what each trace saw, losses and gradients without the loss scale; A is the reference.
        error: the larger of the distances between the minima and between the maxima; None unless kind is "range".
        relative: error by the largest magnitude in A; None where that is no larger than what is allowed.
        allowed: the largest error that counts as rounding.
    """

    kind: Kind
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
        scales: the least and the largest loss scale that its losses and gradients were compared without; None: none.
        only: how many of them have no counterpart.
        only_nonfinite: how many of those hold nonfinite values.
        only_by: how many of those there are, by phase and role: {"forward output": 3}.
        first_only: the first of them, as phase, module and slot; None if there is none.
    """

    path: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    events: int = 0
    scales: tuple[float, float] | None = None
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
        modules: how many modules inside the model each trace names, and how many names both; None if one names none.
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
    modules: tuple[int, int, int] | None = None

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
        from nantrace.diagnosis.difference.words import as_text

        return as_text(self)


def compare(
    a: Trace,
    b: Trace,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Difference:
    """Compare two traces of the same step, event by event. Neither is changed.

    Losses and gradients are compared without the loss scale that the ledger names. Where it does not settle whether
    the scale still stood on one, a difference is one only if it is one both with the scale and without.

    Args:
        a: the reference.
        b: the other: the same step compiled, in another dtype, on another rank, or after a change.
        rtol, atol: an end of a range may move by `atol + rtol * (largest magnitude in A)`. None takes what rounding in
            the coarsest dtype of both traces explains, see `nantrace.diagnosis.difference.tolerance`; 0 means exactly.
        progress: told a line before the events are paired and after each block of pairs.

    Raises:
        ValueError: a tolerance is negative or NaN.
    """
    for name, given in (("rtol", rtol), ("atol", atol)):
        if given is not None and not given >= 0:
            raise ValueError(f"{name} is {given}: pass a number of 0 or more, or leave it out.")
    if progress is not None:
        progress(f"pairing {len(a):,} and {len(b):,} events")
    shared = ground(a, b)
    parts = windows(a, b, shared)
    rules = _Rules(a, b, parts, rtol, atol)
    counts: Counter[str] = Counter(dict.fromkeys((*_KINDS, *_FACTS), 0))
    kept: dict[str, list[SiteDifference]] = {kind: [] for kind in _KINDS}
    alone: tuple[list[Rows], list[Rows]] = ([], [])
    alone_nonfinite = [0, 0]
    for rows in parts:
        sides = _part(a, rows[0]), _part(b, rows[1])
        aligned = align_events(shared, sides[0].trace.events, sides[1].trace.events)
        counts["common"] += len(aligned.a)
        for side, only in enumerate((aligned.only_a, aligned.only_b)):
            alone[side].append(only + rows[side].start)
            alone_nonfinite[side] += int(nonfinite_rows(sides[side].trace.events[only]).sum())
        for begin in range(0, len(aligned.a), _BLOCK):
            block = _Block(rules, sides, aligned, begin)
            for name, flags in block.flags.items():
                counts[name] += int(flags.sum())
            for kind in _KINDS:
                kept[kind] += block.differences(kind, _KEPT - len(kept[kind]))
        if progress is not None:
            progress(f"compared {rows[0].stop:,} of {len(a):,} events")
    return Difference(
        a=_side(a, alone[0], alone_nonfinite[0], rules.scales[0]),
        b=_side(b, alone[1], alone_nonfinite[1], rules.scales[1]),
        common=counts.pop("common", 0),
        nonfinite=tuple(kept["nonfinite"]),
        ranges=tuple(kept["range"]),
        shapes=tuple(kept["shape"]),
        counts=dict(counts),
        steps=shared.steps if shared.steps is not None and shared.steps[0] != shared.steps[1] else None,
        rtol=rtol,
        atol=atol,
        dtype=rules.dtype,
        modules=_modules(a, b),
    )


def _modules(a: Trace, b: Trace) -> tuple[int, int, int] | None:
    named = [{name for entry in trace.modules for name in (entry.fqn, *entry.aliases) if name} for trace in (a, b)]
    return (len(named[0]), len(named[1]), len(named[0] & named[1])) if all(named) else None


def _part(trace: Trace, rows: slice) -> Unscaled:
    """Some steps of a trace, without the loss scale. Their rows are copied where it is taken off, and only those."""
    return without_scale(dataclasses.replace(trace, events=trace.events[rows]))


class _Rules:
    """What holds for all pairs of two traces, by site: tolerances, and what tells shapes and dtypes apart."""

    def __init__(
        self, a: Trace, b: Trace, parts: list[tuple[slice, slice]], rtol: float | None, atol: float | None
    ) -> None:
        traces = (a, b)
        self.dtype = tolerance.coarsest(*traces)
        self.rtol = (tolerance.relative(self.dtype) if self.dtype else 0.0) if rtol is None else rtol
        found = [self._usual(trace, [rows[side] for rows in parts]) for side, trace in enumerate(traces)]
        usual = [sizes for sizes, _ in found]
        self.scales = [scales for _, scales in found]
        self.atol = self._floor(self.dtype, usual[0]) if atol is None else np.full(len(usual[0]), float(atol))
        #: What rounding on each side alone puts where zero belongs; None where the caller says what counts as zero.
        self.noise = None
        if atol is None:
            own = [tolerance.coarsest(trace) for trace in traces]
            self.noise = [self._floor(dtype, sizes) for dtype, sizes in zip(own, usual, strict=True)]
        by_default = rtol is None and atol is None
        self.exact = [
            np.array([by_default and not tolerance.epsilon(site.dtype) for site in trace.sites], np.bool_)
            for trace in traces
        ]
        self.shapes = _coded([[site.shape for site in trace.sites] for trace in traces])
        self.dtypes = _coded([[site.dtype for site in trace.sites] for trace in traces])

    def _floor(self, dtype: str | None, usual: tolerance.Floats) -> tolerance.Floats:
        return tolerance.absolute(dtype, usual) if dtype else np.zeros_like(usual)

    def _usual(self, trace: Trace, parts: list[slice]) -> tuple[tolerance.Floats, tuple[float, float] | None]:
        """What is usual at each site without the loss scale, and between which scales that lay."""
        sizes, scales = np.empty(len(trace)), []
        for rows in parts:
            unscaled = _part(trace, rows)
            sizes[rows] = tolerance.counting(unscaled.trace.events)
            scales += list(unscaled.scales or ())
        return tolerance.usual_magnitudes(trace, sizes), (min(scales), max(scales)) if scales else None


class _Block:
    """Some of the pairs as columns, and what is to be said of each: traces of millions of events go through in blocks.

    Attributes:
        flags: by kind of difference, and by fact, in which pairs it is so.
    """

    def __init__(self, rules: _Rules, sides: tuple[Unscaled, Unscaled], aligned: Alignment, begin: int) -> None:
        self._rules, self._traces, self._aligned, self._begin = rules, [s.trace for s in sides], aligned, begin
        rows = [_run(side[begin : begin + _BLOCK]) for side in (aligned.a, aligned.b)]
        self._a, self._b = (trace.events[at] for trace, at in zip(self._traces, rows, strict=True))
        self._perhaps = [side.perhaps[at] for side, at in zip(sides, rows, strict=True)]
        self._sites = self._a["site"], self._b["site"]
        bad_a, bad_b = nonfinite_rows(self._a), nonfinite_rows(self._b)
        readable = ~(_unreadable(self._a) | _unreadable(self._b))
        sized = ~self._differ(rules.shapes) & (self._a["numel"] == self._b["numel"])
        counted, placed, known = self._counts_and_places()
        nonfinite = readable & ((bad_a != bad_b) | (bad_a & bad_b & sized & (counted | placed)))
        alike = readable & bad_a & bad_b & sized & ~nonfinite
        self._error, self._size, self._allowed = self._errors()
        apart = ((self._error > self._allowed) & ~self._meet_without_scale()) | self._vanished()
        self.flags = {
            "nonfinite": nonfinite,
            "range": readable & sized & ~bad_a & ~bad_b & apart,
            "shape": readable & ~sized & ~nonfinite,
            "dtype": self._differ(rules.dtypes),
            "nonfinite_alike": alike,
            "position_unknown": alike & ~known,
            "unreadable": ~readable,
        }

    def _differ(self, coded: list[Rows]) -> Flags:
        return np.asarray(coded[0][self._sites[0]] != coded[1][self._sites[1]])

    def _counts_and_places(self) -> tuple[Flags, Flags, Flags]:
        """Where nonfinite counts differ; where known first positions do; where those are known on both sides."""
        a, b = self._a, self._b
        counted = (a["nan"] != b["nan"]) | (a["posinf"] != b["posinf"]) | (a["neginf"] != b["neginf"])
        known = (a["columns"] & b["columns"] & np.uint8(Columns.FIRST_BAD)) != 0
        return counted, known & (a["first_bad"] != b["first_bad"]), known

    def _errors(self) -> tuple[tolerance.Floats, tolerance.Floats, tolerance.Floats]:
        """The larger error of both ends, A's largest magnitude, and what is allowed."""
        a, b, rules = self._a, self._b, self._rules
        with np.errstate(over="ignore", invalid="ignore"):  # two ends may be the dtype's whole range apart
            error = np.maximum(np.abs(a["min"] - b["min"]), np.abs(a["max"] - b["max"]))
            size = tolerance.magnitudes(a)
            allowed = rules.rtol * size + rules.atol[self._sites[0]]
        exact = rules.exact[0][self._sites[0]] & rules.exact[1][self._sites[1]]
        return np.asarray(error), size, np.where(exact, 0.0, allowed)

    def _meet_without_scale(self) -> Flags:
        """Where both sides agree once one or both are divided by the scale that may still stand on them."""
        meet = np.zeros(len(self._a), np.bool_)
        rows = np.flatnonzero((self._perhaps[0] != 1) | (self._perhaps[1] != 1))
        if not rows.size:
            return meet
        a, b, allowed = self._a[rows], self._b[rows], self._allowed[rows]
        scale_a, scale_b = (scales[rows] for scales in self._perhaps)
        ones = np.ones(len(rows))
        for of_a, of_b in ((scale_a, ones), (ones, scale_b), (scale_a, scale_b)):
            with np.errstate(over="ignore", invalid="ignore"):
                ends = [np.abs(a[end] / of_a - b[end] / of_b) for end in ("min", "max")]
            meet[rows] |= np.maximum(*ends) <= allowed / of_a
        return meet

    def _vanished(self) -> Flags:
        """Where one side is all zero and the other is not, by more than its own rounding: an underflow."""
        if self._rules.noise is None:
            return np.zeros(len(self._a), np.bool_)
        sizes = self._size, tolerance.magnitudes(self._b)
        noise = [floor[sites] for floor, sites in zip(self._rules.noise, self._sites, strict=True)]
        there = [size > floor for size, floor in zip(sizes, noise, strict=True)]
        return np.asarray(((sizes[0] == 0) & there[1]) | ((sizes[1] == 0) & there[0]))

    def differences(self, kind: Kind, most: int) -> list[SiteDifference]:
        return [self._difference(kind, int(pair)) for pair in np.flatnonzero(self.flags[kind])[:most]]

    def _difference(self, kind: Kind, pair: int) -> SiteDifference:
        a, b = self._a[pair : pair + 1], self._b[pair : pair + 1]
        of_a, of_b = self._traces
        site = of_a.sites[int(a["site"][0])]
        made = SiteDifference(
            kind=kind,
            step=int(a["step"][0]),
            phase=site.phase.label,
            module=site.module,
            role=site.role.label,
            slot=site.slot,
            op=site.op,
            call=int(self._aligned.call[self._begin + pair]),
            occurrence=int(self._aligned.occurrence[self._begin + pair]),
            seq_a=int(a["seq"][0]),
            seq_b=int(b["seq"][0]),
            a=_stats(of_a, a),
            b=_stats(of_b, b),
        )
        if kind != "range":
            return made
        error, size, allowed = (float(column[pair]) for column in (self._error, self._size, self._allowed))
        relative = error / size if size > allowed else None
        return dataclasses.replace(made, error=error, relative=relative, allowed=allowed)


def _stats(trace: Trace, event: npt.NDArray[np.void]) -> TensorStats:
    """The statistics of a slice of one row."""
    return Seen.of(dataclasses.replace(trace, events=event)).stats(0)


def _run(rows: Rows) -> Rows | slice:
    """Rows that follow each other as a slice, which copies nothing."""
    begin, end = int(rows[0]), int(rows[0]) + len(rows)
    return slice(begin, end) if np.array_equal(rows, np.arange(begin, end)) else rows


def _unreadable(events: npt.NDArray[np.void]) -> Flags:
    """Rows of tensors of which no element could be read."""
    counted = (events["finite"] != 0) | nonfinite_rows(events)
    return np.asarray((events["numel"] != 0) & ~counted)


def _coded(sides: list[list[Any]]) -> list[Rows]:
    """Values of sites as numbers, equal where the values are."""
    numbers: dict[Any, int] = {}
    return [np.array([numbers.setdefault(value, len(numbers)) for value in values], np.int64) for values in sides]


def _side(trace: Trace, alone: list[Rows], nonfinite: int, scales: tuple[float, float] | None) -> Side:
    only = np.concatenate([*alone, np.zeros(0, np.int64)])
    by_site = Counter(trace.events["site"][only].tolist())
    by: Counter[str] = Counter()
    for number, count in by_site.items():
        by[_kind(trace.sites[number])] += count
    known = ("torch", "device", "user_mode", "rank")
    return Side(
        path=trace.path,
        facts={key: trace.meta[key] for key in known if key in trace.meta},
        events=len(trace),
        scales=scales,
        only=len(only),
        only_nonfinite=nonfinite,
        only_by=dict(by.most_common()),
        first_only=_place(trace.sites[trace.events["site"][only.min()]]) if len(only) else None,
    )


def _kind(site: Site) -> str:
    return f"{site.phase.label} {site.role.label}"


def _place(site: Site) -> str:
    return f"{site.phase.label} {site.tensor}{f' ({site.op})' if site.op else ''}"
