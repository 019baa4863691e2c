"""Commands that hold a trace against another: `diff`. Knows their options."""

from __future__ import annotations

import click

from nantrace.cli.answers import finish, say_next, show
from nantrace.cli.console import UnderWay, sentences


@click.command()
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--rtol", type=click.FloatRange(0), help="How far an end of a range may move, by A's largest magnitude.")
@click.option(
    "--atol", type=click.FloatRange(0), help="How far it may move besides. Both default to what dtypes round."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the traces differ.")
def diff(a: str, b: str, rtol: float | None, atol: float | None, as_json: bool, exit_code: bool) -> None:
    """Say where two traces A (the reference) and B of the same step first differ: nonfinite values, then ranges.

    Their events stay in the files and are read twice: 300 MB of memory for two traces of five million events.
    """
    work = UnderWay()
    with sentences(so_far=lambda: work):
        from nantrace.api import diff as compare
        from nantrace.render.difference import next_command, text
        from nantrace.store.lazy import opened_lazily

        with work, opened_lazily(a, work.tell) as of_a, opened_lazily(b, work.tell) as of_b:
            try:
                found = compare(of_a, of_b, rtol=rtol, atol=atol, progress=work.tell)
            except ValueError as error:  # NaN, which click takes for a number of 0 or more
                raise click.UsageError(str(error)) from None
        show(found, text, as_json)
        say_next(next_command(found), as_json)
        finish(not found.same, exit_code)
