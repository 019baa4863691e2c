"""Stored infinities that are there on purpose: masks, and observers that never ran. Knows names and counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nantrace.checkpoint.result import CheckedTensor

_MASK = "an attention mask: -inf and 0 alone"
_OBSERVER = "an observer that has seen nothing yet: min_val inf and max_val -inf"


def with_expected(tensors: Sequence[CheckedTensor]) -> tuple[CheckedTensor, ...]:
    """Marks what training stores as infinite without harm; only in a model, and only where nothing else fits."""
    by_name = {tensor.name: tensor for tensor in tensors}
    return tuple(dataclasses.replace(each, expected=_why(each, by_name)) for each in tensors)


def _why(tensor: CheckedTensor, by_name: dict[str, CheckedTensor]) -> str | None:
    stats = tensor.stats
    if not stats.nonfinite or stats.nan or tensor.role != "model":
        return None
    if stats.neginf == stats.nonfinite and stats.finite and stats.min == stats.max == 0 and len(stats.shape) > 1:
        return _MASK
    head, _, last = tensor.name.rpartition(".")
    if last in ("min_val", "max_val"):
        low, high = (by_name.get(f"{head}.{word}" if head else word) for word in ("min_val", "max_val"))
        if low is not None and high is not None:
            untouched = low.stats.posinf == low.stats.numel and high.stats.neginf == high.stats.numel
            return _OBSERVER if untouched else None
    return None
