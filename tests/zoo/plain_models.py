"""Small healthy models in plain PyTorch: one for each construct that a tracer could trip over."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.case import Batch, Program
from tests.zoo.training import TrainingStep, ZooModel, cross_entropy_of, mean_square_of


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-3)


def _labels(count: int, classes: int) -> Tensor:
    return torch.arange(count) % classes


def cnn_batch_norm() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4)
    )
    return model, {"x": torch.randn(4, 3, 8, 8), "y": _labels(4, 4)}, TrainingStep(_adam(model), cross_entropy_of)


def channels_last() -> Program:
    model, batch, step = cnn_batch_norm()
    model = model.to(memory_format=torch.channels_last)
    return model, {**batch, "x": batch["x"].contiguous(memory_format=torch.channels_last)}, step


def conv3d() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(1, 4, 3), nn.GroupNorm(2, 4), nn.GELU(), nn.Flatten(), nn.Linear(108, 2))
    return model, {"x": torch.randn(2, 1, 5, 5, 5), "y": _labels(2, 2)}, TrainingStep(_adam(model), cross_entropy_of)


class _Recurrent(nn.Module):
    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(rnn.hidden_size * (2 if rnn.bidirectional else 1), 3)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.rnn(x)
        return self.head(output[:, -1])


def _recurrent(kind: type[nn.RNNBase], **options: Any) -> Program:
    torch.manual_seed(0)
    model = _Recurrent(kind(4, 6, batch_first=True, **options))
    return model, {"x": torch.randn(3, 5, 4), "y": _labels(3, 3)}, TrainingStep(_adam(model), cross_entropy_of)


def gru() -> Program:
    return _recurrent(nn.GRU, bidirectional=True)


def lstm() -> Program:
    return _recurrent(nn.LSTM, num_layers=2, dropout=0.3)


class _PackedLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 4, 2]), batch_first=True)
        _, (hidden, _) = self.rnn(packed)
        return self.head(hidden[-1])


def packed_lstm() -> Program:
    torch.manual_seed(0)
    model = _PackedLSTM()
    return model, {"x": torch.randn(3, 5, 4), "y": _labels(3, 3)}, TrainingStep(_adam(model), cross_entropy_of)


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 3)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding)[:, 0])


def _encoder_batch() -> Batch:
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    return {"x": torch.randn(2, 5, 8), "padding": padding, "y": _labels(2, 3)}


def _encoder_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["padding"]), batch["y"])


def transformer_encoder_train() -> Program:
    torch.manual_seed(0)
    model = _Encoder()
    return model, _encoder_batch(), TrainingStep(_adam(model), _encoder_loss)


def transformer_encoder_eval() -> Program:
    """In eval mode without gradients the layers take a fused path that calls none of their submodules."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            return model(batch["x"], batch["padding"])

    torch.manual_seed(0)
    return _Encoder().eval(), _encoder_batch(), step


def multihead_attention() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(4)
        output, weights = model(batch["x"], batch["x"], batch["x"], attn_mask=mask)
        return output.pow(2).mean() + weights.pow(2).mean()

    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
    return model, {"x": torch.randn(2, 4, 8)}, TrainingStep(_adam(model), loss_of)


class _TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.body, self.head = nn.Embedding(12, 6), nn.Linear(6, 6), nn.Linear(6, 12, bias=False)
        self.head.weight = self.emb.weight
        self.body_again = self.body

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body_again(torch.tanh(self.body(self.emb(ids)))))


def tied_weights() -> Program:
    torch.manual_seed(0)
    model = _TiedModel()
    return model, {"x": torch.arange(12), "y": _labels(12, 5)}, TrainingStep(_adam(model), cross_entropy_of)


def weight_norm() -> Program:
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
    model = nn.Sequential(normed, nn.Tanh(), nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)))
    return model, {"x": torch.randn(4, 4), "y": _labels(4, 3)}, TrainingStep(_adam(model), cross_entropy_of)


class _Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inp, self.head, self.reentrant = nn.Linear(4, 6), nn.Linear(6, 3), reentrant
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.GELU())

    def forward(self, x: Tensor) -> Any:
        return self.head(checkpoint(self.block, self.inp(x), use_reentrant=self.reentrant))


