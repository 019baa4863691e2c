"""Updates: optimizers that divide by nothing, moments that overflow, rates that explode, closures."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.case import ANY, Answer, Batch, Expectation, Program, case
from tests.zoo.cases.parts import NAN, ReluPerceptron, training
from tests.zoo.further.parts import fault, good_rows


def _square(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).pow(2).mean()


@case("a learning rate of nan from a configuration file", fault("optimizer", op="aten.add_"))
def learning_rate_is_nan() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.param_groups[0]["lr"] = NAN
    return model, {"x": good_rows()}, training(model, _square, optimizer=optimizer)


@case("Adagrad with eps 0 and units that get no gradient", fault("optimizer", op="aten.addcdiv_", kind="nan"))
def adagrad_without_eps() -> Program:
    torch.manual_seed(0)
    model = ReluPerceptron(3, 4, 1)
    with torch.no_grad():
        model.net[0].weight[0].fill_(-1.0)
        model.net[0].bias[0] = -1.0
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2, eps=0.0)
    return model, {"x": good_rows()}, training(model, _square, optimizer=optimizer)


@case(
    "RMSprop squares a gradient of 1e25: the moment is infinite and the weight never moves again",
    fault("optimizer", op="aten.addcmul_", kind="inf"),
)
def rmsprop_moment_overflows() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch["x"]) * 1e25).mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    return model, {"x": good_rows()}, training(model, loss_of, optimizer=optimizer)


@case("a checkpoint with a NaN in Adam's first moment", fault("state", None, state_bad=("exp_avg",), kind="nan"))
def adam_moment_was_nan() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = training(model, _square, optimizer=optimizer)
    batch = {"x": good_rows()}
    step(model, batch)
    optimizer.state[model.weight]["exp_avg"][0, 1] = NAN
    return model, batch, step


@case(
    "a standard deviation without a floor is pushed below zero by its first update",
    fault("update", ANY, op=ANY, module=ANY, kind="nan"),
)
def sigma_turns_negative() -> Program:
    class Gaussian(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.sigma = nn.Linear(3, 1), nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.log(self.sigma) + 0.5 * ((y - self.mean(x)) / self.sigma).pow(2)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["y"]).mean()

    torch.manual_seed(0)
    model = Gaussian()
    with torch.no_grad():
        model.mean.weight.zero_()
        model.mean.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    batch = {"x": good_rows(), "y": torch.full((4, 1), 0.1)}
    return model, batch, training(model, loss_of, iterations=3, optimizer=optimizer)


@case(
    "LBFGS takes a step of ten thousand, and its closure overflows inside the same update",
    Expectation(
        "fault",
        "forward",
        "forward",
        op="aten.exp",
        module="",
        kind="inf",
        alts=(Answer("fault", "update", op="aten.exp", module=""),),
        debatable="the step that overshot and the evaluation that overflowed are one call of the optimizer",
    ),
)
def lbfgs_overshoots() -> Program:
    class Cosh(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.0]))

        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(self.w * x) + torch.exp(-self.w * x)

    model = Cosh()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e4, max_iter=4)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(batch["x"]).mean()
            loss.backward()
            return loss

        return optimizer.step(closure)

    return model, {"x": torch.ones(2, 1)}, step


@case(
    "a recurrent network under a rate of 1e4: weights explode over iterations",
    fault("update", ANY, op=ANY, module=ANY),
)
def recurrent_weights_explode() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.RNN(3, 4, nonlinearity="relu", batch_first=True), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.cell(x)[0][:, -1])

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e4, momentum=0.9)
    batch = {"x": torch.rand(4, 6, 3)}
    return model, batch, training(model, _square, iterations=8, optimizer=optimizer)
