"""The command that reads checkpoints. Knows its options."""

from __future__ import annotations

import click

from nantrace.cli.answers import finish, show
from nantrace.cli.console import UnderWay, fail, sentences


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(), metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if a file fails.")
def checkpoint(files: tuple[str, ...], as_json: bool, exit_code: bool) -> None:
    """Check checkpoints for nonfinite values, tensor by tensor; no code in them is run.

    A FILE is .pt, .pth, .bin, .safetensors, or the folder of a torch distributed checkpoint.
    """
    work = UnderWay()
    with sentences(so_far=lambda: work):
        from nantrace.checkpoint.check import check_checkpoint
        from nantrace.render.checkpoint import text
        from nantrace.render.wording import plural

        with work:
            found = check_checkpoint(*files, progress=work.tell)
        show(found, text, as_json)
        unreadable = sum(file.error is not None for file in found.files)
        if unreadable:  # what was printed says why
            fail(f"{unreadable:,} of {plural(len(found.files), 'file')} could not be read.")
        finish(any(file.status == "fails" for file in found.files), exit_code)
