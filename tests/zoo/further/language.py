"""Language models: masks, positions, experts, caches, preference losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import ANY, Answer, Batch, Program, case
from tests.zoo.cases.parts import INF, fill, training
from tests.zoo.further.parts import HARMLESS, contained, fault, good_rows


def _square(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).float().pow(2).mean()


class _Masked(nn.Module):
    """One attention head that is told by `mask_scores` what to do with the scores, and by `share` how to add up."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)

    def mask_scores(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask, -INF)

    def share(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = torch.bmm(self.q(x), self.k(x).transpose(1, 2)) * 0.5
        return torch.bmm(self.share(self.mask_scores(scores, mask)), x)


class _Encoder(nn.Module):
    def __init__(self, attn: nn.Module, width: int = 4) -> None:
        super().__init__()
        self.attn, self.head = attn, nn.Linear(width, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.attn(x, mask))


def _masked_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"], batch["mask"]).float().pow(2).mean()


def _one_row_masked() -> Batch:
    mask = torch.zeros(2, 3, 3, dtype=torch.bool)
    mask[1, 2] = True
    return {"x": torch.rand(2, 3, 4), "mask": mask}


@case(
    "the smallest float16 is added to scores of -100 of a row that may look at nothing: all of it is -inf",
    fault("forward", op="aten.add", module="attn", kind="inf", dtype="float16"),
)
def smallest_number_is_added_to_scores() -> Program:
    class Attention(_Masked):
        def mask_scores(self, scores: Tensor, mask: Tensor) -> Tensor:
            lowest = torch.finfo(scores.dtype).min
            return scores - 100.0 + torch.zeros(mask.shape, dtype=scores.dtype).masked_fill(mask, lowest)

    torch.manual_seed(0)
    model, batch = _Encoder(Attention()).half(), _one_row_masked()
    return model, {"x": batch["x"].half(), "mask": batch["mask"]}, training(model, _masked_loss)


@case("a row that may look at nothing gets the smallest float32 everywhere: softmax shares evenly", HARMLESS)
def fully_masked_row_of_smallest_numbers() -> Program:
    class Attention(_Masked):
        def mask_scores(self, scores: Tensor, mask: Tensor) -> Tensor:
            return scores.masked_fill(mask, torch.finfo(scores.dtype).min)

    torch.manual_seed(0)
    model = _Encoder(Attention())
    return model, _one_row_masked(), training(model, _masked_loss)


@case(
    "softmax over a masked row, made zero by nan_to_num; masked_fill passes no gradient to that row",
    contained("forward", op="aten._softmax", module="attn", kind="nan"),
)
def masked_row_is_made_zero() -> Program:
    class Attention(_Masked):
        def share(self, scores: Tensor) -> Tensor:
            return scores.softmax(-1).nan_to_num()

    torch.manual_seed(0)
    model = _Encoder(Attention())
    return model, _one_row_masked(), training(model, _masked_loss)


@case(
    "the same with an added mask: NaN comes back through softmax into every weight",
    fault("forward", op="aten._softmax", module="attn", kind="nan"),
)
def masked_row_is_made_zero_too_late() -> Program:
    class Attention(_Masked):
        def mask_scores(self, scores: Tensor, mask: Tensor) -> Tensor:
            return scores + torch.zeros(mask.shape).masked_fill(mask, -INF)

        def share(self, scores: Tensor) -> Tensor:
            return scores.softmax(-1).nan_to_num()

    torch.manual_seed(0)
    model = _Encoder(Attention())
    return model, _one_row_masked(), training(model, _masked_loss)


@case(
    "queries that are padding get NaN and are left out of the loss; their gradient is not",
    fault("forward", op="aten._softmax", module="attn", kind="nan"),
)
def padded_queries_are_left_out_of_the_loss() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        kept = ~batch["mask"].all(-1)
        return model(batch["x"], batch["mask"])[kept].pow(2).mean()

    class Attention(_Masked):
        def mask_scores(self, scores: Tensor, mask: Tensor) -> Tensor:
            return scores + torch.zeros(mask.shape).masked_fill(mask, -INF)

    torch.manual_seed(0)
    model = _Encoder(Attention())
    return model, _one_row_masked(), training(model, loss_of)


@case(
    "`scores[mask] = -inf` in place, with one row full of it",
    fault("forward", op="aten._softmax", module="attn", kind="nan"),
)
def scores_are_masked_by_assignment() -> Program:
    class Attention(_Masked):
        def mask_scores(self, scores: Tensor, mask: Tensor) -> Tensor:
            scores[mask] = -INF
            return scores

    torch.manual_seed(0)
    model = _Encoder(Attention())
    return model, _one_row_masked(), training(model, _masked_loss)


@case("packed documents: a block-diagonal mask of -inf, and every token sees itself", HARMLESS)
def packed_documents_see_only_themselves() -> Program:
    torch.manual_seed(0)
    document = torch.tensor([[0, 0, 1], [0, 1, 1]])
    mask = document[:, :, None] != document[:, None, :]
    model = _Encoder(_Masked())
    return model, {"x": torch.rand(2, 3, 4), "mask": mask}, training(model, _masked_loss)


@case(
    "queries and keys are brought to length 1 by hand, and the padding embedding is 0",
    fault("forward", op="aten.div", module="attn", kind="nan"),
)
def query_of_length_zero() -> Program:
    class Attention(_Masked):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            q = self.q(x)
            q = q / q.norm(dim=-1, keepdim=True)
            return torch.bmm(torch.bmm(q, x.transpose(1, 2)).masked_fill(mask, -INF).softmax(-1), x)

    torch.manual_seed(0)
    model = _Encoder(Attention())
    with torch.no_grad():
        model.attn.q.bias.zero_()
    x = torch.rand(2, 3, 4)
    x[1, 2] = 0.0
    mask = torch.zeros(2, 3, 3, dtype=torch.bool)
    return model, {"x": x, "mask": mask}, training(model, _masked_loss)


@case(
    "positions beyond 65504 are cast to float16 before the angle is computed",
    fault("forward", op="aten._to_copy", module="rope", kind="inf", dtype="float16"),
)
def position_does_not_fit_half() -> Program:
    class Rotary(nn.Module):
        frequency: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequency", torch.tensor([1.0, 0.01]))

        def forward(self, x: Tensor, position: Tensor) -> Tensor:
            angle = position.to(x.dtype)[:, None] * self.frequency
            real, imaginary = x.chunk(2, -1)
            turned = [
                real * angle.cos() - imaginary * angle.sin(),
                real * angle.sin() + imaginary * angle.cos(),
            ]
            return torch.cat(turned, -1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rope, self.head = Rotary(), nn.Linear(4, 1)

        def forward(self, x: Tensor, position: Tensor) -> Tensor:
            return self.head(self.rope(x, position))

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["position"]).float().pow(2).mean()

    torch.manual_seed(0)
    model = Net().half()
    batch = {"x": torch.rand(3, 4).half(), "position": torch.tensor([0, 100, 80000])}
    return model, batch, training(model, loss_of)


@case(
    "model.half() makes the base of the rotary frequencies infinite: all but the first frequency are 0",
    contained("state", None, buffers_bad=("rope.base",), kind="inf"),
)
def rotary_base_becomes_infinite() -> Program:
    class Rotary(nn.Module):
        base: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("base", torch.tensor(500000.0))

        def forward(self, x: Tensor) -> Tensor:
            frequency = 1.0 / self.base ** torch.tensor([0.0, 0.5, 0.75], dtype=x.dtype)
            return x * torch.cos(frequency)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rope, self.head = Rotary(), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rope(x))

    torch.manual_seed(0)
    model = Net().half()
    return model, {"x": good_rows().half()}, training(model, _square)


