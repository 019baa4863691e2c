"""Sums, products, quotients and casts: what each needs, and the numbers that show what it was given."""

from __future__ import annotations

from nantrace.diagnosis.causes.checks import eps_check, locate, range_checks, some_samples, without_samples
from nantrace.diagnosis.causes.dtypes import is_narrow, largest, limits
from nantrace.diagnosis.causes.reading import (
    absmax,
    all_finite,
    argument,
    has_inf,
    has_zero,
    in_backward,
    node_function,
    number,
    product,
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
    read,
    span,
)
from nantrace.lineage import Lineage, Operand, OpEvent

#: A factor of a sum is worth naming from here on; a term is a mask from this share of the range on.
_LARGE, _LOWEST = 1e6, 0.9
#: A bound is compared with the limit after this much slack: rounding may carry a sum a little above it.
_SLACK = 1.05


def overflowed(event: OpEvent, *facts: str, operand: Operand | None = None) -> Explanation:
    """The explanation of a value beyond the range of its dtype."""
    what = "a gradient" if in_backward(event) else "a result"
    first = facts or (f"All that {place(event)} read was finite; {what} went above {limit(event.dtype)}.",)
    return Explanation("overflow", (*first, outcome(event)), range_checks(event, operand))


def beyond_bound(event: OpEvent, bound: float | None, fact: str, *operands: Operand | None) -> Explanation | None:
    """Overflow if a bound on the magnitude of the result lies above the limit; None if it shows that there was none."""
    top = largest(event.dtype)
    if bound is not None and top is not None:
        if bound * _SLACK <= top:
            return None
        fact = f"{fact} {figure(bound)}, against {limit(event.dtype)}."
    else:
        fact = f"All that {place(event)} read was finite; what came out went above {limit(event.dtype)}."
    known = [operand for operand in operands if operand is not None]
    ranges = tuple(read(operand, event.op) for operand in known)
    biggest = max(known, key=lambda operand: absmax(operand) or 0.0, default=None)
    return overflowed(event, fact, *ranges, operand=biggest)


def met_infinity(event: OpEvent, cause: str, fact: str, *operands: Operand | None) -> Explanation:
    """The explanation of a NaN that an op made of infinities."""
    held = tuple(read(operand, event.op) for operand in operands if operand is not None)
    guilty = next((operand for operand in operands if has_inf(operand)), None)
    name = label(guilty, event.op) if guilty is not None else "the infinite input"
    if guilty is not None and guilty.dtype == "number":
        return Explanation(cause, (fact, *held, outcome(event)), (_without_the_literal(event),))
    advice = (
        locate(event, name, "is infinite"),
        f"Replace the infinities of {name} by {_stand_in(guilty, event)} at {line(event)} and see whether the NaN is "
        "gone.",
    )
    return Explanation(cause, (fact, *held, outcome(event)), advice)


def _without_the_literal(event: OpEvent) -> str:
    return (
        f"Use masked_fill or torch.where with the infinity at {line(event)} instead of arithmetic on a mask, and "
        "compare."
    )


def _stand_in(operand: Operand | None, event: OpEvent) -> str:
    """A large finite number to put in an infinity's place."""
    sign = "-" if operand is not None and operand.neginf and not operand.posinf else ""
    return f"{sign}{'1e4' if is_narrow(event.dtype) else '1e9'}"


def multiplication(lineage: Lineage, event: OpEvent) -> Explanation | None:
    left, right = argument(event, "self"), argument(event, "other", "scalar", "scalars")
    if event.kind == "nan" and all_finite(event) is not True and not event.dtype.startswith("complex"):
        fact = f"{place(event)} multiplied 0 by an infinity, which is NaN."
        return met_infinity(event, "zero_times_inf", fact, left, right)
    if not all_finite(event):
        return None
    low, high = absmax(left), absmax(right)
    bound = product(low, high) if low is not None and high is not None else None
    return beyond_bound(event, bound, "The largest magnitudes multiply to", left, right)


def addition(lineage: Lineage, event: OpEvent) -> Explanation | None:
    left, right = argument(event, "self"), argument(event, "other", "end", "scalar")
    if event.kind == "nan" and all_finite(event) is not True:
        return _opposite_infinities(event, left, right)
    if event.kind != "inf":
        return None
    bound, factor = None, number(event, "alpha") or 1.0
    low, high = absmax(left), absmax(right)
    if low is not None and high is not None:
        bound = low + product(abs(factor), high)
    found = beyond_bound(event, bound, "The largest magnitudes add up to", left, right)
    return found if found is None else _of_terms(event, found, factor, left, right)


