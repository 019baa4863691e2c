"""How far an update moved each weight, from a sample of its elements.

A whole copy of the weights would cost as much as the update. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
        # An element that nothing depended on, such as a row of an embedding that no token named, is not expected to
        # move.
        self._slopes = norms_of([(name, _sample(p.grad)) for name, p in self._named if _has_plain_gradient(p)])  # type: ignore[arg-type]
        self._held: set[int] = set()

    def updated(self) -> None:
        """Compare with what an update left; several optimizers may come one after another."""
        moved = []
        for (name, parameter), before in zip(self._named, self._before, strict=True):
            moved.append((name, _elements(parameter) - before))
        self._moved = norms_of(moved)

    def hold(self, parameters: Iterable[torch.Tensor]) -> None:
        """An optimizer holds these."""
        self._held.update(map(id, parameters))

    def not_held(self) -> list[str]:
        """Names of parameters that no optimizer of this step holds."""
        return [name for name, parameter in self._named if id(parameter) not in self._held]

    def slopes(self) -> dict[str, float]:
        """Norms of the gradients of the samples, of those that have one. Waits for the device."""
        return dict(zip(self._slopes.names, self._slopes.values.tolist(), strict=True))

    def sizes(self) -> npt.NDArray[np.float64]:
        """Norms of the samples. Waits for the device."""
        return self._sizes.values

    @property
    def names(self) -> tuple[str, ...]:
        return self._sizes.names

    def relative(self) -> npt.NDArray[np.float64] | None:
        """Norm of the change over the norm of the weight; NaN where the weight is zero or no element of the sample had
        a gradient. None without an update.

        Waits for the device.
        """
        if self._moved is None:
            return None
        slopes = self.slopes()
        sloped = np.array([slopes.get(name, 1.0) != 0 for name in self.names], dtype=bool)
        sizes = self._sizes.values
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where((sizes > 0) & sloped, self._moved.values / sizes, np.nan)


def _is_plain(parameter: torch.Tensor) -> bool:
    return values_of(parameter) is parameter and parameter.numel() > 0 and parameter.is_contiguous()


def _has_plain_gradient(parameter: torch.Tensor) -> bool:
    gradient = parameter.grad
    return gradient is not None and values_of(gradient) is gradient and gradient.is_contiguous()


def _elements(parameter: torch.Tensor) -> torch.Tensor:
    """Evenly spread elements, as a view."""
    flat = parameter.detach().view(-1)
    return flat[:: max(1, flat.numel() // _ELEMENTS)]


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    return _elements(parameter).clone()
