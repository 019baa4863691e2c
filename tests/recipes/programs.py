"""For each rule a program that breaks it and one that does the same by the recipe, on a CPU.

A program gets the parts of a small training and calls them as a user would; it knows nothing of nantrace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

STEPS = 3


def autocast(dtype: torch.dtype = torch.float16, enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


def scaler(scale: float = 1024.0, enabled: bool = True) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)


@dataclass
class Parts:
    """What every program trains with."""

    model: nn.Module
    x: torch.Tensor
    y: torch.Tensor
    scaler: torch.amp.GradScaler = field(default_factory=scaler)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        if not hasattr(self, "_optimizer"):
            self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        return self._optimizer


def parts() -> Parts:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return Parts(model, torch.randn(16, 4), torch.randn(16, 3))


Program = Callable[[Parts], None]


def loss_of(p: Parts) -> torch.Tensor:
    with autocast():
        return F.mse_loss(p.model(p.x), p.y)


def loss_inside(p: Parts) -> None:
    for _ in range(STEPS):
        p.optimizer.zero_grad()
        p.scaler.scale(loss_of(p)).backward()
        p.scaler.step(p.optimizer)
        p.scaler.update()


def loss_outside(p: Parts) -> None:
    for _ in range(STEPS):
        p.optimizer.zero_grad()
        with autocast():
            output = p.model(p.x)
        p.scaler.scale(F.mse_loss(output, p.y.half())).backward()
        p.scaler.step(p.optimizer)
        p.scaler.update()


def loss_outside_in_float(p: Parts) -> None:
    for _ in range(STEPS):
        p.optimizer.zero_grad()
        with autocast():
            output = p.model(p.x)
        p.scaler.scale(F.mse_loss(output.float(), p.y)).backward()
        p.scaler.step(p.optimizer)
        p.scaler.update()


def mean_of_half(p: Parts) -> None:
    """A loss in half precision that autocast leaves so."""
    for _ in range(STEPS):
        p.optimizer.zero_grad()
        with autocast():
            loss = p.model(p.x).abs().mean()
        p.scaler.scale(loss).backward()
        p.scaler.step(p.optimizer)
        p.scaler.update()


def _clipped(p: Parts, clip: Callable[[Parts], object], unscale: bool) -> None:
    for _ in range(STEPS):
        p.optimizer.zero_grad()
        p.scaler.scale(loss_of(p)).backward()
        if unscale:
            p.scaler.unscale_(p.optimizer)
        clip(p)
        p.scaler.step(p.optimizer)
        p.scaler.update()


def clip_scaled(p: Parts) -> None:
    _clipped(p, lambda p: clip_grad_norm_(p.model.parameters(), 1.0), unscale=False)


def clip_unscaled(p: Parts) -> None:
    _clipped(p, lambda p: clip_grad_norm_(p.model.parameters(), 1.0), unscale=True)


def clip_one_by_one(p: Parts) -> None:
    _clipped(p, lambda p: clip_grad_norm_(p.model.parameters(), 1.0, foreach=False), unscale=False)


def clip_scaled_values(p: Parts) -> None:
    _clipped(p, lambda p: clip_grad_value_(p.model.parameters(), 1.0), unscale=False)


def clip_unscaled_values(p: Parts) -> None:
    _clipped(p, lambda p: clip_grad_value_(p.model.parameters(), 1.0), unscale=True)


def clip_to_a_scaled_bound(p: Parts) -> None:
    _clipped(p, lambda p: clip_grad_norm_(p.model.parameters(), 1.0 * p.scaler.get_scale()), unscale=False)


def norm_is_only_read(p: Parts) -> None:
    from torch.nn.utils import get_total_norm

    _clipped(p, lambda p: get_total_norm([q.grad for q in p.model.parameters()]), unscale=False)


def unscaled_by_hand(p: Parts) -> None:
    """Without the scaler's help, but right."""
    for _ in range(STEPS):
        p.optimizer.zero_grad()
        p.scaler.scale(loss_of(p)).backward()
        for q in p.model.parameters():
            q.grad.div_(p.scaler.get_scale())
        p.optimizer.step()


