"""One replay of a step under a change, with everything that a row of a matrix tells of it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nantrace.capture.lifecycle import Lifecycle
from nantrace.events import Trace
from nantrace.replay import surroundings
from nantrace.replay.change.precision import autocast_seen
from nantrace.replay.ends import Ends
from nantrace.replay.observed import Observed
from nantrace.replay.replays import Replays, called
from nantrace.replay.step import Step
from nantrace.replay.written import tracer_of


@dataclass(frozen=True)
class Ran:
    """What one replay came to.

    Attributes:
        ends: what training keeps.
        seen: losses, norms and what the step is made of.
        trace: of its modules; None if it was watched at its ends only.
        seconds: what the step took, probes included.
        drew: names of the random streams that moved.
    """

    ends: Ends
    seen: Observed
    trace: Trace | None
    seconds: float
    drew: tuple[str, ...]


@contextlib.contextmanager
def as_it_is(step: Step) -> Iterator[Step]:
    """The room in which nothing is changed."""
    yield step


def run(replays: Replays, what: str, room: contextlib.AbstractContextManager[Step], *, traced: bool) -> Ran:
    """One replay in `room`; a traced one runs compiled code eagerly.

    Raises:
        Exception: what the room raised on its own account. The state is restored all the same.
    """
    with replays.one(what, same=False) as listener:
        seen = Observed(replays.step.model)
        before, compiled = surroundings.random_state(), _frames()
        with contextlib.ExitStack() as exits:
            exits.enter_context(Lifecycle(seen))
            exits.enter_context(autocast_seen(seen.regions))
            step = exits.enter_context(room)
            tracer = exits.enter_context(tracer_of(step)) if traced else None
            _wait_for_device()
            began = time.perf_counter()
            returned, error = called(step)
            _wait_for_device()
            seconds = time.perf_counter() - began
            seen.ended(returned)
        seen.compiled = _frames() > compiled
        drew = tuple(surroundings.changed_random_state(before))
        ends = listener.ended(returned, error)
    if seen.failure is not None:
        raise seen.failure
    return Ran(ends, seen, None if tracer is None else tracer.trace, seconds, drew)


def _frames() -> int:
    """How many frames the compiler has been through."""
    return int(getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0))


def _wait_for_device() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
