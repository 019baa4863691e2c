"""Autocast and GradScaler: skipped steps that save training, and what they do not save."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.case import ANY, Batch, End, Expectation, Program, case
from tests.zoo.cases.parts import fill, sgd


class _AmpNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


def _autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.float16)


@case(
    "pytorch/pytorch#88474, #90342, #115500",
    Expectation(
        "fault",
        "update",
        phase="forward",
        op="aten.addmm",
        module="stem.proj",
        kind="inf",
        dtype="float16",
        iteration=1,
        buffers_bad=("bn.running_mean", "bn.running_var"),
        culprit="the optimizer step was skipped, the BatchNorm buffers were not: training goes on, evaluation is NaN",
        end=End(loss="finite", params=False, buffers=True),
    ),
)
def bn_running_stats_poisoned_by_skipped_step() -> Program:
    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.proj(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.bn, self.head = Stem(), nn.BatchNorm1d(4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.bn(self.stem(x).float()))

    torch.manual_seed(0)
    model = Net()
    fill(model.stem.proj, 1.0)
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        for x in (batch["bad"], batch["good"]):
            optimizer.zero_grad()
            with _autocast():
                output = model(x)
            loss = output.float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss

    return model, {"bad": torch.full((6, 3), 6e4), "good": torch.randn(6, 3)}, step


@case(
    "Lightning-AI/pytorch-lightning#9799; pytorch/pytorch#111739; ultralytics/yolov5#8578; kenziyuliu/MS-G3D#40",
    Expectation(
        "contained",
        "backward",
        phase="backward",
        op="aten._to_copy",
        node="ToCopyBackward0",
        kind="inf",
        dtype="float16",
        iteration=1,
        culprit="the first loss scale is too large: GradScaler skips steps and lowers it; later steps succeed",
        end=End(loss="finite", params=False, grads=False),
    ),
)
def gradscaler_calibration_skip() -> Program:
    torch.manual_seed(0)
    model = _AmpNet()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1000)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        for _ in range(12):
            optimizer.zero_grad()
            with _autocast():
                output = model(batch["x"])
            loss = output.float().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss

    return model, {"x": torch.randn(4, 4)}, step


@case(
    "huggingface/accelerate#641; espnet/espnet PR#2362",
    Expectation(
        "fault",
        "update",
        phase="backward",
        op="aten._to_copy",
        node="ToCopyBackward0",
        kind="inf",
        dtype="float16",
        iteration=3,
        culprit="unscale_ after the first micro-batch: the second adds gradients 4096 times too large; weights explode "
        "but stay finite, and the first nonfinite value looks like a harmless overflow of the scale",
        end=End(loss="finite", params=False),
    ),
)
def amp_unscale_between_accumulation() -> Program:
    torch.manual_seed(0)
    model = _AmpNet()
    optimizer, scaler = sgd(model, 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        for _ in range(4):
            optimizer.zero_grad()
            for micro in range(2):
                with _autocast():
                    output = model(batch["x"][micro])
                loss = (output.float() - 1).pow(2).mean()
                scaler.scale(loss).backward()
                if micro == 0:
                    scaler.unscale_(optimizer)  # too early: the second micro-batch adds scaled gradients
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return loss

    return model, {"x": torch.randn(2, 4, 4)}, step


@case(
    "huggingface/trl#4901; pytorch/pytorch PR#26512 (one scaler, two optimizers)",
    Expectation(
        "contained",
        "backward",
        phase="backward",
        op="aten._to_copy",
        node="ToCopyBackward0",
        module=ANY,
        kind="inf",
        dtype="float16",
        culprit="the gradient 1024 * 100 does not fit float16; only the discriminator's update is skipped",
    ),
)
def scaler_two_optimizers_one_skips() -> Program:
    class Half(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.l = nn.Linear(inputs, outputs)

        def forward(self, x: Tensor) -> Tensor:
            return self.l(x)

    torch.manual_seed(0)
    model = nn.ModuleDict({"g": Half(2, 4), "d": Half(4, 1)})
    generator = torch.optim.Adam(model.g.parameters(), 1e-3)
    discriminator = torch.optim.Adam(model.d.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        discriminator.zero_grad()
        with _autocast():
            judged = model.d(batch["real"])
        discriminator_loss = judged.float().sum() * 100.0
        scaler.scale(discriminator_loss).backward()
        scaler.step(discriminator)
        generator.zero_grad()
        with _autocast():
            fooled = model.d(model.g(batch["z"]))
        generator_loss = fooled.float().mean()
        scaler.scale(generator_loss).backward()
        scaler.step(generator)
        scaler.update()
        return discriminator_loss.detach() + generator_loss.detach()

    return model, {"real": torch.randn(3, 4), "z": torch.randn(3, 2)}, step


@case(
    "",
    Expectation(
        "fault",
        "backward",
        phase="backward",
        op="aten._to_copy",
        node="ToCopyBackward0",
        module=ANY,
        kind="inf",
        culprit="the scaler skips the head's update, and the body's optimizer steps without it",
    ),
)
def scaler_skips_but_plain_optimizer_steps() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.body(x)))

    torch.manual_seed(0)
    model = Net()
    head_optimizer, body_optimizer = sgd(model.head), sgd(model.body)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        head_optimizer.zero_grad()
        body_optimizer.zero_grad()
        with _autocast():
            output = model(batch["x"])
        scaler.scale(output.float().sum()).backward()
        scaler.step(head_optimizer)
        body_optimizer.step()
        scaler.update()
        return output.float().sum().detach()

    return model, {"x": torch.randn(3, 4)}, step


@case("control: correct AMP recipe", Expectation("clean", end=End(loss="finite", params=False, grads=False)))
def clean_adamw_amp_good_recipe() -> Program:
    torch.manual_seed(0)
    model = _AmpNet()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        for _ in range(3):
            optimizer.zero_grad()
            with _autocast():
                output = model(batch["x"])
            loss = (output.float() - 1).pow(2).mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return loss

    return model, {"x": torch.randn(4, 4)}, step
