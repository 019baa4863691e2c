"""How numbers, operands and places are put into words. Evidence states facts; nothing here judges."""

from __future__ import annotations

import math

from nantrace.diagnosis.causes.dtypes import largest
from nantrace.diagnosis.causes.reading import elements, in_backward, size
from nantrace.diagnosis.causes.roles import role
from nantrace.lineage import Lineage, Operand, OpEvent


def figure(value: float) -> str:
    """A number with up to three significant digits, from a thousand to a million in full: "65,504"."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    if abs(value) >= 1000 and round(abs(value)) < 1e6:
        return f"{round(value):,}"
    return f"{value:.3g}"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def counts(nan: int, posinf: int, neginf: int) -> str:
    """The nonfinite elements by kind: "3 NaN, 2 +inf and 1 -inf"."""
    named = ((nan, "NaN"), (posinf, "+inf"), (neginf, "-inf"))
    held = [f"{count:,} {word}" for count, word in named if count]
    return " and ".join(filter(None, (", ".join(held[:-1]), *held[-1:]))) or "no nonfinite element"


def shape(sizes: tuple[int, ...]) -> str:
    return "x".join(str(n) for n in sizes) if sizes else "scalar"


def spot(event: OpEvent) -> str:
    """The place a user would go to: the module, else the source line."""
    if event.module:
        return f"module {event.module}" if event.module.isdigit() else event.module
    if event.module == "":
        return "the model's own forward"
    return f"the code at {event.where}" if event.where else "the code outside any module"


def line(event: OpEvent) -> str:
    """Where the code to change stands: the source line, else the module."""
    return event.where or spot(event)


def place(event: OpEvent) -> str:
    """The op with its node and module: "aten.div in SqrtBackward0 of dist"."""
    name = event.op or "the op"
    inside = [event.node] if in_backward(event) and event.node else []
    if event.module:
        inside.append(event.module)
    elif event.module == "":
        inside.append("the model")
    return f"{name} in {' of '.join(inside)}" if inside else name


def label(operand: Operand, op: str | None) -> str:
    """What a user calls an operand of that op: the tensor's name if it has one, else what it is: "the divisor"."""
    return operand.tensor or f"the {role(op, operand.name)}"


def called(operand: Operand | None, what: str = "the input") -> str:
    """What an operand is to its op, with its own name if it has one: "the divisor (batch.scale)"."""
    if operand is None:
        return what
    listed = operand.name.partition("[")[2].removesuffix("]")
    own = operand.tensor or (f"tensor {listed} of the list" if listed else "")
    return f"{what} ({own})" if own else what


def span(operand: Operand) -> str:
    """The finite range: "from -1 to 3.22"."""
    if operand.min is None or operand.max is None:
        return "without a finite element" if elements(operand) else "without elements"
    return between(operand.min, operand.max, elements(operand))


def between(low: float, high: float, count: int) -> str:
    """A range in words, which may be one value."""
    if low == high:
        return f"equal to {figure(low)}" if count == 1 else f"all {figure(low)}"
    return f"from {figure(low)} to {figure(high)}" if figure(low) != figure(high) else f"all about {figure(low)}"


def described(operand: Operand, op: str | None) -> str:
    """One operand in words: "the left matrix (float16, 2x32) was finite, from 0 to 80"."""
    if operand.dtype == "number":
        value = operand.min if operand.min is not None else math.nan if operand.nan else math.inf
        value = -math.inf if operand.neginf else value
        return f"{label(operand, op)} was {figure(value)}"
    bad = operand.nan + operand.posinf + operand.neginf
    if not bad and operand.min is None and elements(operand):
        return f"{label(operand, op)} ({operand.dtype}, {shape(operand.shape)}) was finite"
    held = f"held {counts(operand.nan, operand.posinf, operand.neginf)}" if bad else "was finite"
    word = "zero part" if operand.dtype.startswith("complex") else "zero"  # real and imaginary parts are counted
    rest = "the rest " if bad and operand.min is not None else ""
    only_zeros = operand.min == operand.max == 0
    zeros = f" with {plural(operand.zero, word)}" if operand.zero and not only_zeros else ""
    return f"{label(operand, op)} ({operand.dtype}, {shape(operand.shape)}) {held}, {rest}{span(operand)}{zeros}"


def read(operand: Operand, op: str | None) -> str:
    """The sentence about one operand: "The left matrix (float16, 2x32) was finite, from 0 to 80."."""
    words = described(operand, op)
    return f"{words if operand.tensor else sentence(words)}."


def outcome(event: OpEvent) -> str:
    """What came out: "aten.log put out 4 -inf among 16 elements (float32)."."""
    return put_out(event.op, counts(event.nan, event.posinf, event.neginf), size(event), event.dtype)


def put_out(op: str | None, bad: str, numel: int, dtype: str | None) -> str:
    """The sentence of `outcome`, of its parts: a report that shows these numbers otherwise can leave it out."""
    held = f"{bad.removeprefix('1 ')}, its only element" if numel == 1 else f"{bad} among {plural(numel, 'element')}"
    return f"{op or 'It'} put out {held} ({dtype})."


def limit(dtype: str) -> str:
    """ "65,504, the largest float16 value", or a phrase without a number for a dtype without limits."""
    top = largest(dtype)
    return f"{figure(top)}, the largest {dtype} value" if top is not None else f"what {dtype} can hold"


def held_zeros(operand: Operand) -> str:
    """The same as a predicate: "was 0" of one element, "held 4 zeros among 16 elements" of more."""
    return "was 0" if operand.zero and elements(operand) == 1 else f"held {zeros(operand)}"


def zeros(operand: Operand) -> str:
    """How many zeros an operand held, as far as recorded: "4 zeros among 16 elements"."""
    if operand.zero and elements(operand) == 1:
        return "0"
    if operand.zero is None:
        return "at least one zero"
    return f"{plural(operand.zero, 'zero')} among {plural(elements(operand), 'element')}"


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def in_round(lineage: Lineage, iteration: int) -> str:
    """ " in iteration 2", counted from 0, or " in step 2"; nothing where there is one round only."""
    return f" in {round_of(lineage, iteration)}" if has_rounds(lineage) else ""


def round_of(lineage: Lineage, iteration: int) -> str:
    """ "iteration 2" or "step 2", counted from 0."""
    return f"{lineage.round} {iteration - 1}"


def has_rounds(lineage: Lineage) -> bool:
    """Whether there was more than one iteration."""
    seen = (*(event.iteration for event in lineage.events), *(sink.iteration for sink in lineage.sinks))
    return max((*seen, *(number for number, *_ in lineage.growth), *lineage.skipped_iterations), default=1) > 1
