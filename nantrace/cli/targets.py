"""The step that a command is to replay: how it is loaded, how it may end, how the command is typed again."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nantrace.cli.console import fail

if TYPE_CHECKING:
    from nantrace.cli.usercode import Watched
    from nantrace.replay.step import Step


@dataclass(frozen=True)
class Again:
    """How bisect was called, to be called again."""

    target: str
    arguments: tuple[str, ...]
    capture: str | None

    def command(self, *options: str) -> str:
        given = ["--capture", self.capture] if self.capture else []
        script = ["--", *self.arguments] if self.arguments else []
        return shlex.join(["nantrace", "bisect", self.target, *given, *options, *script])


def load_step(target: str, arguments: tuple[str, ...]) -> tuple[Step, Watched]:
    """The step, and what comes out of it when it runs. A target of the wrong form is refused before torch loads."""
    from nantrace.cli.usercode import Watched, loading
    from nantrace.replay.target import parse_target

    path, _ = parse_target(target)
    from nantrace.replay.step import load_target

    with loading(path):
        step = load_target(target, arguments)
    watched = Watched()
    return dataclasses.replace(step, run=watched.around(step.run)), watched


@contextlib.contextmanager
def leaving(watched: Watched) -> Iterator[None]:
    """A step that leaves the interpreter ends the command, not silently and not with an exit code of its own."""
    try:
        yield
    except SystemExit:
        if watched.left is None:
            raise
        fail(f"the step called {watched.left}: a step that is to be replayed has to return or raise.")
