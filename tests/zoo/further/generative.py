"""Diffusion, flows, autoencoders and adversaries: noise levels at their ends, volumes of zero, saturated critics."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import ANY, Batch, Program, case
from tests.zoo.cases.parts import INF, fill, sgd, training
from tests.zoo.further.parts import HARMLESS, fault, good_rows


@case(
    "signal-to-noise weights at both ends of a schedule: the infinite one weighs 0, the other is 0/0",
    fault("loss", op="aten.div", kind="nan"),
)
def signal_to_noise_at_both_ends() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        kept = batch["kept"]
        ratio = kept * torch.reciprocal(1 - kept)
        weight = ratio.clamp(max=5.0) / ratio
        return (weight[:, None] * (model(batch["x"]) - batch["noise"]).square()).mean()

    torch.manual_seed(0)
    batch = {"x": good_rows(), "noise": torch.randn(4, 3), "kept": torch.tensor([1.0, 0.7, 0.3, 0.0])}
    return (model := nn.Linear(3, 3)), batch, training(model, loss_of)


@case("signal-to-noise weights at the clean end: infinite, and worth 0", HARMLESS)
def signal_to_noise_at_the_clean_end() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        kept = batch["kept"]
        ratio = kept / (1 - kept)
        weight = ratio.clamp(max=5.0) / ratio
        return (weight[:, None] * (model(batch["x"]) - batch["noise"]).square()).mean()

    torch.manual_seed(0)
    batch = {"x": good_rows(), "noise": torch.randn(4, 3), "kept": torch.tensor([1.0, 0.7, 0.3, 0.1])}
    return (model := nn.Linear(3, 3)), batch, training(model, loss_of)


class _Embed(nn.Module):
    def forward(self, level: Tensor) -> Tensor:
        angle = level[:, None] * torch.tensor([1.0, 10.0, 100.0])
        return torch.cat([angle.sin(), angle.cos()], -1)


class _Denoiser(nn.Module):
    def __init__(self, precondition: nn.Module) -> None:
        super().__init__()
        self.precondition, self.embed, self.lin = precondition, _Embed(), nn.Linear(9, 3)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        return self.lin(torch.cat([x, self.embed(self.precondition(level))], -1))


def _denoise(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["x"], batch["level"]) - batch["noise"]).square().mean()


@case(
    "the log of a noise level of 0 is embedded by sines",
    fault("forward", op="aten.log", module="precondition", kind="inf"),
)
def noise_level_of_zero_is_embedded() -> Program:
    class Precondition(nn.Module):
        def forward(self, level: Tensor) -> Tensor:
            return torch.log(level) / 4

    torch.manual_seed(0)
    model = _Denoiser(Precondition())
    batch = {"x": good_rows(), "noise": torch.randn(4, 3), "level": torch.tensor([0.5, 0.0, 2.0, 80.0])}
    return model, batch, training(model, _denoise)


@case(
    "the loader brings the log of a noise level of 0, and sines are taken of it",
    fault("input", None, batch_bad=("level",), kind="inf"),
)
def loader_brings_the_log_of_no_noise() -> Program:
    torch.manual_seed(0)
    model = _Denoiser(nn.Identity())
    batch = {"x": good_rows(), "noise": torch.randn(4, 3), "level": torch.tensor([-0.7, -INF, 0.7, 4.4])}
    return model, batch, training(model, _denoise)


@case("scales multiplied along a hierarchy", fault("forward", op="aten.cumprod", module="flow", kind="inf"))
def product_of_scales_overflows() -> Program:
    class Flow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cumprod(x, -1)

    model = nn.Sequential()
    model.add_module("lin", nn.Linear(3, 8))
    model.add_module("flow", Flow())
    fill(model.lin, 1e10)
    return model, {"x": good_rows()}, training(model, lambda model, batch: model(batch["x"]).mean())


@case("the volume of a map that turns space over: logdet of a negative determinant", fault("loss", op=ANY, kind="nan"))
def volume_of_a_reflection() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"]).square().mean() - torch.logdet(model.weight)

    torch.manual_seed(0)
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.diag(torch.tensor([1.0, 2.0, -1.0])))
    return model, {"x": good_rows()}, training(model, loss_of)


@case("the inverse of softplus at 0", fault("forward", op="aten.log", module="inverse", kind="inf"))
def inverse_softplus_at_zero() -> Program:
    class Inverse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(torch.expm1(x))

    model = nn.Sequential()
    model.add_module("lin", nn.Linear(3, 2))
    model.add_module("relu", nn.ReLU())
    model.add_module("inverse", Inverse())
    fill(model.lin, -1.0)
    return model, {"x": good_rows()}, training(model, lambda model, batch: model(batch["x"]).mean())


@case("the divergence from a posterior whose spread underflowed", fault("loss", op="aten.div", kind="inf"))
def divergence_from_a_point() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        mean, log_scale = model(batch["x"]).chunk(2, -1)
        posterior = torch.distributions.Normal(mean, torch.ones_like(mean), validate_args=False)
        prior = torch.distributions.Normal(torch.zeros(2), torch.exp(log_scale - 200), validate_args=False)
        return torch.distributions.kl_divergence(posterior, prior).mean()

    torch.manual_seed(0)
    return (model := nn.Linear(3, 4)), {"x": good_rows()}, training(model, loss_of)


@case("a logistic draw of a uniform number of 0 saturates a relaxed bit", HARMLESS)
def logistic_noise_of_zero() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        noise = torch.log(batch["u"]) - torch.log1p(-batch["u"])
        bits = torch.sigmoid((model(batch["x"]) + noise) / 0.5)
        return (bits * batch["value"]).mean()

    torch.manual_seed(0)
    u = torch.rand(4, 2)
    u[2, 1] = 0.0
    return (model := nn.Linear(3, 2)), {"x": good_rows(), "u": u, "value": torch.rand(4, 2)}, training(model, loss_of)


@case("the error of an exact step is 0: the factor for the next step is cut from infinity to 10", HARMLESS)
def next_step_of_an_exact_solver() -> Program:
    class Solver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate, self.size = nn.Linear(3, 3), 0.1

        def forward(self, x: Tensor) -> Tensor:
            slope = self.rate(x)
            with torch.no_grad():
                error = (slope - self.rate(x)).abs().amax()
                self.size = float((0.9 * (1e-3 / error) ** 0.2).clamp(0.2, 10.0)) * 0.1
            return x + self.size * slope

    torch.manual_seed(0)
    model = Solver()
    return model, {"x": good_rows()}, training(model, lambda model, batch: model(batch["x"]).square().mean())


@case("relativistic adversaries: the log of a probability that underflowed", fault("loss", op="aten.log", kind="inf"))
def relativistic_critic_is_certain() -> Program:
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": nn.Linear(2, 3), "d": nn.Linear(3, 1)})
    fill(model["d"], 1.0)
    of_g, of_d = sgd(model["g"]), sgd(model["d"])

    def step(model: nn.ModuleDict, batch: Batch) -> Tensor:
        fake = model["g"](batch["z"])
        of_d.zero_grad()
        loss_d = -torch.log(torch.sigmoid(model["d"](batch["real"]) - model["d"](fake.detach()))).mean()
        loss_d.backward()
        of_d.step()
        of_g.zero_grad()
        loss_g = -torch.log(torch.sigmoid(model["d"](fake) - model["d"](batch["real"]))).mean()
        loss_g.backward()
        of_g.step()
        return loss_g

    return model, {"z": torch.randn(4, 2), "real": torch.full((4, 3), 100.0)}, step  # type: ignore[return-value]


@case("softplus of logits of ten thousand", HARMLESS)
def logits_of_ten_thousand() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.softplus(-model(batch["x"])).mean() + F.softplus(model(batch["x"].flip(0))).mean()

    fill(model := nn.Linear(3, 1), 1e4)
    return model, {"x": good_rows()}, training(model, loss_of)


@case(
    "a sigmoid written out: exp overflows, the loss is finite, the gradient is 0 * inf",
    fault("forward", op="aten.exp", module="gate", kind="inf"),
)
def sigmoid_written_out() -> Program:
    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 1 / (1 + torch.exp(-x))

    model = nn.Sequential()
    model.add_module("lin", nn.Linear(3, 2))
    model.add_module("gate", Gate())
    fill(model.lin, -100.0)
    return model, {"x": good_rows()}, training(model, lambda model, batch: model(batch["x"]).square().mean())
