"""The steps of a trace out of their rows and lines: what lines say goes before numbers, and long ledgers wait.

Knows bytes and no HDF5. The format is specified in `nantrace.store.schema`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nantrace.errors import TraceFormatError
from nantrace.steps import Step, steps_from
from nantrace.store.plain import from_json

_AT_ONCE = 4 * 2**20  # bytes of lines that are read when the trace is: below a tenth of a second
_LINE_FEED, _BEGIN, _END = b"\n{}"


class Refused(Exception):
    """What is wrong with the file, as the middle of a sentence."""


def steps_of(
    ledger: npt.NDArray[np.uint8], rows: npt.NDArray[np.void], places: npt.NDArray[np.uint64] | None, path: str
) -> Sequence[Step]:
    """All steps; a long ledger is parsed line by line when its steps are asked for.

    Args:
        ledger: lines of JSON.
        rows: the numbers of every step.
        places: for each line its row. None in a file of format 1.0, where each line is a step.
        path: for what is said of a line that turns out to be damaged.

    Raises:
        Refused: a line is not the JSON of a step, or of a step that is not there.
    """
    text = ledger.tobytes()
    ends = np.flatnonzero(ledger == _LINE_FEED)  # behind the last: nothing, or a line that was not finished
    begins = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    if places is None:
        return tuple(_parsed(text[begin:end], number) for number, (begin, end) in enumerate(_pairs(begins, ends)))
    begins, ends, places = begins[: len(places)], ends[: len(places)], places[: len(ends)]
    _check(ledger, begins, ends, places, len(rows))
    bounds = dict(zip(places.tolist(), _pairs(begins, ends), strict=True))  # of several lines the last counts
    if len(text) > _AT_ONCE:
        return steps_from(rows, _Lines(text, bounds, path))
    return steps_from(rows, {place: _parsed(text[begin:end], place) for place, (begin, end) in bounds.items()})


class _Lines(Mapping[int, Step]):
    """Lines that are parsed each time they are asked for."""

    def __init__(self, text: bytes, bounds: dict[int, tuple[int, int]], path: str) -> None:
        self._text = text
        self._bounds = bounds
        self._path = path

    def __getitem__(self, place: int) -> Step:
        begin, end = self._bounds[place]
        try:
            return _parsed(self._text[begin:end], place)
        except (Refused, ValueError) as error:
            raise TraceFormatError(
                f"{self._path} has a damaged line of step {place} in the ledger ({error}): trace the step again."
            ) from None

    def __contains__(self, place: object) -> bool:
        return place in self._bounds

    def __iter__(self) -> Iterator[int]:
        return iter(self._bounds)

    def __len__(self) -> int:
        return len(self._bounds)


def _pairs(begins: npt.NDArray[np.intp], ends: npt.NDArray[np.intp]) -> Iterator[tuple[int, int]]:
    return zip(begins.tolist(), ends.tolist(), strict=True)


def _check(
    ledger: npt.NDArray[np.uint8],
    begins: npt.NDArray[np.intp],
    ends: npt.NDArray[np.intp],
    places: npt.NDArray[np.uint64],
    rows: int,
) -> None:
    """What can be checked of all lines at once."""
    lost = places[places >= rows]
    if len(lost):
        raise Refused(f"has a line of step {lost[0]} of {rows} in the ledger: it is damaged, trace the step again")
    bad = (ledger[begins] != _BEGIN) | (ledger[np.maximum(ends - 1, begins)] != _END)
    if bad.any():
        number = int(np.argmax(bad))
        line = ledger[begins[number] : ends[number]].tobytes()
        raise Refused(f"has {line!r:.40} as line {number} of the ledger: it is damaged, trace the step again")


def _parsed(line: bytes, number: int) -> dict[str, Any]:
    step = from_json(line)
    if not isinstance(step, dict):
        raise Refused(f"has {step!r:.40} as step {number} of the ledger: it is damaged, trace the step again")
    return step
