"""Extremes of many small tensors in host memory at once: of a step's parameters, gradients and optimizer state.

For a bias of 256 elements the calls take far longer than the reading. Tensors of one dtype and shape are stacked, and
two reductions then serve them all. Knows nothing of what the tensors are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from nantrace.stats.formats import REAL_FORMATS
from nantrace.stats.unwrap import PLAIN

_SMALL = 1024  # elements: copying more costs what the calls do
_FEW = 4  # tensors: fewer are read as fast one by one
_INF = math.inf

Extremes = tuple[int, float, float]


def extremes_together(tensors: Sequence[torch.Tensor]) -> list[Extremes | None]:
    """(numel, min, max) of each tensor that is small, plain, finite and has company of its dtype and shape, else None.

    What is None here may be finite all the same: it is to be read by itself. Gradient mode must be off and no mode
    active.
    """
    found: list[Extremes | None] = [None] * len(tensors)
    for places in _companies(tensors):
        try:
            rows = torch.stack([tensors[place] for place in places]).reshape(len(places), -1)
            lows, highs = rows.amin(1).tolist(), rows.amax(1).tolist()
        except Exception:  # a wrapper that looks plain: the careful path knows
            continue
        numel = rows.shape[1]
        for place, low, high in zip(places, lows, highs, strict=True):
            if low > -_INF and high < _INF:  # false for NaN
                found[place] = (numel, low + 0.0, high + 0.0)
    return found


def _companies(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Places of tensors that can be stacked."""
    companies: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if _is_small(tensor):
            companies.setdefault((tensor.dtype, tensor.shape), []).append(place)
    return [places for places in companies.values() if len(places) >= _FEW]


def _is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor is small and holds plain numbers. What was freed, and a lazy zero, has no address."""
    try:
        plain = type(tensor) in PLAIN and tensor.dtype in REAL_FORMATS and tensor.is_cpu and not tensor.is_nested
        return plain and tensor.layout is torch.strided and 0 < tensor.numel() <= _SMALL and tensor.data_ptr() != 0
    except RuntimeError:  # a wrapper that looks plain has no address to ask for
        return False
