"""The command line: `nantrace report`, `info`, `diff`, `export`, `bisect`, `matrix`, `checkpoint`, `gate`.

A room of its own for each group of commands knows their options; the only package that imports click and prints.

Exit codes: 0 done; 1 with `--exit-code` and a fault (of `diff`, a difference; of `checkpoint`, a file that fails; of
`gate`, a run that fails); 2 usage; 3 a `NantraceError`, output that cannot be written, a checkpoint that cannot be
read, or a file or step of the user's that raised or left before anything was found; 130 interrupted.
Progress goes to stderr.
"""

from __future__ import annotations

import click

from nantrace import __version__
from nantrace.cli.bisecting import bisect
from nantrace.cli.checkpoints import checkpoint
from nantrace.cli.comparing import diff
from nantrace.cli.contrasting import matrix
from nantrace.cli.gating import gate
from nantrace.cli.reading import export, info, report


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="nantrace")
def main() -> None:
    """Find where a PyTorch training step first went nonfinite, why, and what to check next."""


for _command in (report, info, diff, export, checkpoint, bisect, matrix, gate):
    main.add_command(_command)
