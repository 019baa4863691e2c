"""The numbers of one stored tensor: its statistics, and what a cast to float16 would do to it.

Knows values; no file. Parts of one tensor are added up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nantrace.checkpoint.entries import StoredTensor
from nantrace.checkpoint.result import CheckedTensor
from nantrace.events import TensorStats
from nantrace.stats.host import tensor_stats
from nantrace.stats.layout import lay_out, pieces

_PIECE = 1 << 18  # elements at once: what they need beside them stays in the processor's cache
_WIDER = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128)  # than float16's range
#: Rounding to nearest even, from here on float16 has infinity; up to there it has zero.
_OVERFLOWS, _VANISHES = 65520.0, 2.0**-25
_HUGE = {"float16": 32752.0, "float32": 1e6, "float64": 1e6, "bfloat16": 1e6, "complex64": 1e6, "complex128": 1e6}
_COUNTERS = ("step", "_growth_tracker", "num_batches_tracked")


@dataclass(frozen=True)
class _Cast:
    overflow: int = 0
    zero: int = 0

    def __add__(self, other: _Cast) -> _Cast:
        return _Cast(self.overflow + other.overflow, self.zero + other.zero)


def measured(stored: StoredTensor) -> CheckedTensor:
    """Reads a tensor part by part and judges it.

    Raises:
        CheckpointError: a part is not what the file says it is.
        OSError: the file cannot be read.
    """
    stats: TensorStats | None = None
    cast, first = _Cast(), None
    for piece in stored.pieces:
        tensor = piece.read()
        part = tensor_stats(tensor, "range")
        cast = cast + _cast(tensor, part)
        del tensor
        piece.done()
        if part.first_bad is not None and part.first_bad >= 0:
            index = _index(part, piece.offsets)
            first = index if first is None or index is None else min(first, index)
        stats = part if stats is None else _sum(stats, part)
    stats = _whole(stored, stats)
    counter = len(stored.shape) == 0 and stored.name.rsplit(".", 1)[-1] in _COUNTERS
    huge = _HUGE.get(stats.dtype)
    return CheckedTensor(
        name=stored.name,
        role=stored.role,
        stats=stats,
        aliases=stored.aliases,
        parameter=stored.parameter,
        index=first,
        float16_overflow=0 if counter else cast.overflow,
        float16_zero=cast.zero,
        huge=huge if huge is not None and not counter and (stats.absmax or 0.0) >= huge else None,
    )


def _index(part: TensorStats, offsets: Sequence[int]) -> tuple[int, ...] | None:
    """Of the part's first nonfinite element in the whole tensor."""
    if part.first_bad is None or any(size < 1 for size in part.shape):
        return None
    found = tuple(int(place) for place in np.unravel_index(part.first_bad, part.shape)) if part.shape else ()
    return tuple(a + b for a, b in zip(found, offsets, strict=True)) if offsets else found


def _sum(a: TensorStats, b: TensorStats) -> TensorStats:
    """Counts and range of two parts of one tensor."""
    lows = [each.min for each in (a, b) if each.min is not None]
    highs = [each.max for each in (a, b) if each.max is not None]
    return dataclasses.replace(
        a,
        numel=a.numel + b.numel,
        finite=a.finite + b.finite,
        nan=a.nan + b.nan,
        posinf=a.posinf + b.posinf,
        neginf=a.neginf + b.neginf,
        min=min(lows, default=None),
        max=max(highs, default=None),
        first_bad=None,
        observed=a.observed and b.observed,
        why=a.why or b.why,
    )


def _whole(stored: StoredTensor, stats: TensorStats | None) -> TensorStats:
    numel = math.prod(stored.shape)
    if stats is None:
        absent = numel > 0
        return TensorStats(
            stored.dtype,
            stored.shape,
            numel,
            0,
            observed=not absent,
            why="it is not stored readably" if absent else None,
        )
    if len(stored.pieces) == 1 and stats.shape == stored.shape:
        return stats
    missing = stats.numel < numel
    return dataclasses.replace(
        stats,
        shape=stored.shape,
        numel=max(stats.numel, numel),
        observed=stats.observed and not missing,
        why=stats.why or ("only a part of it is stored" if missing else None),
    )


def _cast(tensor: torch.Tensor, stats: TensorStats) -> _Cast:
    """What float16 would make of the values that are finite and not zero."""
    if not stats.observed or tensor.dtype not in _WIDER or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return _Cast()
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        tensor = tensor.values()
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return _Cast()
    overflows = (stats.absmax or 0.0) >= _OVERFLOWS
    layout = lay_out(tensor)
    counts = [_cast_of(part, overflows) for part in pieces(layout.elements, _PIECE)]
    return _Cast(layout.repeats * sum(c.overflow for c in counts), layout.repeats * sum(c.zero for c in counts))


def _cast_of(part: torch.Tensor, overflows: bool) -> _Cast:
    size = part.abs()
    vanishes = (size <= _VANISHES) & (size != 0)
    beyond = (size >= _OVERFLOWS) & (size != math.inf) if overflows else None
    if part.dim() == 2:  # complex, as pairs: an element counts if either part does
        vanishes = vanishes.any(dim=1)
        beyond = None if beyond is None else beyond.any(dim=1)
    return _Cast(0 if beyond is None else int(beyond.count_nonzero()), int(vanishes.count_nonzero()))
