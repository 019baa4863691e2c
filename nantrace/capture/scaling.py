"""What stands in each parameter's `.grad`: of which backward passes, times the scale or not, clipped or not.

Follows gradients by identity and by autograd's version counter, and holds none: a gradient that somebody changed in a
way that was not heard is one of which nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from nantrace.capture.quiet import Quiet


@dataclass(slots=True)
class Standing:
    """What is known of one gradient.

    Attributes:
        gradient, version: id and version of the tensor when it was last heard of.
        backward: number of the last backward pass that added to it.
        passes: how many backward passes it is the sum of.
        scaled: whether all of these began at a scaled loss; None if that is not known.
        epoch: how often scales had been updated by then.
        unscaled: a scaler's `unscale_` has divided it since.
        spent: an optimizer has used it, or its scaler has skipped that.
    """

    gradient: int
    version: int
    backward: int
    passes: int
    scaled: bool | None
    epoch: int
    unscaled: bool = False
    spent: bool = False

    def untouched(self, gradient: torch.Tensor | None) -> bool:
        return gradient is not None and id(gradient) == self.gradient and gradient._version == self.version


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

    Attributes:
        on_unscaled: scaled gradients were added to ones that `unscale_` had divided already.
        on_other_scale: they were added to ones of an earlier scale: it was updated in between.
    """

    def __init__(self) -> None:
        self._standing: dict[int, Standing] = {}
        self.on_unscaled, self.on_other_scale = Mixed(), Mixed()

    def forget_mixed(self) -> None:
        self.on_unscaled, self.on_other_scale = Mixed(), Mixed()

    def accumulated(
        self, parameter: torch.Tensor, gradient: torch.Tensor, backward: int, scaled: bool | None, epoch: int
    ) -> None:
        """Backward has added to a gradient, in place if there was one."""
        before = self._standing.get(id(parameter))
        identity, version = id(gradient), gradient._version
        if before is None or before.gradient != identity or version == 0:
            self._standing[id(parameter)] = Standing(identity, version, backward, 1, scaled, epoch)
            return
        same = version == before.version + 1
        if before.backward == backward:  # a shared weight, or one inside of several checkpoints
            before.version = version
            before.scaled = scaled if same and before.scaled is scaled else None
            return
        if not same or before.spent:  # zeroed or changed in place, or not zeroed at all
            self._standing[id(parameter)] = Standing(identity, version, backward, 1, None, epoch)
            return
        if scaled and before.scaled:
            if before.unscaled:
                self.on_unscaled.add(before.passes)
            elif before.epoch != epoch:
                self.on_other_scale.add(before.passes)
        known = scaled if before.scaled is scaled and not before.unscaled else None
        self._standing[id(parameter)] = Standing(identity, version, backward, before.passes + 1, known, epoch)

    def unscaled(self, parameters: Iterable[torch.Tensor]) -> int:
        """`unscale_` has divided these; returns how many of them no scaled loss had contributed to.

        It writes past the version counter.
        """
        never = 0
        for standing, gradient in self._of(parameters):
            never += standing.scaled is False and not standing.unscaled and standing.untouched(gradient)
            standing.unscaled = True
        return never

    def clipped(self, parameters: Iterable[torch.Tensor]) -> int:
        """`clip_grad_norm_` has multiplied these once in place; returns how many were still scaled."""
        found = 0
        for standing, gradient in self._of(parameters):
            if gradient is not None and id(gradient) == standing.gradient:
                standing.version += 1
                found += bool(standing.scaled) and not standing.unscaled and standing.untouched(gradient)
        return found

    def values_clipped(self, gradients: Iterable[torch.Tensor]) -> int:
        """`clip_grad_value_` is about to change these; returns how many are still scaled."""
        by_gradient = {standing.gradient: standing for standing in self._standing.values()}
        found = 0
        for gradient in gradients:
            standing = by_gradient.get(id(gradient))
            if standing is not None:
                found += bool(standing.scaled) and not standing.unscaled and standing.untouched(gradient)
        return found

    def still_scaled(self, parameters: Iterable[torch.Tensor]) -> int:
        """How many of these hold a scaled gradient; 0 if one of them holds anything else."""
        found = 0
        for standing, gradient in self._of(parameters):
            if gradient is None:
                continue
            if not standing.scaled or standing.unscaled or standing.spent or not standing.untouched(gradient):
                return 0
            found += 1
        return found

    def spent(self, parameters: Iterable[torch.Tensor]) -> None:
        for standing, _ in self._of(parameters):
            standing.spent = True

    def _of(self, parameters: Iterable[torch.Tensor]) -> list[tuple[Standing, torch.Tensor | None]]:
        found: list[tuple[Any, torch.Tensor]] = [(self._standing.get(id(one)), one) for one in parameters]
        return [(standing, one.grad) for standing, one in found if standing is not None]


def scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor | None:
    """A copy of the scale where it lies: `get_scale` would wait for the device. None when the scaler is disabled."""
    scale = getattr(scaler, "_scale", None)
    with Quiet():
        return None if scale is None else scale.clone()


def tensors_given(given: Any) -> list[torch.Tensor]:
    """A tensor, or those in a list; what can be read only once is left alone."""
    several = [given] if isinstance(given, torch.Tensor) else given if isinstance(given, (list, tuple)) else []
    return [one for one in several if isinstance(one, torch.Tensor)]
