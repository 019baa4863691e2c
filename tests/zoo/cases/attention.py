"""Masks in attention: infinities that belong there, and the NaN that some of them turn into."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Answer, Batch, End, Expectation, Program, case
from tests.zoo.cases.parts import INF, training


@case(
    "pytorch/pytorch#41508, #26098, #160064; fix proposal PR#189045",
    Expectation(
        "fault",
        "forward",
        phase="forward",
        op="aten._softmax",
        module="layers.0.attn",
        kind="nan",
        culprit="row 1 of the key padding mask masks every key; the loss does not even read that sample",
        end=End(loss="finite", params=True),
    ),
)
def mha_all_masked_row() -> Program:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            return self.norm(x + self.attn(x, x, x, key_padding_mask=padding)[0])

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers = nn.Linear(3, 8), nn.ModuleList([Block(), Block()])
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x, padding)
            return self.head(x)

    torch.manual_seed(0)
    model = Encoder()
    padding = torch.tensor([[False, False, False, True], [True] * 4])
    batch = {"x": torch.randn(2, 4, 3), "pad": padding}
    return model, batch, training(model, lambda model, batch: model(batch["x"], batch["pad"])[0].pow(2).mean())


@case(
    "cerebroai/reformers#3; erickrf/multiffn-nli#10",
    Expectation(
        "fault",
        "forward",
        phase="forward",
        op="aten.mul",
        module="enc.attn",
        kind="naninf",
        culprit="0 * -inf for every kept key: the scalar looks like a mask's, which must not hide the NaN it makes",
        end=End(loss="nonfinite", params=True),
    ),
)
def mask_times_neg_inf() -> Program:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            bias = (1.0 - keep) * -INF
            return (self.q(x) @ self.k(x).transpose(-1, -2) + bias[:, None, :]).softmax(-1) @ x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc = nn.ModuleDict({"attn": Attention()})

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            return self.enc["attn"](x, keep)

    torch.manual_seed(0)
    model = Net()
    batch = {"x": torch.randn(1, 3, 4), "keep": torch.tensor([[1.0, 1.0, 0.0]])}
    return model, batch, training(model, lambda model, batch: model(batch["x"], batch["keep"]).mean())


class _AlibiAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.o((q @ k.transpose(-1, -2) / 8**0.5 + bias).softmax(-1) @ v)


class _AlibiModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.blocks = nn.Embedding(10, 8), nn.ModuleList([_AlibiAttention(), _AlibiAttention()])
        self.head = nn.Linear(8, 10)

    def forward(self, ids: Tensor, bias: Tensor) -> Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = x + block(x, bias)
        return self.head(x)


def _next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _alibi(*, empty_row: bool) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = _AlibiModel()
    distance = torch.arange(5)[None] - torch.arange(5)[:, None]
    bias = (distance * 0.25).float().masked_fill(distance > 0, -INF)[None].repeat(2, 1, 1)
    if empty_row:
        bias[0, :, 0] = -INF
    return model, torch.randint(0, 10, (2, 5)), bias


def _alibi_loss(model: Any, batch: Batch) -> Tensor:
    return _next_token_loss(model(batch["ids"], batch["bias"]), batch["ids"])


@case("", Expectation("expected", culprit="a mask of slopes and -inf comes with the batch"))
def alibi_mask_in_batch() -> Program:
    model, ids, bias = _alibi(empty_row=False)
    return model, {"ids": ids, "bias": bias}, training(model, _alibi_loss, iterations=2)


@case(
    "",
    Expectation(
        "fault",
        "forward",
        phase="forward",
        op="aten._softmax",
        module="blocks.0",
        kind="nan",
        alts=(Answer("fault", "input", tensor="bias"),),
        culprit="the first row of the mask in the batch masks every key",
    ),
)
def alibi_mask_in_batch_empty_row() -> Program:
    model, ids, bias = _alibi(empty_row=True)
    return model, {"ids": ids, "bias": bias}, training(model, _alibi_loss, iterations=2)


@case(
    "",
    Expectation(
        "fault",
        "forward",
        phase="forward",
        op="aten._softmax",
        module="blocks.0",
        kind="nan",
        culprit="the same, with a mask that the step holds itself",
    ),
)
def alibi_mask_in_closure_empty_row() -> Program:
    model, ids, bias = _alibi(empty_row=True)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return _next_token_loss(model(batch["ids"], bias), batch["ids"])

    return model, {"ids": ids}, training(model, loss_of, iterations=2)


@case(
    "standard causal attention (karpathy/nanoGPT style); nn.Transformer.generate_square_subsequent_mask",
    Expectation(
        "expected",
        buffers_bad=("h.0.mask", "h.1.mask"),
        culprit="a -inf buffer goes through `add` (inf in, inf out) and ends in softmax",
        end=End(loss="finite", params=False, grads=False, buffers=True),
    ),
)
def legit_causal_mask() -> Program:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.o = nn.Linear(8, 24), nn.Linear(8, 8)
            self.register_buffer("mask", torch.full((6, 6), -INF).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = q @ k.transpose(-1, -2) / 8**0.5 + self.mask[: x.shape[1], : x.shape[1]]
            return self.o(scores.softmax(-1) @ v)

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.h = nn.Embedding(10, 8), nn.ModuleList([Attention(), Attention()])
            self.head = nn.Linear(8, 10)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.emb(tokens)
            for block in self.h:
                x = x + block(x)
            return self.head(x)

    torch.manual_seed(0)
    model = GPT()
    batch = {"t": torch.randint(0, 10, (2, 6))}
    return (
        model,
        batch,
        training(model, lambda model, batch: _next_token_loss(model(batch["t"]), batch["t"]), iterations=2),
    )


@case(
    "standard masked_fill(-inf) attention",
    Expectation("expected", end=End(loss="finite", params=False, grads=False)),
)
def legit_mask_built_per_step() -> Program:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            scores = (self.q(x) @ self.k(x).transpose(-1, -2)).masked_fill(padding[:, None, :], -INF)
            return scores.softmax(-1) @ x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Attention()

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            return self.attn(x, padding)

    torch.manual_seed(0)
    model = Net()
    batch = {"x": torch.randn(2, 3, 4), "pad": torch.tensor([[False, False, True], [False, True, True]])}
    return (
        model,
        batch,
        training(model, lambda model, batch: model(batch["x"], batch["pad"]).pow(2).mean(), iterations=2),
    )


@case(
    "pytorch SDPA uses a safe softmax (pytorch PR#189045 text); contrast with mha_all_masked_row",
    Expectation(
        "expected",
        culprit="a -inf bias and a -inf logsumexp inside, output and gradients finite",
        end=End(loss="finite", params=False, grads=False),
    ),
)
def legit_sdpa_fully_masked_row() -> Program:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=keep)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Attention()

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            return self.attn(x, keep)

    torch.manual_seed(0)
    model = Net()
    keep = torch.tensor([[[True, True, False], [True, True, False], [False, False, False]]])
    batch = {"x": torch.randn(1, 3, 4), "keep": keep}
    return (
        model,
        batch,
        training(model, lambda model, batch: model(batch["x"], batch["keep"]).pow(2).mean(), iterations=2),
    )


@case(
    "huggingface/transformers (relative position buckets of T5: log(0), cast to int, not selected)",
    Expectation("expected", debatable="a born -inf that an integer cast and where() drop, on every healthy step"),
)
def t5_bucket_log_only() -> Program:
    class RelativeBias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(8, 2)

        def forward(self, length: int) -> Tensor:
            distance = (torch.arange(length)[:, None] - torch.arange(length)[None]).abs()
            large = 4 + (torch.log(distance.float() / 4) / math.log(4) * 4).to(torch.long)
            return self.emb(torch.where(distance < 4, distance, large.clamp(max=7))).permute(2, 0, 1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.qk, self.out = RelativeBias(), nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            scores = (self.qk(x) @ x.transpose(-1, -2))[:, None] + self.bias(x.shape[1])
            return self.out(scores.softmax(-1).mean(1) @ x)

    torch.manual_seed(0)
    model = Net()
    return (
        model,
        {"x": torch.randn(2, 6, 4)},
        training(model, lambda model, batch: model(batch["x"]).pow(2).mean(), iterations=2),
    )
