"""Events between the end of an iteration and the forward or backward that begins the next: whose are they?

Data are prepared there, and schedulers run. What the next iteration can still read, or was made into something that it
can, is that iteration's; what was read before by an update or an average of weights, or is gone by then, belongs to the
iteration that it ran in. Knows events and who wrote which memory, and judges no value.
"""

from __future__ import annotations

from collections.abc import Callable

from nantrace.flow.rounds import Rounds
from nantrace.flow.writers import Writers
from nantrace.lineage import OpEvent

#: Of ops that are no part of an update.
_PHASES = ("forward", "loss", "post_backward")


class Between:
    """Holds such events back until the next iteration begins, and tells of every event in its iteration.

    Args:
        rounds: says in which iteration we are, and whether it is over.
        writers: says which events' elements are still in memory.
        tell: told of each event; None: nobody wants to know.
    """

    def __init__(self, rounds: Rounds, writers: Writers, tell: Callable[[OpEvent], None] | None) -> None:
        self._rounds, self._writers, self._tell = rounds, writers, tell
        self._held: dict[int, OpEvent] = {}
        self._arrived: set[int] = set()  # external events
        self._untold: list[OpEvent] = []  # of the iteration that begins: its step may not be open yet

    def is_here(self, phase: str | None) -> bool:
        """Whether an op of this phase, that runs now, is between two iterations."""
        return self._rounds.over and phase in _PHASES and not self._rounds.in_optimizer

    def read(self, ids: frozenset[int], phase: str) -> None:
        """Somebody reads what these events wrote: an update settles where they belong."""
        if self._held and not self.is_here(phase):
            self._say([self._held.pop(id) for id in sorted(ids) if id in self._held])

    def keep(self, event: OpEvent) -> None:
        """A new event."""
        if self.is_here(event.phase) and self._is_new(event):
            self._held[event.id] = event
        else:
            self.flush()
            self._say([event])

    def arrived(self, event: OpEvent) -> None:
        """Something nonfinite came from outside."""
        if self._rounds.over and event.category in ("batch", "constant"):
            self._arrived.add(event.id)

    def _is_new(self, event: OpEvent) -> bool:
        """Whether it began here: a copy of a loss that was nonfinite already is kept beside that."""
        parents = {*event.nan_parents, *event.inf_parents}
        return event.kind != "propagated" or not parents.isdisjoint(self._arrived | self._held.keys())

    def begin(self) -> None:
        """The next iteration began: what of the held events is left to it?"""
        if self._rounds.over:
            return
        self._arrived.clear()
        if not self._held:
            return
        left = self._writers.present()
        for id in sorted(self._held, reverse=True):
            event = self._held[id]
            if id in left:
                event.iteration = self._rounds.iteration
                left |= {*event.nan_parents, *event.inf_parents}
        held, self._held = list(self._held.values()), {}
        self._untold += [event for event in held if event.id in left]
        self._say([event for event in held if event.id not in left])

    def flush(self) -> None:
        """The step of the iteration that began is open by now."""
        untold, self._untold = self._untold, []
        self._say(untold)

    def finish(self) -> None:
        """No iteration follows."""
        self.flush()
        held, self._held = list(self._held.values()), {}
        self._say(held)

    def _say(self, events: list[OpEvent]) -> None:
        if self._tell is not None:
            for event in events:
                self._tell(event)
