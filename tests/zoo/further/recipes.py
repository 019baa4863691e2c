"""Recipes around the update: scalers, clipping, projections, optimizers inside backward, mixed precision, attacks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import ANY, Answer, Batch, Program, case
from tests.zoo.cases.parts import INF, NAN, fill, sgd, training
from tests.zoo.further.parts import Distance, Exponential, Share, contained, fault, good_rows, hot_rows


def _square(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).pow(2).mean()


@case(
    "fused Adam under a scaler whose scale is too large for three iterations",
    contained("loss", op="aten.mul", kind="inf"),
)
def scaler_skips_three_times() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(batch["x"]).pow(2).mean() * 1e35
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    return model, {"x": good_rows()}, step


@case(
    "SGD's momentum adds two gradients of 2e38",
    fault("optimizer", op="aten.add_", module=ANY, kind="inf"),
)
def momentum_overflows() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"]).sum() * 1e38

    model = nn.Linear(3, 1, bias=False)
    fill(model, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-39, momentum=0.9, foreach=False)
    return model, {"x": torch.full((4, 3), 0.5)}, training(model, loss_of, iterations=2, optimizer=optimizer)


@case(
    "foreach Adam: the gradient of one of two towers is bad",
    fault("backward", op="aten.div", module="b.dist", node="SqrtBackward0"),
)
def foreach_optimizer_with_one_bad_tower() -> Program:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Distance(), Distance()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.a(x).sum() + self.b(y).sum()

    torch.manual_seed(0)
    model, y = Towers(), good_rows()
    y[3] = 0.0
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, foreach=True)
    return (
        model,
        {"x": good_rows(), "y": y},
        training(model, lambda model, batch: model(batch["x"], batch["y"]), optimizer=optimizer),
    )


@case(
    "embedding rows are brought to length 1 after each update; the padding row is 0",
    fault("update", "optimizer", op="aten.div_", module=ANY, kind="nan"),
)
def padding_row_is_projected() -> Program:
    torch.manual_seed(0)
    model = nn.Embedding(5, 4, padding_idx=0)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch["ids"]).pow(2).mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.weight.div_(model.weight.norm(dim=1, keepdim=True))
        return loss.detach()

    return model, {"ids": torch.tensor([0, 1, 2])}, step


@case("gradients scaled to length 1 by hand: they are 0", fault("gradients", op="aten.reciprocal", kind="inf"))
def zero_gradients_are_normalized() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = F.relu(model(batch["x"]) - 100).mean()
        loss.backward()
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        scale = 1.0 / norm
        for parameter in model.parameters():
            parameter.grad.mul_(scale)
        optimizer.step()
        return loss.detach()

    return model, {"x": good_rows()}, step


class _Root(nn.Module):
    """The root of a parameter that holds a 0: its gradient is 1/0."""

    def __init__(self) -> None:
        super().__init__()
        self.variance = nn.Parameter(torch.tensor([1.0, 0.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sqrt(self.variance)


@case(
    "an infinite gradient is clipped by value",
    contained("backward", op="aten.div", module="", node="SqrtBackward0", kind="inf"),
)
def infinite_gradient_is_clipped_by_value() -> Program:
    torch.manual_seed(0)
    model = _Root()
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch["x"]).mean()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return model, {"x": good_rows()}, step


@case(
    "nonfinite gradients are replaced before the update",
    contained("backward", op="aten.div", module="dist", node="SqrtBackward0"),
)
def gradients_are_replaced() -> Program:
    torch.manual_seed(0)
    model, x = Distance(), good_rows()
    x[0] = 0.0
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch["x"]).mean()
        loss.backward()
        for parameter in model.parameters():
            torch.nan_to_num_(parameter.grad, nan=0.0, posinf=0.0, neginf=0.0)
        optimizer.step()
        return loss.detach()

    return model, {"x": x}, step


@case(
    "each parameter is updated by its own optimizer as soon as its gradient is there",
    fault("forward", op="aten.exp", module="act", kind="inf"),
)
def optimizers_inside_backward() -> Program:
    torch.manual_seed(0)
    model = Exponential()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=1e-2) for parameter in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        loss = model(batch["x"]).mean()
        loss.backward()
        return loss.detach()

    return model, {"x": hot_rows()}, step


@case(
    "a hand-written update whose rate is 1 / step, and the first step is 0",
    fault(
        "gradients", op="aten.reciprocal", kind="inf", alts=(Answer("fault", ANY, op="aten.reciprocal", module=None),)
    ),
)
def rate_of_step_zero() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        model.zero_grad()
        loss = _square(model, batch)
        loss.backward()
        with torch.no_grad():
            rate = 1.0 / batch["step"]
            for parameter in model.parameters():
                parameter.sub_(rate * parameter.grad)
        return loss.detach()

    return model, {"x": good_rows(), "step": torch.tensor(0.0)}, step


@case(
    "projected gradient attack: the direction of a gradient of 0",
    fault("loss", op="aten.div", kind="nan", alts=(Answer("fault", "gradients", op="aten.div", module=None),)),
)
def attack_along_a_zero_gradient() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        x = batch["x"].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.relu(model(x) - 100).mean(), [x])
        attacked = batch["x"] + 0.1 * gradient / gradient.norm()
        loss = model(attacked).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, {"x": good_rows()}, step


@case(
    "`if torch.isnan(loss).any(): return`: an infinity minus the infinite mean",
    contained("forward", op="aten.exp", module="act", kind="inf"),
)
def nan_loss_returns_early() -> Program:
    torch.manual_seed(0)
    model = Exponential()
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor | None:
        optimizer.zero_grad()
        y = model(batch["x"])
        loss = (y - y.mean(0)).pow(2).mean()
        if torch.isnan(loss).any():
            return None
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, {"x": hot_rows()}, step


@case("a value of 70000 is cast to float16", fault("forward", op="aten._to_copy", module="cast", kind="inf"))
def cast_to_half_overflows() -> Program:
    class Cast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.float16)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.cast = nn.Linear(3, 2), Cast()
            fill(self.lin, 1e5)

        def forward(self, x: Tensor) -> Tensor:
            return self.cast(self.lin(x)).float()

    model = Net()
    return model, {"x": good_rows()}, training(model, lambda model, batch: model(batch["x"]).mean())


@case(
    "float16 autocast: the first layer's product leaves its range",
    fault("forward", op="aten.addmm", module="0", kind="inf", dtype="float16"),
)
def autocast_product_overflows() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return model(batch["x"]).float().pow(2).mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    fill(model[0], 1000.0)
    return model, {"x": torch.full((4, 3), 100.0)}, training(model, loss_of)


@case("the teacher's checkpoint holds a NaN", fault("state", None, param_bad=("weight",), kind="nan"))
def teacher_is_nan() -> Program:
    torch.manual_seed(0)
    model, teacher = nn.Linear(3, 2), nn.Linear(3, 2)
    with torch.no_grad():
        teacher.weight[1, 1] = NAN

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            target = teacher(batch["x"])
        return F.mse_loss(model(batch["x"]), target)

    return model, {"x": good_rows()}, training(model, loss_of)


@case(
    "the guard drops the loss of an infinite batch, but the running scale has taken it in",
    fault(
        "input",
        None,
        batch_bad=("x",),
        kind="inf",
        buffers_bad=("scale",),
        alts=(Answer("fault", "update", tensor="x"),),
    ),
)
def running_scale_takes_an_infinite_batch() -> Program:
    class Net(nn.Module):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 1)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.scale.copy_(torch.maximum(self.scale, x.abs().max()))
            return self.lin(x / self.scale)

    torch.manual_seed(0)
    model, x = Net(), good_rows()
    x[2, 1] = INF
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        for x in batch["x"]:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            if not torch.isfinite(loss):
                continue
            loss.backward()
            optimizer.step()
        return loss.detach()

    return model, {"x": [good_rows(), x, good_rows()]}, step


@case(
    "the batch statistic that is only compared overflows first; the loss divides by zero",
    fault("forward", op="aten.div", module="norm", kind="nan"),
)
def compared_statistic_overflows_beside_a_fault() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            weight = torch.where(torch.exp(batch["x"] * 1000) > 1, 2.0, 1.0)
        return (model(batch["x"]) * weight).mean()

    torch.manual_seed(0)
    x = good_rows()
    x[1] = 0.0
    return (model := Share()), {"x": x}, training(model, loss_of)
