"""How far an update moved each weight, from a sample of its elements.

A whole copy of the weights would cost as much as the update. Where the sample missed what the gradient is made of, such
as the rows of an embedding that tokens named, nothing is said of the update. Changes nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from nantrace.capture.ledger.norms import Norms, norms_of, values_of

_ELEMENTS = 64  # of each parameter, at least, if it has as many
#: A sample stands for its weight if the mean magnitude of its gradient is this share of the root mean square of all
#: of it. The mean, since one large element among many small ones says nothing of these.
_LIKE = 0.25
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
        slopes = [(name, _elements(p.grad)) for name, p in self._named if _has_plain_gradient(p)]  # type: ignore[arg-type]
        self._slopes, self._sums = norms_of(slopes), norms_of(slopes, 1)
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
        return dict(self._slopes.by_name())

    def sizes(self) -> npt.NDArray[np.float64]:
        """Norms of the samples. Waits for the device."""
        return self._sizes.values

    @property
    def names(self) -> tuple[str, ...]:
        return self._sizes.names

    def relative(self, whole: Mapping[str, float]) -> npt.NDArray[np.float64] | None:
        """Norm of the sample's change over the norm of the sample. None without an update.

        NaN where the weight is zero or in no optimizer of this step, and where the sample does not stand for it: an
        element on which nothing depended, or next to nothing, is not expected to move. Waits for the device.

        Args:
            whole: norms of whole gradients as they stood before the update, of those that are known.
        """
        if self._moved is None:
            return None
        sums, sizes = dict(self._sums.by_name()), self._sizes.values
        stands = [self._stands(place, sums.get(name), whole.get(name)) for place, name in enumerate(self.names)]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where((sizes > 0) & np.array(stands, dtype=bool), self._moved.values / sizes, np.nan)

    def _stands(self, place: int, slope: float | None, whole: float | None) -> bool:
        """Whether the sample of a parameter stands for it: by the magnitudes of its slope, and the whole norm."""
        parameter, sample = self._named[place][1], self._before[place]
        if id(parameter) not in self._held:
            return False
        if slope is None or whole is None:  # of a sparse gradient, say, or of one that no optimizer took
            return slope is not None and slope != 0
        usual = whole * sample.numel() / math.sqrt(parameter.numel())
        return slope != 0 and not slope < _LIKE * usual  # NaN is no reason


def _is_plain(parameter: torch.Tensor) -> bool:
    return values_of(parameter) is parameter and parameter.numel() > 0 and _is_dense(parameter)


def _has_plain_gradient(parameter: torch.Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None or values_of(gradient) is not gradient:
        return False
    return gradient.shape == parameter.shape and gradient.stride() == parameter.stride()


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def _elements(parameter: torch.Tensor) -> torch.Tensor:
    """Evenly spread elements in the order of memory, as a view; of a matrix not all in one column."""
    count = parameter.numel()
    every = _spread(count, parameter.shape[-1] if parameter.dim() else 1)
    return parameter.detach().as_strided((-(-count // every),), (every,), parameter.storage_offset())


@functools.lru_cache(4096)
def _spread(count: int, columns: int) -> int:
    """How far apart elements are taken."""
    every = max(1, count // _ELEMENTS)
    while math.gcd(every, columns) > 1:
        every -= 1
    return every


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    return _elements(parameter).clone()
