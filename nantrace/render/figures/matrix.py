"""What became of a step under each of several changed conditions: axis x outcome, out of plain records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

MOST_AXES = 40
#: The order in which outcomes stand, worst first; others follow in order of appearance.
_ORDER = ("fault", "contained", "inconclusive", "not_reproduced", "expected", "clean")

#: (axis, outcome, detail): "dtype=bfloat16", "clean", "loss 0.31".
Record = tuple[str, str, str]


@dataclass(frozen=True)
class Matrix:
    """A table of counts.

    Attributes:
        axes, outcomes: names of its rows and columns.
        counts: how many records each cell holds, by row.
        details: for each row what its records say.
        note: what was left out, as a sentence; empty if nothing.
    """

    axes: tuple[str, ...]
    outcomes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    details: tuple[str, ...]
    note: str


def matrix(records: Iterable[Record]) -> Matrix:
    """Rows and columns in order of appearance, known outcomes worst first."""
    held = [(str(axis), str(outcome), str(detail)) for axis, outcome, detail in records]
    axes = list(dict.fromkeys(axis for axis, _, _ in held))
    seen = list(dict.fromkeys(outcome for _, outcome, _ in held))
    outcomes = [name for name in _ORDER if name in seen] + [name for name in seen if name not in _ORDER]
    counted = Counter((axis, outcome) for axis, outcome, _ in held)
    said: dict[str, dict[str, None]] = {axis: {} for axis in axes}
    for axis, _, detail in held:
        if detail:
            said[axis].setdefault(detail)
    hidden = len(axes) - MOST_AXES
    note = f"{hidden:,} more {'axis is' if hidden == 1 else 'axes are'} not shown." if hidden > 0 else ""
    axes = axes[:MOST_AXES]
    return Matrix(
        axes=tuple(axes),
        outcomes=tuple(outcomes),
        counts=tuple(tuple(counted[axis, outcome] for outcome in outcomes) for axis in axes),
        details=tuple("; ".join(said[axis]) for axis in axes),
        note=note,
    )
