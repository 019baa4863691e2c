"""The command line: `nantrace report`, `nantrace info`, `nantrace bisect`. The only module that prints.

Exit codes: 0 done; 1 with `--exit-code` and a fault; 2 usage; 3 a `NantraceError`. Progress goes to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from nantrace import __version__
from nantrace.errors import NantraceError

if TYPE_CHECKING:
    from nantrace.diagnosis.verdict import Verdict
    from nantrace.events import Trace
    from nantrace.render.report import Report
    from nantrace.replay.step import Step

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
@click.option("--samples", is_flag=True, help="Also find the fewest samples of the batch that fail (not bit-exact).")
@click.option("--reproducer", metavar="DIR", type=click.Path(), help="Write the op with its inputs as a script.")
@click.option("--dry-run", is_flag=True, help="Say what would be done; the step is not run.")
@click.option("-o", "--output", type=click.Path(), help="Write a trace of the failing step.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the step is at fault.")
def bisect(
    target: str,
    arguments: tuple[str, ...],
    capture: str | None,
    depth: str,
    max_replays: int,
    anomaly: bool,
    samples: bool,
    reproducer: str | None,
    dry_run: bool,
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

    again = _Again(target, arguments, capture)
    with _errors():
        step = load_target(target, arguments)
        if dry_run:
            _plan(step, again)
            return
        verdict = run_bisect(
            step,
            capture=capture,
            depth=depth,  # type: ignore[arg-type]
            anomaly=anomaly,
            max_replays=max_replays,
            path=output,
            progress=_progress,
        )
        more = _more(step, verdict, capture, samples, reproducer)
    command = _next_command(verdict, again, output, more, max_replays)
    if as_json:
        found = {**make_report(verdict).to_dict(), **{name: value for name, (value, _) in more.items()}}
        click.echo(json.dumps(found, indent=2, allow_nan=False))
    else:
        click.echo(_text(None, verdict))
        for _, sentence in more.values():
            click.echo(f"\n{sentence}")
    click.echo(f"Next: {command}", err=as_json)
    _finish(verdict, exit_code)


@dataclass(frozen=True)
class _Again:
    """How bisect was called, to be called again."""

    target: str
    arguments: tuple[str, ...]
    capture: str | None

    def command(self, *options: str) -> str:
        given = ["--capture", self.capture] if self.capture else []
        script = ["--", *self.arguments] if self.arguments else []
        return shlex.join(["nantrace", "bisect", self.target, *given, *options, *script])


def _progress(line: str) -> None:
    click.echo(line, err=True)


def _plan(step: Step, again: _Again) -> None:
    from nantrace.replay.plan import plan

    for sentence in plan(step, again.capture):
        click.echo(sentence)
    click.echo(f"Next: {again.command()}")


def _more(
    step: Step, verdict: Verdict, capture: str | None, samples: bool, reproducer: str | None
) -> dict[str, tuple[dict[str, Any], str]]:
    """What was asked for beyond the verdict, as JSON and as a sentence."""
    if not samples and reproducer is None:
        return {}
    from nantrace.replay.captured import applied
    from nantrace.replay.reproducer import write_reproducer
    from nantrace.replay.samples import smallest_failing_batch

    found: dict[str, tuple[dict[str, Any], str]] = {}
    with contextlib.ExitStack() as exits:
        if capture is not None:
            step = exits.enter_context(applied(step, capture)).step or step
        if samples and verdict.status != "clean":
            fewest = smallest_failing_batch(step, progress=_progress)
            found["samples"] = (dataclasses.asdict(fewest), str(fewest))
        if reproducer is not None:
            made = write_reproducer(reproducer, step, verdict)
            plain = {"script": str(made.script), "verified": made.verified, "said": made.said}
            found["reproducer"] = (plain, str(made))
    return found


def _next_command(
    verdict: Verdict, again: _Again, output: str | None, more: dict[str, tuple[dict[str, Any], str]], most: int
) -> str:
    if verdict.status == "inconclusive" and verdict.replays >= most:
        return again.command("--max-replays", str(4 * most))
    if "reproducer" in more:
        return shlex.join(["python", more["reproducer"][0]["script"]])
    if output is not None:
        return shlex.join(["nantrace", "report", output])
    if verdict.status == "fault" and verdict.origin is not None and verdict.origin.op:
        return again.command("--reproducer", "reproducer")
    return again.command("-o", "step.h5")


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
