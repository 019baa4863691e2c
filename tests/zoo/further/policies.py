"""Policies: forbidden actions, ratios to old policies, returns without spread."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import ANY, Answer, Batch, Program, case
from tests.zoo.cases.parts import INF, training
from tests.zoo.further.parts import HARMLESS, fault, good_rows

_ALLOWED = torch.tensor([[True, False, True], [False, True, True], [True, True, True], [True, True, False]])


@case(
    "the divergence of two policies with the same forbidden action: -inf minus -inf",
    fault("loss", op="aten.sub", kind="nan"),
)
def divergence_of_masked_policies() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        new = F.log_softmax(model(batch["x"]).masked_fill(~batch["allowed"], -INF), -1)
        old = F.log_softmax(batch["old"].masked_fill(~batch["allowed"], -INF), -1)
        return (new.exp() * (new - old)).sum(-1).mean()

    torch.manual_seed(0)
    batch = {"x": good_rows(), "allowed": _ALLOWED, "old": torch.randn(4, 3)}
    return (model := nn.Linear(3, 3)), batch, training(model, loss_of)


@case(
    "the library's divergence of two policies with the same forbidden action: only its gradient is NaN",
    fault("loss", op="aten.sub", module=ANY, kind="nan"),
)
def library_divergence_of_masked_policies() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        new = model(batch["x"]).masked_fill(~batch["allowed"], -INF)
        old = batch["old"].masked_fill(~batch["allowed"], -INF)
        policies = [torch.distributions.Categorical(logits=each, validate_args=False) for each in (old, new)]
        return torch.distributions.kl_divergence(policies[1], policies[0]).mean()

    torch.manual_seed(0)
    batch = {"x": good_rows(), "allowed": _ALLOWED, "old": torch.randn(4, 3)}
    return (model := nn.Linear(3, 3)), batch, training(model, loss_of)


@case(
    "the log probability of an action that the mask forbids",
    fault("loss", op="aten.neg", alts=(Answer("fault", "loss", op="aten.masked_fill", module=None),)),
)
def forbidden_action_was_taken() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"]).masked_fill(~batch["allowed"], -INF)
        policy = torch.distributions.Categorical(logits=logits, validate_args=False)
        return -(policy.log_prob(batch["action"]) * batch["gain"]).mean()

    torch.manual_seed(0)
    batch = {
        "x": good_rows(),
        "allowed": _ALLOWED,
        "action": torch.tensor([0, 0, 1, 1]),
        "gain": torch.tensor([1.0, 0.5, 2.0, 1.0]),
    }
    return (model := nn.Linear(3, 3)), batch, training(model, loss_of)


@case(
    "the old log probability of one action is -inf: clipping hides the infinite ratio from the loss alone",
    fault("input", None, batch_bad=("old",), kind="inf"),
)
def clipping_hides_an_infinite_ratio() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        chosen = F.log_softmax(model(batch["x"]), -1).gather(1, batch["action"][:, None])[:, 0]
        ratio = torch.exp(chosen - batch["old"])
        return -torch.min(ratio * batch["gain"], ratio.clamp(0.8, 1.2) * batch["gain"]).mean()

    torch.manual_seed(0)
    batch = {
        "x": good_rows(),
        "action": torch.tensor([0, 1, 2, 0]),
        "old": torch.tensor([-0.7, -1.1, -INF, -0.3]),
        "gain": torch.tensor([1.0, -1.0, 2.0, 0.5]),
    }
    return (model := nn.Linear(3, 3)), batch, training(model, loss_of)


@case("all answers of a group earn the same, and nothing is added to their spread", fault("loss", op="aten.div"))
def group_without_spread() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        reward = batch["reward"]
        gain = (reward - reward.mean(-1, keepdim=True)) / reward.std(-1, keepdim=True)
        return -(F.logsigmoid(model(batch["x"]))[:, 0] * gain.flatten()).mean()

    torch.manual_seed(0)
    batch = {"x": good_rows(6), "reward": torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])}
    return (model := nn.Linear(3, 1)), batch, training(model, loss_of)


@case(
    "the variance of returns is a difference of two averages, and negative",
    fault("forward", op="aten.sqrt", module="norm", kind="nan"),
)
def variance_by_difference_is_negative() -> Program:
    class Norm(nn.Module):
        mean: Tensor
        mean_square: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.tensor(100.01))
            self.register_buffer("mean_square", torch.tensor(10000.0))

        def forward(self, x: Tensor) -> Tensor:
            return x / torch.sqrt(self.mean_square - self.mean**2)

    class Value(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.norm = nn.Linear(3, 1), Norm()

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.lin(x))

    torch.manual_seed(0)
    model = Value()
    return model, {"x": good_rows()}, training(model, lambda model, batch: model(batch["x"]).square().mean())


@case("importance ratios multiplied along an episode", fault("loss", op="aten.cumprod", kind="inf"))
def ratios_along_an_episode() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        ratio = torch.exp(model(batch["x"])[:, 0] - batch["old"])
        return -(torch.cumprod(ratio, 0) * batch["reward"]).sum()

    torch.manual_seed(0)
    batch = {"x": good_rows(16), "old": torch.full((16,), -9.0), "reward": torch.rand(16)}
    return (model := nn.Linear(3, 1)), batch, training(model, loss_of)


@case("candidates of a beam that do not exist yet score -inf, and none of them is kept", HARMLESS)
def beam_search_for_a_target() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            scores = torch.full((4, 2), -INF)
            scores[:, 0] = 0.0
            step = F.log_softmax(model(batch["x"]), -1)
            best, index = (scores[:, :, None] + step[:, None]).flatten(1).topk(2)
            share = best.exp() / best.exp().sum(-1, keepdim=True)
        found = F.log_softmax(model(batch["x"]), -1).gather(1, index % 3)
        return -(share * found).sum(-1).mean()

    torch.manual_seed(0)
    return (model := nn.Linear(3, 3)), {"x": good_rows()}, training(model, loss_of)


@case("the correlation of constant predictions is only written to a log", HARMLESS)
def correlation_is_logged() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"])[:, 0]
        with torch.no_grad():
            steady = torch.ones_like(out)
            product = (steady - steady.mean()) * (out - out.mean())
            batch["log"].append(product.sum() / ((steady - steady.mean()).norm() * (out - out.mean()).norm()))
        return F.mse_loss(out, batch["y"])

    torch.manual_seed(0)
    batch = {"x": good_rows(), "y": torch.rand(4), "log": []}
    return (model := nn.Linear(3, 1)), batch, training(model, loss_of)
