"""Nonfinite values that are there on purpose. (Masks in attention are in `attention`.)"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Answer, Batch, End, Expectation, Program, case
from tests.zoo.cases.parts import INF, NAN, ReluPerceptron, TanhPerceptron, sgd, training

_UNHARMED = End(loss="finite", params=False, grads=False)


@case(
    "torch.ao.quantization.MinMaxObserver: buffers start at min=+inf, max=-inf",
    Expectation(
        "expected",
        buffers_bad=("unused_obs.min_val", "unused_obs.max_val"),
        culprit="an observer that never ran",
        end=End(loss="finite", params=False, grads=False, buffers=True),
    ),
)
def legit_minmax_observer() -> Program:
    from torch.ao.quantization import MinMaxObserver

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.act_obs, self.unused_obs = nn.Linear(4, 8), MinMaxObserver(), MinMaxObserver()
            self.fc2 = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(self.act_obs(torch.relu(self.fc1(x))))

    torch.manual_seed(0)
    model = Net()
    return (
        model,
        {"x": torch.randn(4, 4)},
        training(model, lambda model, batch: model(batch["x"]).pow(2).mean(), iterations=2),
    )


@case(
    "torch.utils.deterministic.fill_uninitialized_memory documentation; pytorch/pytorch#24263 family",
    Expectation(
        "expected",
        culprit="torch.empty returns NaN on purpose under use_deterministic_algorithms(True)",
        end=_UNHARMED,
    ),
)
def legit_empty_buffers_deterministic_fill() -> Program:
    class Cache(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scratch = torch.empty(4, x.shape[-1])  # fully overwritten below
            for row in range(4):
                scratch[row] = x[row] * 2
            return scratch

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.cache = nn.Linear(3, 3), Cache()

        def forward(self, x: Tensor) -> Tensor:
            return self.cache(self.fc(x))

    torch.manual_seed(0)
    model = Net()
    train = training(model, lambda model, batch: model(batch["x"]).pow(2).mean(), iterations=2)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        torch.use_deterministic_algorithms(True)
        try:
            return train(model, batch)
        finally:
            torch.use_deterministic_algorithms(False)

    return model, {"x": torch.randn(4, 3)}, step


@case(
    "TF-SAME max pooling (pad with -inf, then max_pool), pattern used by timm's MaxPool2dSame",
    Expectation("expected", end=_UNHARMED),
)
def legit_pad_neg_inf_maxpool() -> Program:
    class PoolSame(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.max_pool1d(F.pad(x, (1, 1), value=-INF), 3, 1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool, self.head = nn.Conv1d(2, 3, 1), PoolSame(), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.pool(self.conv(x)).mean(-1))

    torch.manual_seed(0)
    model = Net()
    return (
        model,
        {"x": torch.randn(2, 2, 6)},
        training(model, lambda model, batch: model(batch["x"]).pow(2).mean(), iterations=2),
    )


@case(
    "OGB molecule training loops: NaN = unlabeled, selected away before the loss",
    Expectation("expected", batch_bad=("y",), culprit="the batch holds NaN by design", end=_UNHARMED),
)
def legit_nan_labels_indexed() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        labeled = batch["y"] == batch["y"]
        return F.binary_cross_entropy_with_logits(model(batch["x"])[labeled], batch["y"][labeled])

    torch.manual_seed(0)
    model = ReluPerceptron(4, 8, 3)
    y = torch.randint(0, 2, (5, 3)).float()
    y[2, 1] = y[4, 0] = NAN
    return model, {"x": torch.randn(5, 4), "y": y}, training(model, loss_of, iterations=2)


@case(
    "Lightning-AI/pytorch-lightning#2636; facebookresearch/mmf PR#1073 (loss dictionaries)",
    Expectation(
        "expected",
        alts=(Answer("contained", "loss", op="aten.mean"),),
        debatable="the returned dict holds a NaN accuracy over no samples: it is only logged",
    ),
)
def loss_dict_with_nan_entry() -> Program:
    torch.manual_seed(0)
    model = nn.ModuleDict({"enc": nn.Linear(4, 6), "det": nn.Linear(6, 2), "seg": nn.Linear(6, 2)})
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        hidden = torch.relu(model.enc(batch["x"]))
        losses = {
            "det": model.det(hidden).pow(2).mean(),
            "seg_acc": (model.seg(hidden).argmax(1) == batch["y"])[batch["y"] >= 0].float().mean().detach(),
            "seg": 0.1 * model.seg(hidden).abs().mean(),
        }
        total = losses["det"] + losses["seg"]
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        return {"loss": total.detach(), **{name: loss.detach() for name, loss in losses.items()}}

    return model, {"x": torch.randn(3, 4), "y": torch.full((3,), -1)}, step


@case(
    "Lightning-AI/pytorch-lightning#2636",
    Expectation("expected", debatable="the second returned value is a metric over no samples"),
)
def returns_loss_and_nan_accuracy() -> Program:
    torch.manual_seed(0)
    model = TanhPerceptron(4, 6, 2)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = model(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rare = batch["y"] == 7
        accuracy = (logits.argmax(1)[rare] == 7).float().mean()
        return loss.detach(), accuracy

    return model, {"x": torch.randn(3, 4), "y": torch.tensor([0, 1, 1])}, step


@case(
    "NovaSky-AI/SkyRL PR#2259 (masked vocabulary rows), returned as a model output",
    Expectation("expected", culprit="logits of vocabulary rows that do not exist"),
)
def returns_model_output_with_masked_logits() -> Program:
    class Output(dict[str, Tensor]):
        pass

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 5)

        def forward(self, x: Tensor, y: Tensor, allowed: Tensor) -> Output:
            logits = self.head(x).masked_fill(~allowed, -INF)
            return Output(loss=F.cross_entropy(logits, y), logits=logits)

    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Any:
        output = model(batch["x"], batch["y"], batch["ok"])
        optimizer.zero_grad()
        output["loss"].backward()
        optimizer.step()
        return output

    allowed = torch.ones(3, 5, dtype=torch.bool)
    allowed[:, 4] = False
    return model, {"x": torch.randn(3, 4), "y": torch.tensor([0, 1, 2]), "ok": allowed}, step


@case("", Expectation("expected", culprit="forbidden assignments cost inf, and the minimum never picks them"))
def cost_matrix_blocked_cells() -> Program:
    torch.manual_seed(0)
    model = TanhPerceptron(3, 6, 4)
    cost = torch.rand(4, 4)
    cost[0, 3] = cost[2, 1] = INF

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch["x"])[:, :, None] + cost).amin(1).pow(2).mean()

    return model, {"x": torch.randn(3, 3)}, training(model, loss_of, iterations=2)


@case("", Expectation("expected", culprit="a cutoff of inf means: no cutoff"))
def distance_cutoff_buffer_inf() -> Program:
    class Cutoff(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cutoff", torch.tensor([INF, 2.0, INF]))

        def forward(self, distance: Tensor) -> Tensor:
            return torch.minimum(distance, self.cutoff) * (distance < self.cutoff)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.cut, self.out = nn.Linear(3, 3), Cutoff(), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.cut(self.lin(x).abs()))

    torch.manual_seed(0)
    model = Net()
    return (
        model,
        {"x": torch.randn(4, 3)},
        training(model, lambda model, batch: model(batch["x"]).pow(2).mean(), iterations=2),
    )


@case("", Expectation("expected", culprit="the sky is infinitely deep, and masked"))
def batch_depth_inf_sky_masked() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        predicted = model(batch["x"])
        ground = torch.isfinite(batch["d"])
        return (predicted[ground] - batch["d"][ground]).abs().mean()

    torch.manual_seed(0)
    model = TanhPerceptron(3, 6, 4)
    depth = torch.rand(3, 4) * 5
    depth[0, 1] = INF
    depth[2, 2] = INF
    return model, {"x": torch.randn(3, 3), "d": depth}, training(model, loss_of, iterations=2)


@case("", Expectation("expected", culprit="log(0) in the dataset, clamped before the model"))
def batch_log_mel_minus_inf_clamped() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["mel"].clamp(min=-11.5)), batch["y"])

    torch.manual_seed(0)
    model = TanhPerceptron(4, 6, 2)
    mel = torch.randn(3, 4)
    mel[1, 2] = -INF
    return model, {"mel": mel, "y": torch.tensor([0, 1, 1])}, training(model, loss_of, iterations=2)
