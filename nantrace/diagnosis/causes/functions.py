"""Logarithms, roots, powers, exponentials and functions with a limited domain."""

from __future__ import annotations

import math
from collections.abc import Callable

from nantrace.diagnosis.causes.arithmetic import beyond_bound, lost_eps, met_infinity
from nantrace.diagnosis.causes.checks import guard_before, locate, range_checks, without_samples
from nantrace.diagnosis.causes.dtypes import largest
from nantrace.diagnosis.causes.reading import (
    absmax,
    all_finite,
    argument,
    elements,
    has_inf,
    has_negative,
    has_zero,
    in_backward,
    node_function,
    operation,
    power,
)
from nantrace.diagnosis.causes.table import Explanation
from nantrace.diagnosis.causes.wording import (
    called,
    figure,
    held_zeros,
    label,
    limit,
    line,
    outcome,
    place,
    plural,
    read,
    sentence,
)
from nantrace.lineage import Lineage, Operand, OpEvent

#: exponential -> the largest argument as a function of the dtype's largest value
_LARGEST_ARGUMENT: dict[str, Callable[[float], float]] = {
    "exp": math.log,
    "expm1": math.log,
    "exp2": math.log2,
    "special_exp2": math.log2,
    "sinh": lambda top: math.log(top) + math.log(2),
    "cosh": lambda top: math.log(top) + math.log(2),
}
#: a number just below 1 that the dtype can tell from 1, with a margin
_INSIDE = {"float16": "1 - 1e-3", "bfloat16": "1 - 1e-2"}
#: function -> its domain (closed interval) and the points where it or its value is infinite
_DOMAINS: dict[str, tuple[float, float, tuple[float, ...]]] = {
    "acos": (-1.0, 1.0, ()),
    "asin": (-1.0, 1.0, ()),
    "acosh": (1.0, math.inf, ()),
    "atanh": (-1.0, 1.0, (-1.0, 1.0)),
    "erfinv": (-1.0, 1.0, (-1.0, 1.0)),
    "logit": (0.0, 1.0, (0.0, 1.0)),
    "logit_backward": (0.0, 1.0, (0.0, 1.0)),
    "special_ndtri": (0.0, 1.0, (0.0, 1.0)),
}


