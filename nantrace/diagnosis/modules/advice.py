"""What to check next after a module-level verdict: controlled checks, at most three."""

from __future__ import annotations

from nantrace.diagnosis.modules import suspects
from nantrace.diagnosis.modules.births import is_external
from nantrace.diagnosis.modules.parents import enclosing
from nantrace.diagnosis.modules.reason import last_sound_step, seen_finite
from nantrace.diagnosis.modules.seen import Call, Seen
from nantrace.diagnosis.modules.words import index, named
from nantrace.diagnosis.verdict import Stage
from nantrace.events import Role
from nantrace.steps import likely, numbers_of, was_skipped

_BISECT = "Replay the step to find the op and its line: `nantrace bisect FILE.py:step`."


def advice(seen: Seen, row: int, stage: Stage | None, cause: str | None, kept: int | None = None) -> tuple[str, ...]:
    """The next controlled checks, at most three. `kept`: the row of what holds the damage, if anything does."""
    if is_external(seen, row):
        return advice_for_state(seen, row)
    call: Call | None = enclosing(seen, row)
    name, dtype = named(call.module if call else None), seen.site(row).dtype
    found = []
    if stage == "update" and cause == "exploding_update":
        found.append(
            "Repeat the steps with a learning rate 100 times smaller, or with gradients clipped to a norm of 1: do the "
            "parameters still grow?"
        )
    elif stage == "update" or (kept is not None and seen.role[kept] == Role.BUFFER and suspects.left_out(seen, row)):
        found.append(
            "Keep the running statistics of a step whose update is skipped: restore them, or normalise in float32."
        )
    if cause == "overflow":
        read = f"the inputs and the weights of {name}" if call is not None else "what the loss is computed from"
        found.append(f"Print the largest magnitude of {read}: which of them is large, and since which step?")
        if dtype == "float16":
            what = name if call is not None else "what follows the model, up to the loss,"
            found.append(f"Run {what} in float32 (or bfloat16) and see whether the step stays finite.")
    elif cause == "nonfinite_learning_rate":
        found.append("Print the learning rate after each scheduler.step(): where does it become nonfinite?")
    elif suspects.came_in(seen, row) and not suspects.finite_batch(seen, row):
        found.append("Hand the batch to nantrace.trace(..., batch=batch): is it nonfinite before the model sees it?")
    elif stage == "optimizer":
        found.append(f"Check the optimizer's eps and learning rate: an eps below the smallest {dtype} value is 0.")
    elif stage == "gradients":
        found.append(
            "Print the gradients after each thing between backward and optimizer.step: unscale, clip, all-reduce."
        )
    if suspects.takes_labels(seen, row):
        found.append("Print how many labels count, (labels != -100).sum(): a mean over none of them is NaN.")
    if call is not None and seen.nan[row] and "Attention" in seen.classes.get(call.module, ""):
        found.append(f"Look for a sample of which the mask given to {name} hides every key: its softmax is NaN.")
    found.append(_BISECT)
    return tuple(found[:3])


def advice_for_state(seen: Seen, row: int) -> tuple[str, ...]:
    role, name = int(seen.role[row]), seen.name(row)
    if role == Role.INPUT:
        place = index(seen.stats(row))
        sample = f", sample {place[0]} first" if place else ""
        return (f"Look where {name} is made{sample}: divisions, logs and missing values in the dataset.",)
    finite, sound = seen_finite(seen, row), last_sound_step(seen, row)
    if finite is not None or sound is not None:
        since = f", finite {finite}," if finite is not None else f" after step {sound}, whose loss was finite, and"
        return (
            f"Look at what wrote {name}{since} before step {int(seen.step[row])} used it: an average of weights "
            "(EMA, a teacher), a copy or a load.",
            f"Print whether {name} is finite after each line of the loop that writes it.",
        )
    if role == Role.PARAM:
        return (f"Look at how {name} is initialised, and at the checkpoint that it was loaded from.",)
    if role == Role.STATE:
        return (f"Look at {name} in the checkpoint, and trace the step that last wrote it.",)
    if suspects.updates_before(seen):
        return (f"Reset {name} and trace the steps that write it: which one leaves it nonfinite?",)
    return (
        f"Print {name} right after it is made, and after a checkpoint is loaded: where is it nonfinite first?",
        "Look into the checkpoint that it came from: `nantrace checkpoint FILE` names each nonfinite tensor.",
    )


def of_scaler(seen: Seen, step: int) -> tuple[str, ...]:
    """What to check of gradients that left their range times the scale, in a step that the scaler skipped."""
    steps = seen.trace.steps
    last = max(int(entry["step"]) for entry in likely(steps, was_skipped) if entry.get("skipped"))
    places = range(numbers_of(steps).index(last) + 1, len(steps))
    taken = next((steps[place]["step"] for place in places if steps[place].get("committed")), None)
    if taken is not None:
        return (
            f"From step {taken} on updates were taken again, as a scale does that finds its level: nothing has to "
            "be mended unless the share of skipped updates grows.",
        )
    return (
        "Print scaler.get_scale() over the next steps: if it settles and steps are taken again, this was calibration.",
        f"Run step {step} once without the scaler and compare its largest gradient with the largest value of its "
        "dtype: if it overflows unscaled, no scale helps.",
        _BISECT,
    )
