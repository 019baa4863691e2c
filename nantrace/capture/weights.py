"""How far an update moved each weight, from a sample of its elements.

A whole copy of the weights would cost as much as the update. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from nantrace.capture.norms import Norms, norms_of, values_of

_ELEMENTS = 64  # of each parameter
_FIRST, _EVERY = 4, 8  # steps at the beginning that are sampled, and each so many afterwards


def is_sampled(step: int) -> bool:
    """Whether a step belongs to those whose weights are compared."""
    return step < _FIRST or step % _EVERY == 0


class WeightSample:
    """Evenly spread elements of each parameter, before an update and after it. Use within `Quiet`.

    Args:
        named: parameters in the order in which they are told.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._named = [(name, parameter) for name, parameter in named if _is_plain(parameter)]
        self._before = [_sample(parameter) for _, parameter in self._named]
        self._sizes = norms_of([(name, part) for (name, _), part in zip(self._named, self._before, strict=True)])
        self._moved: Norms | None = None

    def updated(self) -> None:
        """Compare with what an update left; several optimizers may come one after another."""
        moved = []
        for (name, parameter), before in zip(self._named, self._before, strict=True):
            moved.append((name, _sample(parameter) - before))
        self._moved = norms_of(moved)

    @property
    def names(self) -> tuple[str, ...]:
        return self._sizes.names

    def relative(self) -> npt.NDArray[np.float64] | None:
        """Norm of the change over the norm of the weight; NaN where the weight is zero. None without an update.

        Waits for the device.
        """
        if self._moved is None:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            sizes = self._sizes.values
            return np.where(sizes > 0, self._moved.values / sizes, np.nan)


def _is_plain(parameter: torch.Tensor) -> bool:
    return values_of(parameter) is parameter and parameter.numel() > 0 and parameter.is_contiguous()


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    flat = parameter.detach().view(-1)
    return flat[:: max(1, flat.numel() // _ELEMENTS)].clone()
