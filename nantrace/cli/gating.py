"""The command that holds a trace against a promotion rule: `gate`. Knows its options."""

from __future__ import annotations

from typing import Any

import click

from nantrace.cli.answers import finish, say_next, show
from nantrace.cli.console import UnderWay, sentences

_PERCENT = click.FloatRange(0)


@click.command(context_settings={"show_default": True})
@click.argument("trace", type=click.Path())
@click.option("--reference", type=click.Path(), metavar="TRACE", help="A run known to be good, to be compared with.")
@click.option("--updates", type=click.IntRange(1), default=100, help="Committed updates that are asked.")
@click.option("--warm-up", type=click.IntRange(0), default=0, help="Attempted updates at the beginning, left out.")
@click.option("--loss-tolerance", type=_PERCENT, default=10.0, help="Percent that losses may lie apart.")
@click.option("--norm-tolerance", type=_PERCENT, default=25.0, help="Percent that gradient norms may lie apart.")
@click.option("--time-tolerance", type=_PERCENT, default=10.0, help="Percent that the median step may take longer.")
@click.option("--quantile", type=click.FloatRange(0.5, 1), default=0.95, help="Compared beside the median.")
@click.option("--coverage", type=click.FloatRange(0, 100), default=100.0, help="Percent of steps to be looked at.")
@click.option("--fewest", type=click.IntRange(1), default=8, help="Values on each side that make a distribution.")
@click.option("--allow", multiple=True, metavar="NAME", help="A tensor or loss, or a glob, that may be nonfinite.")
@click.option("--explained-by", multiple=True, metavar="KIND", help="A kind of note that explains a skipped update.")
@click.option("--without", multiple=True, metavar="RULE", help="A rule that is not asked.")
@click.option("--strict", is_flag=True, help="Fail by a rule that could not be checked.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the gate fails.")
def gate(trace: str, reference: str | None, as_json: bool, exit_code: bool, **thresholds: Any) -> None:
    """Say whether the run of a TRACE may go on: enough committed updates, all finite, none skipped without a note.

    With --reference, median and upper quantile of losses and gradient norms have to lie near those of the reference,
    over the updates that both hold, and the median step must not take much longer. What was not recorded is said to be
    not checked. --allow, --explained-by and --without may be given again.
    """
    work = UnderWay()
    with sentences(so_far=lambda: work):
        from nantrace.api import load
        from nantrace.diagnosis.gate.rule import gate as judge
        from nantrace.render.gate import next_command, text

        with work:
            run = load(trace, progress=work.tell)
            beside = None if reference is None else load(reference, progress=work.tell)
            work.tell(f"judging {len(run):,} events")
            try:
                found = judge(run, reference=beside, **thresholds)
            except ValueError as error:  # NaN, which click takes for a number in range, or no such rule
                raise click.UsageError(str(error)) from None
        show(found, text, as_json)
        say_next(next_command(found), as_json)
        finish(not found.passed, exit_code)
