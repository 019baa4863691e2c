"""What a step can reach and change: tensors, containers, random generators, found by walking from its objects.

Knows how to walk and what to call things; `snapshot` keeps and restores what is found here. What belongs to the model,
an optimizer, a scheduler, a scaler or the batch is *owned*: its containers are to be restored too. What is merely
reached through the step's function (closure, globals it names, the object it is a method of) is *watched*: tensors and
whole modules or optimizers in it are owned again, but plain Python values there are only compared, and put back once
when everything is over.

Not walked: modules of Python, classes, torch's and the standard library's own objects, `__slots__`.
"""

from __future__ import annotations

import functools
import io
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, types.BuiltinFunctionType)
_OWNERS = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    torch.amp.GradScaler,
)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
#: A watched container with more elements is not walked into: a data set, not state.
_LARGE = 10_000
#: With more than this its elements are not kept either.
_HUGE = 1_000_000
#: Iterators of builtin containers, which can be told where to go on.
_BUILTIN: tuple[Iterable[Any], ...] = ([], (), "", "\u0100", b"", range(1))
_REWINDABLE = tuple(type(iter(container)) for container in _BUILTIN)
_ABSENT = "absent"


@dataclass(frozen=True)
class Holder:
    """A mutable container and what it held: `content` is its shallow copy."""

    name: str
    container: Any  # dict, list, set, deque, or a cell of a closure
    content: Any
    partly: bool = False  # a dict of which only the keys of `content` count


@dataclass(frozen=True)
class Position:
    """How far an iterator or a file was read."""

    source: Any
    at: int

    def put_back(self) -> None:
        if isinstance(self.source, io.IOBase):
            if not self.source.closed:
                self.source.seek(self.at)
        else:
            self.source.__setstate__(self.at)