def step_around(p: Parts) -> None:
    for _ in range(STEPS):
        p.optimizer.zero_grad()
        p.scaler.scale(loss_of(p)).backward()
        p.optimizer.step()


def step_around_after_clip(p: Parts) -> None:
    for _ in range(STEPS):
        p.optimizer.zero_grad()
        p.scaler.scale(loss_of(p)).backward()
        clip_grad_norm_(p.model.parameters(), 100.0)
        p.optimizer.step()


def one_optimizer_without_scaler(p: Parts) -> None:
    """Only one of the two losses is scaled, and only its optimizer goes through the scaler."""
    first = torch.optim.SGD(p.model[0].parameters(), lr=0.01)
    second = torch.optim.SGD(p.model[2].parameters(), lr=0.01)
    for _ in range(STEPS):
        first.zero_grad()
        second.zero_grad()
        p.scaler.scale(loss_of(p)).backward(inputs=list(p.model[0].parameters()))
        loss_of(p).backward(inputs=list(p.model[2].parameters()))
        p.scaler.step(first)
        second.step()
        p.scaler.update()


def _accumulated(p: Parts, after_each: Callable[[Parts], None], divide_scaled: bool = False) -> None:
    for _ in range(STEPS):
        p.optimizer.zero_grad()
        for micro in range(4):
            if divide_scaled:
                (p.scaler.scale(loss_of(p)) / 4).backward()
            else:
                p.scaler.scale(loss_of(p) / 4).backward()
            if micro < 3:
                after_each(p)
        p.scaler.step(p.optimizer)
        p.scaler.update()


def update_each_micro_step(p: Parts) -> None:
    _accumulated(p, lambda p: p.scaler.update(p.scaler.get_scale() / 2))


def accumulation(p: Parts) -> None:
    _accumulated(p, lambda p: None)


def accumulation_divided_after(p: Parts) -> None:
    _accumulated(p, lambda p: None, divide_scaled=True)


def unscale_each_micro_step(p: Parts) -> None:
    def unscale(p: Parts) -> None:
        p.scaler.unscale_(p.optimizer)
        p.scaler.update()

    _accumulated(p, unscale)


def update_for_one_of_two(p: Parts) -> None:
    """The second optimizer's gradients are still being summed when the scale is updated."""
    first = torch.optim.SGD(p.model[0].parameters(), lr=0.01)
    second = torch.optim.SGD(p.model[2].parameters(), lr=0.01)
    for iteration in range(4):
        p.scaler.scale(loss_of(p)).backward()
        p.scaler.step(first)
        first.zero_grad()
        if iteration % 2:
            p.scaler.step(second)
            second.zero_grad()
        p.scaler.update()


def _scaled_loss(p: Parts, backward: Callable[[Parts, torch.Tensor], None], dtype: torch.dtype = torch.float16) -> None:
    for _ in range(STEPS):
        p.optimizer.zero_grad()
        with autocast(dtype):
            loss = F.mse_loss(p.model(p.x), p.y)
        backward(p, loss)
        p.scaler.step(p.optimizer)
        p.scaler.update()


def scaled_twice(p: Parts) -> None:
    _scaled_loss(p, lambda p, loss: p.scaler.scale(loss * p.scaler.get_scale()).backward())


def scaling_undone(p: Parts) -> None:
    _scaled_loss(p, lambda p, loss: (p.scaler.scale(loss) / p.scaler.get_scale()).backward())


def scaling_undone_by_tensor(p: Parts) -> None:
    _scaled_loss(p, lambda p, loss: (p.scaler.scale(loss) / p.scaler._scale).backward())


def scaled_loss_unused(p: Parts) -> None:
    def backward(p: Parts, loss: torch.Tensor) -> None:
        p.scaler.scale(loss)
        loss.backward()

    _scaled_loss(p, backward)


def scaled_by_hand_only(p: Parts) -> None:
    """As the scaler would, and so right."""

    def backward(p: Parts, loss: torch.Tensor) -> None:
        p.scaler.scale(loss)
        (loss * p.scaler.get_scale()).backward()

    _scaled_loss(p, backward)


def divided_by_a_number_like_the_scale(p: Parts) -> None:
    """A sum over 1,024 tokens, by chance as many as the scale."""
    _scaled_loss(p, lambda p, loss: p.scaler.scale(loss.mul(16) / 1024).backward())


