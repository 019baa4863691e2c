"""Commands that read one trace: `report`, `info`, `export`. Knows their options."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from nantrace.cli.answers import finish, print_json, print_out, verdict_text
from nantrace.cli.console import UnderWay, knows_unicode, note, sentences, width, writing

if TYPE_CHECKING:
    from nantrace.events import Trace
    from nantrace.render.report import Report


@click.command()
@click.argument("trace", type=click.Path())
@click.option("-o", "--output", type=click.Path(), help="Write the report: .txt, .json or .html.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the trace shows a fault.")
def report(trace: str, output: str | None, as_json: bool, exit_code: bool) -> None:
    """Say what a TRACE shows: where it went wrong, why, what to check next."""
    work = UnderWay()
    with sentences(so_far=lambda: work):
        from nantrace.api import load
        from nantrace.api import report as make_report

        with work:
            loaded = load(trace, progress=work.tell)
            work.tell(f"judging {len(loaded):,} events")
            made = make_report(loaded)
            if output is not None:
                work.tell(f"writing {output}")
                _save(made, output)
        if output is not None:
            note(f"Wrote {output}")
        elif as_json:
            print_json(made.to_dict())
        else:
            print_out(verdict_text(made.trace, made.verdict))
        finish(made.verdict.status == "fault", exit_code)


@click.command()
@click.argument("trace", type=click.Path())
def info(trace: str) -> None:
    """Say what a TRACE covers: steps, events, modules, what was not observed."""
    work = UnderWay()
    with sentences(so_far=lambda: work):
        from nantrace.api import load
        from nantrace.render.overview import overview

        with work:
            said = overview(load(trace, progress=work.tell), width=width(), ascii=not knows_unicode())
        print_out(said)


@click.command()
@click.argument("trace", type=click.Path())
@click.option(
    "--to",
    "form",
    required=True,
    type=click.Choice(["csv", "parquet", "tensorboard", "chrome-trace"]),
    help="What to write.",
)
@click.option("--step", type=int, metavar="N", help="Only the rows of step N, counted from 0.")
@click.option("-o", "--output", type=click.Path(), help="Where; beside the trace if left out. Nothing is replaced.")
def export(trace: str, form: Any, step: int | None, output: str | None) -> None:
    """Write a TRACE for other tools: a table (csv, parquet), curves (tensorboard), or its order (chrome-trace)."""
    work = UnderWay()
    with sentences(so_far=lambda: work):
        from nantrace.api import load
        from nantrace.export.export import default_path
        from nantrace.export.export import export as write

        target = default_path(trace, form, step) if output is None else output
        with work:
            loaded = load(trace, progress=work.tell)
            if step is not None:
                loaded = _one_step(loaded, step)
            with writing(target):
                made = write(loaded, form, target, work.tell)
        note(f"Wrote {made.path}: {made.written}.")
        note(f"Next: {shlex.join(made.command or ('nantrace', 'report', trace))}")


def _one_step(trace: Trace, number: int) -> Trace:
    try:
        return trace.step(number)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--step") from None


def _save(report: Report, output: str) -> None:
    with writing(output):
        try:
            report.save(output)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="-o") from None
