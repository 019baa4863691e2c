"""One dispatched op between the look at its inputs and the look at its outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nantrace.flow.memory import Look
from nantrace.flow.ops import OpFacts
from nantrace.flow.values import Summary, storage_key, tensors_in

_NOTHING: Mapping[int, Any] = MappingProxyType({})


class Argument(NamedTuple):
    """A tensor argument: position in the schema (-1 unknown), index inside a list (-1 none)."""

    position: int
    index: int  # type: ignore[assignment]  # it hides the tuple's method, which nobody needs
    tensor: Tensor


def any_requires_grad(values: Iterable[Any]) -> bool:
    """Whether a tensor among an op's arguments, or in a list among them, requires grad."""
    for value in values:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, Tensor) and item.requires_grad:
                return True
    return False


class Call:
    """An op with its arguments. What is asked only when something nonfinite is around is worked out when asked.

    Attributes:
        bad: arguments that hold nonfinite values, with what was seen.
        kept: id(tensor) -> what an in-place op was about to overwrite.
    """

    __slots__ = ("_arguments", "_list_length", "args", "bad", "facts", "kept", "kwargs")

    def __init__(self, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.facts, self.args, self.kwargs = facts, args, kwargs
        self.bad: Sequence[tuple[Argument, Look]] = ()
        self.kept: Mapping[int, Summary | Tensor] = _NOTHING
        self._arguments: tuple[Argument, ...] | None = None
        self._list_length: int | None = None

    @property
    def task(self) -> int:
        """Id of the running backward pass, -1 outside."""
        task: int = torch._C._current_graph_task_id()
        return task

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """Its tensors, those in lists too."""
        if self._arguments is None:
            self._arguments = tuple(self._tensors())
        return self._arguments

    def _tensors(self) -> Iterator[Argument]:
        for position, value in self._placed():
            if isinstance(value, Tensor):
                yield Argument(position, -1, value)
            elif isinstance(value, (list, tuple)):
                for index, item in enumerate(value):
                    if isinstance(item, Tensor):
                        yield Argument(position, index, item)

    def _placed(self) -> Iterator[tuple[int, Any]]:
        """Every argument with its position in the schema, -1 unknown."""
        yield from enumerate(self.args)
        for name, value in self.kwargs.items():
            yield self.facts.position.get(name, -1), value

    @property
    def written(self) -> tuple[Argument, ...]:
        """Arguments that the op writes into, by its schema."""
        writes = self.facts.writes
        return tuple(a for a in self.arguments if a.position >= 0 and writes[a.position])

    @property
    def list_length(self) -> int:
        """Of a list op, how many tensors its lists hold."""
        if self._list_length is None:
            in_lists = (a.position for a in self.arguments if a.index >= 0)
            self._list_length = max(Counter(in_lists).values(), default=0) if self.facts.listwise else 0
        return self._list_length

    def literals(self) -> Iterator[complex]:
        """Plain numbers among the arguments that are NaN or infinite."""
        for _, value in self._placed():
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, (float, complex)) and item - item != 0:
                    yield item

    @property
    def nan_literal(self) -> bool:
        return any(number != number for number in self.literals())

    @property
    def inf_literal(self) -> bool:
        return any(number == number for number in self.literals())

    def reads(self, argument: Argument) -> bool:
        """Whether the op reads the argument's values."""
        return argument.position < 0 or self.facts.reads[argument.position]

    def received(self) -> list[Tensor]:
        """Of a collective, the arguments that it fills, however deep they lie."""
        named = dict(zip(self.facts.arguments, self.args, strict=False)) | self.kwargs
        return [tensor for name in self.facts.received for _, tensor in tensors_in(named.get(name), name)]

    def needs_grad(self) -> bool:
        """Whether autograd records the op."""
        return torch.is_grad_enabled() and (
            any_requires_grad(self.args) or (bool(self.kwargs) and any_requires_grad(self.kwargs.values()))
        )

    def writes_into_view(self) -> bool:
        if self.facts.writes_self:
            return bool(self.args[0]._is_view())
        return any(a.tensor._is_view() for a in self.written if a.index < 0)

    def read_ids(self) -> frozenset[int]:
        """Events whose nonfinite values it reads."""
        return frozenset().union(*(look.ids for _, look in self.bad))

    def new_tensors(self, out: Any) -> list[tuple[int, Tensor]]:
        """Tensors whose values are new after the op: (index in a list or -1, tensor)."""
        facts = self.facts
        if type(out) is Tensor and not facts.mutates and not facts.maybe_view:
            return [(-1, out)]
        if facts.writes_self and out is self.args[0]:
            return [(-1, out)]
        written, in_lists = self.written, bool(self.list_length)
        outputs = [(a.index, a.tensor) for a in written]
        old = {id(a.tensor) for a in written}
        for index, item in enumerate(out) if isinstance(out, (list, tuple)) else [(-1, out)]:
            inner = enumerate(item) if isinstance(item, (list, tuple)) else [(index if in_lists else -1, item)]
            outputs += [(j, t) for j, t in inner if isinstance(t, Tensor) and id(t) not in old]
        if facts.maybe_view:
            memory = {storage_key(a.tensor) for a in self.arguments}
            outputs = [(j, t) for j, t in outputs if storage_key(t) not in memory]
        return outputs
