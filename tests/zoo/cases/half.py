"""Values born because float16 ends at 65504 and an eps of 1e-8 is 0 in it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Answer, Batch, End, Expectation, Program, case
from tests.zoo.cases import attention
from tests.zoo.cases.parts import FeedForward, ReluPerceptron, RMSNorm, fill, sgd, training


@case(
    "huggingface/transformers#5651, #9295, #14189",
    Expectation(
        "fault",
        "forward",
        phase="forward",
        op="aten.addmm",
        module="block.1.ff.wo",
        kind="inf",
        dtype="float16",
        also=(("forward", "aten.mul", "block.1.norm"),),
        end=End(loss="nonfinite", params=True),
    ),
)
def t5_ff_fp16_overflow() -> Program:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ff, self.norm = FeedForward(8, 32), RMSNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.ff(x))

    class T5(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.block:
                x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    model = T5().half()
    fill(model.block[1].ff.wi, 10.0)
    fill(model.block[1].ff.wo, 100.0)
    batch = {"x": torch.ones(2, 3, 8).half()}
    return model, batch, training(model, lambda model, batch: model(batch["x"]).float().pow(2).mean())


@case(
    "pytorch/pytorch PR#133085; xlite-dev/LeetCUDA PR#335",
    Expectation(
        "contained",
        "forward",
        phase="forward",
        op="aten.pow",
        module="norm",
        kind="inf",
        dtype="float16",
        culprit="x^2 overflows and rsqrt(inf) is 0: the output is silently zero, nothing nonfinite reaches the loss",
        end=End(loss="finite", params=False),
    ),
)
def rmsnorm_fp16_square_overflow_absorbed() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.norm, self.head = nn.Linear(4, 4), RMSNorm(4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.proj(x)))

    torch.manual_seed(0)
    model = Net().half()
    fill(model.proj, 1.0)
    batch = {"x": torch.full((2, 4), 100.0).half()}
    return model, batch, training(model, lambda model, batch: model(batch["x"]).float().pow(2).mean())


@case(
    "huggingface/diffusers PR#13316",
    Expectation(
        "fault",
        "forward",
        phase="forward",
        op="aten.div",
        module="decoder.norm",
        kind="nan",
        dtype="float16",
        culprit="eps 1e-12 is 0 in float16, and one vector is zero",
        end=End(loss="nonfinite", params=True),
    ),
)
def normalize_fp16_zero_vector() -> Program:
    class Normalize(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.normalize(x, dim=1)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.out = nn.Conv1d(2, 4, 1, bias=False), Normalize(), nn.Conv1d(4, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(self.conv(x)))

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = Decoder()

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(x)

    torch.manual_seed(0)
    model = Autoencoder().half()
    x = torch.randn(1, 2, 5).half()
    x[..., 2] = 0
    return model, {"x": x}, training(model, lambda model, batch: model(batch["x"]).float().pow(2).mean())


@case(
    "pytorch/pytorch#41527; deepspeedai/DeepSpeed#581",
    Expectation(
        "fault",
        "backward",
        phase="backward",
        op="aten.native_layer_norm_backward",
        module="norm",
        node="NativeLayerNormBackward0",
        kind="nan",
        dtype="float16",
        culprit="the forward output of a padding row is 0; its saved rstd is inf and only visible as a third output",
        end=End(loss="finite", params=True),
    ),
)
def layernorm_half_hidden_rstd() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(4, eps=1e-12), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(x))

    torch.manual_seed(0)
    model = Net().half()
    x = torch.randn(3, 4).half()
    x[1] = 0
    batch = {"x": x.requires_grad_()}
    return model, batch, training(model, lambda model, batch: model(batch["x"]).float().pow(2).mean())


@case(
    "pytorch/pytorch#82493 (fp16 output.sum() overflows); chelsea0x3b/dfdx#748 (count > 65504)",
    Expectation(
        "fault",
        "loss",
        phase="forward",
        op="aten.sum",
        module="<Dice>",
        kind="inf",
        dtype="float16",
        culprit="the sum over 70000 pixels exceeds 65504",
        end=End(loss="nonfinite", params=True),
    ),
)
def dice_sum_fp16_overflow() -> Program:
    class Segmentation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).sigmoid()

    class Dice(nn.Module):
        def forward(self, p: Tensor, target: Tensor) -> Tensor:
            return 1 - 2 * (p * target).sum() / (p.sum() + target.sum())

    torch.manual_seed(0)
    model, criterion = Segmentation().half(), Dice()
    fill(model.head, 8.0, 8.0)
    batch = {"x": torch.rand(70000, 2).half(), "y": torch.ones(70000, 1).half()}
    return model, batch, training(model, lambda model, batch: criterion(model(batch["x"]), batch["y"]))


@case(
    "afiaka87/glide-finetune#5, PR#6; NVIDIA/apex#240; pytorch/pytorch#8860; google-deepmind/optax#1754",
    Expectation(
        "fault",
        "optimizer",
        phase="optimizer",
        op="aten.addcdiv_",
        kind="naninf",
        dtype="float16",
        culprit="eps 1e-8 is 0 in float16: zero gradients give 0/0; forward, loss and gradients are all finite",
        end=End(loss="finite", grads=False, params=True),
    ),
)
def adam_fp16_eps_underflow() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"])[:, 0].float().mean()

    torch.manual_seed(0)
    model = ReluPerceptron(4, 8, 2).half()
    batch = {"x": torch.randn(3, 4).half()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    return model, batch, training(model, loss_of, optimizer=optimizer)


@case(
    "huggingface/transformers#9295, PR#9487 (real T5 classes)",
    Expectation(
        "contained",
        "forward",
        phase="forward",
        op="aten.mm",
        module="encoder.block.1.layer.1.DenseReluDense.wo",
        kind="inf",
        dtype="float16",
        culprit="the block clamps inf to 64504, and the gradients through the clamp are 0",
    ),
)
def hf_t5_fp16_overflow_clamped() -> Program:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    model = T5ForConditionalGeneration(config).half()
    with torch.no_grad():
        feed_forward = model.encoder.block[1].layer[1].DenseReluDense
        feed_forward.wi.weight.fill_(10.0)
        feed_forward.wo.weight.fill_(300.0)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return model(input_ids=batch["ids"], labels=batch["ids"]).loss.float()

    batch = {"ids": torch.randint(3, 32, (2, 6), generator=torch.Generator().manual_seed(1))}
    return model, batch, training(model, loss_of, optimizer=sgd(model, 1e-3))


@case(
    "huggingface/transformers PR#9487 (clamped overflow)",
    Expectation(
        "contained",
        "forward",
        phase="forward",
        op="aten.addmm",
        module="ff.wo",
        kind="inf",
        dtype="float16",
        culprit="the float16 overflow that the clamp hides is news, the log(0) of the bucket before it is not",
    ),
)
def overflow_contained_behind_bucket_log() -> Program:
    class ClampedFeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wi, self.wo = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.wo(torch.relu(self.wi(x))).clamp(-60000, 60000)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        attended = model.attn(batch["x"]).float().pow(2).mean()
        return attended + 1e-4 * F.layer_norm(model.ff(batch["x"]).float(), (4,)).pow(2).mean()

    bucketed, _, _ = attention.t5_bucket_log_only.build()
    model = nn.ModuleDict({"attn": bucketed, "ff": ClampedFeedForward()})
    model.half()
    fill(model.ff.wi, 50.0)
    fill(model.ff.wo, 300.0)
    batch = {"x": torch.rand(2, 6, 4).half()}
    return model, batch, training(model, loss_of, optimizer=sgd(model, 1e-4))


@case(
    "",
    Expectation(
        "contained",
        "forward",
        phase="forward",
        op="aten.addmm",
        module="student.0",
        kind="inf",
        alts=(Answer("contained", "forward", op="aten.addmm", module="teacher.0"),),
        culprit="ReLU6 saturates the overflow in both branches; the student's is the one that trains",
    ),
)
def contained_teacher_and_student() -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Sequential(nn.Linear(4, 4), nn.ReLU6())
            self.student = nn.Sequential(nn.Linear(4, 4), nn.ReLU6())
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.teacher(x)
            hidden = self.student(x)
            return self.head(hidden).float().pow(2).mean() + F.mse_loss(hidden.float(), target.float())

    torch.manual_seed(0)
    model = Net().half()
    fill(model.teacher[0], 30.0)
    fill(model.student[0], 30.0)
    x = torch.rand(3, 4).half()
    x[1] = 1000.0
    return model, {"x": x}, training(model, lambda model, batch: model(batch["x"]), optimizer=sgd(model, 1e-4))
