"""Which steps are recorded in detail: every Nth, and the one after a step outside the sample that went wrong.

Knows the ledger's words, no tensor and no hook.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nantrace.steps import shows_nonfinite


class Sample:
    """The sample of one trace.

    The step after one that shows a nonfinite loss or gradient is recorded as well, and so is the step after a skipped
    update; either at most once in `every` steps, so that a run which stays bad cannot turn the sample into everything.

    Args:
        every: steps from one recorded step to the next, counted from step 0; 1 records all.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._beside: int | None = None
        self._last: dict[str, int] = {}

    def takes(self, number: int) -> bool:
        """Whether the step of this number is recorded in detail."""
        return number % self.every == 0 or number == self._beside

    def ended(self, step: Mapping[str, Any]) -> None:
        """A step has ended: what its ledger says decides on the next."""
        if step.get("detailed") is not False:
            return
        number = step["step"]
        for kind, wrong in (("nonfinite", shows_nonfinite(step)), ("skipped", bool(step.get("skipped")))):
            if wrong and number - self._last.get(kind, -self.every) >= self.every:
                self._last[kind] = number
                self._beside = number + 1
