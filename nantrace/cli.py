"""The command line: `nantrace report`, `info`, `diff`, `export`, `bisect`, `matrix`, `checkpoint`. Knows their options.

Exit codes: 0 done; 1 with `--exit-code` and a fault (of `diff`, a difference; of `checkpoint`, a file that fails);
2 usage; 3 a `NantraceError`, output that cannot be written, a checkpoint that cannot be read, or a file or step of the
user's that raised or left before anything was found; 130 interrupted.
Progress goes to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from nantrace import __version__
from nantrace.console import ERROR, FAULT, Progress, colour, fail, knows_unicode, note, say, sentences, width, writing

if TYPE_CHECKING:
    from nantrace.diagnosis.verdict import Verdict
    from nantrace.events import Trace
    from nantrace.render.report import Report
    from nantrace.replay.step import Step
    from nantrace.usercode import Watched


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
    with sentences():
        from nantrace.api import load
        from nantrace.api import report as make_report

        made = make_report(load(trace))
        _show(made, output, as_json)
        _finish(made.verdict, exit_code)


@main.command()
@click.argument("trace", type=click.Path())
def info(trace: str) -> None:
    """Say what a TRACE covers: steps, events, modules, what was not observed."""
    with sentences():
        from nantrace.api import load
        from nantrace.render.overview import overview

        _print(overview(load(trace), width=width(), ascii=not knows_unicode()))


@main.command()
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--rtol", type=click.FloatRange(0), help="How far an end of a range may move, by A's largest magnitude.")
@click.option(
    "--atol", type=click.FloatRange(0), help="How far it may move besides. Both default to what dtypes round."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the traces differ.")
def diff(a: str, b: str, rtol: float | None, atol: float | None, as_json: bool, exit_code: bool) -> None:
    """Say where two traces A (the reference) and B of the same step first differ: nonfinite values, then ranges."""
    with sentences():
        from nantrace.api import diff as compare
        from nantrace.api import load
        from nantrace.render.difference import next_command, text

        traces = load(a), load(b)
        try:
            found = compare(*traces, rtol=rtol, atol=atol)
        except ValueError as error:  # NaN, which click takes for a number of 0 or more
            raise click.UsageError(str(error)) from None
        command = next_command(found)
        if as_json:
            _print(json.dumps(found.to_dict(), indent=2, allow_nan=False))
        else:
            _print(text(found, width=width(), ascii=not knows_unicode()))
        if command is not None:
            (note if as_json else _print)(f"Next: {command}")
        if exit_code and not found.same:
            sys.exit(FAULT)


@main.command()
@click.argument("trace", type=click.Path())
@click.option(
    "--to",
    "form",
    required=True,
    type=click.Choice(["csv", "parquet", "tensorboard", "chrome-trace"]),
    help="What to write.",
)
@click.option("-o", "--output", type=click.Path(), help="Where; beside the trace if left out. Nothing is replaced.")
def export(trace: str, form: Any, output: str | None) -> None:
    """Write a TRACE for other tools: a table (csv, parquet), curves (tensorboard), or its order (chrome-trace)."""
    with sentences():
        from nantrace.api import load
        from nantrace.export.export import default_path
        from nantrace.export.export import export as write

        target = default_path(trace, form) if output is None else output
        loaded = load(trace)
        with writing(target):
            made = write(loaded, form, target)
        note(f"Wrote {made.path}: {made.written}.")
        note(f"Next: {shlex.join(made.command or ('nantrace', 'report', trace))}")


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(), metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if a file fails.")
def checkpoint(files: tuple[str, ...], as_json: bool, exit_code: bool) -> None:
    """Check checkpoints for nonfinite values, tensor by tensor; no code in them is run.

    A FILE is .pt, .pth, .bin, .safetensors, or the folder of a torch distributed checkpoint.
    """
    progress = Progress()
    with sentences(so_far=lambda: progress.last or ""):
        from nantrace.checkpoint.check import check_checkpoint, paced
        from nantrace.render.cells import harmless
        from nantrace.render.checkpoint import text

        watched = sys.stderr is not None and sys.stderr.isatty()
        found = check_checkpoint(*files, progress=paced(progress) if watched else None)
        if as_json:
            _print(json.dumps(found.to_dict(), indent=2, allow_nan=False))
        else:
            _print(text(found, width=width(), ascii=not knows_unicode()))
        unreadable = [file for file in found.files if file.error is not None]
        for file in unreadable:
            note(f"nantrace: {harmless(file.error)}")
        if unreadable:
            sys.exit(ERROR)
        if exit_code and any(file.status == "fails" for file in found.files):
            sys.exit(FAULT)


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
    again = _Again(target, arguments, capture)
    progress = Progress()
    with sentences(so_far=lambda: progress):
        step, watched = _load(target, arguments)
        if dry_run:
            _plan(step, again)
            return
        from nantrace.api import bisect as run_bisect

        with _leaving(watched):
            verdict = run_bisect(
                step,
                capture=capture,
                depth=depth,  # type: ignore[arg-type]
                anomaly=anomaly,
                max_replays=max_replays,
                path=output,
                progress=progress,
            )
            raised = watched.told  # by a run of the whole step: those of parts of the batch may raise too
            more = _more(step, verdict, capture, samples, reproducer, progress)
        if raised is not None:
            note(raised)
        _show_bisected(verdict, more, as_json, _next_command(verdict, again, output, more, max_replays, depth))
        if raised is not None and verdict.status != "fault":
            fail(
                f"the step raised {watched.short} before anything harmful was nonfinite: mend that, then bisect again."
            )
        _finish(verdict, exit_code)


@main.command()
@click.argument("target")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--axis", "axes", multiple=True, metavar="NAME", help="Only this change; may be given again.")
@click.option("--module", metavar="FQN", help="The module to run in float32; the first nonfinite one if left out.")
@click.option("--other", metavar="TARGET", help="A second step, whose batch is tried on the first.")
@click.option("--capture", type=click.Path(), help="Replay from a captured step.")
@click.option("--smallest/--no-smallest", default=True, help="Search for the fewest modules in float32 that suffice.")
@click.option("--max-replays", type=click.IntRange(3), default=60, show_default=True, help="How often to run the step.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the step as it was is at fault.")
def matrix(
    target: str,
    arguments: tuple[str, ...],
    axes: tuple[str, ...],
    module: str | None,
    other: str | None,
    capture: str | None,
    smallest: bool,
    max_replays: int,
    as_json: bool,
    exit_code: bool,
) -> None:
    """Replay the step TARGET (file.py:name) under one change at a time, and say what each pair of runs shows.

    Changes: autocast-off, bfloat16, float32, float64, module-float32, scaler-off, scale-lowered, no-update, evaluation,
    other-batch, deterministic, eager, aot-eager, inductor. ARGUMENTS after -- are the file's sys.argv.
    """
    progress = Progress()
    with sentences(so_far=lambda: progress):
        from nantrace.diagnosis.contrast import AXES

        wrong = [name for name in axes if name not in AXES]
        if wrong:
            raise click.BadParameter(f"{wrong[0]!r} is none of {', '.join(AXES)}.", param_hint="--axis")
        step, watched = _load(target, arguments)
        batch = None if other is None else _other_batch(other, arguments)
        from nantrace.api import matrix as run_matrix
        from nantrace.render.matrix import text

        with _leaving(watched):
            found = run_matrix(
                step,
                capture=capture,
                axes=axes or None,
                module=module,
                other_batch=batch,
                smallest=smallest,
                max_replays=max_replays,
                progress=progress,
            )
        if as_json:
            _print(json.dumps(found.to_dict(), indent=2, allow_nan=False))
        else:
            _print(text(found, width=width(), ascii=not knows_unicode()))
        if found.base.outcome != "finite":
            (note if as_json else _print)(f"Next: {_Again(target, arguments, capture).command()}")
        if exit_code and found.base.outcome == "nonfinite" and found.base.status != "contained":
            sys.exit(FAULT)


def _other_batch(target: str, arguments: tuple[str, ...]) -> Any:
    """The batch of another step. Making that step draws no random numbers of the first one's."""
    from nantrace.errors import ReplayError
    from nantrace.replay.surroundings import random_state, restore_random_state

    before = random_state()
    try:
        step, _ = _load(target, arguments)
    finally:
        restore_random_state(before)
    if step.batch is None:
        raise ReplayError(f"{target} has no batch that could be tried on the step; hand it to its nantrace.Step.")
    return step.batch


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


