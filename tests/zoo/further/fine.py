"""Steps with infinities on purpose, or with code that only looks dangerous: no alarm is right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Batch, Program, case
from tests.zoo.cases.parts import INF, NAN, fill, sgd, silenced, training
from tests.zoo.further.parts import HARMLESS, good_rows


def _square(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).pow(2).mean()


@case("binary cross entropy of certain probabilities: its logs are clamped", HARMLESS)
def certain_probabilities() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.binary_cross_entropy(torch.sigmoid(model(batch["x"])), batch["y"])

    model = nn.Linear(3, 1)
    fill(model, 0.0, 100.0)
    return model, {"x": good_rows(), "y": torch.zeros(4, 1)}, training(model, loss_of)


@case("inverse frequencies of classes: the absent class weighs inf, and no label asks for it", HARMLESS)
def absent_class_weighs_infinity() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        weight = 1.0 / torch.bincount(batch["y"], minlength=3).float()
        return F.cross_entropy(model(batch["x"]), batch["y"], weight=weight)

    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    return model, {"x": good_rows(), "y": torch.tensor([0, 1, 0, 1])}, training(model, loss_of)


@case("the entropy of a categorical distribution over masked logits", HARMLESS)
def entropy_of_masked_actions() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"]).masked_fill(~batch["allowed"], -INF)
        policy = torch.distributions.Categorical(logits=logits)
        return -(policy.log_prob(batch["action"]) + 0.01 * policy.entropy()).mean()

    torch.manual_seed(0)
    allowed = torch.tensor([[True, False, True], [False, True, True]])
    batch = {"x": good_rows(2), "allowed": allowed, "action": torch.tensor([0, 2])}
    model = nn.Linear(3, 3)
    return model, batch, training(model, loss_of)


@case("embedding rows are kept within length 1; one is 0", HARMLESS)
def embedding_with_a_bound() -> Program:
    torch.manual_seed(0)
    model = nn.Embedding(5, 4, max_norm=1.0)
    with torch.no_grad():
        model.weight[1] = 0.0
    return model, {"x": torch.tensor([0, 1, 2])}, training(model, _square)


@case("a forward-mode derivative that is infinite is only logged", HARMLESS)
def infinite_slope_is_logged() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = _square(model, batch)
        loss.backward()
        optimizer.step()
        zero = torch.zeros(3)
        batch["log"].append(torch.func.jvp(torch.sqrt, (zero,), (torch.ones(3),))[1].sum().item())
        return loss.detach()

    return model, {"x": good_rows(), "log": []}, silenced(step, "`torch.jit.script` is deprecated")


@case("the magnitude of a silent spectrum: its gradient at 0 is 0", HARMLESS)
def silent_spectrum() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return torch.fft.rfft(model(batch["x"])).abs().mean()

    model = nn.Linear(3, 4)
    fill(model, 0.0, 1.0)
    return model, {"x": good_rows()}, training(model, loss_of)


@case("weights are averaged after the update", HARMLESS)
def weights_are_averaged() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=10)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        for _ in range(3):
            optimizer.zero_grad()
            loss = _square(model, batch)
            loss.backward()
            optimizer.step()
            scheduler.step()
            averaged.update_parameters(model)
        return loss.detach()

    return model, {"x": good_rows()}, step


@case("the perplexity that is logged overflows", HARMLESS)
def perplexity_overflows() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    fill(model, 100.0)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> dict[str, float]:
        optimizer.zero_grad()
        loss = model(batch["x"]).abs().mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss.item(), "perplexity": torch.exp(loss.detach()).item()}

    return model, {"x": good_rows()}, step


@case("the best loss so far begins at inf", HARMLESS)
def best_loss_begins_at_infinity() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer, best = sgd(model), {"loss": torch.tensor(INF), "ratio": NAN}

    def step(model: nn.Module, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = _square(model, batch)
        loss.backward()
        optimizer.step()
        best["loss"] = torch.minimum(best["loss"], loss.detach())
        return best["loss"]

    return model, {"x": good_rows()}, step


@case("a gate for experts: all but the top two are -inf before softmax", HARMLESS)
def experts_outside_the_top_two() -> Program:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(3, 4), nn.ModuleList(nn.Linear(3, 2) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            logits = self.gate(x)
            top = logits.topk(2, -1)
            kept = torch.full_like(logits, -INF).scatter(-1, top.indices, top.values)
            share = torch.softmax(kept, -1)
            outputs = torch.stack([expert(x) for expert in self.experts], 1)
            return (share[..., None] * outputs).sum(1)

    torch.manual_seed(0)
    model = Experts()
    return model, {"x": good_rows()}, training(model, _square)


@case("directions and similarities of zero vectors: PyTorch's own formulas have an eps", HARMLESS)
def directions_of_zero_vectors() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        h = model(batch["x"])
        return F.normalize(h, dim=-1).sum() + F.cosine_similarity(h, torch.zeros_like(h)).sum()

    torch.manual_seed(0)
    model = nn.Linear(3, 4, bias=False)
    return model, {"x": torch.zeros(2, 3)}, training(model, loss_of)


@case("the mean of a bag that is empty is 0", HARMLESS)
def empty_bag() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["ids"], batch["offsets"]).pow(2).mean()

    torch.manual_seed(0)
    model = nn.EmbeddingBag(6, 4, mode="mean")
    batch = {"ids": torch.tensor([1, 2, 3]), "offsets": torch.tensor([0, 2, 2])}
    return model, batch, training(model, loss_of)


@case("where() twice: the argument is made safe before the division", HARMLESS)
def made_safe_before_dividing() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        x = model(batch["x"]).relu()
        safe = torch.where(x > 0, x, 1.0)
        return torch.where(x > 0, 1.0 / safe, 0.0).mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    fill(model, -1.0)
    return model, {"x": good_rows()}, training(model, loss_of)


@case("path scores in log space: unreachable states are -inf, logsumexp digests them", HARMLESS)
def unreachable_states() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        emissions = model(batch["x"])
        alpha = torch.full((3,), -INF)
        alpha[0] = 0.0
        moves = torch.tensor([[0.0, 0.0, -INF], [-INF, 0.0, 0.0], [-INF, -INF, 0.0]])
        for emission in emissions:
            reached = alpha[:, None] + moves
            alive = torch.isfinite(reached).any(0)
            alpha = torch.where(alive, torch.logsumexp(reached.masked_fill(~alive, 0.0), 0) + emission, -INF)
        return -torch.logsumexp(alpha, 0)

    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    return model, {"x": good_rows()}, training(model, loss_of)
