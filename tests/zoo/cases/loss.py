"""Values born in the loss, after a finite forward pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Batch, End, Expectation, Program, case
from tests.zoo.cases.parts import INF, ReluPerceptron, fill, sgd, silenced, training


@case(
    "GRIST ID_23, 32, 34, 46, 47, 54, 57 (softmax + log by hand)",
    Expectation(
        "fault",
        "loss",
        phase="forward",
        op="aten.log",
        module="<Loss>",
        kind="inf",
        culprit="the softmax output underflows to exactly 0 (finite): y*log(p) = 0 * -inf",
        end=End(loss="nonfinite", params=True),
    ),
)
def softmax_underflow_log() -> Program:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.softmax = nn.Linear(4, 3), nn.Softmax(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.softmax(self.fc(x))

    class Loss(nn.Module):
        def forward(self, p: Tensor, target: Tensor) -> Tensor:
            return (target * -torch.log(p)).sum(1).mean()

    torch.manual_seed(0)
    model, criterion = Classifier(), Loss()
    with torch.no_grad():
        model.fc.weight.mul_(200)
    x = torch.tensor([[1.0, 5, 5, 5], [3.0, 1, 3, 4]])
    batch = {"x": x, "y": F.one_hot(torch.tensor([0, 1]), 3).float()}
    return model, batch, training(model, lambda model, batch: criterion(model(batch["x"]), batch["y"]))


@case(
    "GRIST ID_26, 33, 37, 38, 53, 56 (binary cross-entropy by hand); xingyizhou/CenterNet#234",
    Expectation(
        "fault",
        "loss",
        phase="loss",
        op="aten.log",
        kind="inf",
        culprit="sigmoid is exactly 1.0, so log(1-p) is -inf although the sample is classified correctly",
        end=End(loss="nonfinite", params=True),
    ),
)
def bce_by_hand_saturated() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        p, y = model(batch["x"]), batch["y"]
        return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()

    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("linear", nn.Linear(2, 1))
    model.add_module("sigmoid", nn.Sigmoid())
    fill(model.linear, 10.0)
    batch = {"x": torch.tensor([[1.0, 2.0], [0.1, 0.1]]), "y": torch.tensor([[1.0], [0.0]])}
    return model, batch, training(model, loss_of)


@case(
    "DLR-RM/stable-baselines3#325, #440, #265",
    Expectation(
        "fault",
        "loss",
        phase="loss",
        op="aten.std",
        kind="nan",
        culprit="the last minibatch has one sample; the op runs before the model's forward",
        end=End(loss="nonfinite", params=True),
    ),
)
def ppo_advantage_std_of_one() -> Program:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pi = ReluPerceptron(3, 8, 2)

        def forward(self, observation: Tensor) -> Tensor:
            return F.log_softmax(self.pi(observation), -1)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        advantage = batch["adv"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        return -(model(batch["o"]).gather(1, batch["a"][:, None])[:, 0] * advantage).mean()

    torch.manual_seed(0)
    model = Policy()
    batch = {"o": torch.randn(1, 3), "a": torch.tensor([1]), "adv": torch.tensor([0.7])}
    return model, batch, silenced(training(model, loss_of), r"std\(\): degrees of freedom")


@case(
    "pytorch/pytorch#70348, #75181, #116349",
    Expectation(
        "fault",
        "loss",
        phase="loss",
        op="aten.nll_loss_forward",
        kind="nan",
        culprit="every target is ignore_index: a mean over nothing; the gradients are zero, so the parameters survive",
        end=End(loss="nonfinite", grads=False, params=False),
    ),
)
def ce_all_ignored() -> Program:
    torch.manual_seed(0)
    model = ReluPerceptron(4, 8, 5)
    batch = {"x": torch.randn(3, 4), "y": torch.full((3,), -100)}
    return model, batch, training(model, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]))


@case(
    "wenet-e2e/wenet PR#2299; FangShancheng/ABINet#65; ypwhs/captcha_break#29; espnet/espnet#2771",
    Expectation(
        "fault",
        "loss",
        phase="forward",
        op="aten._ctc_loss",
        module="<CTCLoss>",
        kind="inf",
        culprit="sample 1 has a target of length 5 and an input of length 4: no alignment exists",
        end=End(loss="nonfinite", params=True),
    ),
)
def ctc_target_longer_than_input() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.proj = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            return F.log_softmax(self.proj(self.rnn(x)[0]), -1).transpose(0, 1)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return criterion(model(batch["x"]), batch["y"], batch["il"], batch["tl"])

    torch.manual_seed(0)
    model, criterion = Net(), nn.CTCLoss()
    batch = {
        "x": torch.randn(2, 4, 4),
        "y": torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]),
        "il": torch.tensor([4, 4]),
        "tl": torch.tensor([3, 5]),
    }
    return model, batch, training(model, loss_of)


@case(
    "google-deepmind/optax PR#1762, #896 (0*log 0 with masked logits); pytorch/pytorch#49724",
    Expectation(
        "fault",
        "loss",
        phase="forward",
        op="aten.mul",
        module="<Ent>",
        kind="nan",
        culprit="p*log p of a masked class: 0 * -inf",
        end=End(loss="nonfinite", params=True),
    ),
)
def masked_entropy_zero_times_inf() -> Program:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits = ReluPerceptron(4, 8, 3)

        def forward(self, x: Tensor, legal: Tensor) -> Tensor:
            return F.log_softmax(self.logits(x).masked_fill(~legal, -INF), -1)

    class Ent(nn.Module):
        def forward(self, log_p: Tensor) -> Tensor:
            return -(log_p.exp() * log_p).sum(-1).mean()

    torch.manual_seed(0)
    model, entropy = Policy(), Ent()
    batch = {"x": torch.randn(2, 4), "legal": torch.tensor([[True, True, False], [True, True, True]])}
    return model, batch, training(model, lambda model, batch: -0.01 * entropy(model(batch["x"], batch["legal"])))


@case(
    "allenai/OLMo-core PR#657; ecmwf/WeatherGenerator PR#2718",
    Expectation(
        "fault",
        "loss",
        phase="loss",
        op="aten.div",
        kind="nan",
        culprit="only the shard of rank 1 has no target; the loss and gradients of rank 0 are finite until all-reduce",
        end=End(params=True),
    ),
)
def ddp_one_rank_all_ignored() -> Program:
    class Ranks(nn.Module):
        """Two ranks in one process: the same weights, different shards."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.rank0 = ReluPerceptron(4, 8, 5)
            torch.manual_seed(0)
            self.rank1 = ReluPerceptron(4, 8, 5)

        def forward(self, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
            return self.rank0(x0), self.rank1(x1)

    def rank_loss(logits: Tensor, y: Tensor) -> Tensor:
        keep = (y != -100).float()
        z_loss = 1e-4 * (torch.logsumexp(logits, -1) ** 2 * keep).sum() / keep.sum()
        return F.cross_entropy(logits, y, reduction="sum") / keep.sum() + z_loss

    def all_reduce_mean(model: Ranks) -> None:
        for one, other in zip(model.rank0.parameters(), model.rank1.parameters(), strict=True):
            mean = (one.grad + other.grad) / 2
            one.grad, other.grad = mean.clone(), mean.clone()

    model = Ranks()
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        logits0, logits1 = model(batch["x0"], batch["x1"])
        losses = [rank_loss(logits0, batch["y0"]), rank_loss(logits1, batch["y1"])]
        sum(losses).backward()
        all_reduce_mean(model)
        optimizer.step()
        return losses[0]

    batch = {
        "x0": torch.randn(3, 4),
        "x1": torch.randn(3, 4),
        "y0": torch.tensor([1, 2, 3]),
        "y1": torch.full((3,), -100),
    }
    return model, batch, step