@dataclass
class Reached:
    """Everything that was found, each object once, under the first name it was met."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    arrays: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    owned: list[Holder] = field(default_factory=list)
    watched: list[Holder] = field(default_factory=list)
    opaque: dict[str, str] = field(default_factory=dict)  # name -> type of what cannot be kept
    positions: list[Position] = field(default_factory=list)  # of some of them
    names: dict[int, str] = field(default_factory=dict)  # id of a tensor -> its name
    seen: dict[int, Any] = field(default_factory=dict)  # by id, kept alive so that no id is used twice

    def walk(self, value: Any, name: str, *, owned: bool, in_batch: bool = False) -> None:
        """Find everything from `value` on."""
        todo = [(value, name, owned)]
        while todo:
            value, name, owned = todo.pop()
            if isinstance(value, _PLAIN) or id(value) in self.seen:
                continue
            self.seen[id(value)] = value
            todo.extend(reversed(list(self._visit(value, name, owned, in_batch))))

    def _visit(self, value: Any, name: str, owned: bool, in_batch: bool) -> Iterator[tuple[Any, str, bool]]:
        if isinstance(value, torch.Tensor):
            self.names[id(value)] = name
            self.tensors[_free(self.tensors, name)] = value
            if value.is_leaf and value.grad is not None:
                yield value.grad, f"gradient of {name}", owned
        elif isinstance(value, _GENERATORS):
            self.generators[_free(self.generators, name)] = value
        elif isinstance(value, np.ndarray) and value.dtype != object:
            self.arrays[_free(self.arrays, name)] = value
        elif isinstance(value, (dict, list, set, deque)):
            yield from self._container(value, name, owned)
        elif isinstance(value, (tuple, frozenset)):
            yield from ((item, f"{name}[{i}]", owned) for i, item in enumerate(value))
        elif isinstance(value, _FUNCTIONS):
            if not owned:
                yield from self._function(value, name)
        elif isinstance(value, _OWNERS):
            yield from self._attributes(value, name, owned=True)
        elif _consumed(value):
            self.opaque[name] = type(value).__qualname__
            self.positions += _position(value)
        elif _is_foreign(value):
            if in_batch and not isinstance(value, _harmless()):
                self.opaque[name] = type(value).__qualname__
        else:
            yield from self._attributes(value, name, owned=owned and in_batch)

    def _container(self, value: Any, name: str, owned: bool) -> Iterator[tuple[Any, str, bool]]:
        if not owned and len(value) > _HUGE:
            return
        self._hold(Holder(name, value, _copy(value)), owned)
        if not owned and len(value) > _LARGE:
            return
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield item, self._child(name, key), owned
        if getattr(value, "__dict__", None):  # a subclass of dict or list with attributes of its own
            yield from self._attributes(value, name, owned)

    def _attributes(self, value: Any, name: str, owned: bool) -> Iterator[tuple[Any, str, bool]]:
        attributes = vars(value)
        self._hold(Holder(f"attributes of {name or 'the model'}", attributes, dict(attributes)), owned)
        prefix = f"{name}." if name else ""
        for key, item in list(attributes.items()):
            if isinstance(value, torch.nn.Module) and key in ("_parameters", "_buffers", "_modules"):
                self._hold(Holder(f"{prefix}{key}", item, dict(item)), owned)
                self.seen[id(item)] = item
                yield from ((child, prefix + child_name, owned) for child_name, child in item.items())
            else:
                yield item, prefix + str(key), owned

    def _function(self, function: Any, name: str) -> Iterator[tuple[Any, str, bool]]:
        """The state a function carries: partial arguments, `self`, defaults, closure, and the globals it names."""
        if isinstance(function, functools.partial):
            yield function.func, name, False
            yield from ((item, f"{name}.args[{i}]", False) for i, item in enumerate(function.args))
            yield from ((item, f"{name}.{key}", False) for key, item in function.keywords.items())
            return
        if isinstance(function, types.MethodType):
            yield function.__self__, f"{name}.self", False
            function = function.__func__
        if not isinstance(function, types.FunctionType) or _package(function.__module__) in _LIBRARIES:
            return
        yield from ((item, f"{name}.defaults[{i}]", False) for i, item in enumerate(function.__defaults__ or ()))
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not yet assigned
                continue
            self._hold(Holder(f"variable {key} of {name}", cell, content), False)
            yield content, key, False
        names = _names_in(function.__code__)
        yield from self._globals(function.__globals__, f"globals of {function.__module__}", names)

    def _globals(self, table: dict[str, Any], title: str, names: frozenset[str]) -> Iterator[tuple[Any, str, bool]]:
        """Those that the names in a function's code may mean, also in modules of the user's own."""
        named = {name: table[name] for name in sorted(names) if name in table}
        absent = dict.fromkeys((name for name in sorted(names) if name not in table), _ABSENT)
        self._hold(Holder(title, table, {**named, **absent}, partly=True), False)
        for key, item in named.items():
            if _is_own_module(item) and id(item) not in self.seen:
                self.seen[id(item)] = item
                yield from self._globals(vars(item), f"globals of {item.__name__}", names)
            else:
                yield item, key, False

    def _hold(self, holder: Holder, owned: bool) -> None:
        (self.owned if owned else self.watched).append(holder)

    def _child(self, name: str, key: Any) -> str:
        if isinstance(key, torch.Tensor):  # an optimizer's state is keyed by parameter
            return f"{name}[{self.names.get(id(key), 'a tensor')}]"
        return f"{name}.{key}" if isinstance(key, str) and key.isidentifier() else f"{name}[{key!r}]"


_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "nantrace"}


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _is_own_module(value: Any) -> bool:
    if not isinstance(value, types.ModuleType) or _package(value.__name__) in _LIBRARIES:
        return False
    file = getattr(value, "__file__", None) or ""
    return bool(file) and "site-packages" not in file and "dist-packages" not in file


def _names_in(code: types.CodeType) -> frozenset[str]:
    """Every name that a function's code, or a function defined in it, looks up."""
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def _position(value: Any) -> list[Position]:
    """Where reading goes on, if that can be told without reading, and be put back without loss."""
    if type(value) in _REWINDABLE:
        state = value.__reduce__()
        return [Position(value, state[2])] if len(state) == 3 else []  # shorter once it is used up
    if isinstance(value, io.IOBase):
        try:
            if value.readable() and value.seekable() and not value.writable():
                return [Position(value, value.tell())]
        except (OSError, ValueError):  # closed, or read by `next`, which disables `tell`
            pass
    return []