@case(
    "attention scaled by the log of the position, at least 1: log(0) is clamped",
    contained("forward", op="aten.log", module="scale", kind="inf", alts=(Answer("expected"),)),
)
def log_of_position_zero_is_clamped() -> Program:
    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            position = torch.arange(x.shape[0]).float()
            return x * (position.log() / 2.0).clamp(min=1.0)[:, None]

    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.head = Scale(), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.scale(x))

    model = Net()
    return model, {"x": good_rows()}, training(model, _square)


class _Router(nn.Module):
    """Sigmoid gates, the best two, brought to a sum of 1 without a floor."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        top = torch.sigmoid(self.gate(x)).topk(2, -1)
        return top.values / top.values.sum(-1, keepdim=True), top.indices


@case(
    "sigmoid gates of two experts underflow in float16, and are brought to a sum of 1",
    fault("forward", op="aten.div", module="router", kind="nan", dtype="float16"),
)
def chosen_gates_underflow() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = _Router()
            self.value = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            share, index = self.router(x)
            return (self.value.weight.t()[index] * share[..., None]).sum(1)

    torch.manual_seed(0)
    model = Net().half()
    fill(model.router.gate, 0.0, -30.0)
    return model, {"x": good_rows().half()}, training(model, _square)


@case(
    "the balance loss averages the gates of each expert's tokens, and one expert has none",
    fault("forward", op="aten.mean", module="balance", kind="nan"),
)
def expert_without_tokens() -> Program:
    class Balance(nn.Module):
        def forward(self, gates: Tensor) -> Tensor:
            chosen = gates.argmax(-1)
            return torch.stack([gates[chosen == e, e].mean() for e in range(gates.shape[-1])]).pow(2).sum()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.balance = nn.Linear(3, 4), Balance()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            gates = self.gate(x).softmax(-1)
            return gates, self.balance(gates)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        gates, balance = model(batch["x"])
        return gates.pow(2).mean() + 0.01 * balance

    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.gate.bias[3] = -100.0
    return model, {"x": good_rows()}, training(model, loss_of)


@case("an expert is called with no token at all and adds nothing", HARMLESS)
def expert_is_called_with_nothing() -> Program:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(3, 3), nn.ModuleList(nn.Linear(3, 2) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            gates = self.gate(x).softmax(-1)
            chosen = gates.argmax(-1)
            out = x.new_zeros(x.shape[0], 2)
            for number, expert in enumerate(self.experts):
                tokens = (chosen == number).nonzero()[:, 0]
                out = out.index_add(0, tokens, expert(x[tokens]) * gates[tokens, number, None])
            return out

    torch.manual_seed(0)
    model = Experts()
    with torch.no_grad():
        model.gate.bias[1] = -100.0
    return model, {"x": good_rows()}, training(model, _square)


@case(
    "the square of logsumexp of float16 logits (z-loss) leaves the range",
    fault("loss", op="aten.pow", module=None, kind="inf", dtype="float16"),
)
def z_loss_overflows() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"])
        z = torch.logsumexp(logits, -1)
        return F.cross_entropy(logits.float(), batch["y"]) + 1e-4 * z.pow(2).mean().float()

    torch.manual_seed(0)
    model = nn.Linear(3, 4).half()
    fill(model, 100.0)
    return model, {"x": torch.ones(4, 3).half(), "y": torch.tensor([0, 1, 2, 3])}, training(model, loss_of)


@case(
    "preference loss by hand: the log of a sigmoid of -200",
    fault("loss", op="aten.log", module=None, kind="inf"),
)
def preference_log_of_sigmoid() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        better, worse = model(batch["x"]).squeeze(-1).chunk(2)
        margin = (better - worse) - batch["reference"]
        return -torch.log(torch.sigmoid(margin)).mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    batch = {"x": good_rows(), "reference": torch.tensor([0.1, 200.0])}
    return model, batch, training(model, loss_of)


@case(
    "the third KL estimator takes exp of a log-ratio of 100",
    fault("loss", op="aten.exp", module=None, kind="inf"),
)
def kl_estimator_overflows() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        logp = F.log_softmax(model(batch["x"]), -1).gather(-1, batch["y"][:, None])[:, 0]
        ratio = batch["reference"] - logp
        return (ratio.exp() - ratio - 1).mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    with torch.no_grad():
        model.bias[2] = -120.0
    batch = {"x": good_rows(), "y": torch.tensor([0, 1, 2, 3]), "reference": torch.full((4,), -1.0)}
    return model, batch, training(model, loss_of)


@case(
    "policy and reference forbid the same token: the ratio of their log-probabilities is -inf - -inf",
    fault("loss", op="aten.sub", module=None, kind="nan"),
)
def forbidden_token_in_the_log_ratio() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"])
        with torch.no_grad():
            reference = F.log_softmax((logits * 0.9).masked_fill(batch["forbidden"], -INF), -1)
        policy = F.log_softmax(logits.masked_fill(batch["forbidden"], -INF), -1)
        ratio = (policy - reference).gather(-1, batch["y"][:, None])
        return ratio.exp().mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    forbidden = torch.tensor([False, False, False, True])
    batch = {"x": good_rows(), "forbidden": forbidden, "y": torch.tensor([0, 1, 3, 2])}
    return model, batch, training(model, loss_of)


@case(
    "label smoothing gives forbidden words a share, and their log-probability is -inf",
    fault("loss", op="aten.neg", module=None, kind="inf"),
)
def smoothed_labels_reach_forbidden_words() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"]).masked_fill(batch["forbidden"], -INF)
        return F.cross_entropy(logits, batch["y"], label_smoothing=0.1)

    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    forbidden = torch.tensor([False, False, False, True])
    return model, {"x": good_rows(), "forbidden": forbidden, "y": torch.tensor([0, 1, 2, 0])}, training(model, loss_of)


@case("the bias of words that only pad the vocabulary is -inf, a parameter under weight decay", HARMLESS)
def vocabulary_is_padded_by_a_bias() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    with torch.no_grad():
        model.bias[4] = -INF
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {"x": good_rows(), "y": torch.tensor([0, 1, 2, 3])}
    return model, batch, training(model, loss_of, iterations=2, optimizer=optimizer)


@case(
    "a summed loss is divided by the number of tokens, and every label is ignored",
    fault("loss", op="aten.div", module=None, kind="nan"),
)
def sum_over_ignored_labels_is_divided() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        total = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
        return total / (batch["y"] != -100).sum()

    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    return model, {"x": good_rows(), "y": torch.full((4,), -100)}, training(model, loss_of)


@case("the same, but by at least one token", HARMLESS)
def sum_over_ignored_labels_is_divided_by_one() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        total = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
        return total / (batch["y"] != -100).sum().clamp(min=1)

    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    return model, {"x": good_rows(), "y": torch.full((4,), -100)}, training(model, loss_of)


@case(
    "an embedding is used as the head too, without a scale, in float16",
    fault("forward", op="aten.mm", module="", kind="inf", dtype="float16"),
)
def tied_head_overflows() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(5, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.emb(x), self.emb.weight)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]).float(), batch["y"])

    torch.manual_seed(0)
    model = Net().half()
    fill(model.emb, 100.0)
    return model, {"x": torch.tensor([0, 1, 2]), "y": torch.tensor([1, 2, 3])}, training(model, loss_of)


@case(
    "logits overflow in float16 and a soft cap bends them back",
    contained("forward", op="aten.addmm", module="head", kind="inf"),
)
def soft_cap_takes_an_overflow() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return 30.0 * torch.tanh(self.head(x) / 30.0)

    torch.manual_seed(0)
    model = Net().half()
    fill(model.head, 30000.0)
    return model, {"x": torch.ones(4, 3).half()}, training(model, _square)


class _Quantized(nn.Module):
    """Rounds each row to 8 bits by its largest magnitude, without a floor for the scale."""

    def __init__(self, as_integers: bool) -> None:
        super().__init__()
        self.as_integers = as_integers

    def forward(self, x: Tensor) -> Tensor:
        scale = x.detach().abs().amax(-1, keepdim=True) / 127
        steps = (x / scale).round().clamp(-127, 127)
        if self.as_integers:
            steps = steps.to(torch.int8).to(x.dtype)
        return x + (steps * scale - x).detach()


def _quantizing(as_integers: bool) -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), _Quantized(as_integers), nn.Linear(4, 1))
    x = good_rows()
    x[2] = 0.0
    return model, {"x": x}, training(model, _square)


@case(
    "fake quantization of a row of zeros: its scale is 0",
    fault("forward", op="aten.div", module="1", kind="nan"),
)
def quantized_row_of_zeros() -> Program:
    return _quantizing(as_integers=False)


@case(
    "quantization of a row of zeros to integers: the NaN ends in the cast",
    contained("forward", op="aten.div", module="1", kind="nan"),
)
def row_of_zeros_becomes_integers() -> Program:
    return _quantizing(as_integers=True)


@case(
    "the scale of a low-rank update was computed as alpha / 0",
    fault("state", None, buffers_bad=("lora.scaling",), kind="inf"),
)
def low_rank_scale_is_infinite() -> Program:
    class LowRank(nn.Module):
        scaling: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2, bias=False), nn.Linear(2, 4, bias=False)
            self.register_buffer("scaling", torch.tensor(16.0) / torch.tensor(0.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) * self.scaling

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.lora = nn.Linear(3, 4), LowRank()

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.lora(x)

    torch.manual_seed(0)
    model = Net()
    fill(model.lora.b, 0.0)
    return model, {"x": good_rows()}, training(model, _square)


@case(
    "a low-rank update is merged into float16 weights before the forward: the product leaves the range",
    fault("update", ANY, op="aten.mul", module=None, kind="inf"),
)
def low_rank_update_is_merged() -> Program:
    torch.manual_seed(0)
    model = nn.Linear(3, 4).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(model: Any, batch: Batch) -> Tensor:
        with torch.no_grad():
            delta = (batch["b"] @ batch["a"]) * 512.0
            model.weight.add_(delta)
        optimizer.zero_grad()
        loss = _square(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    batch = {"x": good_rows().half(), "a": torch.full((2, 3), 10.0).half(), "b": torch.full((4, 2), 10.0).half()}
    return model, batch, step


@case(
    "a document without tokens in a packed batch: its mean is 0 / 0",
    fault("forward", op="aten.div", module="pool", kind="nan"),
)
def document_without_tokens() -> Program:
    class Pool(nn.Module):
        def forward(self, x: Tensor, document: Tensor) -> Tensor:
            total = x.new_zeros(3, x.shape[-1]).index_add(0, document, x)
            return total / torch.bincount(document, minlength=3)[:, None]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.pool, self.head = nn.Embedding(6, 4), Pool(), nn.Linear(4, 1)

        def forward(self, x: Tensor, document: Tensor) -> Tensor:
            return self.head(self.pool(self.emb(x), document))

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["document"]).pow(2).mean()

    torch.manual_seed(0)
    model = Net()
    batch = {"x": torch.tensor([1, 2, 3, 4]), "document": torch.tensor([0, 0, 2, 2])}
    return model, batch, training(model, loss_of)
