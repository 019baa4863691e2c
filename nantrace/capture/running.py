"""The tracers whose blocks go on in this process, and what becomes of them in a forked child."""

from __future__ import annotations

import functools
import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nantrace.capture.tracer import Tracer

running: weakref.WeakSet[Tracer] = weakref.WeakSet()


def _after_fork() -> None:
    """A forked child inherits hooks and an open file that are not its own."""
    for tracer in list(running):
        tracer.abandon()


@functools.cache
def watch_forks() -> None:
    """Once a process: it cannot be undone, so it waits until somebody traces."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)
