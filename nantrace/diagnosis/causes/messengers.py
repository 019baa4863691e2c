"""What stands behind an overflow: huge parameters, growth from module to module, exploding updates, a loss scale.

The op that overflowed is then only the messenger. Adds evidence and advice to an explanation, and changes its cause
where the updates or the scale explain it.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise

from nantrace.diagnosis.causes.checks import MODEL_AND_AFTER, SEARCHES
from nantrace.diagnosis.causes.dtypes import largest
from nantrace.diagnosis.causes.reading import in_backward, operation, parents
from nantrace.diagnosis.causes.table import Explanation
from nantrace.diagnosis.causes.wording import figure, has_rounds, line, place, plural, round_of
from nantrace.lineage import Lineage, OpEvent, Sink

OVERFLOWS = frozenset({"overflow", "cast_overflow", "norm_overflow"})
#: The largest parameter norm after one update, or after all so far, over that before: from here on they exploded.
ONE_UPDATE, ALL_UPDATES = 10.0, 100.0
#: Growth from module to module counts as steady from this factor on, over at least this many modules.
_FACTOR, _MODULES = 2.0, 3
#: What there is to measure before the model runs, and where it is not known to have run.
BEFORE_FORWARD, COMPUTED = "each tensor that the code before the forward makes,", "each tensor that is computed"
#: A parameter is worth naming from here on, or from where its square overflows.
_HUGE = 1e6


def with_messengers(lineage: Lineage, event: OpEvent, found: Explanation) -> Explanation:
    """The explanation, with what the rest of the step says about it."""
    for enlarge in (_without_output, _huge_parameters, _growing_outputs, _recomputed, _loss_scale, _updates):
        found = enlarge(lineage, event, found)
    return Explanation(found.cause, (*found.evidence, *_spread_by_clipping(lineage, event)), found.advice[:3])


def _put_first(
    found: Explanation, facts: tuple[str, ...], advice: tuple[str, ...], cause: str | None = None
) -> Explanation:
    return Explanation(cause or found.cause, (*facts, *found.evidence), (*advice, *found.advice))


def _without_search(found: Explanation) -> Explanation:
    """Where the source of a magnitude is known, the advice to look for it is not needed."""
    kept = tuple(text for text in found.advice if not text.startswith(SEARCHES))
    return Explanation(found.cause, found.evidence, kept)


def _without_output(lineage: Lineage, event: OpEvent, found: Explanation) -> Explanation:
    """Where the model has not run since the last update, its output is no place to look for a magnitude."""
    begun = max((time for time in lineage.step_times if time < event.time), default=0)
    if any(begun < time < event.time for time in lineage.round_times):
        return found
    first = not begun and any(time > event.time for time in lineage.round_times)
    advice = tuple(text.replace(MODEL_AND_AFTER, BEFORE_FORWARD if first else COMPUTED) for text in found.advice)
    return Explanation(found.cause, found.evidence, advice)


def _huge_parameters(lineage: Lineage, event: OpEvent, found: Explanation) -> Explanation:
    least = min(_HUGE, math.sqrt(largest(event.dtype) or math.inf))
    ranked = sorted((pair for pair in lineage.huge_params if pair[1] > least), key=lambda pair: -pair[1])
    if found.cause not in OVERFLOWS or not ranked:
        return found
    facts = tuple(f"Parameter {name} reached {figure(size)} in magnitude before the step." for name, size in ranked[:2])
    name = ranked[0][0]
    check = (
        f"Print the magnitude of {name} right after the model is built or loaded, and after each update since: what "
        "made it so large?"
    )
    grown = (
        f"If {name} grew over the updates before, repeat them with a learning rate 100 times smaller and see whether "
        "it still grows: the op that overflowed is then the messenger."
    )
    return _put_first(_without_search(found), facts, (check, grown))


def _growing_outputs(lineage: Lineage, event: OpEvent, found: Explanation) -> Explanation:
    if found.cause not in OVERFLOWS:
        return found
    run = steady_growth(lineage, event)
    if run is None:
        return found
    (first, low), (last, high), count = run[0], run[-1], len(run)
    factor = math.pow(high / low, 1 / (count - 1))
    fact = (
        f"The outputs had been growing by a factor of about {figure(factor)} from module to module since {first}: "
        f"{figure(low)} there, {figure(high)} in {last}, {count - 1} modules later. {place(event)} is the messenger."
    )
    check = (
        f"Check how {first} and the modules like it are initialised and scaled: divide their weights by "
        f"{figure(factor)} and see whether the step stays finite."
    )
    return _put_first(_without_search(found), (fact,), (check,))


def steady_growth(lineage: Lineage, event: OpEvent) -> list[tuple[str, float]] | None:
    """(module, largest output) of the like-named modules before the event, if they grew by a steady factor."""
    if not event.module or not re.search(r"\d", event.module):
        return None
    run: list[tuple[str, float]] = []
    for name, size in _like_named(lineage, event):
        if run and run[-1][0] == name:
            run[-1] = (name, max(size, run[-1][1]))
        elif any(name == earlier for earlier, _ in run):
            run = [(name, size)]
        else:
            run.append((name, size))
    if len(run) < _MODULES:
        return None
    ratios = [after / before for (_, before), (_, after) in pairwise(run)]
    steady = min(ratios) >= _FACTOR and max(ratios) <= 3 * min(ratios)
    return run if steady and run[-1][1] >= 100 * run[0][1] else None


def _like_named(lineage: Lineage, event: OpEvent) -> list[tuple[str, float]]:
    pattern = re.sub(r"\d+", "#", event.module or "")
    return [
        (name, size)
        for time, name, size in lineage.magnitudes
        if time < event.time
        and name is not None
        and name != event.module
        and re.sub(r"\d+", "#", name) == pattern
        and math.isfinite(size)
        and size > 0
    ]


def _recomputed(lineage: Lineage, event: OpEvent, found: Explanation) -> Explanation:
    """A checkpointed forward that went otherwise the second time: what it reads changed in between."""
    same = (event.op, event.module, event.where)
    earlier = any(e.phase == "forward" and (e.op, e.module, e.where) == same for e in lineage.events)
    if event.phase != "recompute" or event.kind not in ("nan", "inf") or earlier:
        return found
    names = [operand.tensor for operand in event.operands if operand.tensor]
    what = names[0] if names else "each input of the op"
    fact = (
        "It happened when the backward recomputed a checkpointed forward; in the forward itself this op stayed finite, "
        "so something that it reads changed in between."
    )
    check = f"Print {what} before {line(event)}, in the forward and again in the recomputation: what changes it?"
    return _put_first(found, (fact,), (check,))


def _loss_scale(lineage: Lineage, event: OpEvent, found: Explanation) -> Explanation:
    if found.cause not in OVERFLOWS or event.iteration not in lineage.skipped_iterations:
        return found
    skips = len(set(lineage.skipped_iterations))
    whole = "trace" if lineage.round == "step" else "step"
    seen = f"GradScaler skipped this {lineage.round} ({plural(skips, lineage.round)} skipped in this {whole})."
    if skips == 1 and not lineage.growth:
        seen = f"GradScaler skipped the update, the only one in this {whole}."
    elif not has_rounds(lineage):
        seen = "GradScaler skipped the update."
    outside = updates_outside_the_scaler(lineage, event)
    facts = tuple(f"{name} was updated all the same: an optimizer stepped outside the scaler." for name in outside[:1])
    later = [iteration for iteration, *_ in lineage.growth if iteration > max(lineage.skipped_iterations)]
    if later and not outside:
        seen += f" From {round_of(lineage, min(later))} on updates were taken again."
    if not in_backward(event) and event.phase not in ("recompute", "post_backward"):
        if _is_scaling(event):
            fact = "It is the product of a loss, which was finite, and the loss scale: a smaller scale keeps it finite."
            smaller = "Run the step with GradScaler(init_scale=1.0) and see whether loss and gradients stay finite."
            return _put_first(_without_search(found), (*facts, seen, fact), (smaller,))
        fact = "The value was born in forward, which the loss scale does not touch: no scale makes it finite."
        return _put_first(found, (*facts, seen, fact), ())
    check = (
        "Call scaler.step(optimizer) for each optimizer that uses these gradients, and compare."
        if outside
        else (
            "Print scaler.get_scale() over the next steps: if it settles and steps are taken again, this "
            "was calibration."
        )
    )
    lower = (
        "Run the step once without the scaler and compare the largest gradient magnitude with "
        f"{figure(largest(event.dtype) or math.inf)}: if it overflows unscaled, no scale helps."
    )
    return _put_first(found, (*facts, seen), (check, lower), "scaled_gradient_overflow")


def _is_scaling(event: OpEvent) -> bool:
    """A loss times a scale: two single numbers, of which one is a power of 2 above 1, as a GradScaler's is."""
    if event.phase != "loss" or operation(event) != "mul" or any(operand.shape for operand in event.operands):
        return False
    values = [operand.min for operand in event.operands if operand.min is not None]
    return len(values) == 2 and any(value > 1 and math.frexp(value)[0] == 0.5 for value in values)


