"""From one event to its explanation: the rule of its node or op, then what the rest of the step says about it."""

from __future__ import annotations

from collections.abc import Callable

from nantrace.diagnosis.causes import (
    arithmetic,
    external,
    functions,
    hyperparameters,
    linalg,
    losses,
    normalization,
    optimizers,
    products,
    reductions,
)
from nantrace.diagnosis.causes.checks import in_wider
from nantrace.diagnosis.causes.gradients import NODES
from nantrace.diagnosis.causes.messengers import with_messengers
from nantrace.diagnosis.causes.reading import argument, has_inf, in_backward, node_function, operation, sources
from nantrace.diagnosis.causes.table import Explanation
from nantrace.diagnosis.causes.wording import counts, line, outcome, place, read
from nantrace.lineage import Lineage, OpEvent

Rule = Callable[[Lineage, OpEvent], "Explanation | None"]


def _table(*rows: tuple[Rule, str]) -> dict[str, Rule]:
    return {name: rule for rule, names in rows for name in names.split()}


#: op (without namespace, `_foreach_` and the `_` of in-place ops) -> what it needs of its operands
OPS: dict[str, Rule] = _table(
    (arithmetic.multiplication, "mul multiply"),
    (arithmetic.addition, "add sub rsub subtract"),
    (arithmetic.product_sum, "lerp"),
    (arithmetic.division, "div divide true_divide floor_divide"),
    (arithmetic.reciprocal, "reciprocal"),
    (arithmetic.remainder, "remainder fmod"),
    (arithmetic.cast, "_to_copy copy to"),
    (arithmetic.unscaling, "_amp_foreach_non_finite_check_and_unscale"),
    (arithmetic.elementwise_growth, "smooth_l1_loss huber_loss _softmax_backward_data _log_softmax_backward_data"),
    (
        arithmetic.elementwise_growth,
        "mse_loss_backward upsample_bilinear2d avg_pool2d index_put embedding_dense_backward",
    ),
    (arithmetic.elementwise_growth, "softplus elu celu gelu silu mish hardswish tanh_backward sigmoid_backward"),
    (products.matrix_product, " ".join(products.FACTORS)),
    (products.attention, "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu"),
    (products.attention, "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"),
    (products.attention, "scaled_dot_product_attention _scaled_dot_product_fused_attention_overrideable"),
    (functions.logarithm, "log log2 log10 log1p"),
    (functions.square_root, "sqrt rsqrt"),
    (functions.powers, "pow float_power"),
    (functions.exponential, "exp expm1 exp2 special_exp2 sinh cosh"),
    (functions.bounded, "acos asin acosh atanh erfinv logit logit_backward special_ndtri"),
    (functions.poles, "lgamma digamma polygamma"),
    (functions.periodic, "sin cos tan"),
    (functions.times_logarithm, "xlogy special_xlogy"),
    (reductions.total, "sum mean cumsum index_add scatter_add scatter_reduce embedding_bag nansum"),
    (reductions.running_product, "prod cumprod"),
    (reductions.norm, "norm linalg_vector_norm"),
    (reductions.deviation, "std var std_mean var_mean"),
    (reductions.softmax, "_softmax _log_softmax softmax log_softmax logsumexp _safe_softmax"),
    (reductions.selection, "median nanmedian nanmean quantile nanquantile"),
    (normalization.normalization, "native_layer_norm native_batch_norm _native_batch_norm_legit cudnn_batch_norm"),
    (
        normalization.normalization,
        "native_group_norm _fused_rms_norm rms_norm miopen_batch_norm _batch_norm_with_update",
    ),
    (normalization.weight_norm, "_weight_norm_interface _weight_norm"),
    (normalization.normalization_backward, "native_layer_norm_backward native_batch_norm_backward"),
    (normalization.normalization_backward, "native_group_norm_backward _fused_rms_norm_backward"),
    (normalization.normalization_backward, "cudnn_batch_norm_backward batch_norm_backward"),
    (
        losses.likelihood,
        "nll_loss_forward nll_loss2d_forward nll_loss nll_loss_nd nll_loss_backward nll_loss2d_backward",
    ),
    (losses.alignment, "_ctc_loss _cudnn_ctc_loss _use_cudnn_ctc_loss ctc_loss _ctc_loss_backward"),
    (losses.binary, "binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits"),
    (losses.squared_error, "mse_loss"),
    (linalg.factorization, "linalg_inv_ex _linalg_solve_ex linalg_solve_triangular linalg_lu_solve linalg_lu"),
    (linalg.factorization, "_linalg_slogdet _linalg_det linalg_cholesky_ex cholesky_solve cholesky_inverse"),
    (linalg.factorization, "triangular_solve linalg_pinv linalg_lstsq linalg_lu_factor_ex cholesky inverse"),
    (optimizers.add_quotient, "addcdiv"),
    (optimizers.second_moment, "addcmul"),
    (optimizers.fused_update, "_fused_adam _fused_adamw _fused_sgd _fused_adagrad"),
)


