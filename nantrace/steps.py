"""The ledger as a value: a row of numbers for every step, and all that was said of some of them.

A long run keeps 85 bytes a step. What a step said beside its numbers (learning rates by group, losses by name, notes)
stands in a mapping of its own, which a sampled or dropped step goes without. Knows no torch and no file.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeGuard, overload

import numpy as np
import numpy.typing as npt

Step = Mapping[str, Any]
#: For rows of `STEP`, which of them.
Could = Callable[[npt.NDArray[np.void]], npt.NDArray[np.bool_]]


class Marks(enum.IntFlag):
    """What a row of numbers cannot say by them."""

    UNDETAILED = 1  # outside the sample: no module was listened to
    LOSS_IS_NAN = 2  # and not absent
    GRADIENT_NORM_IS_NAN = 4


#: One row a step. A float is NaN where it was not recorded as one number; `marks` is a `Marks` mask.
STEP = np.dtype(
    [
        ("step", "<u4"),
        ("first_seq", "<u8"),  # 0 where the events were not written, or after the row
        ("events", "<u8"),  # that were seen, kept or not
        ("loss", "<f8"),
        ("lr", "<f8"),
        ("seconds", "<f8"),
        ("gradient_norm", "<f8"),
        ("scale_before", "<f8"),
        ("scale_after", "<f8"),
        ("attempted", "<u4"),
        ("committed", "<u4"),
        ("skipped", "<u4"),
        ("nonfinite", "<u4"),  # events with a NaN or an infinity
        ("marks", "u1"),
    ]
)
_COUNTS = ("attempted", "committed", "skipped")
_FLOATS = ("seconds", "loss", "lr", "gradient_norm", "scale_before", "scale_after")
#: The largest integer of each column but `marks`; None for floats.
_LARGEST = {
    name: int(np.iinfo(STEP[name]).max) if STEP[name].kind == "u" else None
    for name in STEP.names or ()
    if name != "marks"
}
# Plain integers: an operation on members of an enum takes longer than all the rest of a row.
_NAN_MARKS = {"loss": int(Marks.LOSS_IS_NAN), "gradient_norm": int(Marks.GRADIENT_NORM_IS_NAN)}
_UNDETAILED = int(Marks.UNDETAILED)
_BLOCK = 4096  # rows that iteration unpacks at once


def packed(step: Step) -> tuple[Any, ...]:
    """The numbers of one step, in the order of `STEP`."""
    numbers = {name: _number(step.get(name), largest) for name, largest in _LARGEST.items()}
    numbers["lr"] = _number(_one_of(step.get("lr")), None)
    numbers["events"] = numbers["events"] or _number(step.get("not_kept"), _LARGEST["events"])
    marks = _UNDETAILED if step.get("detailed") is False else 0
    for name, mark in _NAN_MARKS.items():
        value = step.get(name)
        if isinstance(value, float) and math.isnan(value):
            marks |= mark
    return (*numbers.values(), marks)


def unpacked(row: Sequence[Any]) -> dict[str, Any]:
    """The mapping that the numbers of one row amount to; its events count as not kept."""
    numbers = dict(zip(STEP.names or (), row, strict=True))
    step: dict[str, Any] = {"step": numbers["step"], "first_seq": 0, "events": 0}
    step.update((name, numbers[name]) for name in _COUNTS)
    for name in _FLOATS:
        value = numbers[name]
        if value == value or numbers["marks"] & _NAN_MARKS.get(name, 0):
            step[name] = value
    if numbers["events"]:
        step["not_kept"] = numbers["events"]
    if numbers["nonfinite"]:
        step["nonfinite"] = numbers["nonfinite"]
    if numbers["marks"] & _UNDETAILED:
        step["detailed"] = False
    return step


class Steps(Sequence[Step]):
    """The steps of a long run: a sequence of mappings that are made when they are asked for.

    Equal to any sequence of equal mappings. A slice is a tuple.

    Args:
        rows: an array of `STEP`, one row a step.
        said: by the place of a row, all that was said of that step; such a step's numbers are not looked at.
    """

    def __init__(self, rows: npt.NDArray[np.void], said: Mapping[int, Step]) -> None:
        self.rows = rows
        self.said = said

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> Step: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Step, ...]: ...
    def __getitem__(self, place: int | slice) -> Step | tuple[Step, ...]:
        if isinstance(place, slice):
            return tuple(self[at] for at in range(*place.indices(len(self))))
        at = range(len(self))[place]
        return self.said[at] if at in self.said else unpacked(self.rows[at].tolist())

    def __iter__(self) -> Iterator[Step]:
        for begin in range(0, len(self), _BLOCK):
            for at, row in enumerate(self.rows[begin : begin + _BLOCK].tolist(), begin):
                yield self.said[at] if at in self.said else unpacked(row)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # equal to tuples of dicts, which have none either

    def __repr__(self) -> str:
        shown = [repr(step) for step in itertools.islice(self, 3)]
        return f"<{len(self)} steps: {', '.join(shown)}{', ...' if len(self) > 3 else ''}>"


def steps_from(rows: npt.NDArray[np.void], said: Mapping[int, Step]) -> Sequence[Step]:
    """The steps; as a plain tuple where everything is known of each and is in memory already."""
    if len(said) == len(rows) and isinstance(said, dict):
        return tuple(said[place] for place in range(len(rows)))
    return Steps(rows, said)


def told(steps: Iterable[Step]) -> Iterator[Step]:
    """The steps of which more is known than numbers, in order: notes, decisions and conduct stand nowhere else."""
    if not isinstance(steps, Steps):
        return iter(steps)
    return (steps.said[place] for place in sorted(steps.said))


def likely(steps: Iterable[Step], could: Could) -> Iterator[Step]:
    """The steps that can be of interest by their numbers, and all of which more is known, in order.

    Args:
        could: says for rows of `STEP` which can be; the others are not unpacked. Steps that stand nowhere as a row of
            numbers all come.
    """
    return _at(steps, likely_places(steps, could)) if isinstance(steps, Steps) else iter(steps)


def _at(steps: Steps, places: Sequence[int]) -> Iterator[Step]:
    """The steps at these places; their rows are unpacked many at once."""
    for begin in range(0, len(places), _BLOCK):
        block = places[begin : begin + _BLOCK]
        for place, row in zip(block, steps.rows[block].tolist(), strict=True):
            yield steps.said[place] if place in steps.said else unpacked(row)


def likely_places(steps: Sequence[Step], could: Could) -> Sequence[int]:
    """The places of the steps that `likely` gives."""
    if not isinstance(steps, Steps):
        return range(len(steps))
    chosen = could(steps.rows)
    chosen[list(steps.said)] = True
    places: list[int] = np.flatnonzero(chosen).tolist()
    return places


def was_skipped(rows: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Which rows of `STEP` skipped an update."""
    return np.asarray(rows["skipped"] > 0)


