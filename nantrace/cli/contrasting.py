"""The command that replays a step under one change at a time. Knows its options."""

from __future__ import annotations

from typing import Any

import click

from nantrace.cli.answers import finish, say_next, show
from nantrace.cli.console import Progress, fail, note, sentences
from nantrace.cli.targets import Again, leaving, load_step


@click.command()
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
        from nantrace.diagnosis.contrast.rows import AXES

        wrong = [name for name in axes if name not in AXES]
        if wrong:
            raise click.BadParameter(f"{wrong[0]!r} is none of {', '.join(AXES)}.", param_hint="--axis")
        step, watched = load_step(target, arguments)
        batch = None if other is None else _other_batch(other, arguments)
        from nantrace.api import matrix as run_matrix
        from nantrace.render.matrix import text

        with leaving(watched):
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
        broken = watched.told is not None and found.base.outcome == "raised"  # over nothing that was nonfinite
        if broken and watched.told is not None:
            note(watched.told)
        show(found, text, as_json)
        if broken:
            fail(f"the step raised {watched.short} before anything was nonfinite: mend that, then run matrix again.")
        again = Again(target, arguments, capture).command()
        say_next(again if found.base.outcome != "finite" else None, as_json)
        finish(found.base.outcome == "nonfinite" and found.base.status != "contained", exit_code)


def _other_batch(target: str, arguments: tuple[str, ...]) -> Any:
    """The batch of another step. Making that step draws no random numbers of the first one's."""
    from nantrace.errors import ReplayError
    from nantrace.replay.surroundings import random_state, restore_random_state

    before = random_state()
    try:
        step, _ = load_step(target, arguments)
    finally:
        restore_random_state(before)
    if step.batch is None:
        raise ReplayError(f"{target} has no batch that could be tried on the step; hand it to its nantrace.Step.")
    return step.batch
