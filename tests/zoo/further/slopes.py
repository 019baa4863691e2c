"""Gradients without a limit where forward is finite: powers, angles, distances and matrices at their worst place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.case import ANY, Batch, Program, case
from tests.zoo.cases.parts import INF, training
from tests.zoo.further.parts import Code, chain, contained, fault


def _mean(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).mean()


def _rows(zero: int) -> Tensor:
    x = torch.randn(4, 3)
    x[zero] = 0.0
    return x


def _behind_linear(outputs: int, **code: nn.Module) -> Any:
    """A linear layer without bias, which maps a row of zeros to zeros, then `code`."""
    torch.manual_seed(0)
    return chain(lin=nn.Linear(3, outputs, bias=False), **code)


@case(
    "x ** 0.5 at 0, in double precision and two modules deep",
    fault("backward", op="aten.pow", node="PowBackward0", module="inner.unit", kind="inf"),
)
def half_power_of_zero() -> Program:
    unit = Code(lambda x: x / (x.square().sum(1, keepdim=True) ** 0.5 + 1e-10))
    model = chain(inner=_behind_linear(4, unit=unit)).double()
    return model, {"x": _rows(3).double()}, training(model, lambda model, b: (model(b["x"]) - 1).square().mean())


@case(
    "x ** 0.75 at 0 behind a hard limit, whose gradient is 0 there",
    contained("backward", op="aten.pow", node="PowBackward0", module="safe", kind="inf"),
)
def power_behind_a_hard_limit() -> Program:
    safe = Code(lambda x: torch.where(x > 0, x**0.75, torch.zeros_like(x)))
    model = _behind_linear(4, limit=nn.Hardtanh(0.0, 1.0), safe=safe)
    return model, {"x": torch.randn(4, 3)}, training(model, _mean)


@case("the radius of the origin", fault("backward", op="aten.div", node="HypotBackward0", module="polar", kind="nan"))
def radius_of_the_origin() -> Program:
    model = _behind_linear(2, polar=Code(lambda z: torch.hypot(z[..., 0], z[..., 1])))
    return model, {"x": _rows(0)}, training(model, _mean)


@case(
    "sin(x) / x with 1 put in at 0 by where()",
    fault("backward", op="aten.div", node="DivBackward0", module="sinc", kind="nan"),
)
def sinc_with_where() -> Program:
    sinc = Code(lambda x: torch.where(x != 0, torch.sin(x) / x, torch.ones_like(x)))
    return (model := _behind_linear(2, sinc=sinc)), {"x": _rows(1)}, training(model, _mean)


@case(
    "xlogy(0, 0) is 0, and its gradient 0 / 0",
    fault("backward", op="aten.div", node="XlogyBackward0", module="surprise", kind="nan"),
)
def impossible_class_is_certainly_absent() -> Program:
    absent = torch.tensor([1.0, 0.0])
    model = _behind_linear(2, act=Code(torch.abs), surprise=Code(lambda p: torch.xlogy(absent, p + absent)))
    with torch.no_grad():
        model.lin.weight.fill_(1.0)
    return model, {"x": torch.cat([torch.rand(3, 3), torch.zeros(1, 3)])}, training(model, _mean)


@case(
    "singular vectors of a matrix whose singular values are equal",
    fault("backward", op=ANY, node="LinalgSvdBackward0", module="project"),
)
def singular_values_are_equal() -> Program:
    class Project(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ torch.linalg.svd(self.weight, full_matrices=False)[0][:, :1]).square()

    torch.manual_seed(0)
    return (model := chain(project=Project())), {"x": torch.rand(4, 3)}, training(model, _mean)


def _two_paths(scan: nn.Module) -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emit, self.scan = nn.Linear(3, 2), scan

        def forward(self, x: Tensor, open_: Tensor) -> Tensor:
            return self.scan(self.emit(x), open_)

    torch.manual_seed(0)
    batch = {"x": torch.randn(3, 3), "open": torch.tensor([[True, True], [True, False], [False, False]])}
    return (model := Net()), batch, training(model, lambda model, b: model(b["x"], b["open"]).sum())


@case(
    "two impossible paths are added in the log domain under a mask that is added",
    fault("backward", op="aten.sub", node="LogaddexpBackward0", module="scan", kind="nan"),
)
def two_impossible_paths() -> Program:
    def scan(scores: Tensor, open_: Tensor) -> Tensor:
        scores = scores + torch.zeros_like(scores).masked_fill(~open_, -INF)
        return torch.where(open_.any(-1), torch.logaddexp(scores[:, 0], scores[:, 1]), 0.0)

    return _two_paths(Code(scan))


@case(
    "the same under a mask that is selected, which erases the gradient",
    contained("backward", op="aten.sub", node="LogaddexpBackward0", module="scan", kind="nan"),
)
def two_impossible_paths_erased_by_their_mask() -> Program:
    def scan(scores: Tensor, open_: Tensor) -> Tensor:
        scores = torch.where(open_, scores, -INF)
        return torch.where(open_.any(-1), torch.logaddexp(scores[:, 0], scores[:, 1]), 0.0)

    return _two_paths(Code(scan))


@case(
    "group norm of a sample of zeros in half: 1 / sqrt(eps) is infinite, and only backward reads it",
    fault("backward", op="aten.native_group_norm_backward", node="NativeGroupNormBackward0", module="norm", kind="nan"),
)
def group_norm_of_zeros_in_half() -> Program:
    torch.manual_seed(0)
    conv = nn.Conv1d(2, 4, 1, bias=False)
    model = chain(conv=conv, norm=nn.GroupNorm(2, 4, eps=1e-12), head=nn.Conv1d(4, 1, 1)).half()
    x = torch.randn(3, 2, 5).half()
    x[0] = 0.0
    return model, {"x": x}, training(model, lambda model, b: model(b["x"]).float().square().mean())


@case("a hand-written backward divides by a length of 0", fault("backward", op="aten.div", module="norm", kind="nan"))
def custom_backward_divides() -> Program:
    class Unit(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            length = x.square().sum(-1, keepdim=True)
            ctx.save_for_backward(length)
            return x / (length + 1e-6)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return 0 * gradient / ctx.saved_tensors[0]

    return (model := _behind_linear(3, norm=Code(Unit.apply))), {"x": _rows(0)}, training(model, _mean)


@case(
    "a hook replaces the infinite gradient of a root before it goes on",
    contained("backward", op="aten.div", node="SqrtBackward0", module="root", kind="inf"),
)
def hook_cleans_the_gradient_of_a_root() -> Program:
    def root(x: Tensor) -> Tensor:
        x = x.square()
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.nan_to_num(0.0, 0.0, 0.0))
        return x.sqrt()

    return (model := _behind_linear(2, root=Code(root))), {"x": _rows(1)}, training(model, _mean)
