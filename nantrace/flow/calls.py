"""One dispatched op between the look at its inputs and the look at its outputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nantrace.flow.memory import Look
from nantrace.flow.ops import OpFacts
from nantrace.flow.values import Summary, storage_key


class Argument(NamedTuple):
    """A tensor argument: position in the schema (-1 unknown), index inside a list (-1 none)."""

    position: int
    index: int  # type: ignore[assignment]  # it hides the tuple's method, which nobody needs
    tensor: Tensor


class Call:
    """An op with its arguments.

    Attributes:
        task: id of the running backward pass, -1 outside.
        bad: arguments that hold nonfinite values, with what was seen.
        skipped: arguments that were not looked at, because all that was written to their memory was finite.
        kept: id(tensor) -> what an in-place op was about to overwrite.
        nan_literal, inf_literal: whether a plain number among the arguments is NaN, or infinite.
        list_length: of a list op, how many tensors its lists hold.
        written: arguments that the op writes into.
    """

    __slots__ = (
        "args", "arguments", "bad", "facts", "inf_literal", "kept", "kwargs", "list_length", "nan_literal", "skipped",
        "task", "written",
    )  # fmt: skip

    def __init__(self, facts: OpFacts, task: int, args: Any, kwargs: Any) -> None:
        self.facts, self.args, self.kwargs = facts, args, kwargs
        self.task = task
        self.arguments: list[Argument] = []
        self.bad: list[tuple[Argument, Look]] = []
        self.skipped: list[Argument] = []
        self.kept: dict[int, Summary | Tensor] = {}
        self.nan_literal = self.inf_literal = False
        self.written: list[Argument] = []
        self.list_length = 0

    def reads(self, argument: Argument) -> bool:
        """Whether the op reads the argument's values."""
        return argument.position < 0 or self.facts.reads[argument.position]

    def needs_grad(self) -> bool:
        """Whether autograd records the op."""
        return torch.is_grad_enabled() and any(a.tensor.requires_grad for a in self.arguments)

    def read_ids(self) -> frozenset[int]:
        """Events whose nonfinite values it reads."""
        return frozenset().union(*(look.ids for _, look in self.bad))

    def new_tensors(self, out: Any) -> list[tuple[int, Tensor]]:
        """Tensors whose values are new after the op: (index in a list or -1, tensor)."""
        facts = self.facts
        if type(out) is Tensor and not facts.mutates and not facts.maybe_view:
            return [(-1, out)]
        written = self.written
        outputs = [(a.index, a.tensor) for a in written]
        if len(written) == 1 and out is written[0].tensor:
            return outputs
        old = {id(a.tensor) for a in written}
        for index, item in enumerate(out) if isinstance(out, (list, tuple)) else [(-1, out)]:
            inner = enumerate(item) if isinstance(item, (list, tuple)) else [(index if self.list_length else -1, item)]
            outputs += [(j, t) for j, t in inner if isinstance(t, Tensor) and id(t) not in old]
        if facts.maybe_view:
            memory = {storage_key(a.tensor) for a in self.arguments}
            outputs = [(j, t) for j, t in outputs if storage_key(t) not in memory]
        return outputs
