"""Nonfinite numbers in an update: a learning rate, a decay or an eps that a schedule or a configuration spoilt.

Such a number is no mark that something later takes out again: whatever it multiplies is lost at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from nantrace.diagnosis.causes.table import Explanation
from nantrace.diagnosis.causes.wording import figure, line, outcome
from nantrace.lineage import Hyperparameter, Lineage, OpEvent

_UPDATES = ("optimizer", "post_backward", "update")


def nonfinite_number(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """The explanation of an event that is a nonfinite setting, or that computed an update with a nonfinite number."""
    written = settings_made_of(lineage).get(event.id)
    if written and event.kind in ("inserted", "external", "propagated"):
        return _of_setting(written, event, _writer(event))
    used = _nonfinite_scalars(event)
    if event.phase not in _UPDATES or event.kind == "propagated" or not used:
        return None
    settings = _in_force(lineage, event) if event.phase == "optimizer" else []
    if not settings:
        return _of_unnamed(event, used)
    return _of_setting(settings, event, f"{event.op} computed the update with it ({used}).")


def silencing(lineage: Lineage) -> Hyperparameter | None:
    """An infinite eps: updates are divided by it, so that each is exactly 0 and nothing ever turns nonfinite."""
    found = (s for s in lineage.hyperparameters if s.name.partition("[")[0] == "eps" and math.isinf(s.value))
    return next(found, None)


def of_silencing(setting: Hyperparameter) -> Explanation:
    """The explanation of updates that an infinite eps made 0."""
    name = _place(setting)
    facts = (
        f"{setting.name} of {setting.optimizer}, param_groups[{setting.group}], was {figure(setting.value)} when the "
        "update began.",
        "The update is divided by it: each change of a parameter in that group was exactly 0, so nothing is learnt.",
    )
    advice = (
        f"Print {name} after the optimizer is built and after each change to it: where does it become infinite?",
        f"Set {setting.name} to its default and see whether the parameters move.",
    )
    return Explanation("nonfinite_hyperparameter", facts, advice)


def _place(setting: Hyperparameter) -> str:
    key, _, index = setting.name.partition("[")
    return f"optimizer.param_groups[{setting.group}]['{key}']{'[' + index if index else ''}"


def settings_made_of(lineage: Lineage) -> dict[int, list[Hyperparameter]]:
    """Event id -> the settings, kept as tensors, that hold what it wrote or what was computed of that beside training.

    A rate computed from the loss is not followed: what is wrong with it began elsewhere.
    """
    found: dict[int, list[Hyperparameter]] = {}
    for setting in lineage.hyperparameters:
        waiting, seen = list(setting.writers), set(setting.writers)
        while waiting:
            event = lineage.event(waiting.pop())
            if event.carries_grad or event.category not in (None, "constant"):
                continue
            found.setdefault(event.id, []).append(setting)
            more = {*event.nan_parents, *event.inf_parents} - seen
            seen |= more
            waiting += sorted(more)
    return found


def _in_force(lineage: Lineage, event: OpEvent) -> list[Hyperparameter]:
    """The nonfinite settings of the update in which the event lies; the learning rate first."""
    begun = [s for s in lineage.hyperparameters if s.time <= event.time and s.iteration == event.iteration]
    last = max((s.time for s in begun), default=0)
    return sorted((s for s in begun if s.time == last), key=lambda s: s.name != "lr")


def _writer(event: OpEvent) -> str:
    if event.kind == "external":
        return "It is a tensor, and it held that value before the step."
    return f"It is a tensor, and {event.op} at {line(event)} made the value that was written into it."


def _of_setting(settings: Sequence[Hyperparameter], event: OpEvent, how: str) -> Explanation:
    first = settings[0]
    same = [s for s in settings if s.name == first.name]
    groups = f"param_groups[{first.group}]" + (f" and {len(same) - 1} more" if len(same) > 1 else "")
    facts = [f"{first.name} of {first.optimizer}, {groups}, was {figure(first.value)} when the update began.", how]
    facts += [f"{s.name} was {figure(s.value)} too." for s in settings if s not in same][:2]
    shown = _place(first)
    rate = first.name.partition("[")[0] == "lr"
    who = "each scheduler.step()" if rate else "the optimizer is built and after each change to it"
    advice = (
        f"Print {shown} after {who}: where does it become {figure(first.value)}?",
        f"Set {first.name} to {'a small finite number, such as 1e-3,' if rate else 'its default'} before this update "
        "and see whether the parameters stay finite.",
    )
    said = (*facts, outcome(event)) if event.kind != "external" else tuple(facts)
    return Explanation("nonfinite_learning_rate" if rate else "nonfinite_hyperparameter", said, advice)


def _of_unnamed(event: OpEvent, used: str) -> Explanation:
    fact = f"{event.op} at {line(event)} computed with a number that was not finite: {used}."
    none = ("None of the optimizer's own settings was nonfinite.",) if event.phase == "optimizer" else ()
    advice = (
        f"Print each number that goes into the update at {line(event)} (learning rate, decay, scale): which one is "
        "not finite, and from which division or schedule?",
    )
    return Explanation("nonfinite_hyperparameter", (fact, *none, outcome(event)), advice)


def _nonfinite_scalars(event: OpEvent) -> str:
    """The nonfinite numbers among an op's arguments: "alpha = -inf"; empty if there is none."""
    found = []
    for name, value in event.scalars.items():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, float) and not math.isfinite(item):
                found.append(f"{name} = {figure(item)}")
    return ", ".join(dict.fromkeys(found))
