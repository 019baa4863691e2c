"""The command that reads checkpoints. Knows its options."""

from __future__ import annotations

import sys

import click

from nantrace.cli.answers import print_json, print_out
from nantrace.cli.console import FAULT, UnderWay, fail, knows_unicode, sentences, width


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
        if as_json:
            print_json(found.to_dict())
        else:
            print_out(text(found, width=width(), ascii=not knows_unicode()))
        unreadable = sum(file.error is not None for file in found.files)
        if unreadable:  # what was printed says why
            fail(f"{unreadable:,} of {plural(len(found.files), 'file')} could not be read.")
        if exit_code and any(file.status == "fails" for file in found.files):
            sys.exit(FAULT)
