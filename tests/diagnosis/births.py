"""Turns a real computation into the events that an explanation is given: each op's operands, and what came out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nantrace.diagnosis.causes.explain import explain
from nantrace.diagnosis.causes.table import Explanation
from nantrace.lineage import Lineage, Operand, OpEvent


def operand(name: str, tensor: Tensor) -> Operand:
    """The statistics of one tensor."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    values = values.double()
    finite = values[torch.isfinite(values)]
    nonzero = finite[finite != 0].abs()
    return Operand(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        nan=int(values.isnan().sum()),
        posinf=int((values == math.inf).sum()),
        neginf=int((values == -math.inf).sum()),
        min=finite.min().item() if finite.numel() else None,
        max=finite.max().item() if finite.numel() else None,
        absmin=nonzero.min().item() if nonzero.numel() else None,
        zero=int((finite == 0).sum()),
    )


class Births(TorchDispatchMode):
    """Notes every op whose output is nonfinite."""

    def __init__(self) -> None:
        super().__init__()
        self.lineage = Lineage()
        self.time = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.time += 1
        names = [argument.name for argument in func._schema.arguments]
        given = list(zip(names, args, strict=False)) + list((kwargs or {}).items())
        operands, scalars = _split(given)
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, (list, tuple)) else [args[0] if result is None else result]
        for output in (part for entry in outputs for part in (entry if isinstance(entry, list) else [entry])):
            self._note(func._schema.name, operands, scalars, output)
        return result

    def _note(self, name: str, operands: list[Operand], scalars: dict[str, Any], output: Any) -> None:
        if not isinstance(output, Tensor) or not (output.is_floating_point() or output.is_complex()):
            return
        found = operand("output", output)
        if not found.nan + found.posinf + found.neginf:
            return
        node = torch._C._current_autograd_node()
        event = OpEvent(
            id=len(self.lineage.events) + 1,
            time=self.time,
            op="aten." + name.split("::")[1],
            kind=_kind(operands, scalars, found),
            phase="backward" if node else "forward",
            module="block.1",
            node=node.name() if node else None,
            where="model.py:41 in forward",
            iteration=1,
            dtype=found.dtype,
            shape=found.shape,
            nan=found.nan,
            posinf=found.posinf,
            neginf=found.neginf,
            operands=tuple(operands),
            scalars=scalars,
        )
        self.lineage.events.append(event)


def _split(given: list[tuple[str, Any]]) -> tuple[list[Operand], dict[str, Any]]:
    operands: list[Operand] = []
    scalars: dict[str, Any] = {}
    for name, value in given:
        if isinstance(value, Tensor):
            operands.append(operand(name, value))
        elif isinstance(value, (list, tuple)) and any(isinstance(entry, Tensor) for entry in value):
            operands.extend(operand(f"{name}[{i}]", entry) for i, entry in enumerate(value))
        else:
            scalars[name] = value
    return operands, scalars


def _kind(operands: list[Operand], scalars: dict[str, Any], found: Operand) -> Any:
    numbers = [value for value in scalars.values() if isinstance(value, float)]
    nan_in = any(o.nan for o in operands) or any(math.isnan(n) for n in numbers)
    inf_in = any(o.posinf + o.neginf for o in operands) or any(math.isinf(n) for n in numbers)
    if found.nan and not nan_in:
        return "nan"
    return "propagated" if nan_in or inf_in else "inf"


def births(run: Callable[[], Any], node: str | None = None) -> list[tuple[OpEvent, Explanation]]:
    """Every birth of a computation with its explanation; with `node`, those in that autograd node only."""
    with Births() as seen:
        run()
    found = [event for event in seen.lineage.events if event.kind in ("nan", "inf")]
    return [
        (event, explain(seen.lineage, event)) for event in found if node is None or (event.node or "").startswith(node)
    ]
