"""Backward nodes: where a forward function has an infinite slope, its gradient divides by 0.

The forward was finite there. A `where` or a mask behind the function sets the incoming gradient to 0 and turns
1 / 0 into 0 / 0; it cannot repair it.
"""

from __future__ import annotations

from collections.abc import Callable

from nantrace.diagnosis.causes.checks import guard_before, without_samples
from nantrace.diagnosis.causes.functions import edge_checks
from nantrace.diagnosis.causes.linalg import factorization, spectrum_gradient
from nantrace.diagnosis.causes.reading import all_finite, argument, has_inf, has_negative, has_zero, operation
from nantrace.diagnosis.causes.reductions import masked_row
from nantrace.diagnosis.causes.table import Explanation
from nantrace.diagnosis.causes.wording import held_zeros, line, outcome, place, plural, read, zeros
from nantrace.lineage import Lineage, Operand, OpEvent

RuleOfNode = Callable[[Lineage, OpEvent], "Explanation | None"]


def divisor(event: OpEvent) -> Operand | None:
    """What the op of the node divides by: the denominator of a quotient, the only operand of a reciprocal or rsqrt."""
    return argument(event, "other") or (argument(event, "self") if len(event.operands) == 1 else None)


def incoming(event: OpEvent) -> tuple[str, ...]:
    """A fact about the gradient that came in: whether a later selection had already set it to 0."""
    gradient = argument(event, "self") if argument(event, "other") else None
    if event.kind != "nan" or gradient is None or has_zero(gradient) is not True:
        return ()
    return (
        f"The incoming gradient held {zeros(gradient)}: 0 / 0 is NaN, so a where() or a mask behind the function, "
        "which only sets that gradient to 0, cannot help.",
    )


def _at_zero(cause: str, function: str, formula: str, condition: str = "x > 0") -> RuleOfNode:
    """The rule of a node whose gradient divides by 0 where the condition does not hold."""

    def rule(lineage: Lineage, event: OpEvent) -> Explanation | None:
        below = divisor(event)
        if operation(event) not in ("div", "reciprocal") or below is None:
            return None
        if has_zero(below) is not True or has_inf(below):
            return None
        fact = f"The gradient of {function} is {formula}; {place(event)} divided by {zeros(below)}."
        forward = tuple(read(operand, None) for operand in event.forward_operands[:1])
        located = f"Print the indices where {_zero(function, condition)}, at {line(event)}."
        advice = (located, _repair(event, cause, function, condition), without_samples(event))
        return Explanation(cause, (fact, *incoming(event), *forward, outcome(event)), advice)

    return rule


def _zero(function: str, condition: str) -> str:
    """ "x is 0 in sqrt(x)" for the condition "x > 0", "the norm is 0" for "a norm"."""
    name = function.removeprefix("a ")
    return f"the {name} is 0" if name != function else f"{condition.replace(' > ', ' is ')} in {function}"


def _repair(event: OpEvent, cause: str, function: str, condition: str) -> str:
    """The change before the function that would keep its gradient finite."""
    if cause == "norm_at_zero":
        return (
            f"Compute {function} at {line(event)} as the root of a sum of squares plus 1e-6, and see whether the "
            "gradient stays finite."
        )
    if cause == "sqrt_at_zero":
        return (
            f"Add 1e-6 inside the root at {line(event)}, not behind it, or put torch.where({condition}, x, 1) before "
            "it: does the gradient stay finite?"
        )
    return guard_before(event, function, "1", condition, "y" if condition.startswith("y ") else "x")


def _edge(function: str, formula: str) -> RuleOfNode:
    """The rule of a node whose gradient is infinite at the edge of the domain."""

    def rule(lineage: Lineage, event: OpEvent) -> Explanation | None:
        below = divisor(event)
        if below is None or not all_finite(event):
            return None
        forward = event.forward_operands[0] if event.forward_operands else None
        known = (read(forward, None),) if forward is not None else ()
        if event.kind == "nan" and not argument(event, "other") and has_negative(below):
            fact = f"The gradient of {function} is {formula}; the root was taken of a negative number."
            return Explanation("outside_domain", (fact, *known, outcome(event)), edge_checks(event, function, forward))
        if has_zero(below) is not True:
            return None
        fact = (
            f"The gradient of {function} is {formula}, infinite at the edge; the denominator in {place(event)} "
            f"{held_zeros(below)}."
        )
        return Explanation(
            "domain_edge", (fact, *incoming(event), *known, outcome(event)), edge_checks(event, function, forward)
        )

    return rule


