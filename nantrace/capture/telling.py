"""What a tracer tells the user, and when it may be said: warnings once, errors never out of a hook.

Knows nothing of steps, files or hooks; what a fault is it is told.
"""

from __future__ import annotations

import sys
from typing import Literal

from nantrace.capture.surroundings import warn_user
from nantrace.errors import NantraceWarning, NonfiniteError, RecipeWarning

OnNonfinite = Literal["warn", "raise", "ignore"]


class Telling:
    """Keeps back what cannot be said yet.

    Args:
        on_nonfinite: what a fault does: "warn" once, "raise" when `to_raise` or `report` is asked, or "ignore".

    Attributes:
        faults: how many steps were at fault so far.
        given: the error that was raised, or None.
    """

    def __init__(self, on_nonfinite: OnNonfinite) -> None:
        self.faults = 0
        self.given: NonfiniteError | None = None
        self.raises = on_nonfinite == "raise"
        self._warns = on_nonfinite == "warn"
        self._error: NonfiniteError | None = None  # waits to be raised
        self._unsaid: list[tuple[str, type[NantraceWarning]]] = []
        self._said: set[str] = set()
        self._departed: list[str] = []
        self._handled_before: BaseException | None = None

    def begin(self) -> None:
        """Remember which exception the user handles already, if the block stands in an `except`."""
        self._handled_before = sys.exc_info()[1]

    def say(self, sentence: str, category: type[NantraceWarning] = NantraceWarning) -> None:
        """Warn now; where warnings are errors, wait until raising one cannot break the user's step."""
        try:
            warn_user(sentence, category)
        except NantraceWarning:
            self._unsaid.append((sentence, category))

    def say_once(self, what: str, sentence: str) -> None:
        """Warn of `what`, unless it was warned of before."""
        if what not in self._said:
            self._said.add(what)
            self.say(sentence)

    def fault(self, sentence: str | None, step: int) -> None:
        """A step was at fault."""
        self.faults += 1
        sentence = sentence or f"step {step} went nonfinite: look at the trace for where"
        if self.raises:
            self._error = self._error or NonfiniteError(sentence)
        elif self._warns and self.faults == 1:
            self.say(sentence)

    def departure(self, rule: str, sentence: str) -> bool:
        """A rule of mixed precision was broken; said once, by `say_departures`. Whether it was the first time."""
        first = rule not in self._said
        if first:
            self._said.add(rule)
            self._departed.append(sentence)
        return first

    def say_departures(self) -> None:
        while self._departed:
            self.say(self._departed.pop(0), RecipeWarning)

    def users_exception_is_under_way(self) -> bool:
        handled = sys.exc_info()[1]
        return handled is not None and handled is not self._handled_before

    def to_raise(self) -> Exception | None:
        """What goes to the user out of the call that ended a step."""
        self.say_departures()
        if self._error is None or self.users_exception_is_under_way():
            return None
        self.given, self._error = self._error, None
        return self.given

    def report(self, quietly: bool) -> None:
        """Raise what waits to be raised; `quietly` when an exception of the user's is on its way."""
        error, self._error = self._error, None
        unsaid, self._unsaid = self._unsaid, []
        if not quietly:
            for sentence, category in unsaid:
                warn_user(sentence, category)
            if error is not None:
                self.given = error
                raise error
        elif error is not None:
            self.say(str(error))
