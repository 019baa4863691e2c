"""The recipes of "Automatic Mixed Precision examples" in PyTorch's documentation, on a CPU.

The first of them, "typical mixed precision training", is `programs.loss_inside`.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.recipes.programs import STEPS, Parts, Program, autocast, loss_of


def clipping(p: Parts) -> None:
    for _ in range(STEPS):
        p.optimizer.zero_grad()
        p.scaler.scale(loss_of(p)).backward()
        p.scaler.unscale_(p.optimizer)
        torch.nn.utils.clip_grad_norm_(p.model.parameters(), 0.1)
        p.scaler.step(p.optimizer)
        p.scaler.update()


def accumulating(p: Parts) -> None:
    for iteration in range(8):
        loss = loss_of(p) / 4
        p.scaler.scale(loss).backward()
        if (iteration + 1) % 4 == 0:
            p.scaler.unscale_(p.optimizer)
            torch.nn.utils.clip_grad_norm_(p.model.parameters(), 0.1)
            p.scaler.step(p.optimizer)
            p.scaler.update()
            p.optimizer.zero_grad()


def gradient_penalty(p: Parts) -> None:
    for _ in range(STEPS):
        p.optimizer.zero_grad()
        with autocast():
            loss = F.mse_loss(p.model(p.x), p.y)
        scaled = torch.autograd.grad(p.scaler.scale(loss), list(p.model.parameters()), create_graph=True)
        inverse = 1.0 / p.scaler.get_scale()
        gradients = [one * inverse for one in scaled]
        with autocast():
            norm = torch.stack([one.pow(2).sum() for one in gradients]).sum().sqrt()
            loss = loss + norm
        p.scaler.scale(loss).backward()
        p.scaler.step(p.optimizer)
        p.scaler.update()


def several(p: Parts) -> None:
    """Two models, losses and optimizers on one scaler."""
    other = torch.nn.Linear(4, 3)
    second = torch.optim.Adam(other.parameters())
    for _ in range(STEPS):
        p.optimizer.zero_grad()
        second.zero_grad()
        with autocast():
            output0, output1 = p.model(p.x), other(p.x)
            loss0 = F.mse_loss(2 * output0 + 3 * output1, p.y)
            loss1 = F.mse_loss(3 * output0 - 5 * output1, p.y)
        p.scaler.scale(loss0).backward(retain_graph=True)
        p.scaler.scale(loss1).backward()
        p.scaler.unscale_(p.optimizer)
        p.scaler.step(p.optimizer)
        p.scaler.step(second)
        p.scaler.update()


def fused(p: Parts) -> None:
    """A fused optimizer divides by the scale itself, and leaves the gradients scaled."""
    optimizer = torch.optim.AdamW(p.model.parameters(), fused=True)
    for _ in range(STEPS):
        optimizer.zero_grad()
        p.scaler.scale(loss_of(p)).backward()
        p.scaler.step(optimizer)
        p.scaler.update()


def zeroed_in_place(p: Parts) -> None:
    for _ in range(STEPS):
        p.optimizer.zero_grad(set_to_none=False)
        p.scaler.scale(loss_of(p)).backward()
        p.scaler.unscale_(p.optimizer)
        torch.nn.utils.clip_grad_norm_(p.model.parameters(), 0.1)
        p.scaler.step(p.optimizer)
        p.scaler.update()


def checkpointed(p: Parts) -> None:
    from torch.utils.checkpoint import checkpoint

    for _ in range(STEPS):
        p.optimizer.zero_grad()
        with autocast():
            hidden = checkpoint(p.model[0], p.x.requires_grad_(), use_reentrant=False)
            loss = F.mse_loss(p.model[2](p.model[1](hidden)), p.y)
        p.scaler.scale(loss).backward()
        p.scaler.step(p.optimizer)
        p.scaler.update()


DOCUMENTED: tuple[Program, ...] = (
    clipping,
    accumulating,
    gradient_penalty,
    several,
    fused,
    zeroed_in_place,
    checkpointed,
)
