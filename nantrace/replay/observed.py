"""What one run of a step is made of, in numbers: losses, gradient norm, scalers, optimizers, autocast.

Listens as `ends` does, and changes nothing. Losses and norms are told without the loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from nantrace.capture.lifecycle import StepListener, parameters_of
from nantrace.flow.values import unseen


class Observed(StepListener):
    """Ask for `loss` and `norm` when `ended` was told what the run returned.

    Attributes:
        losses: of each backward pass, unscaled; NaN for one of several elements that is not all finite.
        scalers: (enabled, scale before the step) of each scaler that was used.
        optimizers: class names of those that stepped, or were skipped by a scaler.
        regions: dtype of each autocast region that was entered; filled by `precision.autocast_seen`.
        training: a module was in training mode when the run ended.
        compiled: something was compiled in the run.
        failure: of this listener's own.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.losses: list[float] = []
        self.scalers: list[tuple[bool, float]] = []
        self.optimizers: list[str] = []
        self.regions: list[torch.dtype] = []
        self.training = False
        self.compiled = False
        self.failure: Exception | None = None
        self._given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # scaled -> itself and what was scaled
        self._scale = 1.0  # that gradients still carry
        self._norm: float | None = None
        self._returned: float | None = None

    @property
    def loss(self) -> float | None:
        """The first nonfinite one, else the last; what the step returned if it ran no backward pass."""
        if not self.losses:
            return self._returned
        return next((loss for loss in self.losses if not math.isfinite(loss)), self.losses[-1])

    @property
    def norm(self) -> float | None:
        return self._norm

    def scaler_seen(self, scaler: torch.amp.GradScaler) -> None:
        scale = scaler._init_scale if scaler._scale is None else float(scaler._scale)
        self.scalers.append((scaler.is_enabled(), float(scale)))

    def loss_scaled(self, scaler: torch.amp.GradScaler, given: Any, scaled: Any) -> None:
        if scaler.is_enabled() and scaler._scale is not None:
            self._scale = float(scaler._scale)
            if isinstance(given, torch.Tensor):
                self._given[id(scaled)] = (scaled, given)

    def backward_begins(self, roots: tuple[torch.Tensor, ...], accumulates: bool, nested: bool) -> None:
        if nested or not accumulates:
            return
        with unseen():
            for root in roots:
                pair = self._given.get(id(root))
                self.losses.append(_number(root) / self._scale if pair is None else _number(pair[1]))

    def gradients_unscaled(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        self._scale = 1.0

    def gradients_clipped(self, parameters: Any, max_norm: float, total_norm: torch.Tensor) -> None:
        if self._norm is None:
            with unseen():
                self._norm = float(total_norm) / self._scale

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        self._meet(optimizer)

    def scaler_stepped(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, found_inf: tuple[torch.Tensor, ...]
    ) -> None:
        self._meet(optimizer)

    def recorder_failed(self, error: Exception) -> None:
        self.failure = self.failure or error

    def ended(self, returned: Any) -> None:
        """The run is over, and its state not yet wound back."""
        self.training = any(module.training for module in self._model.modules())
        self._given.clear()
        with unseen():
            self._look(self._model.parameters())
            if isinstance(returned, torch.Tensor) and returned.numel() == 1:
                self._returned = _number(returned)
            elif isinstance(returned, float):
                self._returned = returned

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers.append(type(optimizer).__name__)
        with unseen():
            self._look(parameters_of(optimizer))

    def _look(self, parameters: Iterable[torch.Tensor]) -> None:
        """The first look counts: before an update clears or clips them."""
        gradients = [p.grad for p in parameters if p.grad is not None and not p.grad.is_meta]
        if self._norm is None and gradients:
            self._norm = math.sqrt(sum(_squares(g) for g in gradients)) / self._scale


def _squares(gradient: torch.Tensor) -> float:
    plain = gradient.detach()
    if plain.layout != torch.strided:
        plain = plain.coalesce().values() if plain.layout == torch.sparse_coo else plain.values()
    wide = torch.view_as_real(plain) if plain.is_complex() else plain
    return float(wide.to(torch.float64).pow(2).sum())


def _number(loss: torch.Tensor) -> float:
    """The loss; of several elements the sum, as that is what their gradients add up to."""
    return float(loss.detach().to(torch.float64).sum()) if not loss.is_complex() else abs(complex(loss.detach().sum()))
