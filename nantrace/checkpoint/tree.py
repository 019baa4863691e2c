"""Nested containers to leaves with dotted names. Knows dicts, lists and stand-ins; reads no value of a tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nantrace.checkpoint.result import Role
from nantrace.checkpoint.roles import named_role, role_of
from nantrace.checkpoint.stand_ins import StandIn

_PLAIN = (str, bytes, bytearray, bool, int, float, complex, type(None), torch.dtype, torch.device, torch.layout)
_OF_A_MODULE = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class Leaf:
    """A tensor or a float with its place; of a complex number each part is one."""

    name: str
    role: Role
    value: Any


@dataclass
class Walked:
    """The leaves of a tree, and what else was met on the way."""

    tensors: list[Leaf] = field(default_factory=list)
    numbers: list[Leaf] = field(default_factory=list)
    objects: list[tuple[str, str]] = field(default_factory=list)
    same: list[tuple[str, str]] = field(default_factory=list)  # a container met again, where it was first
    optimizers: list[tuple[str, Mapping[Any, Any]]] = field(default_factory=list)
    state_dicts: list[Mapping[str, torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class _Node:
    name: str
    role: Role | None
    value: Any


def walk(root: Any) -> Walked:
    """Visits each container once, in order, however deep and however entangled they are."""
    found = Walked()
    visited: dict[int, str] = {}
    waiting = [_Node("", None, root)]
    while waiting:
        node = waiting.pop()
        if _leaf(found, node):
            continue
        if id(node.value) in visited:
            if _holds_anything(node.value):
                found.same.append((node.name or "(the file)", visited[id(node.value)] or "(the file)"))
            continue
        visited[id(node.value)] = node.name
        children = list(_children(found, node))
        waiting.extend(reversed(children))
    return found


def _holds_anything(container: Any) -> bool:
    return isinstance(container, StandIn) or bool(container)


def _leaf(found: Walked, node: _Node) -> bool:
    """Whether it is one; files it."""
    value = node.value
    if isinstance(value, torch.Tensor):
        found.tensors.append(Leaf(node.name or "(the tensor)", node.role or named_role(node.name), value))
    elif isinstance(value, float) or type(value) is complex:
        parts = (value.real, value.imag) if isinstance(value, complex) else (value,)
        found.numbers.extend(Leaf(node.name, node.role or named_role(node.name), part) for part in parts)
    elif isinstance(value, type) and issubclass(value, StandIn):
        found.objects.append((node.name, value.kind))
    elif not isinstance(value, (Mapping, list, tuple, set, frozenset, StandIn, *_PLAIN)):
        found.objects.append((node.name, f"{type(value).__module__}.{type(value).__qualname__}"))
    else:
        return isinstance(value, _PLAIN)
    return True


def _children(found: Walked, node: _Node) -> Iterator[_Node]:
    value = node.value
    if isinstance(value, StandIn):
        found.objects.append((node.name or "(the file)", value.kind))
        yield from _inside(node)
    elif isinstance(value, Mapping):
        role = node.role or role_of(value)
        if role == "optimizer" and node.role is None:
            found.optimizers.append((node.name, value))
        if role is None and any(isinstance(each, torch.Tensor) for each in value.values()):
            found.state_dicts.append(value)
        yield from (_Node(_joined(node.name, key), role, each) for key, each in value.items())
    else:
        yield from (_Node(_joined(node.name, place), node.role, each) for place, each in enumerate(value))


def _inside(node: _Node) -> Iterator[_Node]:
    """What an object was to be made of; of a module under the names that its `state_dict` would give."""
    for place, part in enumerate(node.value.parts):
        if isinstance(part, Mapping) and all(isinstance(part.get(key), Mapping) for key in _OF_A_MODULE):
            for key in _OF_A_MODULE:
                yield from (_Node(_joined(node.name, name), node.role, each) for name, each in part[key].items())
        elif isinstance(part, Mapping):
            yield dataclasses.replace(node, value=part)
        elif not isinstance(part, type):
            yield _Node(_joined(node.name, place), node.role, part)


def _joined(prefix: str, key: Any) -> str:
    word = key if isinstance(key, str) else str(key) if isinstance(key, (int, bool)) else f"<{type(key).__name__}>"
    return f"{prefix}.{word}" if prefix else word
