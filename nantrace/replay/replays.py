"""Runs a step again and again from the same state, and counts. Each run leaves the state as it found it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from nantrace.capture.lifecycle import Lifecycle
from nantrace.flow.record import Recording, record
from nantrace.replay.ends import Ends, EndsListener
from nantrace.replay.snapshot import Snapshot
from nantrace.replay.step import Step


class Replays:
    """The replays of one step.

    Args:
        step: what to run.
        most: how many runs are allowed; asking whether some are left is the caller's business.
        progress: told one line a run.

    Attributes:
        count: runs so far.
        untouched: changes in plain Python state that are not wound back, of the first run that made any.
        settings: torch's switches that a run changed.
        latest: what the latest run came to.
        unprobed: what each run that was watched at its ends only came to.

    Raises:
        ReplayError: the state cannot be kept.
    """

    def __init__(self, step: Step, most: int, progress: Callable[[str], None] | None = None) -> None:
        self.step, self.most = step, most
        self.snapshot = Snapshot(step)
        self.count = 0
        self.untouched: tuple[str, ...] = ()
        self.settings: tuple[str, ...] = ()
        self.latest = Ends()
        self.unprobed: list[Ends] = []
        self._progress = progress

    @property
    def left(self) -> int:
        return self.most - self.count

    @contextlib.contextmanager
    def one(self, what: str) -> Iterator[EndsListener]:
        """The room for one run; whatever happens in it, the state is restored behind it."""
        self.count += 1
        number = self.count
        listener = EndsListener(self.step.model)
        try:
            with Lifecycle(self.snapshot.listener()), Lifecycle(listener):
                yield listener
            self.untouched = self.untouched or self.snapshot.untouched()
            self.settings = self.settings or self.snapshot.settings_changed()
        finally:
            self.snapshot.restore()
        self.latest = listener.ends
        if self._progress is not None:
            self._progress(f"replay {number}: {what}: {listener.ends.in_words()}")

    def plain(self, what: str) -> Ends:
        """One run that is watched at its ends only, compiled where the user compiled it."""
        with self.one(what) as listener:
            returned, error = called(self.step)
            ends = listener.ended(returned, error)
        self.unprobed.append(ends)
        return ends

    def recorded(self, what: str, **options: Any) -> tuple[Recording, Ends]:
        """One run under the op recorder; `options` are those of `flow.record`."""
        step = self.step
        with self.one(what) as listener:
            recording = record(step, step.model, step.batch, optimizer=step.optimizer, **options)
            return recording, listener.ended(recording.returned, recording.error)


def called(step: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What a step returned, or what it raised."""
    try:
        return step(), None
    except Exception as error:
        return None, error
