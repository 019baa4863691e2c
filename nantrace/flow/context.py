"""Where an op runs: its phase, the module whose code it is, its autograd node and the user's line.

Decided from the stack of module calls, the backward pass that runs (if one does), the state of the round, and the first
frame of the user's code. Says nothing about values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from nantrace.flow.calls import any_requires_grad
from nantrace.flow.externals import Externals
from nantrace.flow.links import Frames, Line, Link, Links, in_recompute, sequence_number
from nantrace.flow.ops import OpFacts
from nantrace.flow.rounds import Rounds
from nantrace.flow.values import storage_key


class Context(NamedTuple):  # made for every forward op: a frozen dataclass takes five times as long
    """Where one op runs. `node_key` identifies one run of one autograd node: (backward pass, sequence number, name).

    `own_line`: the line is one that runs in backward, of the node's own code or of a hook, not that of its forward.
    """

    phase: str
    module: str | None
    line: Line | None
    node: str | None = None
    node_key: tuple[int, int, str] | None = None
    forward_op: str | None = None
    own_line: bool = False

    @property
    def where(self) -> str | None:
        return None if self.line is None else str(self.line)

    def fields(self) -> dict[str, Any]:
        """As an event's fields."""
        return {
            "phase": self.phase,
            "module": self.module,
            "node": self.node,
            "where": self.where,
            "node_key": self.node_key,
            "forward_op": self.forward_op,
            "own_line": self.own_line,
        }


class HasTensor(Protocol):
    """An argument of an op, at a position of its schema."""

    @property
    def position(self) -> int: ...
    @property
    def tensor(self) -> Tensor: ...


class ModuleListener(Protocol):
    """Is told of every module call, through PyTorch's global hooks."""

    def on_module_begins(self, module: torch.nn.Module, args: Any) -> None: ...
    def on_module_ends(self, module: torch.nn.Module, args: Any, output: Any) -> None: ...


class Whereabouts:
    """Answers where an op runs, now.

    Attributes:
        stack: the modules being called, outermost first, each with the backward pass that it was called in (-1 none).
    """

    def __init__(self, model: torch.nn.Module, rounds: Rounds, externals: Externals) -> None:
        self.frames = Frames(model)
        self.links = Links()
        self.stack: list[tuple[torch.nn.Module, int]] = []
        self._rounds, self._externals = rounds, externals
        self._thread: int | None = None

    def begin(self) -> None:
        """What autograd numbered before now is nobody's here."""
        self._thread = threading.get_ident()
        self.links.last = sequence_number()

    def is_ours(self, thread: int) -> bool:
        return thread == self._thread

    def watch_modules(self, listener: ModuleListener) -> list[Any]:
        """Put global hooks on; returns their handles. They change no module and no execution path."""

        def begins(module: torch.nn.Module, args: Any) -> None:
            listener.on_module_begins(module, args)

        def ends(module: torch.nn.Module, args: Any, output: Any) -> None:
            listener.on_module_ends(module, args, output)

        return [
            register_module_forward_pre_hook(begins),
            register_module_forward_hook(ends, always_call=True),
        ]

    def leave(self, module: torch.nn.Module) -> int | None:
        """Unwind the stack through `module`; returns the backward pass it was called in, None if it is not there."""
        for index in range(len(self.stack) - 1, -1, -1):
            if self.stack[index][0] is module:
                task = self.stack[index][1]
                del self.stack[index:]
                return task
        return None

    def forget(self) -> None:
        self.stack.clear()

    def link(self, op: str, number: int, task: int, args: Sequence[Any], time: int) -> None:
        """Autograd numbered a node since the last op: remember where its forward op ran."""
        if task >= 0 and not torch.is_grad_enabled():
            return
        differentiable = torch.is_grad_enabled() and any_requires_grad(args)
        here = self._find(task, lambda: differentiable, (), None)
        self.links.assign(number, Link(here.module, here.line, op), differentiable, time)

    def find(
        self,
        task: int,
        needs_grad: Callable[[], bool],
        arguments: Iterable[HasTensor],
        facts: OpFacts,
    ) -> Context:
        """Where the op with these arguments runs.

        Args:
            task: id of the running backward pass, -1 outside.
            needs_grad: whether autograd records the op.
            arguments: its tensors.
            facts: its schema.
        """
        return self._find(task, needs_grad, arguments, facts)

    def _find(
        self, task: int, needs_grad: Callable[[], bool], arguments: Iterable[HasTensor], facts: OpFacts | None
    ) -> Context:
        rounds = self._rounds
        frame = self.frames.user()
        if rounds.in_optimizer and task < 0 and len(self.stack) == rounds.optimizer_depth and not needs_grad():
            return Context("optimizer", None, _line(frame))
        if task >= 0:
            return self._in_backward(task, frame)
        inner = self.stack[-1][0] if self.stack else None
        method_of = None if frame is None else self.frames.module_of(frame, inner)
        if inner is not None:
            return self._in_module(inner, method_of, frame)
        if method_of is not None:  # a submodule's method, called outside any module call
            return Context("forward", method_of, _line(frame))
        return Context(self._outside(needs_grad, arguments, facts), None, _line(frame))

    def _in_module(self, inner: torch.nn.Module, method_of: str | None, frame: FrameType | None) -> Context:
        module = self.frames.label(inner)
        inside = any(id(called) in self.frames.names for called, _ in self.stack)
        descends = method_of is not None and (module == "" or method_of.startswith(module + "."))
        if inside and descends and not module.startswith("<"):
            module = str(method_of)  # `child.forward()` was called directly, past the hooks
        return Context("forward" if inside else "loss", module, _line(frame))

    def _in_backward(self, task: int, frame: FrameType | None) -> Context:
        called_in = self.stack[-1][1] if self.stack else -1
        if called_in >= 0 or (torch.is_grad_enabled() and in_recompute()):
            if called_in >= 0:
                module: str | None = self.frames.label(self.stack[-1][0])
            else:
                module = None if frame is None else self.frames.module_of(frame, None)
            return Context("recompute", module, _line(frame))
        node = torch._C._current_autograd_node()
        if node is None:
            return Context("backward", None, _line(frame))
        name, number = node.name(), node._sequence_nr()
        link = self.links.get(number)
        module = link.module if link else self._owner(node, name)
        line = _line(frame) or (link.line if link else None)
        op = link.op if link else None
        return Context("backward", module, line, name, (task, number, name), op, own_line=frame is not None)

    def _owner(self, node: Any, name: str) -> str | None:
        """The module that owns the parameter whose gradient is accumulated."""
        if not name.endswith("AccumulateGrad"):
            return None
        parameter = self._externals.parameters.get(id(getattr(node, "variable", None)))
        return None if parameter is None else parameter.rpartition(".")[0]

    def _outside(self, needs_grad: Callable[[], bool], arguments: Iterable[HasTensor], facts: OpFacts | None) -> str:
        """The phase of an op that runs in no module: what it touches says whether it is part of an update."""
        state = self._rounds.state
        if state == "forward" or needs_grad() or facts is None:
            return "loss"
        keys = [(argument, storage_key(argument.tensor)) for argument in arguments]
        writes = any(
            argument.position >= 0 and facts.writes[argument.position] and self._externals.is_state(key)
            for argument, key in keys
        )
        if state == "after_backward":
            return "optimizer" if writes else "post_backward"
        reads = any(self._externals.is_state(key, "param") for _, key in keys)
        return "update" if writes or reads else "loss"


def _line(frame: FrameType | None) -> Line | None:
    return None if frame is None else Line(frame.f_code, frame.f_lineno)
