"""The causes that an explanation can name, and the explanation itself. Knows no op and no number."""

from __future__ import annotations

from dataclasses import dataclass

#: Identifier of each cause and the sentence that says what it means. Identifiers are stable: tools match on them.
CAUSES: dict[str, str] = {
    "overflow": "A result was larger than its dtype can hold, out of finite inputs.",
    "cast_overflow": "A cast to a narrower dtype met values above that dtype's largest.",
    "norm_overflow": "The norm of finite values, or its sum of squares, did not fit the dtype.",
    "scaled_gradient_overflow": "A gradient that the loss scale had enlarged did not fit its dtype.",
    "exploding_update": "Earlier updates made the parameters grow; the op that overflowed is the messenger.",
    "log_of_zero": "The logarithm, or its gradient, was taken at 0.",
    "log_of_negative": "The logarithm was taken of a negative number.",
    "sqrt_at_zero": "A root with an infinite slope (or its reciprocal) was taken at 0.",
    "sqrt_of_negative": "The square root was taken of a negative number.",
    "power_of_negative": "A negative number was raised to a fractional power.",
    "division_by_zero": "A nonzero number was divided by 0.",
    "zero_over_zero": "0 was divided by 0.",
    "inf_over_inf": "An infinity was divided by an infinity.",
    "zero_times_inf": "0 was multiplied by an infinity.",
    "inf_minus_inf": "Infinities of opposite sign met in a sum or a difference.",
    "function_of_inf": "A function without a limit at infinity was given an infinity.",
    "domain_edge": "A function was taken where its value or its slope is infinite, such as atanh(1).",
    "outside_domain": "A function was taken outside its domain, such as acos(1.5).",
    "norm_at_zero": "The gradient of a norm or a standard deviation was taken at 0.",
    "all_masked_row": "A softmax or logsumexp ran over a row that held nothing but -inf.",
    "empty_reduction": "A mean or another reduction ran over no elements.",
    "single_element_std": "A standard deviation or variance had no degrees of freedom, such as that of one element.",
    "nothing_to_average": "A loss averaged over targets whose total weight was 0.",
    "infinite_weight": "A loss was given an infinite weight.",
    "no_alignment": "The CTC loss found no alignment of a target with its input.",
    "eps_underflow": "The eps that protects a division is too small for the dtype.",
    "degenerate_spectrum": "The gradient of a spectral decomposition met equal eigenvalues or singular values.",
    "singular_matrix": "A linear solve, inverse, determinant or factorisation met a singular matrix.",
    "nonfinite_learning_rate": "The optimizer was given a learning rate that was infinite or NaN.",
    "nonfinite_hyperparameter": "An update computed with a plain number that was infinite or NaN.",
    "bad_input": "The batch held nonfinite values before the step.",
    "bad_constant": "A tensor that the step brought along held nonfinite values.",
    "bad_param": "A parameter was nonfinite before the step.",
    "bad_buffer": "A buffer was nonfinite before the step.",
    "bad_moment": "The optimizer state was nonfinite before the step.",
    "bad_gradient": "A gradient that was never cleared was nonfinite before the step.",
    "other_rank": "A collective brought nonfinite values from another process, or its sum left the range.",
    "uninitialised_memory": "Memory that nobody had written was used.",
    "sentinel_escaped": "An infinity or NaN inserted on purpose left the place where it was meant to stay.",
    "unknown": "The recorded numbers do not tell the cause.",
}


@dataclass(frozen=True)
class Explanation:
    """Why a value became nonfinite.

    Attributes:
        cause: a key of `CAUSES`.
        evidence: sentences that state facts, the strongest first.
        advice: the next controlled checks, at most three.
    """

    cause: str
    evidence: tuple[str, ...]
    advice: tuple[str, ...]
