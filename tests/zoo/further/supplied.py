"""What the data brings along: weights, masks, unused columns, casts, empty batches; and numbers only logged."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tests.zoo.case import ANY, Answer, Batch, Expectation, Program, case
from tests.zoo.cases.parts import INF, NAN, sgd, training
from tests.zoo.further.parts import HARMLESS, Exponential, fault, good_rows, hot_rows


def _square(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).pow(2).mean()


@case("the weight of one sample is NaN", fault("input", None, batch_bad=("weight",), kind="nan"))
def sample_weight_is_nan() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return (F.mse_loss(model(batch["x"])[:, 0], batch["y"], reduction="none") * batch["weight"]).mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    batch = {"x": good_rows(), "y": torch.rand(4), "weight": torch.tensor([1.0, 0.5, NAN, 1.0])}
    return model, batch, training(model, loss_of)


@case("a column that the model leaves out is NaN", HARMLESS)
def unused_column_is_nan() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x[:, :3])

    torch.manual_seed(0)
    model, x = Net(), good_rows(4, 4)
    x[:, 3] = NAN
    return model, {"x": x}, training(model, _square)


@case("labels of a second task are NaN under binary cross entropy", fault("input", None, batch_bad=("y",), kind="nan"))
def label_is_nan() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch["x"]), batch["y"])

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    y = torch.tensor([[0.0, 1.0], [1.0, NAN], [0.0, 0.0], [1.0, 1.0]])
    return model, {"x": good_rows(), "y": y}, training(model, loss_of)


@case("a float mask holds NaN where it should hold 0", fault("input", None, batch_bad=("mask",), kind="nan"))
def mask_is_nan() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (self.lin(x) + mask).softmax(-1)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch["x"], batch["mask"]) * batch["value"]).sum(-1).mean()

    torch.manual_seed(0)
    model = Net()
    mask = torch.zeros(4, 4)
    mask[0, 1], mask[2, 2] = -INF, NAN
    return model, {"x": good_rows(), "mask": mask, "value": torch.rand(4, 4)}, training(model, loss_of)


@case("log of a count of 0 becomes a bucket number, clamped to the table", HARMLESS)
def log_of_zero_becomes_a_bucket() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.emb(torch.log2(x).clamp(0, 7).long())

    torch.manual_seed(0)
    model = Net()
    return model, {"x": torch.tensor([0.0, 1.0, 3.0, 100.0])}, training(model, _square)


@case("the last batch is empty", fault("loss", op="aten.nll_loss_forward", module=None, kind="nan"))
def last_batch_is_empty() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        for x, y in zip(batch["x"].split(4), batch["y"].split(4), strict=True):
            chosen = y >= 0
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[chosen]), y[chosen])
            loss.backward()
            optimizer.step()
        return loss.detach()

    return model, {"x": good_rows(8), "y": torch.tensor([0, 1, 2, 3, -1, -1, -1, -1])}, step


@case(
    "targets are standardized by their own deviation, and all are the same",
    fault("loss", op="aten.div", module=None, kind="nan"),
)
def targets_without_spread() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        y = (batch["y"] - batch["y"].mean()) / batch["y"].std()
        return F.mse_loss(model(batch["x"])[:, 0], y)

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, {"x": good_rows(), "y": torch.full((4,), 2.0)}, training(model, loss_of)


@case(
    "a float64 feature of 1e300 is cast to float32 before the model runs",
    fault(
        "loss",  # by when it runs; ahead of the model and read by it, it prepares the input
        op="aten._to_copy",
        module=None,
        kind="inf",
        dtype="float32",
        alts=(Answer("fault", "input", op="aten._to_copy", module=None),),
    ),
)
def feature_does_not_fit_float() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"].float()).pow(2).mean()

    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), good_rows().double()
    x[2, 1] = 1e300
    return model, {"x": x}, training(model, loss_of)


@case(
    "sequences are padded with NaN; the padding is left out of the loss, not of the weight's gradient",
    fault("loss", op=ANY, module=None, kind="nan"),
)
def sequences_are_padded_with_nan() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        x = pad_sequence(batch["x"], batch_first=True, padding_value=NAN)
        out = model(x)[..., 0]
        real = ~x.isnan().any(-1)
        loss = torch.where(real, out, torch.zeros_like(out)).pow(2).sum() / real.sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, {"x": [torch.rand(2, 3), torch.rand(4, 3)]}, step


@case("a plateau schedule and a history are fed a NaN metric of an empty validation set", HARMLESS)
def nan_metric_drives_a_schedule() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = _square(model, batch)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            metric = model(batch["validation"]).pow(2).mean()
        schedule.step(metric.item())
        return loss.detach()

    return model, {"x": good_rows(), "validation": torch.zeros(0, 3)}, step


@case("the correlation of constant outputs is logged", HARMLESS)
def correlation_of_constants_is_logged() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> dict[str, float]:
        optimizer.zero_grad()
        out = model(batch["x"])[:, 0]
        loss = out.pow(2).mean()
        loss.backward()
        optimizer.step()
        correlation = torch.corrcoef(torch.stack([out.detach(), batch["y"]]))[0, 1]
        return {"loss": loss.item(), "correlation": correlation.item()}

    return model, {"x": good_rows(), "y": torch.ones(4)}, step


@case("an auxiliary output is infinite, is returned and never used", HARMLESS)
def unused_output_is_infinite() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.aux = nn.Linear(3, 1), Exponential()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"main": self.main(x), "aux": self.aux(x)}

    torch.manual_seed(0)
    model = Net()
    return model, {"x": hot_rows() / 1.0}, training(model, lambda model, batch: model(batch["x"])["main"].mean())


@case(
    "an auxiliary loss has the weight 0, and is infinite",
    fault("forward", op="aten.exp", module="aux.act", kind="inf"),
)
def auxiliary_loss_of_weight_zero() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.aux = nn.Linear(3, 1), Exponential()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.main(x), self.aux(x)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        main, aux = model(batch["x"])
        return main.mean() + 0.0 * aux.mean()

    torch.manual_seed(0)
    model = Net()
    return model, {"x": hot_rows()}, training(model, loss_of)


def _dropping(kept: Any) -> Program:
    torch.manual_seed(0)
    model, x = Exponential(), good_rows()
    x[1] = 1000.0
    return model, {"x": x}, training(model, lambda model, batch: kept(model(batch["x"]).mean(-1)))


@case(
    "samples with an infinite loss are left out by index; their gradient is 0 * inf",
    fault("forward", op="aten.exp", module="act", kind="inf"),
)
def infinite_samples_are_left_out() -> Program:
    return _dropping(lambda losses: losses[torch.isfinite(losses)].mean())


@case(
    "samples with an infinite loss are replaced by where()",
    fault("forward", op="aten.exp", module="act", kind="inf"),
)
def infinite_samples_are_replaced() -> Program:
    return _dropping(lambda losses: torch.where(torch.isfinite(losses), losses, 0.0).mean())


@case(
    "nothing but evaluation: the model's output is NaN on purpose nowhere, and the loss is infinite",
    Expectation("fault", "forward", "forward", op="aten.exp", module="act", kind="inf"),
)
def evaluation_overflows() -> Program:
    torch.manual_seed(0)
    model = Exponential().eval()

    def step(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            return model(batch["x"]).mean()

    return model, {"x": hot_rows()}, step
