"""Mixed precision: scalers, casts and functions that choose their own precision."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.case import Batch, Program, case
from tests.zoo.cases.parts import fill, sgd, training
from tests.zoo.further.parts import Distance, contained, fault, good_rows


def _autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.float16)


@case(
    "the squared error is computed in float16",
    fault("loss", op="aten.pow", module=None, kind="inf", dtype="float16"),
)
def squared_error_in_half() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        with _autocast():
            out = model(batch["x"])
        return (out - batch["y"].half()).pow(2).mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, {"x": good_rows(), "y": torch.full((4, 1), 1000.0)}, training(model, loss_of)


@case(
    "the gradient of a float16 weight, times the scale, leaves the range; a few halvings help",
    contained("backward", op="aten.mm", module="", node="AddmmBackward0", kind="inf", dtype="float16"),
)
def scaled_gradient_in_half() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = sgd(model, 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        for _ in range(6):
            optimizer.zero_grad()
            with _autocast():
                out = model(batch["x"])
            loss = (out + 3.0).abs().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    return model, {"x": good_rows()}, step


@case(
    "a disabled scaler skips nothing",
    fault("backward", op="aten.div", module="dist", node="SqrtBackward0"),
)
def disabled_scaler() -> Program:
    torch.manual_seed(0)
    model, x = Distance(), good_rows()
    x[1] = 0.0
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", enabled=False)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch["x"]).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return model, {"x": x}, step


@case(
    "every forward overflows: the scaler skips each update, and no scale helps",
    fault("forward", op="aten.addmm", module="0", kind="inf", dtype="float16"),
)
def scaler_skips_over_a_forward_overflow() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    fill(model[0], 1000.0)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(4):
            optimizer.zero_grad()
            with _autocast():
                loss = model(batch["x"]).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    return model, {"x": torch.full((4, 3), 100.0)}, step


class _Square(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float16)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class _Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Square.apply(x)


def _custom(bias: float, factor: float) -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.square = nn.Linear(3, 2), _Squared()

        def forward(self, x: Tensor) -> Tensor:
            return self.square(self.lin(x).float())

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        with _autocast():
            out = model(batch["x"])
        return out.float().sum() * factor

    torch.manual_seed(0)
    model = Net()
    fill(model.lin, 0.0, bias)
    return model, {"x": good_rows()}, training(model, loss_of)


@case(
    "a custom function multiplies in float16 under autocast",
    fault("forward", op="aten.mul", module="square", kind="inf", dtype="float16"),
)
def custom_forward_in_half() -> Program:
    return _custom(300.0, 1.0)


@case(
    "backward of a custom function multiplies in float16",
    fault("backward", op="aten.mul", module="square", node="_SquareBackward", kind="inf", dtype="float16"),
)
def custom_backward_in_half() -> Program:
    return _custom(200.0, 400.0)


@case(
    "gradients are unscaled by hand with a scale that has become 0",
    fault("gradients", "post_backward", op="aten.reciprocal", module=None, kind="inf"),
)
def scale_has_become_zero() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch["x"]).pow(2).mean()
        (loss * batch["scale"]).backward()
        inverse = 1.0 / batch["scale"]
        for p in model.parameters():
            p.grad.mul_(inverse)
        optimizer.step()
        return loss.detach()

    return model, {"x": good_rows(), "scale": torch.tensor(0.0)}, step


@case(
    "a checkpointed block under float16 autocast overflows, and again when it is recomputed",
    fault("forward", op="aten.addmm", module="block.0", kind="inf", dtype="float16"),
)
def checkpointed_block_overflows_in_half() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = nn.Linear(3, 3)
            self.block = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 1))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, self.inp(x), use_reentrant=False)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        with _autocast():
            return model(batch["x"]).float().pow(2).mean()

    torch.manual_seed(0)
    model = Net()
    fill(model.inp, 30.0)
    fill(model.block[0], 1000.0)
    return model, {"x": good_rows()}, training(model, loss_of)


@case(
    "an additive mask of -1e9 is cast to float16 under autocast: a row of -inf",
    fault("forward", op="aten._to_copy", module="attn", kind="inf", dtype="float16"),
)
def large_mask_is_cast_to_half() -> Program:
    class Attention(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            scores = torch.bmm(x, x.transpose(1, 2))
            return torch.bmm(torch.softmax(scores + mask.to(scores.dtype), -1, dtype=scores.dtype), x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.attn = nn.Linear(4, 4), Attention()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.attn(self.lin(x), mask)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        with _autocast():
            out = model(batch["x"], batch["mask"])
        return out.float().pow(2).mean()

    torch.manual_seed(0)
    model = Net()
    mask = torch.zeros(2, 3, 3)
    mask[1, 2] = -1e9
    return model, {"x": torch.rand(2, 3, 4), "mask": mask}, training(model, loss_of)


@case(
    "the labels are smoothed in float16, and log_softmax of the sure logits is -inf there",
    fault("loss", op="aten.log", module=None, kind="inf"),
)
def log_of_probabilities_in_half() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        with _autocast():
            logits = model(batch["x"])
        share = F.softmax(logits, -1)
        target = F.one_hot(batch["y"], 3) * 0.9 + 0.1 / 3
        return -(target * share.log()).sum(-1).mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    fill(model, 0.0)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([0.0, 30.0, 0.0]))
    return model, {"x": good_rows(), "y": torch.tensor([0, 1, 2, 0])}, training(model, loss_of)