def weighted_losses(p: Parts) -> None:
    def backward(p: Parts, loss: torch.Tensor) -> None:
        p.scaler.scale(0.5 * loss + 3 * loss.sqrt()).backward()

    _scaled_loss(p, backward)


def backward_inside_autocast(p: Parts) -> None:
    for _ in range(STEPS):
        p.optimizer.zero_grad()
        with autocast():
            loss = F.mse_loss(p.model(p.x), p.y)
            p.scaler.scale(loss).backward()
        p.scaler.step(p.optimizer)
        p.scaler.update()


def backward_in_a_disabled_region(p: Parts) -> None:
    for _ in range(STEPS):
        p.optimizer.zero_grad()
        with autocast():
            loss = F.mse_loss(p.model(p.x), p.y)
            with autocast(enabled=False):
                p.scaler.scale(loss).backward()
        p.scaler.step(p.optimizer)
        p.scaler.update()


def _scheduled(p: Parts, guarded: bool, bad: tuple[int, ...], every: int = 1) -> None:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(p.optimizer, 10)
    for iteration in range(6):
        p.optimizer.zero_grad()
        loss = loss_of(p)
        p.scaler.scale(loss * float("inf") if iteration in bad else loss).backward()
        p.scaler.step(p.optimizer)
        before = p.scaler.get_scale()
        p.scaler.update()
        if (iteration + 1) % every == 0 and not (guarded and p.scaler.get_scale() < before):
            scheduler.step()


def scheduler_moves_on(p: Parts) -> None:
    _scheduled(p, guarded=False, bad=(3,))


def scheduler_is_guarded(p: Parts) -> None:
    _scheduled(p, guarded=True, bad=(3,))


def scheduler_of_epochs(p: Parts) -> None:
    """The last update of an epoch was skipped, others were not."""
    _scheduled(p, guarded=False, bad=(2, 5), every=3)


def bce_on_probabilities(p: Parts) -> None:
    for _ in range(STEPS):
        p.optimizer.zero_grad()
        with autocast():
            loss = F.binary_cross_entropy(torch.sigmoid(p.model(p.x)), p.y.sigmoid())
        p.scaler.scale(loss).backward()
        p.scaler.step(p.optimizer)
        p.scaler.update()


def bce_on_logits(p: Parts) -> None:
    for _ in range(STEPS):
        p.optimizer.zero_grad()
        with autocast():
            loss = F.binary_cross_entropy_with_logits(p.model(p.x), p.y.sigmoid())
        p.scaler.scale(loss).backward()
        p.scaler.step(p.optimizer)
        p.scaler.update()


def bce_in_float32(p: Parts) -> None:
    for _ in range(STEPS):
        p.optimizer.zero_grad()
        with autocast():
            output = p.model(p.x)
            with autocast(enabled=False):
                loss = F.binary_cross_entropy(torch.sigmoid(output.float()), p.y.sigmoid())
        p.scaler.scale(loss).backward()
        p.scaler.step(p.optimizer)
        p.scaler.update()


def half_model_with_scaler(p: Parts) -> None:
    p.model.half()
    optimizer = torch.optim.SGD(p.model.parameters(), lr=0.01)
    p.scaler.scale(p.model(p.x.half()).float().mean()).backward()
    p.scaler.step(optimizer)  # PyTorch refuses: "Attempting to unscale FP16 gradients."


def half_model_without_scaler(p: Parts) -> None:
    p.model.half()
    for _ in range(STEPS):
        p.optimizer.zero_grad()
        p.model(p.x.half()).float().mean().backward()
        p.optimizer.step()


def bfloat16_with_scaler(p: Parts) -> None:
    _scaled_loss(p, lambda p, loss: p.scaler.scale(loss).backward(), torch.bfloat16)


def bfloat16_with_disabled_scaler(p: Parts) -> None:
    p.scaler = scaler(enabled=False)
    bfloat16_with_scaler(p)


def bfloat16_alone(p: Parts) -> None:
    for _ in range(STEPS):
        p.optimizer.zero_grad()
        with autocast(torch.bfloat16):
            loss = F.mse_loss(p.model(p.x), p.y)
        loss.backward()
        clip_grad_norm_(p.model.parameters(), 1.0)
        p.optimizer.step()


