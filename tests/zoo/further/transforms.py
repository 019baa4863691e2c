"""Function transforms, views, recomputation and writes in place."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.case import ANY, Batch, Program, case
from tests.zoo.cases.parts import fill, sgd, training
from tests.zoo.further.parts import Distance, fault, good_rows


def _checkpointed(use_reentrant: bool) -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block = nn.Linear(3, 3, bias=False), Distance()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, self.stem(x), use_reentrant=use_reentrant)

    torch.manual_seed(0)
    x = good_rows()
    x[0] = 0.0
    model = Net()
    return model, {"x": x}, training(model, lambda model, batch: model(batch["x"]).mean())


@case(
    "checkpointing: the gradient of a length of 0 inside the block",
    fault("backward", op="aten.div", module="block.dist", node="SqrtBackward0"),
)
def bad_gradient_inside_a_checkpoint() -> Program:
    return _checkpointed(use_reentrant=False)


@case(
    "reentrant checkpointing: the gradient of a length of 0 inside the block",
    fault("backward", op="aten.div", module="block.dist", node="SqrtBackward0"),
)
def bad_gradient_inside_a_reentrant_checkpoint() -> Program:
    return _checkpointed(use_reentrant=True)


@case("vmap over rows, one of which sums to 0", fault("loss", op="aten.log", kind="inf"))
def log_under_vmap() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return -torch.vmap(lambda row: torch.log(row.sum().square()))(model(batch["x"])).mean()

    torch.manual_seed(0)
    x = good_rows()
    x[3] = 0.0
    model = nn.Linear(3, 2, bias=False)
    return model, {"x": x}, training(model, loss_of)


@case("weights of rare classes are written with out=, one count is 0", fault("loss", op="aten.div", kind="inf"))
def weights_written_into_a_buffer() -> Program:
    weights = torch.empty(3)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        torch.div(batch["total"], batch["count"], out=weights)
        return (weights * model(batch["x"]).pow(2)).mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    batch = {"x": good_rows(), "total": torch.tensor([6.0]), "count": torch.tensor([4.0, 2.0, 0.0])}
    return model, batch, training(model, loss_of)


@case("one column is divided by another, in place", fault("forward", op="aten.div_", module="mix", kind="inf"))
def column_divided_in_place() -> Program:
    class Mix(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            x[:, 0] /= x[:, 1].relu()
            return x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.mix = nn.Linear(3, 2), Mix()
            fill(self.lin, 1.0)
            with torch.no_grad():
                self.lin.weight[1].fill_(-1.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(self.lin(x))

    model = Net()
    return model, {"x": good_rows()}, training(model, lambda model, batch: model(batch["x"]).mean())


@case("the log of a dropped unit: replays drop the same ones", fault("forward", op="aten.log", module="", kind="inf"))
def log_of_a_dropped_unit() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.drop = nn.Linear(3, 64), nn.Dropout(0.5)
            fill(self.lin, 1.0)

        def forward(self, x: Tensor) -> Tensor:
            return torch.log(self.drop(self.lin(x)))

    model = Net()
    return model, {"x": good_rows()}, training(model, lambda model, batch: model(batch["x"]).mean())


@case(
    "the mean gradient over samples by func.grad, through a length of 0",
    fault("backward", op="aten.div", module=ANY, node="SqrtBackward0"),
)
def func_grad_of_a_length() -> Program:
    from torch.func import functional_call, grad

    torch.manual_seed(0)
    model = Distance()
    optimizer = sgd(model)
    x = good_rows()
    x[1] = 0.0

    def step(model: nn.Module, batch: Batch) -> Tensor:
        parameters = dict(model.named_parameters())
        found = grad(lambda p: functional_call(model, p, (batch["x"],)).sum())(
            {name: parameter.detach() for name, parameter in parameters.items()}
        )
        for name, parameter in parameters.items():
            parameter.grad = found[name]
        optimizer.step()
        return found["lin.weight"].norm()

    return model, {"x": x}, step