def _checkpointed(*, reentrant: bool) -> Program:
    torch.manual_seed(0)
    model = _Checkpointed(reentrant=reentrant)
    return model, {"x": torch.randn(4, 4), "y": _labels(4, 3)}, TrainingStep(_adam(model), cross_entropy_of)


def checkpoint_reentrant() -> Program:
    return _checkpointed(reentrant=True)


def checkpoint_not_reentrant() -> Program:
    return _checkpointed(reentrant=False)


class _InplaceResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act, self.head = nn.Conv1d(2, 2, 1), nn.ReLU(inplace=True), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y += x
        y[:, 0].mul_(0.5)
        return self.head(self.act(y).mean(-1))


def inplace_relu() -> Program:
    torch.manual_seed(0)
    model = _InplaceResidual()
    return model, {"x": torch.randn(3, 2, 5), "y": _labels(3, 3)}, TrainingStep(_adam(model), cross_entropy_of)


class _KeywordsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.heads = nn.Linear(4, 6), nn.ModuleDict({"a": nn.Linear(6, 2), "b": nn.Linear(6, 3)})

    def forward(self, *, features: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        hidden = torch.relu(self.shared(features)) * options["scale"]
        return {"heads": {name: (head(hidden),) for name, head in self.heads.items()}, "hidden": [hidden], "none": None}


def keywords_and_nested_outputs() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        output = model(features=batch["x"], options={"scale": torch.tensor(2.0), "name": "unused"})
        return sum(F.cross_entropy(logits, batch["y"]) for (logits,) in output["heads"].values())

    torch.manual_seed(0)
    model = _KeywordsOnly()
    return model, {"x": torch.randn(4, 4), "y": _labels(4, 2)}, TrainingStep(_adam(model), loss_of)


def amp_grad_scaler() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-3), torch.amp.GradScaler("cpu", init_scale=64.0)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(batch["x"])
            loss = F.cross_entropy(logits.float(), batch["y"])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    return model, {"x": torch.randn(4, 4), "y": _labels(4, 2)}, step


def lbfgs() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def step(model: nn.Module, batch: Batch) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = mean_square_of(model, batch)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return model, {"x": torch.randn(6, 3)}, step


def embedding_bag_sparse() -> Program:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(20, 6, mode="sum", sparse=True), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.bag(x))

    torch.manual_seed(0)
    model = Bag()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse invariant checks")  # torch says it once a process
        torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1), (1,))
    return model, {"x": torch.randint(0, 20, (4, 3)), "y": _labels(4, 3)}, TrainingStep(optimizer, cross_entropy_of)


def gradient_accumulation() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    optimizer = _adam(model)

    def step(model: nn.Module, batch: Batch) -> list[Tensor]:
        losses = []
        for micro in batch["x"]:
            loss = F.cross_entropy(model(micro), batch["y"]) / len(batch["x"])
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return losses

    return model, {"x": torch.randn(3, 4, 4), "y": _labels(4, 3)}, step


def double_backward() -> Program:
    """A gradient penalty: autograd.grad with create_graph, then backward through it."""

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        x = batch["x"].detach().requires_grad_()
        score = model(x).sum()
        (gradient,) = torch.autograd.grad(score, x, create_graph=True)
        return score.pow(2) + (gradient.norm(dim=1) - 1).pow(2).mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Softplus(), nn.Linear(6, 1))
    return model, {"x": torch.randn(4, 3)}, TrainingStep(_adam(model), loss_of)


#: Every model of this module.
PLAIN_MODELS: tuple[ZooModel, ...] = tuple(
    ZooModel(build.__name__, build)
    for build in (
        cnn_batch_norm,
        channels_last,
        conv3d,
        gru,
        lstm,
        packed_lstm,
        transformer_encoder_train,
        transformer_encoder_eval,
        multihead_attention,
        tied_weights,
        weight_norm,
        checkpoint_reentrant,
        checkpoint_not_reentrant,
        inplace_relu,
        keywords_and_nested_outputs,
        amp_grad_scaler,
        lbfgs,
        embedding_bag_sparse,
        gradient_accumulation,
        double_backward,
    )
)
