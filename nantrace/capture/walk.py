"""The tensors inside a value that a module was given or gave back, each with the path that leads to it.

Opens tuples, lists, dicts and their subclasses (model outputs), dataclasses and sets. Other objects stay closed and
are named in `unopened`. Knows nothing of modules, sites or gradients.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import torch

_PLAIN = (type(None), bool, int, float, str, bytes, complex, torch.dtype, torch.device, torch.Size, slice, range)
_DEEPEST = 32


def tensors_in(value: Any, slot: str, unopened: set[str]) -> list[tuple[str, torch.Tensor]]:
    """(path, tensor) for every tensor inside `value`, in order: "output[0].logits", "kwargs.mask".

    Args:
        value: anything.
        slot: path of `value` itself.
        unopened: receives the class names of objects that were not looked into.
    """
    if isinstance(value, torch.Tensor):
        return [(slot, value)]
    found: list[tuple[str, torch.Tensor]] = []
    _collect(value, slot, found, unopened, ())
    return found


def _collect(
    value: Any, slot: str, found: list[tuple[str, torch.Tensor]], unopened: set[str], around: tuple[int, ...]
) -> None:
    if isinstance(value, torch.Tensor):
        found.append((slot, value))
        return
    if isinstance(value, _PLAIN) or id(value) in around:
        return
    parts = _parts(value, slot) if len(around) < _DEEPEST else None
    if parts is None:
        unopened.add(type(value).__name__)
        return
    for path, part in parts:
        _collect(part, path, found, unopened, (*around, id(value)))


def _parts(value: Any, slot: str) -> list[tuple[str, Any]] | None:
    """(path, part) of a container, None for what is not one."""
    if isinstance(value, (tuple, list, collections.deque)):
        names = getattr(value, "_fields", None)
        if names is not None and len(names) == len(value):
            return [(f"{slot}.{name}", part) for name, part in zip(names, value, strict=True)]
        return [(f"{slot}[{index}]", part) for index, part in enumerate(value)]
    if isinstance(value, (dict, collections.UserDict)):
        return [(f"{slot}{_key(key)}", part) for key, part in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f"{slot}.{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    if isinstance(value, (set, frozenset)):
        return [(f"{slot}{{{index}}}", part) for index, part in enumerate(value)]
    return None


def _key(key: object) -> str:
    if isinstance(key, str):
        return f".{key}" if key.isidentifier() else f"[{key!r}]"
    return f"[{key}]" if isinstance(key, int) else f"[{type(key).__name__}]"