def _of_terms(
    event: OpEvent, found: Explanation, factor: float, left: Operand | None, right: Operand | None
) -> Explanation:
    """What makes a sum large that its terms do not show: a factor, or a mask made of the lowest number."""
    top = largest(event.dtype)
    if abs(factor) > _LARGE:
        term = right.tensor if right is not None and right.tensor else "The second term"
        fact = f"{term} counts {figure(factor)} times."
        whose = "optimizer.param_groups" if event.phase == "optimizer" else "the factor alpha"
        check = f"Print {whose} just before {line(event)}: what makes the factor {figure(factor)}?"
        return Explanation(found.cause, (*found.evidence[:1], fact, *found.evidence[1:]), (check, *found.advice[:1]))
    lows = [operand.min for operand in (left, right) if operand is not None and operand.min is not None]
    if not event.neginf or top is None or min(lows, default=0.0) > -_LOWEST * top:
        return found
    fact = f"A term goes down to {figure(min(lows))}, as masks do: what is added to it can only leave the range."
    check = (
        f"Write the mask with masked_fill, or with torch.minimum, instead of adding it at {line(event)}, and compare."
    )
    return Explanation(found.cause, (*found.evidence, fact), (check, *found.advice[:2]))


def _opposite_infinities(event: OpEvent, *operands: Operand | None) -> Explanation:
    fact = f"In {place(event)} infinities cancelled: inf - inf is NaN."
    return met_infinity(event, "inf_minus_inf", fact, *operands)


