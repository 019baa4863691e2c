"""Finite gradients and harmful updates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import ANY, Batch, End, Expectation, Program, case
from tests.zoo.cases.parts import ReluPerceptron, sgd, training


@case(
    "pytorch/pytorch PR#53843 (2e22 test values), #46849",
    Expectation(
        "contained",
        "gradients",
        phase="post_backward",
        op="aten._foreach_norm",
        kind="inf",
        culprit="all gradients are finite, their norm overflows float32, the clip coefficient is 0: no update at all",
        end=End(loss="finite", params=False, grads=False),
    ),
)
def clip_norm_overflow_zeroes_grads() -> Program:
    torch.manual_seed(0)
    model = ReluPerceptron(4, 8, 2)
    optimizer = sgd(model)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        loss = (model(batch["x"]) * 1e22).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return model, {"x": torch.randn(3, 4)}, step


@case(
    "facebookresearch/detectron2#508, #1128; er-muyue/DeFRCN#8; roytseng-tw/Detectron.pytorch#29",
    Expectation(
        "fault",
        "update",
        phase=ANY,
        op=ANY,
        module=ANY,
        kind="inf",
        culprit="learning rate 5.0: weights grow step after step; the op that overflows at last is the messenger",
        end=End(loss="nonfinite", params=True),
    ),
)
def sgd_huge_lr() -> Program:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch["x"]), batch["y"])

    torch.manual_seed(0)
    model = ReluPerceptron(4, 16, 1)
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 1)}
    return model, batch, training(model, loss_of, iterations=12, optimizer=sgd(model, 5.0))
