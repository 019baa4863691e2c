"""One thing that stands out over the steps of a trace, as a value: what it shows, and what it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nantrace.diagnosis.verdict import plain

_NUMBERS = 4


@dataclass(frozen=True)
class Observation:
    """Something that stands out.

    Attributes:
        kind: short identifier: "loss_spike", "skipped_update", "persistent_overflow", ...
        steps: numbers of the steps concerned.
        sentence: what was seen, with numbers.
        evidence: more of what was seen.
        proves: what follows from it.
        leaves_open: what does not follow, or what to check.
    """

    kind: str
    steps: tuple[int, ...]
    sentence: str
    evidence: tuple[str, ...] = ()
    proves: str = ""
    leaves_open: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON types only."""
        found = plain(self)
        assert isinstance(found, dict)
        return found


def numbered(numbers: Sequence[int], what: str = "step") -> str:
    """ "step 3", "steps 3, 5 and 2 more"."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    shown = ", ".join(str(number) for number in numbers[:_NUMBERS])
    more = len(numbers) - _NUMBERS
    return f"{what}s {shown}" + (f" and {more:,} more" if more > 0 else "")