def logarithm(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """log, log2, log10 need x > 0; log1p needs x > -1."""
    operand = argument(event, "self")
    edge = -1.0 if operation(event) == "log1p" else 0.0
    if event.kind == "inf":  # what is infinite in the input, if anything, made other elements of the output
        return _log_at_edge(event, operand, edge)
    if event.kind == "nan" and not event.dtype.startswith("complex"):
        return _log_below_edge(event, operand, edge)
    return None


def _log_at_edge(event: OpEvent, operand: Operand | None, edge: float) -> Explanation | None:
    if operand is not None and not (has_zero(operand) is not False if edge == 0 else (operand.min or 0.0) <= edge):
        return None
    name = called(operand)
    count = plural(event.neginf + event.posinf, "element")
    fact = f"{place(event)} is infinite at {figure(edge)}, and {count} of its input had that value."
    known = (read(operand, event.op),) if operand is not None else ("The values of its input were not recorded.",)
    advice = (locate(event, name, f"is {figure(edge)}", operand), *_away_from(event, operand, edge))
    return Explanation("log_of_zero", (fact, *known, *lost_eps(event), outcome(event)), advice)


def _away_from(event: OpEvent, operand: Operand | None, edge: float) -> tuple[str, ...]:
    """How to keep the input of a logarithm off the edge: log1p and complex numbers take no probabilities."""
    whole = event.dtype.startswith("complex")
    if operation(event) in ("xlogy", "special_xlogy"):
        return (guard_before(event, "xlogy(x, y)", "1", "y > 0", "y"),)
    guard = guard_before(event, operation(event), "1", "x != 0" if whole else f"x > {figure(edge)}")
    if operand is not None and operand.tensor is not None:  # it was there before, nothing computed it
        return f"Keep {operand.tensor} a little above {figure(edge)} where it is prepared, and compare.", guard
    if edge or whole:
        return (guard,)
    stable = "If the input is a softmax or a sigmoid, take log_softmax or logsigmoid of the logits"
    return f"{stable} at {line(event)} and compare.", guard


def _log_below_edge(event: OpEvent, operand: Operand | None, edge: float) -> Explanation | None:
    if operand is not None and not operand.neginf and (operand.min is None or operand.min >= edge):
        return None
    name = called(operand)
    fact = f"{place(event)} needs values above {figure(edge)}; below it the result is NaN."
    known = (read(operand, event.op),) if operand is not None else ("The values of its input were not recorded.",)
    advice = (
        locate(event, name, f"is below {figure(edge)}", operand),
        f"Print the smallest value of each factor that {name} is made of, before {line(event)}: which one leaves its "
        "range?"
        if operand is None or not operand.tensor
        else f"Keep {operand.tensor} above {figure(edge)}: clamp it where it is made or after each update, or learn "
        "its logarithm.",
        *(() if operand is not None and operand.tensor and elements(operand) == 1 else (without_samples(event),)),
    )
    return Explanation("log_of_negative", (fact, *known, outcome(event)), advice)


def square_root(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """sqrt needs x >= 0, rsqrt x > 0."""
    operand = argument(event, "self")
    if event.kind == "inf" and operation(event) == "rsqrt":
        return _root_at_zero(event, operand)
    if event.kind != "nan" or event.dtype.startswith("complex"):
        return None
    if operand is not None and not has_negative(operand):
        return None
    known = (read(operand, event.op),) if operand is not None else ("The values of its input were not recorded.",)
    name = called(operand)
    advice = (
        locate(event, name, "is negative", operand),
        f"Compute {name} in float64 before {line(event)}: if it is not negative there, it is a rounding error of a "
        "difference.",
        without_samples(event),
    )
    fact = f"{place(event)} needs values of at least 0; below it the result is NaN."
    return Explanation("sqrt_of_negative", (fact, *known, outcome(event)), advice)


def _root_at_zero(event: OpEvent, operand: Operand | None) -> Explanation | None:
    if operand is not None and has_zero(operand) is False:
        return None
    name = called(operand)
    fact = f"{place(event)} is 1 / sqrt(x), infinite at 0."
    held = f"{sentence(name)} {held_zeros(operand)}." if operand is not None else "Its input was not recorded."
    advice = (
        locate(event, name, "is 0", operand),
        f"Add 1e-6 inside the root at {line(event)} and compare.",
        without_samples(event),
    )
    return Explanation("sqrt_at_zero", (fact, held, *lost_eps(event), outcome(event)), advice)


def powers(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """pow: 0 must not meet a negative exponent, nor a negative number a fractional one."""
    base, exponent = argument(event, "self"), argument(event, "exponent")
    if base is None or exponent is None or exponent.min is None or exponent.max is None:
        return None
    if event.kind == "nan":
        return None if has_inf(base) or has_inf(exponent) else _fractional(event, base, exponent)
    if event.kind != "inf":
        return None
    if exponent.min < 0 and has_zero(base) is not False:
        return _negative_power_of_zero(event, base, exponent)
    if exponent.dtype == "number":
        fact = f"Magnitudes of up to {figure(absmax(base) or 0.0)} to the power {figure(exponent.max)} reach"
        return beyond_bound(event, _power_bound(base, exponent), fact, base)
    return beyond_bound(event, _power_bound(base, exponent), "The power may reach", base, exponent)


def _power_bound(base: Operand, exponent: Operand) -> float | None:
    high, low = absmax(base), base.absmin
    if high is None or exponent.min is None or exponent.max is None:
        return None
    if exponent.min < 0 and low is None:
        return None
    return max(power(high, exponent.max), power(low, exponent.min) if low and exponent.min < 0 else 0.0)


def _fractional(event: OpEvent, base: Operand, exponent: Operand) -> Explanation | None:
    whole = exponent.min == exponent.max and exponent.min is not None and exponent.min == int(exponent.min)
    if whole or not has_negative(base) or event.dtype.startswith("complex"):
        return None
    fact = f"{place(event)} raised a negative number to a fractional power, which is NaN."
    advice = (
        locate(event, called(base), "is negative", base),
        f"Take abs() or clamp {called(base)} at 0 at {line(event)} and compare.",
        without_samples(event),
    )
    return Explanation(
        "power_of_negative", (fact, read(base, event.op), read(exponent, event.op), outcome(event)), advice
    )


def _negative_power_of_zero(event: OpEvent, base: Operand, exponent: Operand) -> Explanation | None:
    if has_zero(base) is None:
        return None
    lowest = exponent.min or 0.0
    held = f"{sentence(label(base, event.op))} {held_zeros(base)}; 0 to the power {figure(lowest)} is infinite."
    if in_backward(event) and node_function(event) == "Pow" and -1 < lowest < 0:
        fact = f"The gradient of x ** {figure(lowest + 1)} is infinite at x = 0."
        advice = (
            locate(event, called(base), "is 0", base),
            guard_before(event, f"the power {figure(lowest + 1)}", "1", "x > 0"),
            without_samples(event),
        )
        return Explanation("sqrt_at_zero", (fact, held, read(base, event.op), outcome(event)), advice)
    advice = (
        locate(event, called(base), "is 0", base),
        f"Clamp {called(base)} at a small positive value at {line(event)} and compare.",
        without_samples(event),
    )
    return Explanation("division_by_zero", (held, read(base, event.op), *lost_eps(event), outcome(event)), advice)


def exponential(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """exp and its kin leave the dtype's range above the logarithm of its largest value."""
    if event.kind != "inf":
        return None
    operand, top = argument(event, "self"), largest(event.dtype)
    op = operation(event)
    reach = absmax(operand) if op in ("sinh", "cosh") else (operand.max if operand is not None else None)
    if top is None:
        return None
    edge = _LARGEST_ARGUMENT[op](top)
    known = (read(operand, event.op),) if operand is not None else ("The values of its input were not recorded.",)
    if operand is not None and (reach is None or reach < edge * 0.99):
        return None
    reached = f"; the input reached {figure(reach)}" if reach is not None else ""
    fact = f"{op}(x) exceeds {limit(event.dtype)}, from x = {figure(edge)} on{reached}."
    name = called(operand)
    advice = (
        f"Clamp {name} below {figure(math.floor(edge))} at {line(event)} and see whether the step stays finite.",
        *range_checks(event, operand)[:2],
    )
    return Explanation("overflow", (fact, *known, outcome(event)), advice)


def bounded(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """acos, atanh and others: the argument must lie in the domain, and off its infinite edges."""
    op = operation(event)
    low, high, edges = _DOMAINS[op]
    operand = argument(event, "self")
    domain = f"at least {figure(low)}" if high == math.inf else f"from {figure(low)} to {figure(high)}"
    if event.kind == "inf" and edges:
        return _at_edge(event, operand, edges, op)
    if event.kind != "nan":
        return None
    if operand is not None and not _outside(operand, low, high):
        return None
    known = (read(operand, event.op),) if operand is not None else ("The values of its input were not recorded.",)
    name = called(operand)
    fact = f"{place(event)} takes values {domain}; outside, the result is NaN."
    advice = (
        f"Print the smallest and largest {name} before {line(event)} in float64: is the excess more than rounding?",
        f"Clamp {name} just inside the domain at {line(event)} and compare.",
    )
    return Explanation("outside_domain", (fact, *known, outcome(event)), advice)


def _outside(operand: Operand, low: float, high: float) -> bool:
    if has_inf(operand):
        return True
    return operand.min is not None and operand.max is not None and (operand.min < low or operand.max > high)


def _at_edge(event: OpEvent, operand: Operand | None, edges: tuple[float, ...], op: str) -> Explanation | None:
    touched = [edge for edge in edges if operand is not None and edge in (operand.min, operand.max)]
    if operand is not None and not touched:
        return None
    where = " and ".join(figure(edge) for edge in touched or edges)
    fact = f"{op}(x) is infinite at x = {where}."
    known = (read(operand, event.op),) if operand is not None else ("The values of its input were not recorded.",)
    return Explanation("domain_edge", (fact, *known, outcome(event)), edge_checks(event, op, operand))


def edge_checks(event: OpEvent, op: str, operand: Operand | None) -> tuple[str, ...]:
    name = called(operand)
    return (
        f"Count how many elements of {name} lie exactly on the edge before {op} at {line(event)}.",
        f"Clamp the input of {op} a little inside the edge ({_INSIDE.get(event.dtype, '1 - 1e-6')} instead of 1) and "
        "compare: a clamp to the edge itself is not enough.",
        without_samples(event),
    )


def poles(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """lgamma, digamma, polygamma: infinite at 0 and the negative whole numbers."""
    operand = argument(event, "self")
    if operand is None or not all_finite(event) or operand.min is None or operand.min > 0:
        return beyond_bound(event, None, "", operand) if operand is not None and event.kind == "inf" else None
    fact = (
        f"{place(event)} has poles at 0 and at the negative whole numbers; {label(operand, event.op)} went down to "
        f"{figure(operand.min)}."
    )
    return Explanation(
        "domain_edge",
        (fact, read(operand, event.op), outcome(event)),
        edge_checks(event, operation(event), operand)[::2],
    )


def periodic(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """sin, cos, tan have no value at infinity."""
    operand = argument(event, "self")
    if event.kind != "nan" or (operand is not None and not has_inf(operand)):
        return None
    return met_infinity(event, "function_of_inf", f"{place(event)} has no value at an infinity.", operand)


def times_logarithm(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """xlogy(x, y) is x * log(y), 0 where x is 0."""
    operand = argument(event, "other")
    if operand is None or not elements(operand):
        return None
    if event.kind == "inf" and has_zero(operand):
        return _log_at_edge(event, operand, 0.0)
    if event.kind == "nan" and has_negative(operand):
        return _log_below_edge(event, operand, 0.0)
    return None
