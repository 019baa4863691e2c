"""What a step is given: tables with a bad row, data made by threads or numpy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from tests.zoo.case import Batch, Program, case
from tests.zoo.cases.parts import NAN, sgd, training
from tests.zoo.further.parts import HARMLESS, fault, good_rows


def _embedding(ids: Tensor, bad_row: int) -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["ids"]).pow(2).mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 1))
    with torch.no_grad():
        model[0].weight[bad_row] = NAN
    return model, {"ids": ids}, training(model, loss_of, iterations=2)


@case("a row of the embedding that nobody looks up is NaN", HARMLESS)
def unused_row_is_nan() -> Program:
    return _embedding(torch.tensor([[0, 1], [2, 3]]), bad_row=5)


@case("a row of the embedding that the batch reads is NaN", fault("state", None, param_bad=("0.weight",), kind="nan"))
def used_row_is_nan() -> Program:
    return _embedding(torch.tensor([[0, 1], [2, 5]]), bad_row=5)


@case(
    "a worker thread standardizes a constant signal",
    fault("input", None, batch_bad=("",), any_tensor=True, kind="nan"),
)
def thread_prepares_the_data() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = sgd(model)

    def standardized(x: Tensor) -> Tensor:
        return (x - x.mean()) / (x - x.mean()).abs().sum()

    def step(model: nn.Module, batch: Batch) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            x = pool.submit(standardized, batch["x"]).result()
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, {"x": torch.ones(4, 3)}, step


@case(
    "features computed by numpy inside the model",
    fault("input", None, batch_bad=("",), any_tensor=True, kind="nan"),
)
def numpy_makes_a_feature() -> Program:
    import numpy as np

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            with np.errstate(invalid="ignore"):
                feature = torch.from_numpy(np.sqrt(x.numpy() - 1.0))
            return self.lin(feature)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"]).pow(2).mean()

    torch.manual_seed(0)
    model = Net()
    return model, {"x": good_rows()}, training(model, loss_of)


@case("labels that are NaN where unknown, and where() before the loss", HARMLESS)
def missing_labels_are_replaced() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        known = ~torch.isnan(batch["y"])
        target = torch.where(known, batch["y"], torch.zeros_like(batch["y"]))
        return ((model(batch["x"])[:, 0] - target).pow(2) * known).sum() / known.sum()

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, {"x": good_rows(), "y": torch.tensor([0.1, NAN, 0.3, NAN])}, training(model, loss_of)
