"""The command line: `nantrace report`, `info`, `diff`, `export`, `bisect`, `matrix`, `checkpoint`, `gate`.

A room of its own for each group of commands knows their options; the only package that imports click and prints.

Exit codes: 0 done; 1 with `--exit-code` and a fault (of `diff`, a difference; of `checkpoint`, a file that fails; of
`gate`, a run that fails); 2 usage; 3 a `NantraceError`, output that cannot be written, a checkpoint that cannot be
read, or a file or step of the user's that raised or left before anything was found; 130 interrupted.
Progress goes to stderr.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import click

from nantrace import __version__

_ROOMS = {
    "report": "reading",
    "info": "reading",
    "diff": "comparing",
    "export": "reading",
    "checkpoint": "checkpoints",
    "bisect": "bisecting",
    "matrix": "contrasting",
    "gate": "gating",
}


class _Commands(Mapping[str, click.Command]):
    """The commands by name, each loaded when it is asked for: a report waits for no other command's options."""

    def __getitem__(self, name: str) -> click.Command:
        command: click.Command = getattr(importlib.import_module(f"nantrace.cli.{_ROOMS[name]}"), name)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(_ROOMS)

    def __len__(self) -> int:
        return len(_ROOMS)


_COMMANDS: Any = _Commands()  # click asks for a mapping that commands can be added to; none are


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, commands=_COMMANDS)
@click.version_option(__version__, prog_name="nantrace")
def main() -> None:
    """Find where a PyTorch training step first went nonfinite, why, and what to check next."""
