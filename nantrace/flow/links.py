"""Which forward code an autograd node came from: sequence number -> module, user line and op.

Autograd numbers its nodes; the number of an op's node is already taken when the op is dispatched. Two exceptions are
repaired here: an in-place op that saves `self` clones it first, and the clone takes a number in between; an in-place
op on a view makes its nodes (`CopySlices`) only after it ran.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import nantrace
from nantrace.capture import lifecycle
from nantrace.capture.sites import plain_name, wrapper_parts
from nantrace.flow.source import line_of_source

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_OWN = os.path.dirname(os.path.abspath(nantrace.__file__)) + os.sep
_ENGINE = "nantrace_backward"  # lifecycle's wrapper of the engine: no user code lies between it and an autograd node
#: How many unlinked numbers before an op's own can still be its clones and nodes.
_REACH = 8


def fqn(name: str, model: torch.nn.Module) -> str:
    """A name within the model without the levels that wrappers add."""
    return plain_name(name, wrapper_parts(model))


class Line(NamedTuple):  # as `Link`, made for every forward op: a frozen dataclass takes five times as long
    """A line of the user's code; formatted only when somebody asks."""

    code: CodeType
    number: int

    def __str__(self) -> str:
        return line_of_source(self.code.co_filename, self.number, self.code.co_name)


class Link(NamedTuple):
    """Where a node's forward op ran."""

    module: str | None
    line: Line | None
    op: str


class Frames:
    """Finds the first frame of the user's code above the handler, and the module whose method it runs."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._codes: dict[int, tuple[CodeType, int]] = {}  # id -> (kept alive, 0 user | 1 foreign | 2 engine)
        self.names = {id(module): fqn(name, model) for name, module in model.named_modules()}
        self._methods = _method_codes(model)
        self._ambiguous: dict[int, bool] = {}  # by id of a module

    def label(self, module: torch.nn.Module) -> str:
        """FQN inside the model, "<ClassName>" outside it."""
        name = self.names.get(id(module))
        return f"<{type(module).__name__}>" if name is None else name

    def user(self) -> FrameType | None:
        """The innermost frame that is neither PyTorch's, Python's own nor ours; None if the engine comes first."""
        frame: FrameType | None = sys._getframe(1)
        codes = self._codes
        while frame is not None:
            code = frame.f_code
            entry = codes.get(id(code))
            if entry is None:
                entry = codes[id(code)] = (code, _classify(code))
            if entry[1] == 0:
                return frame
            if entry[1] == 2:
                return None
            frame = frame.f_back
        return None

    def module_of(self, frame: FrameType, innermost: torch.nn.Module | None) -> str | None:
        """FQN of the module whose own method this frame runs, called or not; None if it is no such method."""
        code = frame.f_code
        if id(code) not in self._methods:
            return None
        if innermost is not None and not self._is_ambiguous(innermost):
            forward = getattr(type(innermost).forward, "__code__", None)
            if forward is code:  # reading f_locals is slow, and would say the same
                return self.names.get(id(innermost))
        return self.names.get(id(frame.f_locals.get(code.co_varnames[0])))

    def _is_ambiguous(self, module: torch.nn.Module) -> bool:
        """Whether a module of the model holds another of its own class, so that a frame may run either's method."""
        ambiguous = self._ambiguous.get(id(module))
        if ambiguous is None:
            cls, inside = type(module), id(module) in self.names
            ambiguous = inside and any(type(other) is cls for other in module.modules() if other is not module)
            self._ambiguous[id(module)] = ambiguous
        return ambiguous


def _classify(code: CodeType) -> int:
    name = code.co_filename
    if name.startswith(_OWN):
        return 2 if code.co_name == _ENGINE and name == lifecycle.__file__ else 1
    generated = name.startswith("<") and not name.startswith(("<stdin", "<ipython", "<string"))
    standard = name.startswith(_STANDARD) and "-packages" not in name  # threads, queues, decorators: nobody's model
    return 1 if generated or standard or name.startswith(_TORCH) else 0


def _method_codes(model: torch.nn.Module) -> Mapping[int, CodeType]:
    """Code objects of the methods of the model's classes, by id; PyTorch's own classes left out."""
    codes: dict[int, CodeType] = {}
    classes = {type(module) for module in model.modules()}
    for cls in {base for each in classes for base in each.__mro__}:
        for function in vars(cls).values():
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType) and code.co_argcount and not code.co_filename.startswith(_TORCH):
                codes[id(code)] = code
    return codes


class Links:
    """Hands the sequence numbers that autograd has taken since the last op to the op they belong to."""

    def __init__(self) -> None:
        self._links: dict[int, Link] = {}
        self.last = sequence_number()
        self._previous: Link | None = None
        self._wrote_into_view = False
        self._taken_before = (-1, range(0))  # when an op found numbers below its own, and which

    def get(self, number: int) -> Link | None:
        return self._links.get(number)

    def assign(self, number: int, link: Link, differentiable: bool, time: int) -> None:
        """Numbers up to `number` were taken since the last op; `link` is the op being dispatched, the `time`-th."""
        earlier = self._previous if self._wrote_into_view and self._previous is not None else link
        between = range(max(self.last + 1, number - _REACH), number)
        for taken in between:
            self._links.setdefault(taken, earlier)
        self._taken_before = (time, range(0) if self._wrote_into_view else between)
        if self._wrote_into_view and not differentiable:
            link = earlier
        self._links[number] = self._previous = link
        self.last = number

    def wrote(self, op: str, into_view: bool, number: int, time: int) -> None:
        """An op that writes owns the numbers taken before the clone right before it, and after it if into a view."""
        cloned, taken_before = self._taken_before
        if time == cloned + 1:
            for taken in taken_before:
                self._links[taken] = self._links[taken]._replace(op=op)
        self._wrote_into_view = into_view
        if into_view:
            self._previous = self._links.get(number, self._previous)


def sequence_number() -> int:
    """The number of this thread's newest autograd node."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number - 1


def in_recompute() -> bool:
    """Whether activation checkpointing's own hook is on top: its second forward runs."""
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return bool(top) and getattr(top[0], "__qualname__", "").startswith("_recomputation_hook")
