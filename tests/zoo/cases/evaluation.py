"""Steps that evaluate, alone or after training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.case import Answer, Batch, Expectation, Program, case
from tests.zoo.cases.parts import INF, TanhPerceptron, sgd


@case(
    "",
    Expectation(
        "fault", "forward", phase="forward", op="aten.log", module="", kind="nan", culprit="sigmoid(x) - 2 < 0"
    ),
)
def eval_only_step_nan() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.out = nn.Linear(3, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.log(self.lin(x).sigmoid() - 2))

    def step(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            return model(batch["x"]).mean()

    torch.manual_seed(0)
    return Net(), {"x": torch.randn(3, 3)}, step


@case(
    "",
    Expectation(
        "contained",
        "forward",
        phase="forward",
        op="aten.div",
        module="norm",
        kind="nan",
        alts=(Answer("fault", "forward", op="aten.div", module="norm"),),
        debatable="the validation loss that is returned is NaN; training is unharmed",
    ),
)
def train_then_eval_nan() -> Program:
    class Normalize(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.abs().sum(1, keepdim=True)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = Normalize(), TanhPerceptron(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(self.norm(x))

    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        loss = model(batch["x"]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            return model(batch["val"]).pow(2).mean()

    return model, {"x": torch.randn(3, 3), "val": torch.zeros(2, 3)}, step


@case("", Expectation("expected", culprit="banned logits of an evaluation step"))
def eval_only_step_masked_logits() -> Program:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            return model(batch["x"]).masked_fill(batch["ban"], -INF)

    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    return model, {"x": torch.randn(3, 3), "ban": torch.tensor([False, True, False, False])}, step
