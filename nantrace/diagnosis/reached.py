"""How much of what training keeps a nonfinite value reached, counted over every optimizer of an iteration.

A trace ends a step when its optimizer has stepped. Where several optimizers take turns (a discriminator, a generator)
one iteration of the loop is several steps; counts of one of them would tell of half the damage.
"""

from __future__ import annotations

from nantrace.diagnosis.modules.seen import Seen
from nantrace.events import Phase, Role


def iteration_of(seen: Seen, step: int) -> list[int]:
    """The steps of the loop's iteration that `step` belongs to: those up to an optimizer that steps again."""
    together: list[int] = []
    taken: set[str] = set()
    for number in range(_beginning(seen, step), int(seen.step[-1]) + 1):
        mine = _consumed(seen, number)
        if not mine or not taken or taken & mine:
            if step in together:
                break
            together, taken = [], set()
        together.append(number)
        taken |= mine
    return together


def _beginning(seen: Seen, step: int) -> int:
    """The nearest step, up to `step`, at which an iteration begins whatever came before it."""
    mine = _consumed(seen, step)
    while mine:
        before = _consumed(seen, step - 1)
        if not before or before & mine:
            break
        step, mine = step - 1, before
    return step


def _consumed(seen: Seen, step: int) -> set[str]:
    """The names of the gradients that an optimizer read in a step."""
    return {seen.name(int(r)) for r in seen.rows(step, Role.GRAD, phases=[Phase.OPTIMIZER])}


def reached(seen: Seen, row: int, step: int) -> str:
    """ "the output of the model, the loss, 6 of 8 gradients": what holds nonfinite values from `row` on."""
    steps = iteration_of(seen, step)
    parts = []
    outermost = [call for call in seen.outermost(step) if not call.foreign]
    output = next((call for call in outermost if any(r >= row and seen.bad[r] for r in call.outputs)), None)
    if output is not None:
        parts.append(f"the output of {output.module or 'the model'}")
    if any(r >= row and seen.bad[r] for number in steps for r in seen.rows(number, Role.LOSS)):
        parts.append("the loss")
    for role, what in (
        (Role.GRAD, "gradients"),
        (Role.PARAM, "parameters after the update"),
        (Role.STATE, "optimizer tensors"),
        (Role.BUFFER, "buffers"),
    ):
        rows = [r for number in steps for r in _kept(seen, number, role)]
        bad = {seen.name(r) for r in rows if r >= row and _is_damage(seen, r)}
        if bad:
            every = len({seen.name(r) for r in rows})
            parts.append(f"{len(bad)} of {every} {what}" if every > 1 else f"the only {what.replace('s', '', 1)}")
    over = f" (steps {steps[0]} to {steps[-1]}, in which the optimizers take turns)" if len(steps) > 1 else ""
    return ", ".join(parts) + over if parts else ""


def _kept(seen: Seen, step: int, role: Role) -> list[int]:
    if role is not Role.GRAD:
        return [int(r) for r in seen.rows(step, role, phases=[Phase.UPDATE])]
    consumed = seen.rows(step, role, phases=[Phase.OPTIMIZER])
    return [int(r) for r in (consumed if consumed.size else seen.rows(step, role))]


def _is_damage(seen: Seen, row: int) -> bool:
    return bool(seen.bad[row]) and not (seen.role[row] == Role.BUFFER and seen.mark[row])
