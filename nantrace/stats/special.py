"""Rows of tensors that are made of other tensors: sparse and nested ones. Knows their parts; counts none itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nantrace.stats.exact import EMPTY_RANGE, FULL, NAN, RANGE, Row, merge
from nantrace.stats.unwrap import UnreadableError

Measure = Callable[[torch.Tensor, bool], Row]


def nested_row(tensor: torch.Tensor, full: bool, measure: Measure) -> Row:
    """The row of the concatenation of a nested tensor's components."""
    return merge([measure(component, full) for component in tensor.unbind()] or [EMPTY_RANGE], full)


def jagged_row(tensor: torch.Tensor, full: bool, measure: Measure) -> Row:
    """The same of a jagged one: its values lie in one tensor, with holes if it has lengths."""
    jagged: Any = tensor
    values, offsets, lengths = jagged._values, jagged._offsets, jagged._lengths
    if lengths is None:
        return measure(values, full)
    ragged = jagged._ragged_idx - 1
    starts = offsets.tolist()[: lengths.numel()]
    parts = [values.narrow(ragged, start, size) for start, size in zip(starts, lengths.tolist(), strict=True)]
    return merge([measure(part, full) for part in parts] or [EMPTY_RANGE], full)


def sparse_row(tensor: torch.Tensor, full: bool, measure: Measure) -> Row:
    """The row of a sparse tensor: stored elements (duplicates summed), and a zero for each that is not stored."""
    if tensor.is_meta:
        raise UnreadableError("it is a meta tensor, which holds no values")
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.detach().coalesce()
    values = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    stored = measure(values, full)
    absent = tensor.numel() - values.numel()
    unstored: Row = (absent, absent, 0, 0, 0, 0.0, 0.0, NAN, -1, absent if full else 0, 0, 0, FULL if full else RANGE)
    numbers = merge([stored, unstored] if absent else [stored], full)
    if stored[8] < 0:
        return numbers
    return (*numbers[:8], _first_bad(tensor), *numbers[9:])


def _first_bad(tensor: torch.Tensor) -> int:
    """Row-major index, in the whole tensor, of the first nonfinite element."""
    if tensor.layout is not torch.sparse_coo:
        tensor = tensor.to_sparse(layout=torch.sparse_coo).coalesce()
    indices, values = tensor._indices(), tensor._values()
    bad = (~torch.isfinite(values)).nonzero()
    places = torch.cat([indices[:, bad[:, 0]], bad[:, 1:].T]) if bad.shape[1] > 1 else indices[:, bad[:, 0]]
    flat = torch.zeros(places.shape[1], dtype=torch.int64)
    for size, index in zip(tensor.shape, places, strict=True):
        flat = flat * size + index
    return int(flat.min())
