"""The command that replays a step down to an op, and what it offers beside. Knows its options."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
from typing import TYPE_CHECKING, Any

import click

from nantrace.cli.answers import finish, print_json, print_out, say_next, verdict_text
from nantrace.cli.console import Progress, fail, note, sentences
from nantrace.cli.targets import Again, leaving, load_step
from nantrace.errors import ReplayError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nantrace.diagnosis.verdict import Verdict
    from nantrace.replay.reproducer import Reproducer
    from nantrace.replay.step import Step

#: What was asked for beyond a verdict, by name: as JSON and as a sentence.
_More = dict[str, tuple[dict[str, Any], str]]


@click.command()
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
    again = Again(target, arguments, capture)
    progress = Progress()
    with sentences(so_far=lambda: progress):
        step, watched = load_step(target, arguments)
        if dry_run:
            _plan(step, again)
            return
        from nantrace.api import bisect as run_bisect

        with leaving(watched):
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
        if raised is not None:
            note(raised)
        if not as_json:
            print_out(verdict_text(None, verdict))  # before more is tried: that may take long, and may not come off
        with leaving(watched):
            more = _more(step, verdict, capture, samples, reproducer, progress)
        from nantrace.capture.surroundings import own_path, rank

        output = None if output is None else own_path(output, rank())
        _show_more(verdict, more, as_json, _next_command(verdict, again, output, more, max_replays, depth))
        if raised is not None and verdict.status != "fault":
            fail(
                f"the step raised {watched.short} before anything harmful was nonfinite: mend that, then bisect again."
            )
        finish(verdict.status == "fault", exit_code)


def _plan(step: Step, again: Again) -> None:
    from nantrace.replay.plan import plan

    print_out("\n".join([*plan(step, again.capture), f"Next: {again.command()}"]))


def _more(
    step: Step,
    verdict: Verdict,
    capture: str | None,
    samples: bool,
    reproducer: str | None,
    progress: Progress,
) -> _More:
    """What was asked for beyond the verdict; of what cannot be had, one sentence that says why."""
    from nantrace.replay.ranks import meet

    asked = [name for name, given in (("--samples", samples), ("--reproducer", reproducer is not None)) if given]
    meet(step.model, bool(asked), " ".join(asked))
    if not asked:
        return {}
    from nantrace.replay.captured import applied
    from nantrace.replay.reproducer import write_reproducer

    found: _More = {}
    with contextlib.ExitStack() as exits:
        if capture is not None:
            step = exits.enter_context(applied(step, capture)).step or step
        if samples:
            found["samples"] = _or_why_not(lambda: _fewest(step, verdict, progress))
        if reproducer is not None:
            found["reproducer"] = _or_why_not(lambda: _written(write_reproducer(reproducer, step, verdict)))
    meet(step.model, False, "")  # a launcher stops the ranks that are still at work when one leaves with a code
    return found


def _or_why_not(find: Callable[[], tuple[dict[str, Any], str]]) -> tuple[dict[str, Any], str]:
    try:
        return find()
    except ReplayError as error:
        return {"problem": str(error)}, str(error)


def _fewest(step: Step, verdict: Verdict, progress: Progress) -> tuple[dict[str, Any], str]:
    from nantrace.replay.replays import replay_more
    from nantrace.replay.samples import batch_size, smallest_failing_batch

    problem = None
    if verdict.status in ("clean", "expected"):
        problem = f"No failing samples: the verdict is {verdict.status}, there is nothing to leave out."
    else:
        try:
            batch_size(step.batch)
        except ReplayError as error:
            problem = str(error)
    replay_more(step, problem)
    fewest = smallest_failing_batch(step, progress=progress)
    return dataclasses.asdict(fewest), str(fewest)


def _written(made: Reproducer) -> tuple[dict[str, Any], str]:
    return {"script": str(made.script), "verified": made.verified, "said": made.said}, str(made)


def _show_more(verdict: Verdict, more: _More, as_json: bool, command: str | None) -> None:
    if as_json:
        from nantrace.render.report import Report

        found = {**Report(verdict).to_dict(), **{name: value for name, (value, _) in more.items()}}
        print_json(found)
    else:
        for _, sentence in more.values():
            print_out(f"\n{sentence}")
    say_next(command, as_json)


def _next_command(verdict: Verdict, again: Again, output: str | None, more: _More, most: int, depth: str) -> str | None:
    """What helps most after this verdict; None where nothing is left to find."""
    if verdict.status == "inconclusive" and verdict.replays >= most:
        return again.command("--max-replays", str(4 * most))
    if "script" in more.get("reproducer", ({}, ""))[0]:
        return shlex.join(["python", more["reproducer"][0]["script"]])
    if output is not None and os.path.exists(output):  # no replay, or no room, may have been left for it
        return shlex.join(["nantrace", "report", output])
    origin = verdict.origin
    if verdict.status in ("clean", "expected") or origin is None:
        return None
    if not origin.op:
        if verdict.stage in ("input", "state"):
            return None
        return again.command() if depth == "module" else None
    wanted = verdict.status in ("fault", "contained") and "reproducer" not in more
    return again.command("--reproducer", "reproducer") if wanted else None