def _spread_by_clipping(lineage: Lineage, event: OpEvent) -> tuple[str, ...]:
    """Gradients that were finite until an op after backward multiplied them by a nonfinite coefficient."""
    writers: dict[str, tuple[OpEvent, ...]] = {}
    for sink in lineage.sinks:
        if sink.kind == "grad" and sink.iteration == event.iteration and not sink.left:
            written = (lineage.events[id - 1] for id, _ in sink.starts if 1 <= id <= len(lineage.events))
            writers.setdefault(sink.name, tuple(written))
    between = {name: found for name, found in writers.items() if any(e.phase == "post_backward" for e in found)}
    own = [
        name
        for name, found in between.items()
        for e in found
        if any(p.phase == "backward" for p in parents(lineage, e))
    ]
    spread = len(between) - len(set(own))
    if event.phase == "post_backward" or not own or spread <= 0:
        return ()
    return (
        f"Backward left {plural(len(set(own)), 'gradient')} nonfinite ({own[0]} first); {spread:,} more became so "
        "only afterwards, multiplied by a coefficient made of the first, as clipping by the norm does.",
    )


def updates_outside_the_scaler(lineage: Lineage, event: OpEvent) -> list[str]:
    """Parameters that hold what came from the event although the scaler skipped that iteration."""
    return [
        sink.name
        for sink in lineage.sinks
        if sink.kind in ("param", "state")
        and sink.excuse is None
        and sink.iteration == event.iteration
        and _reached(lineage, event, sink)
    ]