def had_nonfinite_numbers(rows: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Which rows of `STEP` had a loss or a norm of gradients that was a NaN or an infinity."""
    infinite = np.isinf(rows["loss"]) | np.isinf(rows["gradient_norm"])
    return np.asarray(infinite | (rows["marks"] & sum(_NAN_MARKS.values()) != 0))


def had_scale(rows: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Which rows of `STEP` had a loss scale."""
    return np.asarray(~np.isnan(rows["scale_before"]))


def figures(steps: Iterable[Step], name: Literal["loss", "attempted"]) -> Iterator[tuple[Any, Any]]:
    """(number, figure) of each step in order; what was not recorded is a NaN, or None."""
    if not isinstance(steps, Steps):
        yield from ((step.get("step"), step.get(name)) for step in steps)
        return
    for begin in range(0, len(steps), _BLOCK):
        block = steps.rows[begin : begin + _BLOCK]
        pairs = zip(block["step"].tolist(), block[name].tolist(), strict=True)
        for place, (number, figure) in enumerate(pairs, begin):
            if place in steps.said:
                step = steps.said[place]
                yield step.get("step"), step.get(name)
            else:
                yield number, figure


def numbers_of(steps: Iterable[Step]) -> list[int]:
    """The numbers of the steps, of those that have one."""
    if isinstance(steps, Steps):
        numbers: list[int] = steps.rows["step"].tolist()
        return numbers
    found = (step.get("step") for step in steps)
    return [number for number in found if isinstance(number, int)]


def by_number(steps: Iterable[Step], wanted: Iterable[int]) -> dict[int, Step]:
    """The steps with these numbers, by their number; of several with one number the first."""
    numbers = frozenset(wanted)
    found: dict[int, Step] = {}
    for step in _candidates(steps, numbers):
        number = step.get("step")
        if number in numbers:
            found.setdefault(number, step)
    return found


def is_nonfinite(value: Any) -> TypeGuard[float]:
    """Whether a value of the ledger was recorded as a NaN or an infinity."""
    return isinstance(value, float) and not math.isfinite(value)


def shows_nonfinite(step: Step) -> bool:
    """Whether the loss of a step, or the norm of its gradients, was recorded as a NaN or an infinity."""
    return any(is_nonfinite(step.get(name)) for name in _NAN_MARKS)


def rates(step: Step) -> Sequence[Any]:
    """The learning rates of a step, by group; one None where none was recorded."""
    found = step.get("lr")
    return found if isinstance(found, (list, tuple)) else (found,)


def _candidates(steps: Iterable[Step], numbers: frozenset[int]) -> Iterable[Step]:
    """All steps among which those with these numbers are; of a long run no other is unpacked."""
    if not isinstance(steps, Steps):
        return steps
    places = np.flatnonzero(np.isin(steps.rows["step"], np.array(sorted(numbers), np.int64)))
    return _at(steps, places.tolist())


def _one_of(value: Any) -> Any:
    """What all parameter groups share."""
    return value[0] if isinstance(value, (list, tuple)) and value and all(one == value[0] for one in value) else value


def _number(value: Any, largest: int | None) -> Any:
    """A value for a numeric column; what is not one number is NaN, or 0 in an integer column."""
    absent = math.nan if largest is None else 0
    if isinstance(value, (bool, str)) or value is None:
        return absent
    try:
        number = float(value) if largest is None else int(value)
    except (TypeError, ValueError, OverflowError):
        return absent
    if largest is not None and not 0 <= number <= largest:
        return absent
    return number
