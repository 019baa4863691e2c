"""How large a step's tensors were beside the same tensors in the steps before it. Has no opinion on why."""

from __future__ import annotations

import numpy as np

from nantrace.diagnosis.modules.seen import Seen
from nantrace.events import Phase, Role, distinct

#: By how much a largest magnitude must exceed that of every earlier step. Healthy training moves it by a few percent a
#: step, a warm-up or a fresh head by a few times.
UNUSUAL = 32.0

_WATCHED = [int(role) for role in (Role.INPUT, Role.OUTPUT)]


def left_its_usual_range(seen: Seen, row: int) -> str | None:
    """A sentence on the first tensor of the step, before `row`, that was far larger than in any earlier step."""
    events, step = seen.trace.events, int(seen.step[row])
    with np.errstate(invalid="ignore"):
        largest = np.fmax(np.abs(events["min"]), np.abs(events["max"]))
    watched = np.isin(seen.role, _WATCHED) & (seen.phase == Phase.FORWARD) & ~np.isnan(largest)
    earlier = watched & (seen.step < step)
    usual = np.zeros(len(seen.trace.sites))
    np.maximum.at(usual, events["site"][earlier], largest[earlier])
    before = usual[events["site"]]
    jumped = watched & (seen.step == step) & (before > 0) & (largest >= UNUSUAL * before)
    (rows,) = np.nonzero(jumped[:row])
    if not rows.size:
        return None
    first, steps = int(rows[0]), len(distinct(seen.step[earlier]))
    plural = f"{steps} steps" if steps > 1 else "step"
    return (
        f"The first tensor of the step to leave its usual range was {seen.name(first)}: up to {largest[first]:.3g}, "
        f"in the {plural} before at most {before[first]:.3g}."
    )
