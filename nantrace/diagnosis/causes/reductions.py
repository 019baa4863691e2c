"""Sums, means, norms, deviations and softmax: what they need of the elements they run over."""

from __future__ import annotations

import math

from nantrace.diagnosis.causes.arithmetic import beyond_bound, met_infinity, overflowed
from nantrace.diagnosis.causes.checks import range_checks, without_samples
from nantrace.diagnosis.causes.dtypes import is_narrow, largest
from nantrace.diagnosis.causes.reading import (
    absmax,
    all_finite,
    argument,
    elements,
    has_inf,
    number,
    operation,
    power,
    product,
    size,
    sources,
)
from nantrace.diagnosis.causes.table import Explanation
from nantrace.diagnosis.causes.wording import called, figure, label, limit, line, outcome, place, plural, read, sentence
from nantrace.lineage import Lineage, Operand, OpEvent


def reduced(event: OpEvent, operand: Operand) -> int:
    """How many elements each output summarises."""
    outputs = 1 if operand.name.endswith("tensors)") else size(event)
    return elements(operand) // max(outputs, 1)


def empty(event: OpEvent, operand: Operand | None) -> Explanation | None:
    """A reduction over nothing."""
    if operand is None or elements(operand):
        return None
    fact = f"{place(event)} ran over no elements: {called(operand, 'its input')} has shape {list(operand.shape)}."
    advice = (
        f"Print the shape and the mask or index that made {called(operand)} empty at {line(event)}.",
        f"Return 0 for an empty selection at {line(event)} and see whether the step stays finite.",
    )
    return Explanation("empty_reduction", (fact, outcome(event)), advice)