def masked_exponentials(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """logsumexp's gradient is exp(x - logsumexp(x)): with a row of -inf that is -inf - (-inf)."""
    scores, result = argument(event, "self"), argument(event, "other")
    if event.kind != "nan" or scores is None or result is None or not (scores.neginf and result.neginf):
        return None
    found = masked_row(lineage, event, scores)
    fact = (
        f"{plural(result.neginf, 'row')} of the logsumexp in the forward came out as -inf; its gradient computes "
        "exp(x - logsumexp(x)), and a where() on the value does not reach it."
    )
    advice = (*found.advice[:2], guard_before(event, "logsumexp", "0", "mask.any(-1, keepdim=True)"))
    return Explanation(found.cause, (fact, *found.evidence), advice)


def singular(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """The gradients of solves and factorisations solve again; other ops of the node are judged as ops."""
    op = event.op or ""
    return factorization(lineage, event) if any(word in op for word in ("solve", "inv", "lu", "cholesky")) else None


def spectrum(lineage: Lineage, event: OpEvent) -> Explanation | None:
    op = event.op or ""
    return spectrum_gradient(lineage, event) if any(word in op for word in ("div", "reciprocal", "pow")) else None


#: forward function of a node (`SqrtBackward0` -> "Sqrt") -> what its gradient needs
NODES: dict[str, RuleOfNode] = {
    "Sqrt": _at_zero("sqrt_at_zero", "sqrt(x)", "grad / (2 * sqrt(x))"),
    "Log": _at_zero("log_of_zero", "log(x)", "grad / x"),
    "Log2": _at_zero("log_of_zero", "log2(x)", "grad / (x * log(2))"),
    "Log10": _at_zero("log_of_zero", "log10(x)", "grad / (x * log(10))"),
    "Log1P": _at_zero("log_of_zero", "log1p(x)", "grad / (1 + x)", "x > -1"),
    "Xlogy": _at_zero("log_of_zero", "x * log(y)", "grad * x / y", "y > 0"),
    "LinalgVectorNorm": _at_zero("norm_at_zero", "a norm", "grad * x / norm(x)", "norm > 0"),
    "Norm": _at_zero("norm_at_zero", "a norm", "grad * x / norm(x)", "norm > 0"),
    "Dist": _at_zero("norm_at_zero", "a distance", "grad * (a - b) / distance", "distance > 0"),
    "Hypot": _at_zero("norm_at_zero", "hypot(x, y)", "grad * x / hypot(x, y)", "x * x + y * y > 0"),
    "Std": _at_zero("norm_at_zero", "a standard deviation", "grad * (x - mean) / std", "std > 0"),
    "StdMean": _at_zero("norm_at_zero", "a standard deviation", "grad * (x - mean) / std", "std > 0"),
    "Acos": _edge("acos(x)", "-grad / sqrt(1 - x * x)"),
    "Asin": _edge("asin(x)", "grad / sqrt(1 - x * x)"),
    "Atanh": _edge("atanh(x)", "grad / (1 - x * x)"),
    "Acosh": _edge("acosh(x)", "grad / sqrt(x * x - 1)"),
    "Atan2": _at_zero("division_by_zero", "atan2(y, x)", "grad * x / (x * x + y * y)", "x * x + y * y > 0"),
    "Logsumexp": masked_exponentials,
    "LinalgEigh": spectrum,
    "LinalgEig": spectrum,
    "LinalgSvd": spectrum,
    "LinalgInvEx": singular,
    "LinalgSolveEx": singular,
    "LinalgCholeskyEx": singular,
    "LinalgSlogdet": singular,
    "LinalgDet": singular,
    "LinalgQr": singular,
    "LinalgLuFactorEx": singular,
    "LinalgSolveTriangular": singular,
    "LinalgLstsq": singular,
}
