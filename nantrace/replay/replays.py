"""Runs a step again and again from the same state, and counts. Each run leaves the state as it found it.

The state: see `snapshot`. Plain values outside of model and batch are put back when all runs are over.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from nantrace.capture.lifecycle import Lifecycle
from nantrace.capture.sites import watched_modules
from nantrace.errors import NantraceError, ReplayError
from nantrace.flow.record import Recording, record
from nantrace.replay.afford import Cost
from nantrace.replay.ends import Ends, EndsListener
from nantrace.replay.ranks import Ranks, meet
from nantrace.replay.snapshot import Snapshot
from nantrace.replay.step import Step

#: The number of the next autograd node of this thread.
_nodes_made: Callable[[], int] = torch._C._autograd._get_sequence_nr


class Replays:
    """The replays of one step; a context manager.

    Args:
        step: what to run.
        most: how many runs are allowed; asking whether some are left is the caller's business.
        progress: told one line a run.
        alike: where several ranks run the step together, each of their runs must be of the same kind.

    Attributes:
        count: runs so far.
        untouched: changes in plain Python state that are not wound back, of the first run that made any.
        settings: torch's switches that a run changed.
        latest: what the latest run came to.
        cost: what the latest run that was watched at its ends only took.
        unprobed: what each run that was watched at its ends only came to.
        probed: what each run under probes that leave the step as it is came to.

    Raises:
        ReplayError: the state cannot be kept.
    """

    def __init__(
        self, step: Step, most: int, progress: Callable[[str], None] | None = None, *, alike: bool = False
    ) -> None:
        self.step, self.most = step, most
        self.snapshot = Snapshot(step)
        self.count = 0
        self.untouched: tuple[str, ...] = ()
        self.settings: tuple[str, ...] = ()
        self.latest = Ends()
        self.cost = Cost()
        self.unprobed: list[Ends] = []
        self.probed: list[Ends] = []
        self._progress = progress
        self._ranks = Ranks(step.model, alike)

    def __enter__(self) -> Replays:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None or issubclass(kind, NantraceError):
                self._run_along()
        finally:
            self.snapshot.leave()

    def _run_along(self) -> None:
        """This rank has done; other ranks of the step may not have, and need it in their collectives."""
        while self.count and self._ranks.go_on(None):
            self._plain(self._one("along with other ranks", same=False))

    @property
    def left(self) -> int:
        return self.most - self.count

    @contextlib.contextmanager
    def one(self, what: str, *, same: bool = True) -> Iterator[EndsListener]:
        """The room for one run; whatever happens in it, the state is restored behind it.

        `same`: it is under probes, and meant to come to the same ends as a run without.
        """
        if self.count:
            self._ranks.go_on(what)
        with self._one(what, same) as listener:
            yield listener

    @contextlib.contextmanager
    def _one(self, what: str, same: bool) -> Iterator[EndsListener]:
        self.count += 1
        number = self.count
        listener = EndsListener(self.step.model)
        try:
            with contextlib.ExitStack() as exits:
                if number == 1:
                    exits.enter_context(self._ranks.meeting())
                exits.enter_context(Lifecycle(self.snapshot.listener()))
                exits.enter_context(Lifecycle(listener))
                exits.enter_context(_listening(self.step.model, listener))
                yield listener
            self.untouched = self.untouched or self.snapshot.untouched()
            self.settings = self.settings or self.snapshot.settings_changed()
        finally:
            self.snapshot.restore()
        self.latest = listener.ends
        if same:
            self.probed.append(listener.ends)
        if self._progress is not None:
            self._progress(f"replay {number}: {what}: {listener.ends.in_words()}")

    def plain(self, what: str) -> Ends:
        """One run that is watched at its ends only, compiled where the user compiled it."""
        return self._plain(self.one(what, same=False))

    def _plain(self, room: contextlib.AbstractContextManager[EndsListener]) -> Ends:
        with room as listener:
            began, nodes = time.perf_counter(), _nodes_made()
            returned, error = called(self.step)
            self.cost = Cost(time.perf_counter() - began, max(0, _nodes_made() - nodes))
            ends = listener.ended(returned, error)
        self.unprobed.append(ends)
        return ends

    def recorded(self, what: str, **options: Any) -> tuple[Recording, Ends]:
        """One run under the op recorder; `options` are those of `flow.record`."""
        step = self.step
        with self.one(what, same=not {"freeze", "neutral"} & options.keys()) as listener:
            recording = record(step, step.model, step.batch, optimizer=step.optimizer, **options)
            return recording, listener.ended(recording.returned, recording.error)


def replay_more(step: Step, problem: str | None) -> None:
    """All ranks of a step come here before more replays of it; one that cannot use them runs along with the others.

    Args:
        step: replayed before.
        problem: why this rank needs no more; None if it does.

    Raises:
        ReplayError: the problem, when the other ranks have done.
    """
    wanted = meet(step.model, problem is None, "")
    if problem is None:
        return
    if wanted:
        with Replays(step, 1) as replays:
            replays.plain("along with other ranks")
            raise ReplayError(problem)  # having run along until nobody wants another
    raise ReplayError(problem)


@contextlib.contextmanager
def _listening(model: torch.nn.Module, listener: EndsListener) -> Iterator[None]:
    """Lets the listener see what the model is called with, where a hook changes nothing."""
    outside = isinstance(model, getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", ()))
    hookable = not _compiles() and all(each.hookable for each in watched_modules(model, depth=0)[0])
    if not (outside or hookable):
        yield
        return
    listener.hears_calls = lambda: outside or not _compiles()
    handle = model.register_forward_pre_hook(listener.model_called, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _compiles() -> bool:
    """Whether anything in this process went through the compiler: calls of what it compiled run no hook.

    That the compiler is loaded says nothing: the first optimizer loads it, often in the middle of a run.
    """
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    return bool(getattr(compiler, "FRAME_COUNTER", "torch._dynamo" in sys.modules))


def called(step: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What a step returned, or what it raised."""
    try:
        return step(), None
    except Exception as error:
        return None, error
