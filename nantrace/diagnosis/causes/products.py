"""The matrix products, convolutions and attention: sums of products, with a bound on how large they can become."""

from __future__ import annotations

import math

from nantrace.diagnosis.causes.arithmetic import beyond_bound, met_infinity, overflowed
from nantrace.diagnosis.causes.reading import (
    absmax,
    all_finite,
    argument,
    elements,
    has_inf,
    has_zero,
    number,
    operation,
    product,
)
from nantrace.diagnosis.causes.table import Explanation
from nantrace.diagnosis.causes.wording import figure, outcome, place, read
from nantrace.lineage import Lineage, Operand, OpEvent

#: op -> schema names of the left factor, the right factor and the addend
FACTORS: dict[str, tuple[str, str, str | None]] = {
    "mm": ("self", "mat2", None),
    "bmm": ("self", "mat2", None),
    "mv": ("self", "vec", None),
    "dot": ("self", "tensor", None),
    "vdot": ("self", "other", None),
    "matmul": ("self", "other", None),
    "_int_mm": ("self", "mat2", None),
    "_scaled_mm": ("self", "mat2", "bias"),
    "addmm": ("mat1", "mat2", "self"),
    "_addmm_activation": ("mat1", "mat2", "self"),
    "_sparse_addmm": ("mat1", "mat2", "self"),
    "_sparse_sparse_matmul": ("self", "other", None),
    "sspaddmm": ("mat1", "mat2", "self"),
    "addmv": ("mat", "vec", "self"),
    "addr": ("vec1", "vec2", "self"),
    "addbmm": ("batch1", "batch2", "self"),
    "baddbmm": ("batch1", "batch2", "self"),
    "linear": ("input", "weight", "bias"),
    "mkldnn_linear": ("self", "weight", "bias"),
    "convolution": ("input", "weight", "bias"),
    "_convolution": ("input", "weight", "bias"),
    "cudnn_convolution": ("self", "weight", None),
    "cudnn_convolution_transpose": ("self", "weight", None),
    "miopen_convolution": ("self", "weight", "bias"),
    "mkldnn_convolution": ("self", "weight", "bias"),
    "mps_convolution": ("self", "weight", "bias"),
    "convolution_backward": ("grad_output", "weight", "input"),
}


def matrix_product(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """Overflow of a sum of K products; or a NaN out of infinities in a factor."""
    left_name, right_name, added_name = FACTORS[operation(event)]
    left, right = argument(event, left_name), argument(event, right_name)
    added = argument(event, added_name) if added_name else None
    if event.kind == "nan" and not all_finite(event):
        return _with_infinities(event, left, right, added)
    if not all_finite(event):
        return None
    terms = _terms(event, left, right)
    bound, fact = _bound(event, terms, left, right, added)
    return beyond_bound(event, bound, fact, left, right, added)


def _terms(event: OpEvent, left: Operand | None, right: Operand | None) -> int | None:
    """K, the number of products that one element sums; None where the shapes do not say."""
    op = operation(event)
    if op == "convolution_backward" or left is None or right is None:
        return None
    if "convolution" in op:
        if not right.shape:
            return None
        wide = event.scalars.get("transposed") is True or op.endswith("_transpose")
        return math.prod(right.shape[2:]) * (right.shape[0] if wide else math.prod(right.shape[1:2]))
    if op == "addr":
        return 1
    if op == "addbmm":
        return math.prod(left.shape[:1]) * math.prod(left.shape[-1:])
    return left.shape[-1] if left.shape else None


def _bound(
    event: OpEvent, terms: int | None, left: Operand | None, right: Operand | None, added: Operand | None
) -> tuple[float | None, str]:
    """K * max|a| * max|b| + max|c|, and the sentence that leads up to it."""
    one, other = absmax(left), absmax(right)
    if terms is None or one is None or other is None:
        return None, ""
    bound = product(abs(number(event, "alpha") or 1.0), terms, one, other)
    fact = f"Each element sums {terms:,} products of up to {figure(one)} x {figure(other)}, which may reach"
    if added is not None and absmax(added):
        bound += product(abs(number(event, "beta") or 1.0), absmax(added) or 0.0)
        fact = f"{fact[:-17]} and adds up to {figure(absmax(added) or 0.0)}, which may reach"
    return bound, fact


def _with_infinities(
    event: OpEvent, left: Operand | None, right: Operand | None, added: Operand | None
) -> Explanation | None:
    if left is None or right is None:
        return None
    pairs = [(a, b) for a, b in ((left, right), (right, left)) if has_inf(a)]
    answers = [has_zero(b) for _, b in pairs]
    if any(answer is True for answer in answers):
        fact = f"In {place(event)} an infinity in one factor met a 0 in the other: 0 * inf is NaN."
        return met_infinity(event, "zero_times_inf", fact, left, right)
    if any(answer is None for answer in answers) or not (pairs or has_inf(added)):
        return None
    fact = f"In {place(event)} infinities of opposite sign were added up; the other factor holds no 0."
    return met_infinity(event, "inf_minus_inf", fact, left, right, added)


def attention(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """Fused attention: the scores query * key must fit, and each row needs a key that is not masked."""
    query, key = argument(event, "query"), argument(event, "key")
    mask = argument(event, "attn_mask", "attn_bias")
    if mask is not None and mask.neginf and not has_inf(query) and not has_inf(key) and event.kind == "nan":
        fact = f"{place(event)} put out NaN from finite queries and keys and a mask with {mask.neginf:,} -inf."
        advice = (
            "Count the rows of the mask whose every key is masked: (attn_mask == -inf).all(-1).sum().",
            "Let each such row attend to one key and see whether the NaN is gone.",
        )
        return Explanation("all_masked_row", (fact, read(mask, event.op), outcome(event)), advice)
    if not all_finite(event):
        return None
    return _scores(event, query, key)


def _scores(event: OpEvent, query: Operand | None, key: Operand | None) -> Explanation | None:
    one, other = absmax(query), absmax(key)
    if query is None or key is None or one is None or other is None or not elements(query):
        return overflowed(event) if event.kind == "inf" else None
    width = query.shape[-1] if query.shape else 1
    scale = number(event, "scale") or 1 / math.sqrt(max(width, 1))
    bound = product(width, one, other, max(abs(scale), 1.0))
    fact = f"A score sums {width:,} products of up to {figure(one)} x {figure(other)}, which may reach"
    return beyond_bound(event, bound, fact, query, key)
