"""The next controlled checks, as sentences: one change, one comparison, with place, tensor or dtype named."""

from __future__ import annotations

import math

from nantrace.diagnosis.causes.dtypes import is_narrow, largest, limits, wider
from nantrace.diagnosis.causes.reading import in_backward
from nantrace.diagnosis.causes.wording import figure, limit, line, spot
from nantrace.lineage import Operand, OpEvent

#: The check where no samples are known; it tells nothing of what a step computes without data.
ANOTHER_BATCH = "Repeat the step on another batch and see whether the same op fails."
#: What there is to measure outside the model, up to a place: after the model ran, or in another part of the step.
MODEL_AND_AFTER = "the model's output and of each tensor after it,"
_MAGNITUDES = {
    "post_backward": "each gradient after backward and of each tensor made of them,",
    "update": "each parameter after the update and of each tensor made of them,",
}
#: How the advice to look for the source of a magnitude begins.
SEARCHES = (
    "Print the largest magnitude of each module",
    "Print the largest magnitude of the model",
    "Print the largest magnitude of each tensor that",
    "Print the largest magnitude of each gradient after",
    "Print the largest magnitude of each parameter after",
    "Compare the largest magnitude of",
)


def in_wider(event: OpEvent) -> str:
    """Repeat in a wider dtype and compare with the limit of the narrow one."""
    if event.phase == "optimizer":
        return f"Print the largest magnitude of each gradient just before {line(event)}: which of them is large?"
    what = spot(event)
    if in_backward(event):
        what = f"{what if event.module == '' else f'the forward of {what}'}, and so its backward,"
    top = largest(event.dtype)
    against = figure(top) if top is not None else "the values here"
    return f"Run {what} in {wider(event.dtype)} and compare its largest magnitude with {against}."


def in_bfloat16(event: OpEvent) -> str:
    return (
        f"Run the step in bfloat16, whose largest value is {figure(largest('bfloat16') or 0)}: if it stays finite, "
        f"the range of {event.dtype} is what is missing."
    )


def follow_magnitude(event: OpEvent, operand: Operand | None) -> str:
    """Look for the place where the operand became large; a tensor with a name was so before the op."""
    if in_backward(event):
        return f"Print the largest gradient magnitude module by module down to {spot(event)} and find the first jump."
    if operand is not None and operand.tensor and operand.min is not None and operand.max is not None:
        reach = figure(max(abs(operand.min), abs(operand.max)))
        return f"Compare the largest magnitude of {operand.tensor}, here {reach}, with that of a step that works."
    what = _MAGNITUDES.get(event.phase or "", MODEL_AND_AFTER) if event.module is None else "each module's output"
    return f"Print the largest magnitude of {what} up to {line(event)}: where does it start to grow?"


def range_checks(event: OpEvent, operand: Operand | None = None) -> tuple[str, ...]:
    """The checks for a value beyond the dtype's range."""
    if event.phase == "optimizer":
        clipped = "Clip the gradient norm to 1 before the update and see whether moments and parameters stay finite."
        return in_wider(event), clipped
    follow = follow_magnitude(event, operand)
    if some_samples(event):
        return in_wider(event), without_samples(event), follow
    return (in_wider(event), in_bfloat16(event), follow) if is_narrow(event.dtype) else (in_wider(event), follow)


def locate(event: OpEvent, what: str, condition: str, operand: Operand | None = None) -> str:
    """Print the elements that meet a condition, just before the op; of a single element, where it came from."""
    before = f"just before {event.op or 'the op'} at {line(event)}"
    if operand is not None and operand.dtype == "number":
        why = condition.replace("is", "is it", 1)
        if event.phase == "optimizer":
            return f"Print optimizer.param_groups {before}: of which setting is {what}, a plain number, made?"
        return f"Print {what}, a plain number, {before}, and what it is made of: why {why}?"
    if operand is not None and math.prod(operand.shape) == 1:
        why = condition.replace("is", "is it", 1)
        if operand.tensor:  # nothing in the step computed it
            return f"Print {operand.tensor} in this step and in those before: since when, and why, {why}?"
        return f"Print {what} {before}, and what it is made of: why {why}?"
    return f"Print the indices where {what} {condition} {before}."


#: Where no sample is computed with, and so no other batch helps: what is read there instead.
_WITHOUT_DATA = {
    "optimizer": "the gradients, moments and settings",
    "update": "the smallest and largest value of each tensor",
}


def some_samples(event: OpEvent) -> bool:
    """Whether a part of the batch is concerned, and the rest is not."""
    return bool(event.samples) and len(event.samples) < math.prod(event.shape[:1])


def without_samples(event: OpEvent) -> str:
    """Repeat the step without the samples concerned, where they are known."""
    if event.phase in _WITHOUT_DATA:
        return f"Print {_WITHOUT_DATA[event.phase]} that {line(event)} reads, in this step and before: what changed?"
    if not some_samples(event):
        return ANOTHER_BATCH
    named = ", ".join(str(index) for index in event.samples[:8]) + (", ..." if len(event.samples) > 8 else "")
    word = "sample" if len(event.samples) == 1 else "samples"
    return f"Repeat the step without {word} {named} of the batch and see whether it stays finite."


def guard_before(event: OpEvent, function: str, harmless: str, condition: str, input: str = "x") -> str:
    """Make the input harmless before the op; a mask after it cannot repair the gradient."""
    what = "the input of" if input == "x" else f"{input} in"
    return (
        f"Replace {what} {function} at {line(event)} by torch.where({condition}, {input}, {harmless}) and select "
        "afterwards: does the step stay finite?"
    )


def eps_check(event: OpEvent) -> str:
    return (
        f"Compare every eps at {line(event)} with {figure_of_smallest(event)}: rerun with eps above it, or with the "
        "computation in float32."
    )


def figure_of_smallest(event: OpEvent) -> str:
    found = limits(event.dtype)
    return f"{figure(found[2])}, the smallest {event.dtype} value" if found else limit(event.dtype)
