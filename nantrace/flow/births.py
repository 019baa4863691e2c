"""From an op with a nonfinite output to its `OpEvent`: how it came about, out of what, and where it sits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nantrace.flow.calls import Argument, Call
from nantrace.flow.externals import Externals
from nantrace.flow.marked import first
from nantrace.flow.rows import BatchRows
from nantrace.flow.values import FLOATS, INTEGERS, Masks, Scanner, Summary, dtype_name, planes, storage_key, summarize
from nantrace.lineage import Kind, Operand

#: An argument that an in-place op overwrites is kept up to this many elements; of larger ones only the extent is.
_KEEP = 1 << 16
#: Operands described at a birth.
_DESCRIBED = 8
#: Batch indices listed at a birth.
_SAMPLES = 64


def kind_of(call: Call, found: Masks, nan_parents: frozenset[int], inf_parents: frozenset[int]) -> Kind:
    """How the nonfinite output came about; see `nantrace.lineage.Kind`."""
    nan_in = bool(nan_parents) or call.nan_literal
    inf_in = bool(inf_parents) or call.inf_literal
    if found.nan and not nan_in:
        return "nan"
    if not nan_in and not inf_in:
        return "inf"
    return "propagated" if nan_parents or inf_parents else "inserted"


def keep(overwritten: Sequence[Tensor], scanner: Scanner) -> dict[int, Summary | Tensor]:
    """What an in-place op is about to overwrite, by the tensor's id, should its result turn out bad. Autograd does not
    see it: it listens above the handler that calls this."""
    kept = {}
    for tensor in overwritten:
        for plane in planes(tensor):
            kept[id(tensor)] = _copy(plane, scanner)
    return kept


def _copy(plane: Tensor, scanner: Scanner) -> Summary | Tensor:
    if plane.numel() <= _KEEP:
        return plane.clone()
    low, high = scanner.extent(plane)
    finite = low - low == 0 and high - high == 0
    return Summary(dtype_name(plane.dtype), tuple(plane.shape), 0, 0, 0, *((low, high) if finite else (None, None)))


def output_fields(plane: Tensor, found: Masks, rows: BatchRows, described: bool) -> dict[str, Any]:
    """An output's statistics as fields of an event; extent and samples only if it is to be described."""
    fields: dict[str, Any] = {"dtype": dtype_name(plane.dtype), "shape": tuple(plane.shape)}
    fields |= {"nan": found.nan, "posinf": found.posinf, "neginf": found.neginf}
    fields["first_bad"] = 0 if found.count == plane.numel() else first(found.bad)
    if described:
        summary = summarize(plane)
        fields |= {"min": summary.min, "max": summary.max}
        if rows.are_rows_of(plane):
            concerned = found.bad.reshape(plane.shape[0], -1).any(1).nonzero().reshape(-1)
            fields["samples"] = tuple(concerned[:_SAMPLES].tolist())
    return fields


def operands(call: Call, index: int, externals: Externals) -> tuple[Operand, ...]:
    """Statistics of what was read for output `index`, as it was before the op."""
    found: list[Operand] = []
    for argument in call.arguments:
        other = call.list_length and argument.index >= 0 and index >= 0 and argument.index != index
        if other or not call.reads(argument):
            continue
        before = call.kept.get(id(argument.tensor), argument.tensor)
        for summary in (before,) if isinstance(before, Summary) else _summaries(before):
            key = storage_key(argument.tensor)
            external = externals.get(key, int(argument.tensor.storage_offset()) if key is not None else None)
            name = _argument_name(call, argument)
            found.append(Operand(name=name, tensor=external.name if external else None, **vars(summary)))
        if len(found) >= _DESCRIBED:
            break
    return tuple(found)


def _summaries(tensor: Tensor) -> tuple[Summary, ...]:
    """Of each plane; of an empty tensor that there is nothing in it; of integers and booleans their extent."""
    if tensor.layout is not torch.strided or (tensor.dtype in FLOATS and tensor.numel()):
        return tuple(summarize(plane) for plane in planes(tensor))
    name, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    if not tensor.numel():
        return (Summary(name, shape, zero=0),)
    if tensor.dtype not in INTEGERS or tensor.is_meta:
        return ()
    low, high = (int(end) for end in torch.aminmax(tensor))
    return (Summary(name, shape, min=low, max=high, zero=int((tensor == 0).sum())),)


def _argument_name(call: Call, argument: Argument) -> str:
    name = call.facts.arguments[argument.position] if argument.position >= 0 else "?"
    return f"{name}[{argument.index}]" if argument.index >= 0 else name


def scalars(call: Call) -> dict[str, Any]:
    """The plain arguments by schema name: numbers, flags, names, and lists of numbers."""
    named = dict(zip(call.facts.arguments, call.args, strict=False)) | call.kwargs
    return {name: value for name, value in named.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, (bool, int, float, str)) for item in value)
    return isinstance(value, (bool, int, float, complex, str))


def is_datalike(plane: Tensor, found: Masks) -> bool:
    """Data, not a mark: at least two different nonzero finite values stand beside the nonfinite ones."""
    if plane.is_complex() or plane.element_size() == 1:
        return False
    values = plane.detach()[~found.bad & (plane.detach() != 0)]
    return values.numel() > 1 and bool((values != values[0]).any())