def total(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """sum, cumsum, mean: the partial sums must fit."""
    operand = argument(event, "self", "input")
    if event.kind == "nan" and (nothing := empty(event, operand)):
        return nothing
    if event.kind == "nan" and has_inf(operand):
        fact = f"{place(event)} added up infinities of opposite sign: inf - inf is NaN."
        return met_infinity(event, "inf_minus_inf", fact, operand)
    if operand is None:
        return overflowed(event) if event.kind == "inf" else _over_what(event)
    if not all_finite(event):
        return None
    reach, terms = absmax(operand), _terms(event, operand)
    bound = None if reach is None else product(reach, terms)
    fact = f"{plural(terms, 'element')} of up to {figure(reach or 0.0)} may add up to"
    found = beyond_bound(event, bound, fact, operand)
    many = reach is not None and bound is not None and reach * 100 <= bound and is_narrow(event.dtype)
    return _by_number(event, found, terms) if found is not None and many else found


def _by_number(event: OpEvent, found: Explanation, terms: int) -> Explanation:
    """A sum of many small elements: to look for a large one would lead nowhere."""
    advice = (
        f"Sum in float32 (dtype=torch.float32) at {line(event)} and compare the result with "
        f"{figure(largest(event.dtype) or 0.0)}.",
        f"Divide by {terms:,} before the sum, or use a mean, and see whether the step stays finite.",
    )
    return Explanation(found.cause, found.evidence, advice)


def _over_what(event: OpEvent) -> Explanation | None:
    """A NaN mean whose input was not recorded: two possibilities are left, so the cause is not claimed."""
    if event.kind != "nan" or event.nan_parents or event.inf_parents or operation(event) != "mean":
        return None
    fact = (
        f"{place(event)} read no NaN and no infinity; a mean is NaN then when it runs over no elements, or "
        "when its partial "
        "sums overflow in both directions."
    )
    advice = (
        f"Print the shape of its input at {line(event)}: does a mask or an index leave no element?",
        f"Return 0 for an empty selection at {line(event)} and see whether the step stays finite.",
    )
    return Explanation("unknown", (fact, "Its input was not recorded.", outcome(event)), advice)


def _terms(event: OpEvent, operand: Operand) -> int:
    if operation(event) in ("cumsum", "logcumsumexp", "index_add", "scatter_add", "scatter_reduce"):
        return max(operand.shape, default=1)
    return max(reduced(event, operand), 1)


def running_product(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """prod, cumprod."""
    operand = argument(event, "self")
    if event.kind == "nan" and has_inf(operand):
        fact = f"{place(event)} multiplied an infinity by 0, which is NaN."
        return met_infinity(event, "zero_times_inf", fact, operand)
    return beyond_bound(event, None, "", operand) if all_finite(event) else None


def norm(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """linalg_vector_norm, _foreach_norm: neither the norm nor the sum of powers under it may overflow."""
    operand, top = argument(event, "self"), largest(event.dtype)
    if event.kind != "inf" or top is None:
        return None
    degree = number(event, "ord", "p") or 2.0
    reach = absmax(operand)
    known: tuple[str, ...] = ("The values of its input were not recorded.",)
    fact = f"All that {place(event)} read was finite, but the norm went above {limit(event.dtype)}."
    if operand is not None and reach is not None:
        raised = product(elements(operand), power(reach, degree)) if degree > 0 else math.inf
        if raised <= top:
            return None
        fact = (
            f"The magnitudes reach {figure(reach)}; {figure(reach)} ** {figure(degree)} is "
            f"{figure(power(reach, degree))}, "
        )
        fact += f"against {limit(event.dtype)}."
        known = (read(operand, event.op),)
    clip = event.phase == "post_backward"
    effect = ("A clip by this norm multiplies every gradient by 0 and so erases the update.",) if clip else ()
    advice = (
        f"Compute the norm at {line(event)} in float64 and compare it with {figure(top)}.",
        "Print the largest magnitude of each tensor in the norm and find the one that dominates.",
        "Clip by value, or by a norm in float64, before this line and see whether the update survives."
        if clip
        else range_checks(event, operand)[-1],
    )
    return Explanation("norm_overflow", (fact, *known, *effect, outcome(event)), advice)


def deviation(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """std, var: divide by n - correction, which must be positive; the squares must fit."""
    operand = argument(event, "self")
    if operand is None:
        return overflowed(event) if event.kind == "inf" else None
    if event.kind == "nan":
        return empty(event, operand) or _without_freedom(event, operand) or _deviation_of_infinities(event, operand)
    if event.kind != "inf":
        return None
    reach = absmax(operand)
    bound = None if reach is None else product(reduced(event, operand), 4.0, reach, reach)
    return beyond_bound(event, bound, "The sum of squared deviations may reach", operand)


def _without_freedom(event: OpEvent, operand: Operand) -> Explanation | None:
    correction = number(event, "correction")
    if correction is None:
        correction = 0.0 if event.scalars.get("unbiased") is False else 1.0
    count = reduced(event, operand)
    if count - correction > 0:
        return None
    fact = (
        f"{place(event)} had {plural(count, 'element')} to each result and divides by n - {figure(correction)} = "
        f"{figure(count - correction)}: {called(operand, 'its input')} has shape {list(operand.shape)}."
    )
    advice = (
        f"Print the shape of {called(operand)} there over the last batches: is this a short last batch or a "
        "short sample?",
        f"Leave out what divides by this deviation at {line(event)} when there is one element, and compare: "
        "correction=0 only gives 0 instead, and a division by it fails next.",
    )
    return Explanation("single_element_std", (fact, outcome(event)), advice)


def _deviation_of_infinities(event: OpEvent, operand: Operand) -> Explanation | None:
    if has_inf(operand):
        fact = f"{place(event)} subtracted an infinite mean from an infinity: inf - inf is NaN."
        return met_infinity(event, "inf_minus_inf", fact, operand)
    return beyond_bound(event, None, "", operand) if all_finite(event) else None


def softmax(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """softmax, log_softmax, logsumexp: each row needs one element above -inf and none that is +inf."""
    operand = argument(event, "self", "input")
    if event.kind != "nan" or operand is None or not has_inf(operand):
        return None
    if operand.posinf:
        fact = f"{place(event)} subtracts the largest element of a row from each; with +inf that is inf - inf."
        return met_infinity(event, "inf_minus_inf", fact, operand)
    return masked_row(lineage, event, operand)


def masked_row(lineage: Lineage, event: OpEvent, operand: Operand) -> Explanation:
    """A row that holds nothing but -inf."""
    rows = _masked_rows(event, operand)
    what = label(operand, event.op)
    fact = f"In {place(event)}, {rows} of {what} held nothing but -inf: -inf - (-inf) is NaN."
    count = f"{what if operand.tensor else sentence(what)} held {operand.neginf:,} -inf among "
    count += f"{plural(elements(operand), 'element')}."
    written = next((source for source in sources(lineage, event) if source.neginf), None)
    mask = written.tensor or "the mask" if written is not None else "the mask"
    given = written is not None and written.tensor
    made = (
        f"where {written.tensor} is made"
        if written is not None and given
        else (f"at {(written and written.where) or line(event)}")
    )
    dim = event.scalars.get("dim")
    full = f"(scores == -inf).all({dim if isinstance(dim, int) else -1}).nonzero()"
    advice = (
        f"Print which rows {mask} masks entirely, {full}, at {line(event)}.",
        f"Mask with {_lowest(event)} instead of -inf {made} and see whether the NaN is gone.",
        without_samples(event),
    )
    return Explanation("all_masked_row", (fact, count, outcome(event)), advice)


def _masked_rows(event: OpEvent, operand: Operand) -> str:
    """How many rows came out as NaN, which for a softmax without NaN or +inf in its input are the masked ones."""
    width = _width(event, operand)
    if not width or "softmax" not in operation(event) or size(event) != elements(operand) or event.nan % width:
        return "a row"
    count = event.nan // width
    return f"{count:,} of {plural(elements(operand) // width, 'row')}"


def _lowest(event: OpEvent) -> str:
    return f"torch.finfo(torch.{event.dtype}).min"


def _width(event: OpEvent, operand: Operand) -> int | None:
    dim = event.scalars.get("dim")
    if isinstance(dim, (list, tuple)):
        dim = dim[0] if len(dim) == 1 else None
    if not isinstance(dim, int) or not -len(operand.shape) <= dim < len(operand.shape):
        return None
    return operand.shape[dim] or None


def selection(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """median, quantile and others that have no value over no elements."""
    return empty(event, argument(event, "self", "input")) if event.kind == "nan" else None
