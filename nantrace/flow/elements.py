"""Which elements of an op's output which elements of its inputs explain.

An infinity that stands elsewhere explains nothing: 0/0 is a birth even where the same tensor holds a mask, or padding
that is NaN, or an overflow that the op itself turns into 0. Known of ops that work element by element, move elements,
reduce or normalize along dimensions, or multiply matrices. All others are taken as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from nantrace.flow.calls import Argument, Call
from nantrace.flow.marked import covers, equal, marks_any, once
from nantrace.flow.memory import Look
from nantrace.flow.values import Masks

#: From a mask over an input to the mask over the output of what the marked elements reach.
Way = Callable[[Tensor], Tensor]
#: (tensor, id of an event) -> mask of the elements that the event wrote; None if that cannot be told.
WrittenBy = Callable[[Tensor, int], Tensor | None]


def _ops(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


#: Elementwise ops that PyTorch does not tag so.
_ELEMENTWISE = _ops("copy_ _to_copy masked_fill_")
#: Ops that put elements of their inputs elsewhere; they run on masks as well as on numbers.
_MOVES = _ops("index gather index_select take masked_select cat stack flip roll repeat select_backward slice_backward")
_SPREADS = _ops("_softmax _log_softmax")
_REDUCES = _ops("sum mean amax amin prod logsumexp linalg_vector_norm std var")
_RUNS = _ops("cumsum cumprod logcumsumexp")
_ADDS = _ops("index_add scatter_add")
#: Matrix products: position of the left and of the right factor.
_PRODUCTS = {"aten.mm": (0, 1), "aten.bmm": (0, 1), "aten.addmm": (1, 2), "aten.baddbmm": (1, 2)}
#: More sources, or more shares, than these are not told apart.
_MOST_SOURCES, _MOST_SHARES = 16, 6


@dataclass(frozen=True)
class Share:
    """Nonfinite elements of an output that have the same explanation.

    Attributes:
        mask: which elements these are.
        nan_ids, inf_ids: events that wrote the NaN, and the infinite, input elements that reach them. None of either:
            all that reaches them is finite.
    """

    mask: Tensor
    nan_ids: frozenset[int]
    inf_ids: frozenset[int]


def shares(call: Call, plane: Tensor, found: Masks, written_by: WrittenBy) -> list[Share] | None:
    """Tell an output's nonfinite elements apart by what explains them; None where only the op as a whole can be judged.

    Args:
        call: the op, with the nonfinite inputs that it read.
        plane: its output, already written; of it `found` is nonfinite.
        written_by: who wrote which elements of an input.
    """
    if not call.bad or call.list_length:
        return None
    moves = call.facts.op in _MOVES | _ADDS
    if not moves and all(_is_one_event_throughout(look) for _, look in call.bad):
        return None  # each of them reaches all of it
    sources = []
    for argument, look in call.bad:
        way = _way(call, argument, plane)
        for nan, id, mask in _by_writer(argument, look, written_by) if way is not None else ():
            reached = _follow(way, mask if mask is None or moves else once(mask), plane)
            if reached is None:
                return None
            sources.append((nan, id, reached))
        if way is None or len(sources) > _MOST_SOURCES or look.masks is None:
            return None
    if all(covers(reached, found.bad) for _, _, reached in sources):
        return None  # one explanation of all of it, as most often
    code = torch.zeros(plane.shape, dtype=torch.int32, device=plane.device)
    for bit, (_, _, reached) in enumerate(sources):
        code |= reached.to(torch.int32) << bit
    counts = torch.bincount(torch.where(found.bad, code + 1, 0).reshape(-1))[1:]
    codes: list[int] = counts.nonzero().reshape(-1).tolist()
    if len(codes) > _MOST_SHARES:
        return None
    return [
        Share(found.bad & equal(code, each), _ids(sources, each, True), _ids(sources, each, False)) for each in codes
    ]


def _is_one_event_throughout(look: Look) -> bool:
    one = len(look.nan_ids) == 1 and not look.inf_ids
    return one and look.masks is not None and look.masks.nan == look.masks.nan_mask.numel()


def _ids(sources: list[tuple[bool, int, Tensor]], code: int, nan: bool) -> frozenset[int]:
    return frozenset(id for bit, (is_nan, id, _) in enumerate(sources) if is_nan == nan and code >> bit & 1)


def _by_writer(argument: Argument, look: Look, written_by: WrittenBy) -> Iterator[tuple[bool, int, Tensor | None]]:
    """(NaN or infinite, event, mask of such elements that it wrote) of an input; a mask of None cannot be told."""
    assert look.masks is not None
    for nan, ids, mask in ((True, look.nan_ids, look.masks.nan_mask), (False, look.inf_ids, look.masks.inf_mask)):
        if len(ids) == 1:
            yield nan, next(iter(ids)), mask
            continue
        rest = mask
        for id in ids:
            mine = written_by(argument.tensor, id)
            rest = rest & ~mine if mine is not None else rest
            yield nan, id, mine & mask if mine is not None else None
        if ids and marks_any(rest):  # written by somebody who has another number by now
            yield nan, 0, None


def _follow(way: Way | None, mask: Tensor | None, plane: Tensor) -> Tensor | None:
    if way is None or mask is None:
        return None
    try:
        return way(mask).expand(plane.shape)
    except (RuntimeError, TypeError, IndexError, ValueError):  # an overload with other arguments, another output
        return None


def _way(call: Call, argument: Argument, plane: Tensor) -> Way | None:
    """How the elements of an argument reach the output; None where that is not known."""
    op, position, tensor = call.facts.op, argument.position, argument.tensor
    if type(tensor) not in (Tensor, Parameter) or tensor.layout is not torch.strided or tensor.device != plane.device:
        return None
    if _is_elementwise(call.facts.func):
        return lambda mask: mask
    if op in _PRODUCTS:
        return _factor(op, position)
    if op in _MOVES | _ADDS and call.facts.mutates:  # the op cannot be run again: it would write into the step's memory
        return None
    if op in _MOVES:
        return lambda mask: _run(call, argument, mask)
    if op in _ADDS:
        return (lambda mask: mask) if position == 0 else lambda mask: _run(call, argument, mask.int()) > 0
    if position != 0:
        return None
    dims = _dims(call, tensor.dim())
    if op in _SPREADS:
        return lambda mask: mask.any(dims, keepdim=True)
    if op in _REDUCES:
        return lambda mask: mask.any(dims, keepdim=plane.dim() == tensor.dim())
    if op in _RUNS:
        return lambda mask: mask.int().cumsum(dims[0]) > 0
    if op == "aten.native_layer_norm":
        return lambda mask: mask.any(tuple(range(-len(call.args[1]), 0)), keepdim=True)
    return None


def _factor(op: str, position: int) -> Way:
    left, right = _PRODUCTS[op]
    if position == left:
        return lambda mask: mask.any(-1, keepdim=True)
    if position == right:
        return lambda mask: mask.any(-2, keepdim=True)
    return lambda mask: mask


def _dims(call: Call, rank: int) -> tuple[int, ...]:
    """The dimensions that an op works along: all of them where it names none."""
    place = call.facts.position.get("dim", -1)
    named = call.args[place] if 0 <= place < len(call.args) else call.kwargs.get("dim")
    dims = (named,) if isinstance(named, int) else tuple(named or ())
    return dims or tuple(range(rank))


def _run(call: Call, argument: Argument, mask: Tensor) -> Tensor:
    """The op itself, with a mask in place of one argument and nothing marked in the others of its kind."""

    def stand_in(position: int, index: int, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [stand_in(position, i, item) for i, item in enumerate(value)]
        if (position, index) == (argument.position, argument.index):
            return mask
        return torch.zeros_like(value, dtype=mask.dtype) if _is_number(value) else value

    args = [stand_in(position, -1, value) for position, value in enumerate(call.args)]
    moved: Tensor = call.facts.func(*args, **call.kwargs)
    return moved


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


@functools.cache
def _is_elementwise(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags or func._schema.name.replace("::", ".") in _ELEMENTWISE
