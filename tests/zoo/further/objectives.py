"""Objectives: adversarial, reinforcement, likelihoods and penalties, by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Answer, Batch, Program, case
from tests.zoo.cases.parts import fill, sgd, training
from tests.zoo.further.parts import HARMLESS, fault, good_rows


@case("log(1 - D(fake)) with a discriminator that is certain", fault("loss", op="aten.log", kind="inf"))
def gan_discriminator_is_certain() -> Program:
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": nn.Linear(2, 3), "d": nn.Sequential(nn.Linear(3, 1), nn.Sigmoid())})
    fill(model["d"][0], 0.0, 100.0)  # type: ignore[index]
    of_g, of_d = sgd(model["g"]), sgd(model["d"])

    def step(model: nn.ModuleDict, batch: Batch) -> Tensor:
        fake = model["g"](batch["z"])
        of_d.zero_grad()
        loss_d = -(torch.log(model["d"](batch["real"])) + torch.log(1 - model["d"](fake.detach()))).mean()
        loss_d.backward()
        of_d.step()
        of_g.zero_grad()
        loss_g = -torch.log(model["d"](fake)).mean()
        loss_g.backward()
        of_g.step()
        return loss_d + loss_g

    return model, {"z": torch.randn(4, 2), "real": torch.randn(4, 3)}, step  # type: ignore[return-value]


@case(
    "gradient penalty of a critic that does not depend on its input: the root of 0, differentiated",
    fault("backward", op="aten.div", node="SqrtBackward0", kind="inf"),
)
def gradient_penalty_of_a_flat_critic() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    fill(model, 0.0)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        x = batch["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = (torch.sqrt(slope.pow(2).sum(1)) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, {"x": good_rows()}, step


@case("a probability ratio against a stale log probability", fault("loss", op="aten.exp", kind="inf"))
def policy_ratio_overflows() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        chosen = F.log_softmax(model(batch["x"]), -1).gather(1, batch["a"][:, None])[:, 0]
        ratio = torch.exp(chosen - batch["old"])
        return -torch.min(ratio * batch["adv"], ratio.clamp(0.8, 1.2) * batch["adv"]).mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    batch = {
        "x": good_rows(),
        "a": torch.tensor([0, 1, 0, 1]),
        "old": torch.tensor([-0.7, -0.7, -1000.0, -0.7]),
        "adv": torch.tensor([1.0, -1.0, -1.0, 0.5]),
    }
    return model, batch, training(model, loss_of)


@case(
    "a Gaussian policy whose standard deviation underflows: 0/0 in its log probability",
    fault("loss", op="aten.div", kind="nan"),
)
def policy_without_spread() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        mean, log_std = model(batch["x"]).chunk(2, -1)
        std = torch.exp(log_std - 200.0)
        action = (mean + std * batch["noise"]).detach()
        log_prob = -((action - mean) ** 2) / (2 * std**2)
        return -(log_prob.sum(-1) * batch["reward"]).mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    batch = {"x": good_rows(), "noise": torch.randn(4, 2), "reward": torch.rand(4)}
    return model, batch, training(model, loss_of)


@case("an infinite reward in the replay memory", fault("input", None, batch_bad=("reward",), kind="inf"))
def infinite_reward() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        value = model(batch["x"])[:, 0]
        with torch.no_grad():
            target = batch["reward"] + 0.99 * model(batch["next"])[:, 0]
        return F.mse_loss(value, target)

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    batch = {"x": good_rows(), "next": good_rows(), "reward": torch.tensor([0.5, 1.0, float("inf"), 0.2])}
    return model, batch, training(model, loss_of)


@case("the mean of a selection that is empty", fault("loss", op="aten.mean", kind="nan"))
def mean_of_nothing() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"])[:, 0]
        return out.pow(2).mean() + 0.1 * out[batch["labelled"]].mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, {"x": good_rows(), "labelled": torch.zeros(4, dtype=torch.bool)}, training(model, loss_of)


@case("kl_div with targets of zero: x log x is 0 there", HARMLESS)
def kl_div_handles_zero_targets() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.kl_div(F.log_softmax(model(batch["x"]), -1), batch["p"], reduction="batchmean")

    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    return model, {"x": good_rows(3), "p": torch.eye(3)}, training(model, loss_of)


@case("Gumbel noise of a uniform draw of exactly 0: -inf, which softmax digests", HARMLESS)
def gumbel_noise_of_zero() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        noise = -torch.log(-torch.log(batch["u"]))
        return ((model(batch["x"]) + noise).softmax(-1) * batch["value"]).sum(-1).mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    u = torch.rand(4, 4)
    u[1, 2] = 0.0
    return model, {"x": good_rows(), "u": u, "value": torch.rand(4, 4)}, training(model, loss_of)


@case(
    "focal loss with a root: the gradient of (1 - p)**0.5 at p = 1",
    fault("backward", op="aten.pow", node="PowBackward0"),
)
def focal_loss_with_a_root() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        p = torch.sigmoid(model(batch["x"]))
        return ((1 - p) ** 0.5 * -torch.log(p)).mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    fill(model, 20.0)
    return model, {"x": good_rows()}, training(model, loss_of)


@case(
    "log clamped from below afterwards: forward is finite, 0/0 in the gradient",
    fault(
        "backward",
        op="aten.div",
        node="LogBackward0",
        kind="nan",
        alts=(Answer("fault", "loss", op="aten.log"),),
    ),
)
def clamp_after_the_log() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return -torch.log(model(batch["x"]).abs()).clamp(min=-100).mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    fill(model, 0.0)
    return model, {"x": good_rows()}, training(model, loss_of)


@case(
    "a mixing weight that is a Python nan",
    fault(
        "loss",
        op="aten.mul",
        kind="nan",
        alts=(Answer("fault", "input", op="aten.mul"),),
        debatable="the product prepares data for the model, and the batch is finite",
    ),
)
def mixing_weight_is_nan() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    weight = float("inf") * 0.0

    def step(model: nn.Module, batch: Batch) -> Tensor:
        x = weight * batch["x"] + (1 - weight) * batch["x"].flip(0)
        loss = F.cross_entropy(model(x), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return model, {"x": good_rows(), "y": torch.tensor([0, 1, 0, 1])}, step
