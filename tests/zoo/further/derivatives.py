"""Derivatives taken in other ways, hooks that change gradients, and state that forward writes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import ANY, Answer, Batch, Program, case
from tests.zoo.cases.parts import sgd, silenced, training
from tests.zoo.further.parts import HARMLESS, Distance, Share, fault, good_rows


def _square(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).pow(2).mean()


@case(
    "an ensemble under vmap: one member divides a row by its sum of 0",
    fault("loss", op="aten.div", module="<RowShare>", kind="nan"),
)
def one_member_of_an_ensemble() -> Program:
    class Member(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.norm = nn.Linear(3, 3, bias=False), Share().norm

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.lin(x))

    torch.manual_seed(0)
    members = [Member() for _ in range(3)]
    with torch.no_grad():
        members[1].lin.weight.zero_()
    base = copy.deepcopy(members[0])
    params, _ = torch.func.stack_module_state(members)  # type: ignore[arg-type]
    model = nn.ParameterDict({"weight": nn.Parameter(params["lin.weight"].detach())})

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        def one(weight: Tensor) -> Tensor:
            return torch.func.functional_call(base, {"lin.weight": weight}, (batch["x"],))

        return torch.func.vmap(one)(model["weight"]).pow(2).mean()  # type: ignore[index]

    return model, {"x": good_rows()}, training(model, loss_of)


@case(
    "a penalty on the forward-mode derivative of a root at 0",
    fault("loss", op="aten.div", module=None, kind="inf"),
)
def forward_derivative_at_zero() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        out = model(batch["x"])
        _, slope = torch.func.jvp(torch.sqrt, (batch["y"],), (torch.ones(4, 1),))
        loss = (out * slope).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    batch = {"x": good_rows(), "y": torch.tensor([[1.0], [0.0], [2.0], [1.0]])}
    return model, batch, silenced(step, "`torch.jit.script` is deprecated")


@case(
    "a penalty on the gradient of x ** 1.5: its second derivative at 0 is infinite",
    fault("backward", op="aten.pow", module="power", node="PowBackward0", kind="inf"),
)
def second_derivative_at_zero() -> Program:
    class Power(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.pow(1.5)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.power = nn.Linear(3, 2, bias=False), Power()

        def forward(self, x: Tensor) -> Tensor:
            return self.power(self.lin(x))

    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.lin.weight.abs_()
        model.lin.weight[1].zero_()
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch["x"]).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        penalty = sum(g.sum() for g in gradients)
        (loss + penalty).backward()
        optimizer.step()
        return loss.detach()

    return model, {"x": good_rows()}, step


@case(
    "a full backward hook divides the gradient by the size of one that is 0",
    fault("backward", op="aten.div", module=ANY, kind="nan"),
)
def full_backward_hook_divides() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with torch.no_grad():
        model[2].weight.zero_()
    model[1].register_full_backward_hook(lambda module, given, got: (given[0] / given[0].norm(),))
    return model, {"x": good_rows()}, training(model, _square)


@case(
    "a codebook of moving averages: a code that nothing was assigned to is divided by 0",
    fault("forward", op="aten.div", module="vq", kind="nan", buffers_bad=("vq.codes",)),
)
def code_without_members() -> Program:
    model = _codebook(floor=0.0)
    return model, {"x": good_rows()}, training(model, _square)


@case("the same with a floor for the count", HARMLESS)
def code_without_members_has_a_floor() -> Program:
    model = _codebook(floor=1e-5)
    return model, {"x": good_rows()}, training(model, _square)


def _codebook(floor: float) -> nn.Module:
    class Codebook(nn.Module):
        codes: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.tensor([[0.0, 0.0], [100.0, 100.0]]))

        def forward(self, x: Tensor) -> Tensor:
            assigned = F.one_hot(torch.cdist(x.detach(), self.codes).argmin(-1), 2).float()
            quantized = assigned @ self.codes
            with torch.no_grad():
                self.codes.data = (assigned.t() @ x) / (assigned.sum(0)[:, None] + floor)
            return x + (quantized - x).detach()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.vq = nn.Linear(3, 2), Codebook()

        def forward(self, x: Tensor) -> Tensor:
            return self.vq(self.lin(x))

    torch.manual_seed(0)
    return Net()


@case(
    "batch norm of activations of 1e25: the running variance is infinite from now on",
    fault("forward", op="aten.native_batch_norm", module="bn", kind="inf", buffers_bad=("bn.running_var",)),
)
def variance_overflows() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.head = nn.BatchNorm1d(3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.bn(x))

    torch.manual_seed(0)
    model = Net()
    return model, {"x": good_rows() * 1e25}, training(model, _square)


@case(
    "functorch's gradient of a length of 0, written into .grad by hand",
    fault("backward", op="aten.div", module="dist", node="SqrtBackward0"),
)
def func_gradient_is_written_by_hand() -> Program:
    torch.manual_seed(0)
    model, x = Distance(), good_rows()
    x[2] = 0.0
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        def loss_of(params: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(model, params, (batch["x"],)).mean()

        params = {name: p.detach() for name, p in model.named_parameters()}
        gradients, loss = torch.func.grad_and_value(loss_of)(params)
        for name, p in model.named_parameters():
            p.grad = gradients[name]
        optimizer.step()
        return loss

    return model, {"x": x}, step


class _Softplus(torch.autograd.Function):
    """Backward by hand: exp(x) / (1 + exp(x)) is inf / inf for a large x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.softplus(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.exp() / (1 + x.exp())


@case(
    "a custom function's backward takes exp of 200",
    fault("backward", op="aten.exp", module="act", node="_SoftplusBackward", kind="inf"),
)
def custom_backward_takes_exp() -> Program:
    class Softplus(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _Softplus.apply(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.act = nn.Linear(3, 2), Softplus()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.lin(x))

    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.lin.weight.fill_(0.1)
    x = good_rows()
    x[1] = 1000.0
    return model, {"x": x}, training(model, lambda model, batch: model(batch["x"]).mean())


@case(
    "two losses share one graph: the second holds the log of 0, in a module outside the model",
    fault("loss", op="aten.log", module="<Entropy>", kind="inf"),
)
def second_loss_takes_a_log() -> Program:
    class Entropy(nn.Module):
        def forward(self, p: Tensor) -> Tensor:
            return -(p * torch.log(p)).sum(-1).mean()

    torch.manual_seed(0)
    model, entropy = nn.Linear(3, 3), Entropy()
    with torch.no_grad():
        model.bias[0] = 200.0
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        p = model(batch["x"]).softmax(-1)
        (-p.mean()).backward(retain_graph=True)
        loss = entropy(p)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, {"x": good_rows()}, step


@case(
    "a running statistic is written into a saved activation's memory through `.data`: the power of it is NaN",
    fault("forward", op="aten.pow", module="power", kind="nan"),
)
def power_of_data_written_in_place() -> Program:
    class Power(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.data.sub_(10.0)
            return x.pow(0.5)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.power = nn.Linear(3, 2), Power()

        def forward(self, x: Tensor) -> Tensor:
            return self.power(self.lin(x))

    torch.manual_seed(0)
    model = Net()
    return model, {"x": good_rows()}, training(model, _square)


@case(
    "an ensemble in one batched product: its learned temperature divides by 0 in one member",
    fault("forward", op="aten.div", module="", kind=None, alts=(Answer("fault", "forward", op="aten.div"),)),
)
def temperature_of_one_member_is_zero() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3, 3, 2))
            self.temperature = nn.Parameter(torch.tensor([1.0, 0.0, 2.0]))

        def forward(self, x: Tensor) -> Tensor:
            logits = torch.einsum("bi,eio->ebo", x, self.weight)
            return (logits / self.temperature[:, None, None]).softmax(-1).mean(0)

    torch.manual_seed(0)
    model = Net()
    return model, {"x": good_rows()}, training(model, _square)
