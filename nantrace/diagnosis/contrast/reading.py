"""What each pair of rows of a contrast does and does not establish. Pure: knows rows, and runs nothing.

One thing differs between the rows of a pair, and both ran from the same state. A failure that goes away shows that this
thing is needed for it, never that it is wrong; one that stays shows that it is not needed. A row that could not apply,
raised, or was not run shows nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nantrace.diagnosis.contrast.rows import BASE, Reading, Row

_OPEN = "Which op made the first value, and out of what, is for nantrace bisect to say."

#: axis -> (what it establishes that the failure goes away, what that leaves open).
_VANISHES: Mapping[str, tuple[str, str]] = {
    "autocast-off": (
        "The failure needs autocast: without it the same step from the same state is finite. The step is sensitive to "
        "half precision.",
        "It does not say why the values got where half precision fails, nor that they are healthy without it.",
    ),
    "bfloat16": (
        "The failure goes away with the range of bfloat16, at fewer digits: range is what was missing (overflow or "
        "underflow), not digits.",
        "It does not say why the values left the range; they may go on growing.",
    ),
    "float32": (
        "The failure needs half precision: in float32 the same step from the same state is finite. That localises the "
        "sensitivity.",
        "It does not say why the values got where half precision fails, nor that they are healthy in float32.",
    ),
    "float64": (
        "The failure goes away with the digits and the range of float64.",
        "It does not say which of the two was missing, nor why the values got there; float32 is tried in its own row.",
    ),
    "module-float32": (
        "It suffices that this module computes in float32: what fails, fails within it or with what it hands on.",
        "It does not say that this module is to blame: its inputs may be extreme already, and other modules may do as "
        "well.",
    ),
    "scaler-off": (
        "The failure is one of scaled values: without the loss scale the same step is finite.",
        "It does not say that the scale is wrong for long: a GradScaler skips such updates and lowers its scale. Nor "
        "does it say that gradients survive half precision without a scale.",
    ),
    "scale-lowered": (
        "The loss scale was too high for these gradients: with a lower one the same step is finite.",
        "It does not say that the model is broken: a skipped update and a lower scale are how a GradScaler calibrates.",
    ),
    "no-update": (
        "The failure is in the update: up to there, loss and gradients of the same step are finite.",
        "It does not say whether the learning rate, an optimizer's moment or its eps did it.",
    ),
    "evaluation": (
        "The failure needs what only training mode does: dropout, statistics of the batch, or code that asks for it.",
        "It does not say which of them; the values were others too.",
    ),
    "other-batch": (
        "The failure needs this batch: from the same state the other one is finite.",
        "It does not say that the batch is wrong: good data can meet a model that is at the brink.",
    ),
    "deterministic": (
        "The failure goes away with deterministic algorithms: which kernel runs, or in what order it adds, matters.",
        "It does not say that a kernel is wrong: a value at the brink goes over it by rounding alone.",
    ),
    "eager": (
        "The failure needs compilation: run eagerly, the same step from the same state is finite.",
        "It does not say which stage of compilation; the rows aot_eager and inductor part them.",
    ),
    "aot-eager": (
        "The failure goes away when the graphs run with AOTAutograd but without the backend's code.",
        "It does not say that the generated code is wrong: fused kernels keep or round other intermediate values.",
    ),
    "inductor": (
        "The failure goes away under inductor.",
        "It does not say why: fused kernels often keep intermediate values in float32.",
    ),
}
#: The same for a failure that stays.
_STAYS: Mapping[str, tuple[str, str]] = {
    "autocast-off": ("The failure does not need autocast.", ""),
    "bfloat16": (
        "The range of bfloat16 does not help.",
        "Digits may be what is missing, of which bfloat16 has fewer: see the row float32.",
    ),
    "float32": ("The failure does not need half precision.", "It may still need float32's own limits: see float64."),
    "float64": (
        "No digits and no range mend it: a value that has no logarithm, root or quotient, an input, a mask, or growth "
        "without bound.",
        "",
    ),
    "module-float32": (
        "It does not suffice that this module computes in float32.",
        "It may still be one of several, or only the first to show it.",
    ),
    "scaler-off": ("This is not a loss-scale problem: the same step fails without a scale.", ""),
    "scale-lowered": ("The scale is not what is too high: the same step fails at a lower one.", ""),
    "no-update": ("The failure is there without the update of this step.", "Earlier updates may have led up to it."),
    "evaluation": ("The failure does not need training mode.", ""),
    "other-batch": (
        "The failure is not particular to this batch: the other one fails too.",
        "Both may be bad, if they come from the same source.",
    ),
    "deterministic": ("The failure does not need a nondeterministic algorithm.", ""),
    "eager": ("The failure does not need compilation.", ""),
    "aot-eager": ("The failure is there without the backend's code.", "Dynamo and AOTAutograd ran in both."),
    "inductor": ("The failure is there under inductor too.", ""),
}


def readings(rows: Sequence[Row]) -> tuple[Reading, ...]:
    """The reading of every pair that shows something, in the order of the rows; the step as it was is the first."""
    table = {row.axis: row for row in rows}
    if not rows or rows[0].axis != BASE or not rows[0].ran:
        return ()
    found = [reading for row in rows[1:] if (reading := _pair(row, table.get(row.compared_with)))]
    return (*found, *_among(table))


def _pair(row: Row, other: Row | None) -> Reading | None:
    if other is None or not other.ran or not row.ran:
        return None
    pair = (row.axis, other.axis)
    if other.outcome == "finite":
        return _breaks(row, other)
    if row.outcome == "finite":
        shows, leaves = _VANISHES[row.axis]
        return Reading(pair, shows, " ".join([leaves, *_limits(row)]))
    shows, leaves = _STAYS[row.axis]
    where = _moved(row, other)
    return Reading(pair, " ".join([shows, *where]), " ".join([part for part in (leaves, *_limits(row)) if part]))


def _breaks(row: Row, other: Row) -> Reading | None:
    """The step is finite without the change."""
    if row.outcome == "finite":
        return None
    return Reading(
        (row.axis, other.axis),
        f"The change itself makes the step fail{f', at {row.place}' if row.place else ''}: it was finite before it.",
        "Nothing of this explains a failure of the step as it was.",
    )


def _moved(row: Row, other: Row) -> list[str]:
    """Whether it is the same failure that stays."""
    if not row.place or not other.place:
        return []
    if (row.stage, row.module) == (other.stage, other.module):
        return [f"It begins at the same place, {row.place}."]
    return [f"It begins at another place, {row.place} in place of {other.place}: it may be another failure."]


def _limits(row: Row) -> list[str]:
    """Where the change did not reach, its row rules nothing out."""
    return [f"The change did not reach everything: {note}." for note in row.notes]


def _among(table: Mapping[str, Row]) -> Iterator[Reading]:
    """Pairs of changed rows that say more together than each against the step as it was."""
    if table[BASE].outcome != "nonfinite":
        return
    if _are(table, bfloat16="nonfinite", float32="finite"):
        yield Reading(
            ("bfloat16", "float32"),
            "It takes the digits of float32, not its range alone: bfloat16 has the range and fails.",
            "A range beyond that of float16 may be needed as well.",
        )
    if _are(table, float32="nonfinite", float64="finite"):
        yield Reading(
            ("float32", "float64"), "float32's own digits or range are the limit, not half precision's.", _OPEN
        )
    if _are(table, autocast_off="nonfinite", float32="finite"):
        yield Reading(
            ("autocast-off", "float32"),
            "What fails is computed in half precision of the model's or the batch's own, not of autocast's.",
            _OPEN,
        )
    if _are(table, scaler_off="finite", autocast_off="finite"):
        yield Reading(
            ("scaler-off", "autocast-off"),
            "Either change suffices: the product of scale and gradient leaves half precision, the gradient does not.",
            "Modules in float32 would hide a scale that is too high; see the row of the lower one first.",
        )
    if _are(table, scaler_off="finite", scale_lowered="nonfinite"):
        yield Reading(
            ("scaler-off", "scale-lowered"),
            "The scale is needed for the failure, and the lower one is still too high, or is fixed by the step's code.",
            "",
        )
    if _are(table, eager="finite", aot_eager="finite"):
        yield Reading(
            (BASE, "aot-eager"),
            "Tracing and AOTAutograd do not suffice for the failure: the code that the backend made is needed.",
            "A fused kernel that rounds otherwise is no wrong kernel; compare the two runs with nantrace diff.",
        )
    if _are(table, eager="finite", aot_eager="nonfinite"):
        yield Reading(
            ("aot-eager", "eager"),
            "The failure comes with the graph that Dynamo and AOTAutograd made, before any generated code.",
            "",
        )


def _are(table: Mapping[str, Row], **wanted: str) -> bool:
    return all(
        (row := table.get(axis.replace("_", "-"))) is not None and row.outcome == outcome
        for axis, outcome in wanted.items()
    )
