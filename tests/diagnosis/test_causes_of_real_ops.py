"""Causes of values that PyTorch itself made nonfinite: forward ops, autograd nodes, optimizers, losses."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.diagnosis.births import births

INF = math.inf
T = torch.tensor


def half(*values: float) -> Tensor:
    return T(values, dtype=torch.float16)


def full(shape: tuple[int, ...], value: float) -> Tensor:
    return torch.full(shape, value, dtype=torch.float16)


FORWARD: dict[str, tuple[Callable[[], object], str, str]] = {
    "matmul": (lambda: full((2, 4), 1e3) @ full((4, 2), 100), "overflow", "4 products of up to 1,000 x 100"),
    "matmul limit": (lambda: full((2, 4), 1e3) @ full((4, 2), 100), "overflow", "400,000, against 65,504"),
    "bmm": (lambda: torch.einsum("bij,bjk->bik", *[full((1, 2, 2), 1e3)] * 2), "overflow", "2e+06, against 65,504"),
    "addmm": (lambda: F.linear(full((1, 2), 200), full((3, 2), 200), full((3,), 60)), "overflow", "adds up to 60"),
    "convolution": (lambda: F.conv1d(full((1, 2, 5), 100), full((1, 2, 3), 6e4)), "overflow", "6 products"),
    "mul": (lambda: half(1e3) * half(1e3), "overflow", "multiply to 1e+06, against 65,504"),
    "add": (lambda: half(6e4) + half(6e4), "overflow", "add up to 120,000"),
    "sum": (lambda: full((70000,), 1).sum(), "overflow", "70,000 elements of up to 1 may add up to 70,000"),
    "cumsum": (lambda: full((4,), 3e4).cumsum(0), "overflow", "add up to 120,000"),
    "square": (lambda: half(100, 300) ** 2, "overflow", "reach 90,000, against 65,504"),
    "exp": (lambda: T([1.0, 200.0]).exp(), "overflow", "from x = 88.7 on; the input reached 200"),
    "exp half": (lambda: half(12).exp(), "overflow", "from x = 11.1 on"),
    "cosh": (lambda: half(-13).cosh(), "overflow", "x = 11.8"),
    "mse": (lambda: F.mse_loss(T([3e20]), T([0.0])), "overflow", "9e+40, against 3.4e+38"),
    "reciprocal of little": (lambda: half(1e-6).reciprocal(), "overflow", "against 65,504"),
    "cast": (lambda: T([70000.0]).half(), "cast_overflow", "reached 70,000, above 65,504, the largest float16 value"),
    "cast bfloat16": (lambda: T([1e39], dtype=torch.float64).bfloat16(), "cast_overflow", "3.39e+38"),
    "cast e5m2": (lambda: T([1e6]).to(torch.float8_e5m2), "cast_overflow", "above 57,344"),
    "cast e4m3fnuz": (lambda: T([1e6]).to(torch.float8_e4m3fnuz), "cast_overflow", "above 240"),
    "norm": (lambda: torch.linalg.vector_norm(full((3,), 6e4)), "norm_overflow", "60,000 ** 2 is 3.6e+09"),
    "log 0": (lambda: T([0.0, 1.0, 0.0]).log(), "log_of_zero", "with 2 zeros"),
    "log1p -1": (lambda: T([-1.0, 1.0]).log1p(), "log_of_zero", "from -1 to 1"),
    "log -3": (lambda: T([-3.0, 1.0]).log(), "log_of_negative", "from -3 to 1"),
    "sqrt -1": (lambda: T([-1e-7, 1.0]).sqrt(), "sqrt_of_negative", "from -1e-07 to 1"),
    "rsqrt 0": (lambda: T([0.0, 1.0]).rsqrt(), "sqrt_at_zero", "1 zero among 2 elements"),
    "0 ** -0.5": (lambda: T([0.0, 1.0]) ** -0.5, "division_by_zero", "0 to the power -0.5 is infinite"),
    "(-1) ** 1.5": (lambda: T([-1.0, 1.0]) ** 1.5, "power_of_negative", "The exponent was 1.5"),
    "1 / 0": (lambda: T([1.0, 1.0]) / T([0.0, 2.0]), "division_by_zero", "divisor held 1 zero among 2 elements"),
    "0 / 0": (lambda: T([0.0, 1.0]) / T([0.0, 2.0]), "zero_over_zero", "divisor held 1 zero among 2 elements"),
    "0 / 0 half": (lambda: half(0) / half(0), "zero_over_zero", "a number up to 2.98e-08 becomes 0"),
    "inf / inf": (lambda: T([INF, 1.0]) / T([INF, 2.0]), "inf_over_inf", "held 1 +inf"),
    "x % 0": (lambda: T([1.0]) % T([0.0]), "division_by_zero", "its divisor was 0"),
    "inf % 2": (lambda: T([INF]) % 2.0, "function_of_inf", "held 1 +inf"),
    "sin inf": (lambda: T([INF]).sin(), "function_of_inf", "held 1 +inf"),
    "0 * inf": (lambda: T([0.0, 1.0]) * -INF, "zero_times_inf", "The second factor was -inf"),
    "inf - inf": (lambda: T([INF, 1.0]) - T([INF, 2.0]), "inf_minus_inf", "held 1 +inf"),
    "sum of infs": (lambda: T([INF, -INF]).sum(), "inf_minus_inf", "held 1 +inf and 1 -inf"),
    "matmul 0 inf": (lambda: T([[0.0, 1.0]]) @ T([[INF], [1.0]]), "zero_times_inf", "with 1 zero"),
    "matmul infs": (lambda: T([[1.0, 1.0]]) @ T([[INF], [-INF]]), "inf_minus_inf", "1 +inf and 1 -inf"),
    "atanh 1": (lambda: T([0.5, 1.0]).atanh(), "domain_edge", "infinite at x = 1"),
    "logit 0": (lambda: T([0.0, 0.5]).logit(), "domain_edge", "infinite at x = 0"),
    "acos 1.5": (lambda: T([1.5, 0.5]).acos(), "outside_domain", "from -1 to 1"),
    "acosh 0.5": (lambda: T([0.5]).acosh(), "outside_domain", "at least 1"),
    "lgamma 0": (lambda: T([0.0]).lgamma(), "domain_edge", "poles"),
    "softmax": (
        lambda: T([[-INF, -INF], [0.0, -INF]]).softmax(1),
        "all_masked_row",
        "1 of 2 rows of the input held nothing but -inf",
    ),
    "log_softmax": (lambda: T([-INF, -INF]).log_softmax(0), "all_masked_row", "2 -inf among 2"),
    "softmax +inf": (lambda: T([INF, 0.0]).softmax(0), "inf_minus_inf", "inf - inf"),
    "mean of none": (lambda: torch.zeros(0).mean(), "empty_reduction", "shape [0]"),
    "median of none": (lambda: torch.zeros(0).median(), "empty_reduction", "shape [0]"),
    "std of one": (lambda: T([0.7]).std(), "single_element_std", "1 element to each result and divides by n - 1 = 0"),
    "std of a frame": (lambda: torch.zeros(2, 1, 4).std(1, keepdim=True), "single_element_std", "n - 1 = 0"),
    "var of one": (lambda: T([0.7]).var(), "single_element_std", "shape [1]"),
    "layer_norm": (lambda: F.layer_norm(full((2, 4), 0), (4,), eps=1e-12), "eps_underflow", "eps is 1e-12"),
    "layer_norm 0": (lambda: F.layer_norm(torch.zeros(2, 4), (4,), eps=0), "eps_underflow", "eps is 0"),
    "ignored": (lambda: F.cross_entropy(torch.zeros(2, 3), T([-100, -100])), "nothing_to_average", "of the 2 targets"),
    "weights 0": (
        lambda: F.cross_entropy(torch.zeros(1, 3), T([0]), weight=T([0.0, 1.0, 1.0])),
        "nothing_to_average",
        "with 1 zero",
    ),
    "weight inf": (
        lambda: F.cross_entropy(torch.zeros(1, 3), T([0]), weight=T([INF, 1.0, 2.0])),
        "infinite_weight",
        "1 infinite entry",
    ),
    "weights inf": (
        lambda: F.binary_cross_entropy(T([1.0, 0.5]), T([1.0, 0.0]), weight=T([INF, INF])),
        "infinite_weight",
        "2 infinite entries",
    ),
    "ctc": (
        lambda: F.ctc_loss(torch.zeros(2, 1, 4).log_softmax(-1), torch.ones(1, 3, dtype=torch.long), (2,), (3,)),
        "no_alignment",
        "Sample 0 has a target of length 3 and an input of 2 frames",
    ),
    "xlogy": (lambda: torch.xlogy(T([1.0]), T([0.0])), "log_of_zero", "1 element of its input had that value"),
    "inverse": (lambda: torch.linalg.inv_ex(torch.ones(2, 2)), "singular_matrix", "all 1"),
    "slogdet": (lambda: torch.slogdet(torch.ones(2, 2)), "singular_matrix", "pivots of the matrix"),
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
@pytest.mark.parametrize("name", FORWARD)
def test_a_forward_op_is_explained_by_its_numbers(name: str) -> None:
    run, cause, number = FORWARD[name]
    _, found = births(run)[0]
    assert found.cause == cause, found
    assert number in " ".join(found.evidence)
    assert 1 <= len(found.advice) <= 3


def through(function: Callable[[Tensor], Tensor], *values: float) -> Callable[[], None]:
    """Forward and backward of the sum of a function."""

    def run() -> None:
        x = T([float(value) for value in values], requires_grad=True)
        function(x).sum().backward()

    return run


def _fully_masked(x: Tensor) -> Tensor:
    scores = x + T([[-INF, -INF], [0.0, 0.0]])
    return torch.where(T([False, True]), torch.logsumexp(scores, 1), 0)


def _eigenvectors(x: Tensor) -> Tensor:
    return torch.linalg.eigh(torch.diag(x))[1][0]


BACKWARD: dict[str, tuple[Callable[[], None], str, str, str]] = {
    "sqrt": (through(torch.sqrt, 0, 4), "SqrtBackward", "sqrt_at_zero", "divided by 1 zero among 2 elements"),
    "sqrt masked": (
        through(lambda x: torch.where(x > 0, x.sqrt(), 0), 0, 4),
        "SqrtBackward",
        "sqrt_at_zero",
        "held 1 zero among 2 elements: 0 / 0 is NaN, so a where() or a mask behind the function",
    ),
    "log masked": (
        through(lambda x: torch.where(x > 0, x.log(), 0), 0, 4),
        "LogBackward",
        "log_of_zero",
        "gradient held 1 zero",
    ),
    "x ** 0.5": (through(lambda x: x**0.5, 0, 4), "PowBackward", "sqrt_at_zero", "gradient of x ** 0.5"),
    "1 / x": (through(lambda x: T([1.0]) / x, 0, 1), "DivBackward", "division_by_zero", "held 1 zero"),
    "norm": (through(lambda x: x.norm() * 0, 0, 0), "LinalgVectorNorm", "norm_at_zero", "grad * x / norm(x)"),
    "std": (through(torch.std, 1, 1, 1), "StdBackward", "norm_at_zero", "standard deviation"),
    "hypot": (through(lambda x: torch.hypot(x, x), 0, 1), "HypotBackward", "norm_at_zero", "1 zero"),
    "acos": (through(torch.acos, 1, 0.5), "AcosBackward", "domain_edge", "held 1 zero among 2 elements"),
    "asin": (through(torch.asin, 1.5, 0.5), "AsinBackward", "outside_domain", "negative number"),
    "atanh": (through(torch.atanh, 1, 0.5), "AtanhBackward", "domain_edge", "1 - x * x"),
    "atan2": (through(lambda x: torch.atan2(x, x), 0, 1), "Atan2", "division_by_zero", "x * x + y * y"),
    "logit": (through(torch.logit, 0, 0.5), "LogitBackward", "domain_edge", "x = 0"),
    "logsumexp": (through(_fully_masked, 0, 0), "Logsumexp", "all_masked_row", "1 row of the logsumexp"),
    "eigh": (through(_eigenvectors, 1, 1), "LinalgEigh", "degenerate_spectrum", "2 zeros among 4 elements"),
    "kl_div": (through(lambda x: F.kl_div(x, x, reduction="sum"), 0, 1), "Xlogy", "log_of_zero", "1 zero"),
    "cholesky": (
        through(lambda x: torch.linalg.cholesky_ex(torch.diag(x))[0], 0, 0),
        "LinalgCholesky",
        "singular_matrix",
        "All its elements are 0",
    ),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_a_backward_node_is_explained_by_its_forward_function(name: str) -> None:
    run, node, cause, words = BACKWARD[name]
    _, found = births(run, node)[0]
    assert found.cause == cause, found
    assert words in " ".join(found.evidence)
    assert 1 <= len(found.advice) <= 3


def test_a_layer_norm_whose_inverse_deviation_overflowed_is_found_in_its_backward() -> None:
    x = full((2, 4), 0).requires_grad_()
    _, found = births(lambda: F.layer_norm(x, (4,), eps=1e-12).sum().backward(), "NativeLayerNorm")[0]
    assert found.cause == "eps_underflow"
    assert "2 of its 2 elements held +inf, though the forward output was finite" in found.evidence[0]


def test_binary_cross_entropy_in_half_loses_the_eps_of_its_backward() -> None:
    x = half(0, 1).requires_grad_()
    _, found = births(lambda: F.binary_cross_entropy(x, half(1, 0)).backward(), "BinaryCrossEntropy")[0]
    assert found.cause == "eps_underflow" and "p reached 0 and 1" in found.evidence[0]


@pytest.mark.parametrize("foreach", [False, True])
def test_adam_in_half_divides_by_an_eps_that_is_zero(foreach: bool) -> None:
    parameter = torch.nn.Parameter(half(1, 1))
    parameter.grad = half(0, 0)
    optimizer = torch.optim.Adam([parameter], foreach=foreach)
    (event, _), *_ = births(optimizer.step)
    event.phase = "optimizer"
    from nantrace.diagnosis.causes.explain import explain
    from nantrace.lineage import Lineage

    found = explain(Lineage(events=[event]), event)
    assert found.cause == "eps_underflow"
    assert "held 2 zeros among 2 elements" in found.evidence[0]
    assert "the smallest float16 value is 5.96e-08" in found.evidence[1]


def test_a_gradient_norm_that_overflows_is_told_from_an_overflowing_gradient() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 1e30)
    (event, found), *_ = births(lambda: torch.nn.utils.clip_grad_norm_([parameter], 1.0))
    assert event.op == "aten._foreach_norm" and found.cause == "norm_overflow"
    assert "1e+30 ** 2 is 1e+60, against 3.4e+38" in found.evidence[0]


def test_a_cast_in_backward_is_a_cast_overflow() -> None:
    x = half(1).requires_grad_()
    _, found = births(lambda: (x.float() * 1e6).sum().backward(), "ToCopyBackward")[0]
    assert found.cause == "cast_overflow"
    assert "reached 1e+06, above 65,504" in found.evidence[0]