def product_sum(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """addcmul, lerp: a sum with a product in it."""
    operands = [argument(event, name) for name in ("self", "tensor1", "tensor2", "end", "weight")]
    if event.kind == "inf":
        return beyond_bound(event, _addcmul_bound(event), "The magnitudes add up to at most", *operands)
    if not any(has_inf(operand) for operand in operands):
        return None
    vanishing = any(operand is not None and has_zero(operand) for operand in operands[1:])
    if vanishing:
        fact = f"{place(event)} multiplies and adds; 0 met an infinity."
        return met_infinity(event, "zero_times_inf", fact, *operands)
    return _opposite_infinities(event, *operands)


def _addcmul_bound(event: OpEvent) -> float | None:
    added, left, right = (absmax(argument(event, name)) for name in ("self", "tensor1", "tensor2"))
    if added is None or left is None or right is None:
        return None
    return added + product(left, right, abs(number(event, "value") or 1.0))


def division(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """div, and by other names reciprocal, addcdiv and the remainders."""
    top = argument(event, "tensor1", "self")
    bottom = argument(event, "tensor2", "other", "scalar", "scalars")
    return quotient(event, top, bottom)


def quotient(event: OpEvent, top: Operand | None, bottom: Operand | None) -> Explanation | None:
    """What a quotient of these two operands explains."""
    if event.kind == "inf":
        return _infinite_quotient(event, top, bottom)
    if top is None or bottom is None:
        return None
    if has_inf(top) and has_inf(bottom):
        fact = f"{place(event)} divided an infinity by an infinity, which is NaN."
        both_zero = has_zero(top) is not False and has_zero(bottom) is not False
        extra = (f"Both also hold, or may hold, zeros: 0 / 0 is not ruled out in {place(event)}.",) if both_zero else ()
        found = met_infinity(event, "inf_over_inf", fact, top, bottom)
        return Explanation(found.cause, found.evidence + extra, found.advice)
    if has_zero(top) is False or has_zero(bottom) is False:
        return None
    fact = f"{place(event)} divided 0 by 0: {called(bottom, 'its divisor')} {held_zeros(bottom)}."
    return Explanation(
        "zero_over_zero",
        (fact, read(top, event.op), *lost_eps(event), outcome(event)),
        _zero_checks(event, bottom),
    )


def _infinite_quotient(event: OpEvent, top: Operand | None, bottom: Operand | None) -> Explanation | None:
    if bottom is None or has_zero(bottom) is None:
        return None
    if has_zero(bottom):
        fact = f"{place(event)} divided by 0: {called(bottom, 'its divisor')} {held_zeros(bottom)}."
        ranges = () if top is None else (read(top, event.op),)
        return Explanation(
            "division_by_zero", (fact, *ranges, *lost_eps(event), outcome(event)), _zero_checks(event, bottom)
        )
    reach, least = absmax(top) if top is not None else 1.0, _least(bottom)
    bound = None if reach is None or not least else reach / least
    return beyond_bound(event, bound, "The largest numerator over the smallest denominator is", top, bottom)


def _least(operand: Operand) -> float | None:
    """Smallest magnitude of an operand without zeros."""
    if operand.absmin is not None or operand.min is None or operand.max is None:
        return operand.absmin
    return min(abs(operand.min), abs(operand.max)) if operand.min > 0 or operand.max < 0 else None


def lost_eps(event: OpEvent) -> tuple[str, ...]:
    """A fact about float16 that is worth knowing wherever a denominator was 0."""
    found = limits(event.dtype)
    if found is None or not is_narrow(event.dtype):
        return ()
    return (
        f"In {event.dtype} a number up to {figure(found[2] / 2)} becomes 0, so an eps of 1e-8 or 1e-12 does not "
        "protect a denominator.",
    )


def _zero_checks(event: OpEvent, bottom: Operand) -> tuple[str, ...]:
    divisor = called(bottom, "the divisor")
    last = (
        eps_check(event)
        if is_narrow(event.dtype)
        else f"Keep {divisor} at least 1e-6 away from 0 at {line(event)} and see whether the step stays finite."
    )
    if node_function(event) in ("Div", "TrueDivide", "Reciprocal"):  # else a hook or a function of the user divides
        last = guarded_division(event)
    kept = bottom.tensor is not None and not bottom.tensor.startswith(("batch", "args"))  # no batch brought it
    others = () if kept and not some_samples(event) else (without_samples(event),)
    return locate(event, divisor, "is 0", bottom), last, *others


def guarded_division(event: OpEvent) -> str:
    return (
        f"Replace zeros in the denominator at {line(event)} by 1 before the forward division, "
        "select afterwards, and see whether the gradient stays finite: a mask after it cannot."
    )


def reciprocal(lineage: Lineage, event: OpEvent) -> Explanation | None:
    return quotient(event, None, argument(event, "self"))


def remainder(lineage: Lineage, event: OpEvent) -> Explanation | None:
    top, bottom = argument(event, "self"), argument(event, "other")
    if has_inf(top):
        return met_infinity(event, "function_of_inf", f"{place(event)} has no value at an infinity.", top)
    if bottom is None or has_zero(bottom) is not True:
        return quotient(event, top, bottom) if event.kind == "inf" else None
    fact = f"{place(event)} divided by 0: {called(bottom, 'its divisor')} {held_zeros(bottom)}."
    return Explanation("division_by_zero", (fact, outcome(event)), _zero_checks(event, bottom))


def cast(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """_to_copy, copy_: the value must fit the new dtype."""
    source = argument(event, "src", "self")
    top = largest(event.dtype)
    reach = absmax(source)
    if source is None or reach is None or top is None or reach <= top or has_inf(source):
        return None
    fact = (
        f"{place(event)} turned {source.dtype} into {event.dtype}; the values reached {figure(reach)}, "
        f"above {limit(event.dtype)}."
    )
    rest = f"The values went {span(source)}." if span(source).startswith("from ") else ""
    keep = f"Keep {label(source, event.op)} in {source.dtype} at {line(event)} and see whether the step stays finite."
    advice = (
        *(() if in_backward(event) else (keep,)),  # there autocast does it, not a line of the user
        *range_checks(event, source)[1:],
    )
    return Explanation("cast_overflow", tuple(filter(None, (fact, rest, outcome(event)))), advice)


def elementwise_growth(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """Ops that leave the finite range from finite inputs in no other way than overflow."""
    if event.kind != "inf":
        return None
    return beyond_bound(event, None, "", *event.operands[:3])


def unscaling(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """_amp_foreach_non_finite_check_and_unscale_: gradients times the inverse scale."""
    grads, inverse = argument(event, "self"), argument(event, "inv_scale")
    if event.kind != "inf":
        return None
    reach, factor = absmax(grads), absmax(inverse)
    bound = product(reach, factor) if reach is not None and factor is not None else None
    return beyond_bound(event, bound, "Gradient and inverse loss scale multiply to", grads, inverse)