def _with_adam(p: Parts, dtype: torch.dtype, eps: float) -> None:
    p.model.to(dtype)
    optimizer = torch.optim.Adam(p.model.parameters(), lr=1e-3, eps=eps)
    for _ in range(STEPS):
        optimizer.zero_grad()
        p.model(p.x.to(dtype)).float().pow(2).mean().mul(100).backward()
        optimizer.step()


def eps_of_float32(p: Parts) -> None:
    _with_adam(p, torch.float16, 1e-8)


def eps_of_float16(p: Parts) -> None:
    _with_adam(p, torch.float16, 1e-4)


def eps_in_bfloat16(p: Parts) -> None:
    _with_adam(p, torch.bfloat16, 1e-8)


def eps_in_float32(p: Parts) -> None:
    _with_adam(p, torch.float32, 1e-8)


#: (rule, program that breaks it, a part of what is said of it)
WRONG: tuple[tuple[str, Program, str], ...] = (
    ("loss_outside_autocast", loss_outside, "the loss MseLoss was computed in float16, outside of the autocast region"),
    ("bce_on_probabilities", bce_on_probabilities, "all above 1 - 1/4,096 are 1"),
    ("clip_before_unscale", clip_scaled, "clip_grad_norm_ clipped 4 gradients to 1 while they were still multiplied"),
    ("clip_before_unscale", clip_one_by_one, "by the scale 1,024, which leaves a norm of at most 0.00098"),
    ("clip_before_unscale", clip_scaled_values, "clip_grad_value_ clipped 4 gradients to 1"),
    ("step_around_scaler", step_around, "SGD.step() was called directly with 4 gradients that are still multiplied"),
    ("step_around_scaler", step_around_after_clip, "by the scale 1,024"),
    ("update_inside_accumulation", update_each_micro_step, "4 gradients held the sum of 1 backward pass and a"),
    ("update_inside_accumulation", update_for_one_of_two, "2 gradients held the sum of 1 backward pass"),
    ("unscale_inside_accumulation", unscale_each_micro_step, "unscale_ divided 4 gradients after"),
    ("loss_scaled_by_hand", scaled_twice, "multiplied by the scale 1,024 by hand before scaler.scale"),
    ("loss_scaled_by_hand", scaling_undone, "divided by the scale 1,024 by hand after scaler.scale"),
    ("loss_scaled_by_hand", scaling_undone_by_tensor, "divided by the scale 1,024 by hand after scaler.scale"),
    ("loss_scaled_by_hand", scaled_loss_unused, "4 gradients of SGD were divided by the scale 1,024 all the same"),
    ("backward_under_autocast", backward_inside_autocast, "backward() ran inside of an autocast region of float16"),
    ("scheduler_after_skip", scheduler_moves_on, "the update was skipped since its last move (attempted 1, committed"),
    ("half_model_with_scaler", half_model_with_scaler, "4 parameters of SGD (param_groups[0]) are float16 themselves"),
    ("scaler_with_bfloat16", bfloat16_with_scaler, "autocast ran in bfloat16, which has the range of float32"),
    ("eps_vanishes", eps_of_float32, "eps=1e-08 of Adam (param_groups[0]) is 0 in float16, the dtype of 4"),
)

#: Programs of which nothing is to be said.
RIGHT: tuple[Program, ...] = (
    loss_inside,
    loss_outside_in_float,
    mean_of_half,
    clip_unscaled,
    clip_unscaled_values,
    clip_to_a_scaled_bound,
    norm_is_only_read,
    unscaled_by_hand,
    one_optimizer_without_scaler,
    accumulation,
    accumulation_divided_after,
    scaled_by_hand_only,
    divided_by_a_number_like_the_scale,
    weighted_losses,
    backward_in_a_disabled_region,
    scheduler_is_guarded,
    scheduler_of_epochs,
    bce_on_logits,
    bce_in_float32,
    half_model_without_scaler,
    bfloat16_with_disabled_scaler,
    bfloat16_alone,
    eps_of_float16,
    eps_in_bfloat16,
    eps_in_float32,
)