def _reached(lineage: Lineage, event: OpEvent, sink: Sink) -> bool:
    queue, seen = [id for id, _ in sink.starts], set()
    while queue:
        id = queue.pop()
        if id == event.id:
            return True
        if id not in seen and 1 <= id <= len(lineage.events):
            seen.add(id)
            above = lineage.events[id - 1]
            queue.extend((*above.nan_parents, *above.inf_parents))
    return False


def kept_buffers(lineage: Lineage, event: OpEvent) -> list[str]:
    """Buffers that hold what came from the event although the iteration was skipped."""
    if event.iteration not in lineage.skipped_iterations:
        return []
    return [sink.name for sink in lineage.sinks if sink.kind == "buffer" and _reached(lineage, event, sink)]


def _updates(lineage: Lineage, event: OpEvent, found: Explanation) -> Explanation:
    kept = kept_buffers(lineage, event)
    if kept:
        fact = (
            f"The optimizer step was skipped, but buffer {kept[0]} kept nonfinite values "
            f"({plural(len(kept), 'buffer')} in all)."
        )
        check = (
            f"Restore {kept[0]} from before the step, or skip the batch before the forward, and compare the evaluation."
        )
        found = _put_first(found, (fact,), (check,))
    grown = update_growth(lineage, event)
    if grown is None:
        return found
    total, worst, before, after = grown
    who = "Earlier updates" if lineage.round == "step" else "Updates earlier in this step"
    fact = (
        f"{who} took the largest parameter norm from {figure(before)} to "
        f"{figure(after)}, a factor "
        f"of {figure(total)}{f', up to {figure(worst)} in one update' if figure(worst) != figure(total) else ''}."
    )
    slower = "Repeat with a learning rate 100 times smaller and see whether the parameter norm still grows."
    clipped = "Clip the gradient norm to 1 before each update and see whether the parameter norm still grows."
    unscaled = (
        "Call scaler.unscale_ and clipping once, after the last backward of an accumulation, and compare the gradient "
        "norms just before the update."
    )
    checks = (unscaled, slower) if lineage.skipped_iterations else (slower, clipped)
    return _put_first(found, (fact,), checks, "exploding_update" if _is_overflow(found) else None)


def _is_overflow(found: Explanation) -> bool:
    return found.cause in OVERFLOWS or found.cause == "scaled_gradient_overflow"


def update_growth(lineage: Lineage, event: OpEvent) -> tuple[float, float, float, float] | None:
    """(total factor, largest factor of one update, norm before, norm after) of exploding updates before the event."""
    seen = [
        (before, after)
        for _, before, after, time in lineage.growth
        if time <= event.time and math.isfinite(before) and math.isfinite(after) and before > 0
    ]
    if not seen:
        return None
    start, peak = seen[0][0], max(after for _, after in seen)
    worst = max(after / before for before, after in seen)
    total = peak / start
    return (total, worst, start, peak) if worst >= ONE_UPDATE or total >= ALL_UPDATES else None
