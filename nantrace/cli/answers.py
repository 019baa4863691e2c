"""What commands answer on standard output: text, JSON, a verdict; and the exit code that a verdict means."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, Protocol

from nantrace.cli.console import FAULT, colour, knows_unicode, note, say, width, writing

if TYPE_CHECKING:
    from collections.abc import Callable

    from nantrace.diagnosis.verdict import Verdict
    from nantrace.events import Trace


class Found(Protocol):
    """What a command found."""

    def to_dict(self) -> dict[str, Any]: ...


def print_out(content: str) -> None:
    with writing("standard output"):
        say(content)


def print_json(found: dict[str, Any]) -> None:
    """Strict JSON; what it holds has to be made of JSON's types already."""
    print_out(json.dumps(found, indent=2, allow_nan=False))


def verdict_text(trace: Trace | None, verdict: Verdict) -> str:
    from nantrace.render.text import text

    return text(trace, verdict, width=width(), colour=colour(), ascii=not knows_unicode())


def show(found: Found, text: Callable[..., str], as_json: bool) -> None:
    """What was found as strict JSON, or as its `text` for this terminal."""
    if as_json:
        print_json(found.to_dict())
    else:
        print_out(text(found, width=width(), ascii=not knows_unicode()))


def say_next(command: str | None, as_json: bool) -> None:
    """The command to type next, if there is one; beside JSON on stderr."""
    if command is not None:
        (note if as_json else print_out)(f"Next: {command}")


def finish(failed: bool, exit_code: bool) -> None:
    """Ends the command with the code of a fault, if one was asked for."""
    if exit_code and failed:
        sys.exit(FAULT)
