"""The conditions under which a tensor may be read inside somebody else's step.

No autograd graph grows, and the user's dispatch and function modes do not see what nantrace computes.
"""

from __future__ import annotations

import contextlib
from types import TracebackType

import torch
from torch.utils._python_dispatch import _disable_current_modes


class Quiet:
    """A context in which gradient mode is off and no mode of the user is active.

    `torch.no_grad` does the same at four times the cost, in a place that runs thousands of times a step.
    """

    __slots__ = ("grad", "modes")

    def __enter__(self) -> None:
        self.modes: contextlib.ExitStack | None = None
        if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
            self.modes = contextlib.ExitStack()
            self.modes.enter_context(torch._C.DisableTorchFunction())
            self.modes.enter_context(_disable_current_modes())
        self.grad = torch.is_grad_enabled()
        if self.grad:
            torch._C._set_grad_enabled(False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.grad:
            torch._C._set_grad_enabled(True)
        if self.modes is not None:
            self.modes.close()


_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state


def undisturbed() -> bool:
    """Whether a tensor can be read without `Quiet`, once gradient mode is off."""
    return not (_function_modes() or _dispatch_modes()) and _transform() is None and _tracing() is None


def unreadable() -> bool:
    """Whether tensors are stand-ins right now: inside a functorch transform, or while `torch.jit.trace` records."""
    return _transform() is not None or _tracing() is not None
