"""Values that leave the range inside a model: normalization, attention, gradients by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.case import ANY, Batch, Program, case
from tests.zoo.cases.parts import fill, training
from tests.zoo.further.parts import HARMLESS, Exp, RowShare, fault, good_rows


def _square(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).float().pow(2).mean()


@case(
    "a custom autograd function forgets the zero in its backward",
    fault("backward", op="aten.div", module="root", node="_RootBackward", kind="inf"),
)
def custom_function_divides() -> Program:
    class _Root(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = torch.sqrt(x)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (y,) = ctx.saved_tensors
            return gradient / (2 * y)

    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _Root.apply(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.root = nn.Linear(3, 2), Root()

        def forward(self, x: Tensor) -> Tensor:
            return self.root(self.lin(x).abs()) + 1

    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.lin.weight[0].zero_()
        model.lin.bias[0] = 0.0
    return model, {"x": good_rows()}, training(model, _square)


@case("standardization in float16: an eps of 1e-8 is 0 there", fault("forward", op="aten.div", module="norm"))
def eps_underflows_in_half() -> Program:
    class Standardize(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-8)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = Standardize(), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(x))

    torch.manual_seed(0)
    x = good_rows()
    x[1] = 2.0
    model = Net().half()
    return model, {"x": x.half()}, training(model, _square)


@case("float16 attention scores without a scale", fault("forward", op="aten.bmm", module="attn", kind="inf"))
def attention_scores_overflow() -> Program:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(self.q(x), self.k(x).transpose(1, 2)).softmax(-1) @ x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.head = Attention(), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attn(x))

    torch.manual_seed(0)
    model = Net().half()
    fill(model.attn.q, 100.0)
    fill(model.attn.k, 100.0)
    return model, {"x": torch.ones(2, 3, 4).half()}, training(model, _square)


@case(
    "a log of a 0/1 mask is added to scores of which one overflows: only the overflow does harm",
    fault("forward", op="aten.exp", module="gate", kind="inf"),
)
def overflow_beside_a_log_mask() -> Program:
    class Bias(nn.Module):
        def forward(self, mask: Tensor) -> Tensor:
            return torch.log(mask)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.lin, self.gate = Bias(), nn.Linear(3, 4), Exp()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            bias = self.bias(mask)
            return (bias + self.gate(self.lin(x))).softmax(-1)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch["x"], batch["mask"]) * batch["value"]).sum(-1).mean()

    torch.manual_seed(0)
    model = Net()
    fill(model.lin, 0.1)
    x = good_rows()
    x[2] = 1000.0
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0]).expand(4, 4).clone()
    return model, {"x": x, "mask": mask, "value": torch.rand(4, 4)}, training(model, loss_of)


@case("every unit is dropped, then a row is divided by its sum", fault("forward", op="aten.div", module="norm"))
def everything_is_dropped() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.drop, self.norm = nn.Linear(3, 3), nn.Dropout(1.0), RowShare()

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.drop(self.lin(x)))

    torch.manual_seed(0)
    model = Net()
    return model, {"x": good_rows()}, training(model, _square)


@case("logits divided by a temperature of zero", fault("forward", op="aten.div", module="", kind="inf"))
def temperature_of_zero() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 4)
            self.register_buffer("temperature", torch.tensor(0.0))

        def forward(self, x: Tensor) -> Tensor:
            return torch.log_softmax(self.lin(x) / self.temperature, -1)

    torch.manual_seed(0)
    model = Net()
    return model, {"x": good_rows()}, training(model, _square)


@case(
    "weight normalization of a row of zeros",
    fault("forward", op="aten._weight_norm_interface", module=ANY, kind="nan"),
)
def weight_norm_of_zeros() -> Program:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight[1].zero_()
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(layer))
    return model, {"x": good_rows()}, training(model, _square)


@case(
    "a gradient hook that normalizes a gradient of zero",
    fault("backward", op="aten.div", module=ANY, node=None, kind="nan"),
)
def hook_normalizes_a_zero_gradient() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.lin(x))
            h.register_hook(lambda gradient: gradient / gradient.norm())
            return self.head(h)

    torch.manual_seed(0)
    model = Net()
    fill(model.head, 0.0)
    return model, {"x": good_rows()}, training(model, _square)


@case("the norm of a row of zeros: PyTorch's own gradient is 0 there", HARMLESS)
def norm_of_zeros_is_masked() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x).norm(dim=-1)

    torch.manual_seed(0)
    model = Net()
    x = good_rows()
    x[1] = 0.0
    return model, {"x": x}, training(model, _square)
