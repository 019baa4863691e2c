"""Forwards that backward computes again: activation checkpointing of either kind, nested, and around dropped values."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.case import ANY, Batch, Program, case
from tests.zoo.cases.parts import INF, fill, training
from tests.zoo.further.parts import HARMLESS, Code, RowShare, chain, contained, fault


class Checkpointed(nn.Module):
    """A first linear layer without bias, then `block` under checkpoint."""

    def __init__(self, block: nn.Module, width: int = 3, *, reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.block, self.reentrant = nn.Linear(width, width, bias=False), block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)


def _rows(zero: int) -> Tensor:
    x = torch.rand(4, 3)
    x[zero] = 0.0
    return x


@case(
    "left padding under a causal mask: the first query sees nothing, and the loss reads the last alone",
    fault("forward", op="aten._softmax", module="decoder.late", kind="nan"),
)
def left_padding_under_a_causal_mask() -> Program:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            scores = self.q(x) @ self.k(x).transpose(-1, -2) + mask
            return scores.softmax(-1, dtype=torch.float32).to(x.dtype) @ x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.head = nn.ModuleDict({"early": Attention(), "late": Attention()}), nn.Linear(4, 1)

        def forward(self, x: Tensor, padded: Tensor) -> Tensor:
            causal = torch.full((x.shape[1],) * 2, -INF, dtype=x.dtype).triu(1)
            x = checkpoint(self.decoder["early"], x, causal, use_reentrant=False)
            mask = causal + torch.zeros_like(x[:, None, :, 0]).masked_fill(padded[:, None], -INF)
            return self.head(checkpoint(self.decoder["late"], x, mask, use_reentrant=False))

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["padded"]).float()[:, -1].square().mean()

    torch.manual_seed(0)
    model, padded = Net().bfloat16(), torch.zeros(3, 4, dtype=torch.bool)
    padded[2, :2] = True
    return model, {"x": torch.randn(3, 4, 4).bfloat16(), "padded": padded}, training(model, loss_of)


@case(
    "the NaN of a reentrantly checkpointed block is replaced in the loss, the recomputed one is not",
    fault("forward", op="aten.log", module="block.logs", kind="inf"),
)
def log_dropped_after_reentrant_checkpoint() -> Program:
    torch.manual_seed(0)
    block = chain(lin=nn.Linear(3, 3, bias=False), logs=Code(lambda x: x * torch.log(x.square())))
    model = Checkpointed(block, reentrant=True)
    return model, {"x": _rows(1)}, training(model, lambda model, b: model(b["x"]).nan_to_num(0.0).square().mean())


@case(
    "NaN is replaced within a checkpointed block, after the product that keeps the log's infinity for backward",
    fault("forward", op="aten.log", module="block.kl", kind="inf"),
)
def cleaned_inside_a_checkpoint() -> Program:
    torch.manual_seed(0)
    kl = Code(lambda p: (p * torch.log(p)).nan_to_num(0.0))
    model = Checkpointed(chain(lin=nn.Linear(3, 4, bias=False), square=Code(torch.square), kl=kl))
    return model, {"x": _rows(0)}, training(model, lambda model, b: model(b["x"]).mean())


@case(
    "checkpointed code of the loss divides 0 by 0 in a row that is dropped: so does the division's own gradient",
    fault("backward", op="aten.div", node="DivBackward0", kind="nan"),
)
def row_dropped_after_checkpointed_code() -> Program:
    def share(x: Tensor) -> Tensor:
        return x / x.sum(-1, keepdim=True) * 2

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return checkpoint(share, model(batch["x"]), use_reentrant=False)[:3].square().mean()

    torch.manual_seed(0)
    return (model := nn.Linear(3, 3, bias=False)), {"x": _rows(3)}, training(model, loss_of)


@case("a checkpoint within a checkpoint", fault("forward", op="aten.div", module="block.block.share", kind="nan"))
def checkpoint_inside_checkpoint() -> Program:
    torch.manual_seed(0)
    inner = Checkpointed(chain(lin=nn.Linear(3, 3, bias=False), share=RowShare()))
    model = Checkpointed(inner)
    return model, {"x": _rows(1)}, training(model, lambda model, b: model(b["x"]).square().mean())


@case(
    "a temperature that each call lowers is 0 when backward calls again",
    fault("backward", "recompute", op="aten.div", module="block", kind="inf"),
)
def temperature_reaches_zero_in_recompute() -> Program:
    class Anneal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = 2.0

        def forward(self, x: Tensor) -> Tensor:
            self.temperature -= 1.0
            return torch.tanh(x / self.temperature)

    torch.manual_seed(0)
    model = Checkpointed(Anneal(), reentrant=True)
    return model, {"x": torch.rand(2, 3)}, training(model, lambda model, b: model(b["x"]).square().mean())


@case(
    "layer norm of a zero row in half under checkpoint",
    fault(
        "backward",
        op="aten.native_layer_norm_backward",
        node="NativeLayerNormBackward0",
        module="block.norm",
        kind="nan",
    ),
)
def checkpointed_norm_of_zeros() -> Program:
    torch.manual_seed(0)
    block = chain(lin=nn.Linear(3, 4, bias=False), norm=nn.LayerNorm(4, eps=1e-12))
    model = Checkpointed(block).half()
    return model, {"x": _rows(0).half()}, training(model, lambda model, b: model(b["x"]).float().square().sum())


@case(
    "a gate in half overflows and saturates, under checkpoint",
    contained("forward", op="aten.addmm", module="block.gate", kind="inf", dtype="float16"),
)
def checkpointed_gate_saturates() -> Program:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(self.gate(x))

    torch.manual_seed(0)
    model = Checkpointed(Gated()).half()
    fill(model.first, 1.0)
    fill(model.block.gate, 4e4)
    return model, {"x": _rows(2).half()}, training(model, lambda model, b: model(b["x"]).float().square().mean())


@case("causal attention under a reentrant checkpoint", HARMLESS)
def checkpointed_causal_attention() -> Program:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return (self.q(x) @ x.transpose(-1, -2) + torch.full((5, 5), -INF).triu(1)).softmax(-1) @ x

    torch.manual_seed(0)
    model = Checkpointed(Attention(), 4, reentrant=True)
    batch = {"x": torch.randn(2, 5, 4)}
    return model, batch, training(model, lambda model, b: model(b["x"]).square().mean(), iterations=2)


@case(
    "a gradient that a hook within a checkpointed block divides by its length",
    fault("backward", op="aten.div", module=ANY, kind="nan"),
)
def checkpointed_hook_divides_by_a_zero_gradient() -> Program:
    def unit_gradient(x: Tensor) -> Tensor:
        h = torch.tanh(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient / gradient.norm(dim=-1, keepdim=True))
        return h

    torch.manual_seed(0)
    model = Checkpointed(chain(lin=nn.Linear(3, 3), act=Code(unit_gradient)))
    batch = {"x": torch.rand(4, 3), "weight": torch.tensor([1.0, 1.0, 0.0, 1.0])}
    return model, batch, training(model, lambda model, b: (model(b["x"]).sum(-1) * b["weight"]).square().mean())


@case(
    "a checkpointed block is called twice; in the second call a row may look at nothing, and is left out of the loss",
    fault("forward", op="aten._softmax", module="attn", kind="nan"),
)
def shared_block_fails_in_the_second_call() -> Program:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(3, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (self.q(x) @ x.transpose(-1, -2) + mask).softmax(-1) @ x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.attn = nn.Linear(3, 3), Attention()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x = checkpoint(self.attn, self.first(x), torch.zeros_like(mask), use_reentrant=False)
            return checkpoint(self.attn, x, mask, use_reentrant=False)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["mask"])[:, 1:].square().mean()

    torch.manual_seed(0)
    mask = torch.zeros(2, 4, 4)
    mask[1, 0] = -INF
    return (model := Net()), {"x": torch.rand(2, 4, 3), "mask": mask}, training(model, loss_of)
