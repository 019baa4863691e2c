"""Norms of gradients: one reduction over all of them, left where they lie until the step has ended.

Changes no gradient and grows no graph. Knows nothing of optimizers, scales or steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from nantrace.stats.unwrap import PLAIN, UnreadableError, check_readable, unwrapped

_LARGE = 4096  # elements


@dataclass(frozen=True)
class Norms:
    """The norm of each of several tensors.

    Attributes:
        names: of the tensors.
        parts: places in `names`, and the norms of the tensors there: one vector for each device, unread.
        unread: names of tensors that have no norm here: sparse ones that were not coalesced, for example.
    """

    names: tuple[str, ...]
    parts: tuple[tuple[tuple[int, ...], torch.Tensor], ...]
    unread: tuple[str, ...] = ()

    @functools.cached_property
    def values(self) -> npt.NDArray[np.float64]:
        """The norms in the order of `names`; NaN where a tensor holds NaN. Waits for the device."""
        found = np.zeros(len(self.names))
        for places, norms in self.parts:
            found[list(places)] = norms.double().cpu().numpy()
        return found

    def by_name(self) -> Iterator[tuple[str, float]]:
        """Each name with its norm. Waits for the device."""
        return zip(self.names, self.values.tolist(), strict=True)


def norms_of(named: Sequence[tuple[str, torch.Tensor]], order: int = 2) -> Norms:
    """Norms of named tensors, of a DTensor those of its local shard. Call within `Quiet`.

    float64 stays float64; everything else is summed in float32, since squares leave float16 early. On a CPU a norm
    whose squares leave float32 as well is computed once more in float64; on a device it stays infinite.
    """
    names: list[str] = []
    unread: list[str] = []
    groups: dict[tuple[torch.device, bool], tuple[list[int], list[torch.Tensor]]] = {}
    for name, tensor in named:
        values = values_of(tensor)
        if values is None:
            unread.append(name)
            continue
        places, tensors = groups.setdefault((values.device, values.dtype is torch.float64), ([], []))
        places.append(len(names))
        tensors.append(values)
        names.append(name)
    parts = []
    for (device, double), (places, tensors) in groups.items():
        if device.type == "cpu":
            vector = _beyond_float32(_on_host(tensors, order, double), tensors, order)
        else:
            vector = _together(tensors, order, double)
        parts.append((tuple(places), vector))
    return Norms(tuple(names), tuple(parts), tuple(unread))


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Floating-point numbers whose norm is that of the tensor, without a copy; None where there are none to read."""
    try:
        if tensor.layout is torch.sparse_coo:
            if not tensor.is_coalesced():  # its values are sums that nobody has formed yet
                return None
            tensor = tensor._values()
        plain = tensor if type(tensor) in PLAIN else unwrapped(tensor)
        if plain.layout is not torch.strided or plain.is_nested:
            return None
        check_readable(plain)
    except (UnreadableError, RuntimeError, NotImplementedError):
        return None
    if plain.is_complex():
        return torch.view_as_real(plain.resolve_conj())
    return plain if plain.is_floating_point() and plain.element_size() > 1 else None


def _together(tensors: list[torch.Tensor], order: int, double: bool) -> torch.Tensor:
    return torch.stack(torch._foreach_norm(tensors, order, dtype=torch.float64 if double else torch.float32))


def _on_host(tensors: list[torch.Tensor], order: int, double: bool) -> torch.Tensor:
    """Of large tensors by a dot product, which uses all threads and rounds less than the reduction, that uses one."""
    dtype = torch.float64 if double else torch.float32
    large = [place for place, tensor in enumerate(tensors) if order == 2 and _is_for_dot(tensor, dtype)]
    if not large:
        return _together(tensors, order, double)
    norms = torch.empty(len(tensors), dtype=dtype)
    flat = [tensors[place].view(-1) for place in large]
    norms[large] = torch.stack([torch.dot(numbers, numbers) for numbers in flat]).sqrt_()
    small = sorted(set(range(len(tensors))).difference(large))
    if small:
        norms[small] = _together([tensors[place] for place in small], order, double)
    return norms


def _is_for_dot(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype is dtype and tensor.numel() >= _LARGE and tensor.is_contiguous()


def _beyond_float32(norms: torch.Tensor, tensors: Sequence[torch.Tensor], order: int) -> torch.Tensor:
    infinite = torch.isinf(norms).nonzero().flatten().tolist()
    if not infinite:
        return norms
    exact = norms.double()
    for place in infinite:
        exact[place] = torch.linalg.vector_norm(tensors[place], order, dtype=torch.float64)
    return exact


def total(norms: Sequence[float]) -> float:
    """The norm of all tensors together, given theirs; NaN if one of them is."""
    largest = max(norms, default=0.0)
    if not all(norm - norm == 0 for norm in norms):
        return math.nan if any(norm != norm for norm in norms) else math.inf
    return largest * math.sqrt(sum((norm / largest) ** 2 for norm in norms)) if largest else 0.0
