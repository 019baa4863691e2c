"""Numbers that no update can use: a learning rate, a decay or an eps that a schedule or a configuration spoilt.

A nonfinite number is no mark that something later takes out again: whatever it multiplies is lost at once. A beta of
exactly 1 makes the number 0 by which Adam and its kin divide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from nantrace.diagnosis.causes.reading import absmax, argument
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


def with_settings(lineage: Lineage, event: OpEvent, found: Explanation) -> Explanation:
    """The explanation of a birth, with the setting that the value became, or the beta that made its divisor 0."""
    if event.kind not in ("nan", "inf"):
        return found
    became = settings_made_of(lineage).get(event.id) or _as_numbers(lineage, event)
    if became:
        return _with_setting_made(became[0], found)
    beta = _unit_beta(lineage, event)
    return found if beta is None else _with_beta(beta, found)


def _with_setting_made(setting: Hyperparameter, found: Explanation) -> Explanation:
    # Where a plain number came from is not recorded: that it was nonfinite then is a fact, that it is this one is not.
    name = f"{setting.name} of {setting.optimizer}, param_groups[{setting.group}],"
    name = f"It became {name} which" if setting.writers else name
    fact = f"{name} was {figure(setting.value)} when the update began."
    such = ", such as scheduler.step()" if setting.name.partition("[")[0] == "lr" else ""
    check = f"Print {_place(setting)} after each change to it{such}: where does it become {figure(setting.value)}?"
    return Explanation(found.cause, (*found.evidence, fact), (*found.advice[:1], check, *found.advice[1:2]))


def _as_numbers(lineage: Lineage, event: OpEvent) -> list[Hyperparameter]:
    """The nonfinite plain numbers among the settings of the update that this value reached, beside training."""
    if event.carries_grad or event.phase == "optimizer":
        return []
    made = {event.id}
    for later in lineage.events[event.id :]:
        above = {*later.nan_parents, *later.inf_parents}
        if above and above <= made and not later.carries_grad:
            made.add(later.id)
            if later.phase == "optimizer":
                return [s for s in _in_force(lineage, later) if not s.writers]
    return []


def _unit_beta(lineage: Lineage, event: OpEvent) -> Hyperparameter | None:
    """The beta of exactly 1 in the update in which a plain number, or a single one, of 0 divides."""
    divisor = argument(event, "tensor2", "other", "scalar", "scalars")
    if event.phase != "optimizer" or divisor is None or divisor.shape or absmax(divisor) != 0:
        return None
    begun = [s for s in lineage.unit_betas if s.time <= event.time and s.iteration == event.iteration]
    return max(begun, key=lambda s: (s.time, s.name), default=None)


def _with_beta(beta: Hyperparameter, found: Explanation) -> Explanation:
    return Explanation(found.cause, (fact_of_beta(beta), *found.evidence), checks_of_beta(beta.name, beta.group))


def fact_of_beta(beta: Hyperparameter) -> str:
    return (
        f"{beta.name} of {beta.optimizer}, param_groups[{beta.group}], was exactly 1 when the update began: the bias "
        f"correction 1 - {beta.name} ** step is 0 then, and the average with that beta takes nothing in."
    )


def checks_of_beta(name: str, group: int) -> tuple[str, ...]:
    shown = f"optimizer.param_groups[{group}]['betas']"
    return (
        f"Set {name} below 1 (0.9 and 0.999 are the defaults of Adam) and see whether the parameters stay finite.",
        f"Print {shown} after the optimizer is built or loaded and after each change to it: where does it become 1?",
    )


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