#: What was asked for beyond a verdict, by name: as JSON and as a sentence.
_More = dict[str, tuple[dict[str, Any], str]]


def _load(target: str, arguments: tuple[str, ...]) -> tuple[Step, Watched]:
    """The step, and what comes out of it when it runs. A target of the wrong form is refused before torch loads."""
    from nantrace.replay.target import parse_target
    from nantrace.usercode import Watched, loading

    path, _ = parse_target(target)
    from nantrace.replay.step import load_target

    with loading(path):
        step = load_target(target, arguments)
    watched = Watched()
    return dataclasses.replace(step, run=watched.around(step.run)), watched


@contextlib.contextmanager
def _leaving(watched: Watched) -> Iterator[None]:
    """A step that leaves the interpreter ends the command, not silently and not with an exit code of its own."""
    try:
        yield
    except SystemExit:
        if watched.left is None:
            raise
        fail(f"the step called {watched.left}: a step that is to be replayed has to return or raise.")


def _plan(step: Step, again: _Again) -> None:
    from nantrace.replay.plan import plan

    _print("\n".join([*plan(step, again.capture), f"Next: {again.command()}"]))


def _more(
    step: Step,
    verdict: Verdict,
    capture: str | None,
    samples: bool,
    reproducer: str | None,
    progress: Progress,
) -> _More:
    if not samples and reproducer is None:
        return {}
    from nantrace.replay.captured import applied
    from nantrace.replay.reproducer import write_reproducer
    from nantrace.replay.samples import smallest_failing_batch

    found: _More = {}
    with contextlib.ExitStack() as exits:
        if capture is not None:
            step = exits.enter_context(applied(step, capture)).step or step
        if samples and verdict.status != "clean":
            fewest = smallest_failing_batch(step, progress=progress)
            found["samples"] = (dataclasses.asdict(fewest), str(fewest))
        if reproducer is not None:
            made = write_reproducer(reproducer, step, verdict)
            plain = {"script": str(made.script), "verified": made.verified, "said": made.said}
            found["reproducer"] = (plain, str(made))
    return found


