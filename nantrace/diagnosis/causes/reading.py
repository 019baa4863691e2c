"""Questions to a recorded event: which operands it had, what they held. Answers None where that was not recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nantrace.lineage import Lineage, Operand, OpEvent


def operation(event: OpEvent) -> str:
    """The op without namespace, overload, `_foreach_` of list ops and `_` of in-place ops: "div", "_softmax"."""
    if event.op is None:
        return ""
    parts = event.op.replace("::", ".").split(".")
    name = parts[1] if len(parts) > 1 else parts[0]
    return name.removeprefix("_foreach_").rstrip("_")


def node_function(event: OpEvent) -> str:
    """The forward function of an autograd node: "Sqrt" of "SqrtBackward0", "" outside backward."""
    return event.node.rpartition("::")[2].partition("Backward")[0] if event.node else ""


def in_backward(event: OpEvent) -> bool:
    return event.phase == "backward" or event.node is not None


def argument(event: OpEvent, *names: str) -> Operand | None:
    """The operand of the first of these schema names that was recorded; a plain number counts as one element.

    Several tensors under one name (the list of a `_foreach_` op) are merged into one operand.
    """
    for name in names:
        found = [operand for operand in event.operands if operand.name.partition("[")[0] == name]
        if found:
            return found[0] if len(found) == 1 else _merged(name, found)
        value = _own(event, event.scalars.get(name))
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return _of_number(name, value)
    return None


def _own(event: OpEvent, value: object) -> object:
    """Of the numbers of a list op, one to each tensor of its list, the one that made this output."""
    if not isinstance(value, (list, tuple)) or "_foreach_" not in (event.op or ""):
        return value
    indices = {operand.name.partition("[")[2].removesuffix("]") for operand in event.operands}
    index = indices.pop() if len(indices) == 1 else ""
    if index.isdigit() and int(index) < len(value):
        return value[int(index)]
    return value[0] if len(set(value)) == 1 else None


def _of_number(name: str, value: float) -> Operand:
    finite = None if math.isnan(value) or math.isinf(value) else _float(value)
    return Operand(
        name=name,
        dtype="number",
        shape=(),
        nan=int(math.isnan(value)),
        posinf=int(value == math.inf),
        neginf=int(value == -math.inf),
        min=finite,
        max=finite,
        absmin=abs(finite) if finite else None,
        zero=int(value == 0),
    )


def _merged(name: str, parts: list[Operand]) -> Operand:
    lows = [p.min for p in parts if p.min is not None]
    highs = [p.max for p in parts if p.max is not None]
    smallest = [p.absmin for p in parts if p.absmin is not None]
    zeros = [p.zero for p in parts if p.zero is not None]
    return Operand(
        name=f"{name} ({len(parts)} tensors)",
        dtype=parts[0].dtype,
        shape=(sum(elements(p) for p in parts),),
        nan=sum(p.nan for p in parts),
        posinf=sum(p.posinf for p in parts),
        neginf=sum(p.neginf for p in parts),
        min=min(lows, default=None),
        max=max(highs, default=None),
        absmin=min(smallest, default=None),
        zero=sum(zeros) if len(zeros) == len(parts) else None,
    )


def number(event: OpEvent, *names: str) -> float | None:
    """The first of these plain arguments that is a finite number."""
    for name in names:
        value = event.scalars.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return _float(value)
    return None


def elements(operand: Operand) -> int:
    return math.prod(operand.shape)


def size(event: OpEvent) -> int:
    return math.prod(event.shape)


def has_zero(operand: Operand) -> bool | None:
    """Whether an element is 0; None if the record does not tell."""
    if operand.zero is not None:
        return operand.zero > 0
    if operand.min is None or operand.max is None or operand.min > 0 or operand.max < 0:
        return False
    return True if 0 in (operand.min, operand.max) else None


def has_inf(operand: Operand | None) -> bool:
    return operand is not None and operand.posinf + operand.neginf > 0


def has_nan(operand: Operand | None) -> bool:
    return operand is not None and operand.nan > 0


def has_negative(operand: Operand) -> bool:
    return operand.neginf > 0 or (operand.min is not None and operand.min < 0)


def absmax(operand: Operand | None) -> float | None:
    """Largest finite magnitude."""
    if operand is None or operand.min is None or operand.max is None:
        return None
    return max(abs(operand.min), abs(operand.max))


def all_finite(event: OpEvent) -> bool | None:
    """Whether everything the op read was finite; None if the record does not tell."""
    if event.kind == "inf":
        return True
    if any(isinstance(v, float) and not math.isfinite(v) for v in event.scalars.values()):
        return False
    if not event.operands:
        return False if event.inf_parents or event.nan_parents else None
    return not any(has_inf(operand) or has_nan(operand) for operand in event.operands)


def product(*factors: float) -> float:
    """Product of magnitudes, infinite where it is beyond a Python float."""
    result = 1.0
    for factor in factors:
        result *= _float(factor)
    return result


def power(magnitude: float, exponent: float) -> float:
    """`magnitude ** exponent`, infinite where it is beyond a Python float or 0 has a negative exponent."""
    try:
        return math.pow(magnitude, exponent)
    except (OverflowError, ValueError):
        return math.inf


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def parents(lineage: Lineage, event: OpEvent) -> Iterator[OpEvent]:
    """The recorded events that wrote the infinities, then those that wrote the NaN, which this one read."""
    for id in dict.fromkeys((*event.inf_parents, *event.nan_parents)):
        if 1 <= id <= len(lineage.events):
            yield lineage.events[id - 1]


def sources(lineage: Lineage, event: OpEvent) -> list[OpEvent]:
    """Where the nonfinite values that the op read began: the nearest ancestors that did not merely pass them on."""
    found: list[OpEvent] = []
    seen = {event.id}
    queue = list(parents(lineage, event))
    while queue:
        ancestor = queue.pop(0)
        if ancestor.id in seen:
            continue
        seen.add(ancestor.id)
        if ancestor.kind == "propagated":
            queue.extend(parents(lineage, ancestor))
        else:
            found.append(ancestor)
    return found
