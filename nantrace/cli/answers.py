"""What commands answer on standard output: text, JSON, a verdict; and the exit code that a verdict means."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from nantrace.cli.console import FAULT, colour, knows_unicode, say, width, writing

if TYPE_CHECKING:
    from nantrace.diagnosis.verdict import Verdict
    from nantrace.events import Trace


def print_out(content: str) -> None:
    with writing("standard output"):
        say(content)


def print_json(found: dict[str, Any]) -> None:
    """Strict JSON; what it holds has to be made of JSON's types already."""
    print_out(json.dumps(found, indent=2, allow_nan=False))


def verdict_text(trace: Trace | None, verdict: Verdict) -> str:
    from nantrace.render.text import text

    return text(trace, verdict, width=width(), colour=colour(), ascii=not knows_unicode())


def finish(verdict: Verdict, exit_code: bool) -> None:
    if exit_code and verdict.status == "fault":
        sys.exit(FAULT)