def explain(lineage: Lineage, event: OpEvent) -> Explanation:
    """Say why a value was born nonfinite, as far as the recorded numbers prove it.

    Args:
        lineage: everything that the op pass saw.
        event: the birth, or the external event, that was found to be the origin.

    Returns:
        A cause from `CAUSES` ("unknown" where the numbers do not tell), the facts, and at most three next checks.
    """
    found = _first_answer(lineage, event)
    found = hyperparameters.with_settings(lineage, event, _with_sources(lineage, event, found))
    return with_messengers(lineage, event, found)


def _first_answer(lineage: Lineage, event: OpEvent) -> Explanation:
    number = hyperparameters.nonfinite_number(lineage, event)
    if number is not None:
        return number
    if event.kind == "external":
        return external.external(lineage, event)
    if event.kind == "uninit":
        return external.uninitialised(lineage, event)
    if event.kind == "inserted" or (event.kind == "propagated" and _only_infinities(event)):
        return external.sentinel(lineage, event)
    for rule in (NODES.get(node_function(event)), OPS.get(operation(event)), _weights):
        found = rule(lineage, event) if rule is not None and event.kind in ("nan", "inf") else None
        if found is not None:
            return found
    return _unknown(lineage, event)


def _only_infinities(event: OpEvent) -> bool:
    """Whether infinities, and no NaN, came in and went out."""
    return not event.nan and not event.nan_parents and not any(operand.nan for operand in event.operands)


def _weights(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """Any loss that was given an infinite weight."""
    weight = argument(event, "weight", "pos_weight")
    return losses.infinite_weight(event, weight) if has_inf(weight) and "loss" in operation(event) else None


_OWNERS = {
    "batch": "the batch:",
    "param": "parameter",
    "buffer": "buffer",
    "moment": "the optimizer state:",
    "grad": "the gradient",
}


def _with_sources(lineage: Lineage, event: OpEvent, found: Explanation) -> Explanation:
    """Name where the infinities came from that a NaN was made of."""
    if event.kind != "nan":
        return found
    facts = tuple(
        f"The infinities came from {_named(source)}, which {'held' if source.kind == 'external' else 'put out'} "
        f"{counts(0, source.posinf, source.neginf)}."
        for source in sources(lineage, event)[:2]
        if source.posinf or source.neginf
    )
    return Explanation(found.cause, found.evidence + facts, found.advice)


def _named(source: OpEvent) -> str:
    if source.kind == "external":
        word = _OWNERS.get(source.category or "", "a tensor that the step did not compute")
        return f"{word} {source.tensor}" if source.tensor else word
    at = f" ({source.where})" if source.where else ""
    return f"{'a literal in ' if source.kind == 'inserted' else ''}{place(source)}{at}"


def _unknown(lineage: Lineage, event: OpEvent) -> Explanation:
    """What is known without a cause, and what is not."""
    if event.operands:
        known = tuple(read(operand, event.op) for operand in event.operands[:4])
        missing = f"These numbers do not tell why {place(event)} put out nonfinite values."
    else:
        known = ("All that it read was finite.",) if event.kind == "inf" else ()
        missing = f"The operands of {place(event)} were not recorded, so the cause is not known."
    advice = (
        f"Print the smallest and largest value of each tensor that {line(event)} reads, and of each gradient there."
        if in_backward(event)
        else f"Print the smallest and largest value of each tensor that {line(event)} reads.",
        in_wider(event),
    )
    return Explanation("unknown", (outcome(event), *known, missing), advice)
