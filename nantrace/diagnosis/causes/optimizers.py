"""The arithmetic of optimizers: Adam's quotient of moments, fused updates."""

from __future__ import annotations

from nantrace.diagnosis.causes.arithmetic import beyond_bound, division, product_sum, quotient
from nantrace.diagnosis.causes.dtypes import limits, rounds_to_zero
from nantrace.diagnosis.causes.hyperparameters import checks_of_beta
from nantrace.diagnosis.causes.reading import argument, has_inf, has_zero, number
from nantrace.diagnosis.causes.table import Explanation
from nantrace.diagnosis.causes.wording import figure, held_zeros, outcome, place, read
from nantrace.lineage import Lineage, OpEvent

#: Adam's default in torch.optim
_DEFAULT_EPS = 1e-8


def add_quotient(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """addcdiv: self + value * tensor1 / tensor2. In Adam tensor2 is sqrt(second moment) + eps."""
    top, bottom = argument(event, "tensor1"), argument(event, "tensor2")
    if event.phase != "optimizer" or bottom is None or has_zero(bottom) is not True or has_inf(bottom):
        return quotient(event, top, bottom)
    if not rounds_to_zero(_DEFAULT_EPS, event.dtype):
        found = division(lineage, event)
        note = f"sqrt(v) + eps is 0 in {event.dtype}, so eps was 0 or below {_smallest(event.dtype)}."
        return None if found is None else Explanation(found.cause, (note, *found.evidence), _advice(event))
    fact = f"The denominator sqrt(v) + eps of the update {held_zeros(bottom)}."
    eps = (
        f"In {event.dtype} an eps of {figure(_DEFAULT_EPS)}, the default of torch.optim.Adam, is 0: the smallest "
        f"{event.dtype} value is {_smallest(event.dtype)}."
    )
    known = (read(top, event.op),) if top is not None else ()
    return Explanation("eps_underflow", (fact, eps, *known, outcome(event)), _advice(event))


def _smallest(dtype: str) -> str:
    found = limits(dtype)
    return figure(found[2]) if found else "its smallest value"


def _advice(event: OpEvent) -> tuple[str, ...]:
    owner = event.tensor or "the parameters"
    half = event.dtype in ("float16", "bfloat16")
    keep = f"Keep {owner} and their moments in float32 (autocast instead of model.half()) and compare."
    return (
        *((keep,) if half else ()),
        f"Set eps = {'1e-4' if half else '1e-8'} in the optimizer that steps at {event.where or 'its construction'} "
        "and see whether the update stays finite.",
        "Print how many elements of each gradient are exactly 0: there its moments stay 0.",
    )


def second_moment(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """addcmul of the gradient with itself: an infinite second moment freezes its weights for good."""
    found = product_sum(lineage, event)
    if found is None or event.phase != "optimizer" or not event.posinf:
        return found
    effect = "A second moment of +inf makes each later update of its weight 0: the weight is frozen."
    return Explanation(found.cause, (*found.evidence, effect), found.advice)


def fused_update(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """_fused_adam and its kin carry eps as an argument."""
    eps = number(event, "eps")
    if event.kind == "nan" and number(event, "beta2") == 1:
        fact = (
            f"betas[1] was exactly 1 in {place(event)}: the bias correction 1 - betas[1] ** step is 0 then, and the "
            "second moment takes nothing in; 0 / 0 is NaN."
        )
        return Explanation("zero_over_zero", (fact, outcome(event)), checks_of_beta("betas[1]", 0))
    if event.kind == "nan" and eps is not None and rounds_to_zero(eps, event.dtype):
        fact = f"eps is {figure(eps)} in {place(event)}, which is 0 in {event.dtype}; a zero gradient gives 0 / 0."
        return Explanation("eps_underflow", (fact, outcome(event)), _advice(event))
    return beyond_bound(event, None, "", *event.operands[:3]) if event.kind == "inf" else None