def _consumed(value: Any) -> bool:
    """Reading it changes it, and it cannot be wound back."""
    return isinstance(value, (io.IOBase, types.GeneratorType)) or hasattr(type(value), "__next__")


def _is_foreign(value: Any) -> bool:
    """Not an object of the user's: nothing to walk into."""
    return not hasattr(value, "__dict__") or _package(type(value).__module__) in _LIBRARIES


@functools.cache
def _harmless() -> tuple[type, ...]:
    import datetime
    import decimal
    import enum
    import fractions
    import pathlib
    import re

    return (
        torch.dtype, torch.device, torch.layout, torch.memory_format, np.generic, np.dtype, enum.Enum, range, slice,
        pathlib.PurePath, re.Pattern, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo,
        decimal.Decimal, fractions.Fraction, type(...),
    )  # fmt: skip


def _copy(container: Any) -> Any:
    """A shallow copy as a builtin of the same kind, whatever a subclass makes of `copy`."""
    if isinstance(container, dict):
        return dict(container.items())
    return set(container) if isinstance(container, set) else list(container)


def _free(table: dict[str, Any], name: str) -> str:
    """`name`, or a numbered form of it if another object has it."""
    if name not in table:
        return name
    return next(free for i in range(2, len(table) + 3) if (free := f"{name} ({i})") not in table)


def holds_the_same(holder: Holder) -> bool:
    """The container holds the same objects as then, in the same order."""
    now, then = _items(holder)
    return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))


def put_back(holder: Holder) -> None:
    """Make a container hold what it held, itself staying the same object."""
    container, content = holder.container, holder.content
    if isinstance(container, types.CellType):
        container.cell_contents = content
    elif holder.partly:
        for key, value in content.items():
            if value is _ABSENT:
                container.pop(key, None)
            elif container.get(key, _ABSENT) is not value:
                container[key] = value
    elif isinstance(container, dict):
        kind = OrderedDict if isinstance(container, OrderedDict) else dict
        kind.clear(container)
        for key, value in content.items():
            kind.__setitem__(container, key, value)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), content)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, content)
    else:
        deque.clear(container)
        deque.extend(container, content)


def changes(holder: Holder) -> list[str]:
    """What a watched or owned container holds now that it did not: "variable calls of step: 2, was 1"."""
    container, content = holder.container, holder.content
    if isinstance(container, types.CellType):
        pairs = [(holder.name, content, _cell(container))]
    elif isinstance(container, dict):
        keys = content if holder.partly else {**content, **container}
        pairs = [(f"{holder.name}: {_key(k)}", content.get(k, _ABSENT), container.get(k, _ABSENT)) for k in keys]
    else:
        now, then = _items(holder)
        if len(now) != len(then):
            return [f"{holder.name}: {len(now)} elements, was {len(then)}"]
        pairs = [(f"{holder.name}[{i}]", a, b) for i, (a, b) in enumerate(zip(then, now, strict=True)) if a is not b]
    return [f"{name}: {_show(now)}, was {_show(then)}" for name, then, now in pairs if not _alike(now, then)]


def _items(holder: Holder) -> tuple[list[Any], list[Any]]:
    container, content = holder.container, holder.content
    if isinstance(container, types.CellType):
        return [_cell(container)], [content]
    if holder.partly:
        return [container.get(key, _ABSENT) for key in content], list(content.values())
    if isinstance(container, dict):
        return [x for pair in container.items() for x in pair], [x for pair in content.items() for x in pair]
    return list(container), list(content)


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _alike(a: Any, b: Any) -> bool:
    if a is b:
        return True
    plain = (bool, int, float, complex, str, bytes)
    return type(a) is type(b) and isinstance(a, plain) and (a == b or repr(a) == repr(b))  # repr: nan is not nan


def _key(key: Any) -> str:
    return "a tensor" if isinstance(key, torch.Tensor) else str(key)


def _show(value: Any) -> str:
    if isinstance(value, (bool, int, float, complex, str, type(None))):
        text = repr(value) if value is not _ABSENT else _ABSENT
        return text if len(text) <= 60 else text[:57] + "..."
    return f"another {type(value).__name__}"
