"""What stands in each parameter's `.grad`: of which backward passes, times the scale or not, clipped or not.

Follows gradients by identity and by autograd's version counter, and holds none: a gradient that somebody changed in a
way that was not heard is one of which nothing is known. Compares what stands before a backward pass, or a clipping,
with what stands after it: how often either counts a change depends on what else is at work, such as a dispatch mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from nantrace.capture.quiet import Quiet

#: Identity and version of a gradient; those of none are 0 and 0.
Mark: TypeAlias = tuple[int, int]


@dataclass(slots=True)
class Standing:
    """What is known of one gradient.

    Attributes:
        mark: id and version of the tensor when it was last heard of.
        passes: how many backward passes it is the sum of.
        scaled: whether all of these began at a scaled loss; None if that is not known.
        epoch: how often scales had been updated by then.
        unscaled: a scaler's `unscale_` has divided it since.
        spent: an optimizer has used it, or its scaler has skipped that.
    """

    mark: Mark
    passes: int
    scaled: bool | None
    epoch: int
    unscaled: bool = False
    spent: bool = False

    def untouched(self, gradient: torch.Tensor | None) -> bool:
        return gradient is not None and _mark(gradient) == self.mark

    def is_scaled(self, gradient: torch.Tensor | None) -> bool:
        """Whether it is still multiplied by the scale, for all that is known."""
        return bool(self.scaled) and not self.unscaled and self.untouched(gradient)


@dataclass
class Mixed:
    """Gradients to which a backward pass added what does not belong to what stood there.

    Attributes:
        parameters: how many.
        passes: how many backward passes they were the sum of before.
    """

    parameters: int = 0
    passes: int = 0

    def add(self, passes: int) -> None:
        self.parameters += 1
        self.passes = max(self.passes, passes)


class Gradients:
    """The gradients of the traced model, by the id of their parameter.

    Args:
        parameters: gives those of the model, when asked.

    Attributes:
        on_unscaled: scaled gradients were added to ones that `unscale_` had divided already.
        on_other_scale: they were added to ones of an earlier scale: it was updated in between.
    """

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._parameters = parameters
        self._standing: dict[int, Standing] = {}
        self._before: dict[int, Mark] = {}  # while a backward pass runs
        self._clipping: list[tuple[Standing, torch.Tensor]] = []
        self.on_unscaled, self.on_other_scale = Mixed(), Mixed()

    def forget_mixed(self) -> None:
        self.on_unscaled, self.on_other_scale = Mixed(), Mixed()

    def backward_begins(self) -> None:
        self._before = {id(one): _mark(one.grad) for one in self._parameters()}

    def backward_ends(self, scaled: bool | None, epoch: int) -> None:
        """A backward pass has added to some; `scaled`: it began at a scaled loss, None if that is not known."""
        self.accumulated(self._parameters(), scaled, epoch)
        self._before = {}

    def accumulated(self, parameters: Iterable[torch.Tensor], scaled: bool | None, epoch: int) -> None:
        """The backward pass that runs, or has just ended, may have added to these."""
        for parameter in parameters:
            key, now = id(parameter), _mark(parameter.grad)
            then = self._before.get(key, now)
            if now != then:
                self._before[key] = now
                self._standing[key] = self._after(self._standing.get(key), then, now, scaled, epoch)

    def _after(self, before: Standing | None, then: Mark, now: Mark, scaled: bool | None, epoch: int) -> Standing:
        """How a gradient stands to which a pass has added."""
        if then == _NONE:
            return Standing(now, 1, scaled, epoch)
        known = before is not None and before.mark == then and then[0] == now[0] and not before.spent
        if before is None or not known:  # zeroed or changed in place, or not zeroed at all
            return Standing(now, 1, None, epoch)
        if scaled and before.scaled:
            if before.unscaled:
                self.on_unscaled.add(before.passes)
            elif before.epoch != epoch:
                self.on_other_scale.add(before.passes)
        alike = scaled if before.scaled is scaled and not before.unscaled else None
        return Standing(now, before.passes + 1, alike, epoch)

    def unscaled(self, parameters: Iterable[torch.Tensor]) -> int:
        """`unscale_` has divided these; returns how many of them no scaled loss had contributed to.

        It writes past the version counter.
        """
        never = 0
        for standing, gradient in self._of(parameters):
            never += standing.scaled is False and not standing.unscaled and standing.untouched(gradient)
            standing.unscaled = True
        return never

    def clipping(self, parameters: Iterable[torch.Tensor]) -> None:
        """`clip_grad_norm_` is about to multiply these."""
        self._clipping = [(one, grad) for one, grad in self._of(parameters) if grad is not None and one.untouched(grad)]

    def clipped(self) -> int:
        """It has; returns how many were still scaled."""
        found = 0
        for standing, gradient in self._clipping:
            found += bool(standing.scaled) and not standing.unscaled
            standing.mark = _mark(gradient)
        self._clipping = []
        return found

    def values_clipped(self, gradients: Iterable[torch.Tensor]) -> int:
        """`clip_grad_value_` is about to change these; returns how many are still scaled."""
        by_gradient = {standing.mark[0]: standing for standing in self._standing.values()}
        found = ((by_gradient.get(id(gradient)), gradient) for gradient in gradients)
        return sum(standing.is_scaled(gradient) for standing, gradient in found if standing is not None)

    def still_scaled(self, parameters: Iterable[torch.Tensor]) -> int:
        """How many of these hold a scaled gradient; 0 if one of them holds anything else."""
        found = 0
        for standing, gradient in self._of(parameters):
            if gradient is None:
                continue
            if standing.spent or not standing.is_scaled(gradient):
                return 0
            found += 1
        return found

    def spent(self, parameters: Iterable[torch.Tensor]) -> None:
        for standing, _ in self._of(parameters):
            standing.spent = True

    def _of(self, parameters: Iterable[torch.Tensor]) -> list[tuple[Standing, torch.Tensor | None]]:
        found: list[tuple[Any, torch.Tensor]] = [(self._standing.get(id(one)), one) for one in parameters]
        return [(standing, one.grad) for standing, one in found if standing is not None]


_NONE: Mark = (0, 0)


def _mark(gradient: torch.Tensor | None) -> Mark:
    return _NONE if gradient is None else (id(gradient), gradient._version)


def scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor | None:
    """A copy of the scale where it lies: `get_scale` would wait for the device. None when the scaler is disabled."""
    scale = getattr(scaler, "_scale", None)
    with Quiet():
        return None if scale is None else scale.clone()


def tensors_given(given: Any) -> list[torch.Tensor]:
    """A tensor, or those in a list; what can be read only once is left alone."""
    several = [given] if isinstance(given, torch.Tensor) else given if isinstance(given, (list, tuple)) else []
    return [one for one in several if isinstance(one, torch.Tensor)]
