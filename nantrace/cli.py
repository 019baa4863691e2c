"""The command line: `nantrace report`, `nantrace info`, `nantrace bisect`. The only module that prints.

Exit codes: 0 done; 1 with `--exit-code` and a fault; 2 usage; 3 a `NantraceError`. Progress goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from nantrace import __version__
from nantrace.errors import NantraceError

if TYPE_CHECKING:
    from nantrace.diagnosis.verdict import Verdict
    from nantrace.events import Trace
    from nantrace.render.report import Report

_FAULT, _ERROR = 1, 3
_NARROW, _WIDE = 60, 120  # columns of text, whatever the terminal's


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="nantrace")
def main() -> None:
    """Find where a PyTorch training step first went nonfinite, why, and what to check next."""


@main.command()
@click.argument("trace", type=click.Path())
@click.option("-o", "--output", type=click.Path(), help="Write the report: .txt, .json or .html.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the trace shows a fault.")
def report(trace: str, output: str | None, as_json: bool, exit_code: bool) -> None:
    """Say what a TRACE shows: where it went wrong, why, what to check next."""
    from nantrace.api import load
    from nantrace.api import report as make_report

    with _errors():
        made = make_report(load(trace))
    _show(made, output, as_json)
    _finish(made.verdict, exit_code)


@main.command()
@click.argument("trace", type=click.Path())
def info(trace: str) -> None:
    """Say what a TRACE covers: steps, events, modules, what was not observed."""
    from nantrace.api import load
    from nantrace.render.overview import overview

    with _errors():
        loaded = load(trace)
    click.echo(overview(loaded, width=_width(), ascii=not _unicode()))


@main.command(context_settings={"ignore_unknown_options": False})
@click.argument("target")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--capture", type=click.Path(), help="Replay from a captured step.")
@click.option("--depth", type=click.Choice(["module", "op"]), default="op", show_default=True, help="How far down.")
@click.option("--max-replays", type=click.IntRange(1), default=20, show_default=True, help="How often to run the step.")
@click.option("--anomaly", is_flag=True, help="Also ask torch.autograd.detect_anomaly where it can help.")
@click.option("-o", "--output", type=click.Path(), help="Write the trace of the last replay.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the step is at fault.")
def bisect(
    target: str,
    arguments: tuple[str, ...],
    capture: str | None,
    depth: str,
    max_replays: int,
    anomaly: bool,
    output: str | None,
    as_json: bool,
    exit_code: bool,
) -> None:
    """Replay the step TARGET (file.py:name) down to the op that made the first nonfinite value.

    name is a nantrace.Step, or a function without arguments that returns one. ARGUMENTS after -- are the file's
    sys.argv.
    """
    from nantrace.api import bisect as run_bisect
    from nantrace.api import report as make_report
    from nantrace.replay.step import load_target

    with _errors():
        step = load_target(target, arguments)
        verdict = run_bisect(
            step,
            capture=capture,
            depth=depth,  # type: ignore[arg-type]
            anomaly=anomaly,
            max_replays=max_replays,
            path=output,
            progress=lambda line: click.echo(line, err=True),
        )
    _show(make_report(verdict), None, as_json)
    _finish(verdict, exit_code)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Nantrace's own errors become one sentence and exit code 3; others keep their traceback."""
    try:
        yield
    except NantraceError as error:
        click.echo(f"nantrace: {error}", err=True)
        sys.exit(_ERROR)


def _show(report: Report, output: str | None, as_json: bool) -> None:
    from nantrace.render.text import next_command

    if output is not None:
        try:
            report.save(output)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="-o") from None
        except OSError as error:
            click.echo(f"nantrace: {output} cannot be written ({error.strerror}): choose another path.", err=True)
            sys.exit(_ERROR)
        click.echo(f"Wrote {output}", err=True)
        command = next_command(report.trace, report.verdict)
        if command is not None:
            click.echo(f"Next: {command}", err=True)
        return
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2, allow_nan=False))
    else:
        click.echo(_text(report.trace, report.verdict))


def _text(trace: Trace | None, verdict: Verdict) -> str:
    from nantrace.render.text import text

    return text(trace, verdict, width=_width(), colour=_colour(), ascii=not _unicode())


def _finish(verdict: Verdict, exit_code: bool) -> None:
    if exit_code and verdict.status == "fault":
        sys.exit(_FAULT)


def _width() -> int:
    """Columns: the terminal's within reason; 80 where there is none."""
    if not sys.stdout.isatty():
        return 80
    return min(max(shutil.get_terminal_size().columns, _NARROW), _WIDE)


def _colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _unicode() -> bool:
    encoding: Any = getattr(sys.stdout, "encoding", None)
    return str(encoding or "ascii").lower().replace("-", "") in ("utf8", "utf16", "utf8sig")


if __name__ == "__main__":
    main()
