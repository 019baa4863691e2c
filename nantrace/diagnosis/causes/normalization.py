"""Layer, batch, group and RMS norm: they divide by sqrt(var + eps), and keep its inverse for the backward."""

from __future__ import annotations

from nantrace.diagnosis.causes.arithmetic import beyond_bound, met_infinity
from nantrace.diagnosis.causes.checks import in_wider
from nantrace.diagnosis.causes.dtypes import rounds_to_zero, wider
from nantrace.diagnosis.causes.reading import (
    all_finite,
    argument,
    elements,
    has_inf,
    in_backward,
    number,
    operation,
    parents,
    power,
)
from nantrace.diagnosis.causes.table import Explanation
from nantrace.diagnosis.causes.wording import called, figure, label, limit, line, outcome, place, plural, read, spot
from nantrace.lineage import Lineage, Operand, OpEvent

_SAVED = ("rstd", "invstd", "save_invstd", "saved_invstd", "save_var", "reserve")


def normalization(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """The forward: eps must survive in the dtype wherever the variance is 0."""
    operand = argument(event, "input", "self")
    if has_inf(operand):
        fact = f"{place(event)} subtracts the mean: with an infinity among the elements that is inf - inf."
        return met_infinity(event, "inf_minus_inf", fact, operand)
    eps = number(event, "eps", "epsilon")
    if eps is not None and all_finite(event) and rounds_to_zero(eps, event.dtype):
        return _eps_too_small(event, event.dtype, eps, operand, "")
    return beyond_bound(event, None, "", operand) if event.kind == "inf" else None


def weight_norm(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """g * v / norm(v), a row each: finite v of which a row holds nothing but zeros gives 0 / 0."""
    rows, size = argument(event, "v"), argument(event, "g")
    if event.kind != "nan" or rows is None or not all_finite(event) or not rows.zero:
        return None
    fact = f"{place(event)} divides each row of {label(rows, event.op)} by its norm; a row of zeros gives 0 / 0."
    advice = (
        f"Print the norm of each row of {label(rows, event.op)}: which of them is 0, and since when?",
        f"Initialise {label(rows, event.op)} with a row that is not 0 and see whether the step stays finite.",
    )
    known = (read(rows, event.op), *((read(size, event.op),) if size is not None else ()))
    return Explanation("zero_over_zero", (fact, *known, outcome(event)), advice)


def normalization_backward(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """The backward reads the inverse deviation of the forward, which no forward op reads."""
    saved = argument(event, *_SAVED)
    if not has_inf(saved) or saved is None:
        return beyond_bound(event, None, "", *event.operands[:3]) if event.kind == "inf" else None
    eps = next((number(parent, "eps") for parent in parents(lineage, event) if "norm" in operation(parent)), None)
    if eps is not None and not rounds_to_zero(eps, saved.dtype):
        return None
    held = (
        f"{place(event)} read {label(saved, event.op)} = 1 / sqrt(var + eps) from the forward; "
        f"{saved.posinf:,} of its {plural(elements(saved), 'element')} held +inf, though the forward output was finite."
    )
    return _eps_too_small(event, saved.dtype, eps, argument(event, "input"), held)


def _eps_too_small(event: OpEvent, dtype: str, eps: float | None, operand: Operand | None, held: str) -> Explanation:
    if eps is None:
        fact = f"Where the variance is 0, 1 / sqrt(eps) went above {limit(dtype)}; eps itself was not recorded."
    elif eps == 0:
        fact = "eps is 0, so an input without variance divides by 0."
    else:
        fact = f"eps is {figure(eps)}, which is 0 in {dtype}; where the variance is 0, 1 / sqrt(eps) is "
        fact += f"{figure(power(eps, -0.5))}, against {limit(dtype)}."
    known = (read(operand, event.op),) if operand is not None else ()
    advice = (
        f"Set eps = 1e-5 in {spot(event)} and see whether the step stays finite.",
        *((in_wider(event),) if eps is None else (_with_eps_kept(event, dtype),) if eps else ()),
        f"Print which rows of {called(operand)} have no variance at {line(event)}.",
    )
    return Explanation("eps_underflow", (*((held,) if held else ()), fact, *known, outcome(event)), advice)


def _with_eps_kept(event: OpEvent, dtype: str) -> str:
    what = f"the forward of {spot(event)}" if in_backward(event) else spot(event)
    return f"Run {what} in {wider(dtype)}, where eps is not 0, and see whether the step stays finite."
