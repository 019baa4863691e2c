"""Which elements of an elementwise op's output its inputs explain, and which were born beside them.

An infinity that stands in another element of an input explains nothing: 0/0 is a birth even where the same tensor holds
a mask, or an overflow that the op itself turns into 0. Ops that mix elements (products, sums, normalization) are taken
as a whole; so is an op that was given a nonfinite number, which stands beside every element.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from nantrace.flow.calls import Call
from nantrace.flow.values import Masks

#: Elementwise ops that PyTorch does not tag so.
_ELEMENTWISE = frozenset(("aten.copy_", "aten._to_copy", "aten.masked_fill_"))
#: (tensor, mask) -> ids of the events that wrote the elements selected.
Writers = Callable[[Tensor, Tensor], frozenset[int]]


@dataclass(frozen=True)
class Explained:
    """What explains an output element by element.

    Attributes:
        nan_ids, inf_ids: events that wrote the NaN, and the infinite, input elements that stand where the output is
            nonfinite.
        born: "nan" and "inf", as far as there are such output elements over finite inputs alone.
    """

    nan_ids: frozenset[int]
    inf_ids: frozenset[int]
    born: tuple[str, ...]


def explained(call: Call, plane: Tensor, found: Masks, writers: Writers) -> Explained | None:
    """Look at the elements of an elementwise op; None where the op as a whole is all that can be told.

    Args:
        call: the op, with the nonfinite inputs that it read.
        plane: its output, already written; of it `found` is nonfinite.
        writers: who wrote elements of an input.
    """
    if not call.bad or not _is_elementwise(call.facts.func) or call.nan_literal or call.inf_literal:
        return None
    nan_ids: frozenset[int] = frozenset()
    inf_ids: frozenset[int] = frozenset()
    bare = found.bad
    for argument, look in call.bad:
        tensor, inside = argument.tensor, look.masks
        if inside is None or tensor.device != plane.device or not _broadcasts(tensor, plane):
            return None
        if inside.count == tensor.numel():  # whatever is nonfinite has an input that is
            return None
        nan_here, inf_here = inside.nan_mask & found.bad, inside.inf_mask & found.bad
        spread = tensor.detach().expand(plane.shape)
        nan_ids |= writers(spread, nan_here) if nan_here.any() else frozenset()
        inf_ids |= writers(spread, inf_here) if inf_here.any() else frozenset()
        bare = bare & ~inside.bad
    masks = (("nan", found.nan_mask), ("inf", found.inf_mask))
    return Explained(nan_ids, inf_ids, tuple(kind for kind, mask in masks if (bare & mask).any()))


@functools.cache
def _is_elementwise(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags or func._schema.name.replace("::", ".") in _ELEMENTWISE


def _broadcasts(tensor: Tensor, plane: Tensor) -> bool:
    if type(tensor) not in (Tensor, Parameter) or tensor.layout is not torch.strided:
        return False
    try:
        return bool(torch.broadcast_shapes(tensor.shape, plane.shape) == plane.shape)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
