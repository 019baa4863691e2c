"""Sequences, tables and masks: recurrent networks, embeddings, padding, attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import ANY, Batch, Program, case
from tests.zoo.cases.parts import INF, NAN, fill, training
from tests.zoo.further.parts import HARMLESS, RowShare, fault, good_rows


@case("the state carried over from the last chunk is NaN", fault("input", None, batch_bad=("h0",), kind="nan"))
def carried_state_is_nan() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], (batch["h0"], batch["c0"]))[0].pow(2).mean()

    torch.manual_seed(0)
    model = nn.LSTM(3, 4, batch_first=True)
    h0 = torch.zeros(1, 2, 4)
    h0[0, 1, 2] = NAN
    return model, {"x": torch.randn(2, 5, 3), "h0": h0, "c0": torch.zeros(1, 2, 4)}, training(model, loss_of)


@case("a recurrent weight is infinite", fault("state", None, param_bad=("weight_hh_l0",), kind="inf"))
def recurrent_weight_is_infinite() -> Program:
    torch.manual_seed(0)
    model = nn.GRU(3, 4, batch_first=True)
    with torch.no_grad():
        model.weight_hh_l0[0, 0] = INF
    return (
        model,
        {"x": torch.randn(2, 5, 3)},
        training(model, lambda model, batch: model(batch["x"])[0].pow(2).mean()),
    )


@case("a hand-written recurrence grows at every step", fault("forward", op="aten.addmm", module="cell"))
def recurrence_overflows() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(4, 4)
            fill(self.cell, 1e9)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(6):
                x = self.cell(x)
            return x

    model = Net()
    return model, {"x": torch.ones(2, 4)}, training(model, lambda model, batch: model(batch["x"]).mean())


@case(
    "tied weights: nobody looks the NaN row up, but the output layer multiplies by it",
    fault("state", None, param_bad=("weight",), kind="nan"),
)
def tied_weights_share_a_nan_row() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids))

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["ids"]), batch["ids"])

    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.embed.weight[5, 0] = NAN
    return model, {"ids": torch.tensor([0, 1, 2])}, training(model, loss_of)


@case(
    "sparse gradients of an embedding: a row has length 0",
    fault("backward", op="aten.div", node="SqrtBackward0", kind="inf"),
)
def sparse_embedding_of_length_zero() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return torch.sqrt(model(batch["ids"]).pow(2).sum(-1)).mean()

    torch.manual_seed(0)
    model = nn.Embedding(6, 4, sparse=True)
    with torch.no_grad():
        model.weight[2] = 0.0
    optimizer = torch.optim.SparseAdam(model.parameters(), 1e-3)
    return model, {"ids": torch.tensor([0, 1, 2])}, training(model, loss_of, optimizer=optimizer)


@case("the mean over the unpadded tokens of an empty text", fault("forward", op="aten.div", module="pool", kind="nan"))
def masked_mean_of_an_empty_text() -> Program:
    class Pool(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.pool, self.head = nn.Embedding(6, 4), Pool(), nn.Linear(4, 2)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return self.head(self.pool(self.embed(ids), mask))

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["ids"], batch["mask"]), batch["y"])

    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    return (
        (model := Net()),
        {"ids": torch.ones(2, 3).long(), "mask": mask, "y": torch.tensor([0, 1])},
        training(model, loss_of),
    )


class _Attention(nn.Module):
    """Adds the padding mask and the causal mask, both of the smallest finite value: their sum is -inf."""

    def forward(self, scores: Tensor, padding: Tensor, causal: Tensor) -> Tensor:
        lowest = torch.finfo(scores.dtype).min
        mask = padding.float() * lowest + causal.float() * lowest
        return torch.softmax(scores + mask, -1)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.attn = nn.Linear(3, 3), _Attention()

    def forward(self, x: Tensor, padding: Tensor, causal: Tensor) -> Tensor:
        return self.attn(self.lin(x), padding, causal) @ x


def _twice_masked(padding: list[bool], causal: list[list[bool]]) -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["padding"], batch["causal"]).pow(2).mean()

    torch.manual_seed(0)
    batch = {"x": torch.randn(3, 3), "padding": torch.tensor(padding), "causal": torch.tensor(causal)}
    return (model := _Net()), batch, training(model, loss_of)


@case(
    "two masks of finfo.min add up to -inf in a whole row, and softmax makes NaN of it",
    fault("forward", op="aten.add", module="attn", kind="inf"),
)
def masks_add_up_to_a_row_of_minus_inf() -> Program:
    return _twice_masked([True, True, True], [[True, True, True], [False, False, True], [False, False, False]])


@case("two masks of finfo.min add up to -inf in part of a row", HARMLESS)
def masks_add_up_to_minus_inf_in_places() -> Program:
    return _twice_masked([False, True, True], [[False, True, True], [False, False, True], [False, False, False]])


@case(
    "sampling from shares that are 0/0: multinomial raises",
    fault("forward", op="aten.div", module="norm", kind="nan"),
)
def multinomial_refuses() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.norm = nn.Linear(3, 4), RowShare()
            fill(self.lin, 0.0)

        def forward(self, x: Tensor) -> Tensor:
            share = self.norm(F.relu(self.lin(x)))
            return share.gather(1, torch.multinomial(share, 1))

    model = Net()
    return model, {"x": good_rows()}, training(model, lambda model, batch: model(batch["x"]).mean())


@case(
    "a categorical distribution with every action masked: its validation raises",
    fault("loss", op="aten.sub", module=ANY, kind="nan"),
)
def categorical_without_an_action() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"]).masked_fill(~batch["allowed"], -INF)
        return -torch.distributions.Categorical(logits=logits, validate_args=True).entropy().mean()

    torch.manual_seed(0)
    allowed = torch.tensor([[True, False, True], [False, False, False]])
    return (model := nn.Linear(3, 3)), {"x": good_rows(2), "allowed": allowed}, training(model, loss_of)


@case(
    "missing labels are left out by nanmean, but the square before it still has a NaN gradient",
    fault("input", None, batch_bad=("y",), kind="nan"),
)
def nanmean_hides_missing_labels() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return torch.nanmean((model(batch["x"]) - batch["y"]).pow(2))

    torch.manual_seed(0)
    return (
        (model := nn.Linear(3, 1)),
        {"x": good_rows(), "y": torch.tensor([[1.0], [NAN], [2.0], [0.0]])},
        training(model, loss_of),
    )


@case("a sample weight of 0 does not remove a NaN label", fault("input", None, batch_bad=("y",), kind="nan"))
def weight_zero_keeps_nan() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return (batch["w"] * F.l1_loss(model(batch["x"]), batch["y"], reduction="none")).mean()

    torch.manual_seed(0)
    y, w = torch.tensor([[1.0], [NAN]]), torch.tensor([[1.0], [0.0]])
    return (model := nn.Linear(3, 1)), {"x": good_rows(2), "y": y, "w": w}, training(model, loss_of)