def _show_bisected(verdict: Verdict, more: _More, as_json: bool, command: str | None) -> None:
    if as_json:
        from nantrace.render.report import Report

        found = {**Report(verdict).to_dict(), **{name: value for name, (value, _) in more.items()}}
        _print(json.dumps(found, indent=2, allow_nan=False))
        if command is not None:
            note(f"Next: {command}")
        return
    _print("\n\n".join([_text(None, verdict), *(sentence for _, sentence in more.values())]))
    if command is not None:
        _print(f"Next: {command}")


def _next_command(
    verdict: Verdict, again: _Again, output: str | None, more: _More, most: int, depth: str
) -> str | None:
    """What helps most after this verdict; None where nothing is left to find."""
    if verdict.status == "inconclusive" and verdict.replays >= most:
        return again.command("--max-replays", str(4 * most))
    if "reproducer" in more:
        return shlex.join(["python", more["reproducer"][0]["script"]])
    if output is not None:
        return shlex.join(["nantrace", "report", output])
    origin = verdict.origin
    if verdict.status in ("clean", "expected") or origin is None or verdict.stage in ("input", "state"):
        return None
    if not origin.op:
        return again.command() if depth == "module" else None
    return again.command("--reproducer", "reproducer") if verdict.status in ("fault", "contained") else None


def _show(report: Report, output: str | None, as_json: bool) -> None:
    if output is not None:
        with writing(output):
            try:
                report.save(output)
            except ValueError as error:
                raise click.BadParameter(str(error), param_hint="-o") from None
        note(f"Wrote {output}")
    elif as_json:
        _print(json.dumps(report.to_dict(), indent=2, allow_nan=False))
    else:
        _print(_text(report.trace, report.verdict))


def _print(content: str) -> None:
    with writing("standard output"):
        say(content)


def _text(trace: Trace | None, verdict: Verdict) -> str:
    from nantrace.render.text import text

    return text(trace, verdict, width=width(), colour=colour(), ascii=not knows_unicode())


def _finish(verdict: Verdict, exit_code: bool) -> None:
    if exit_code and verdict.status == "fault":
        sys.exit(FAULT)


if __name__ == "__main__":
    main()
