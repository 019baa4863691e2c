"""Calls of modules: who calls whom, what each call reads and puts out, and in which part of the step.

Everything that hooks see ends here. Keeps one call stack a thread. Knows no steps beyond telling when a call begins
from outside any other.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nantrace.capture.buffer import Buffer
from nantrace.capture.gradients import GradientRecorder
from nantrace.capture.quiet import Quiet, undisturbed, unreadable
from nantrace.capture.walk import tensors_in
from nantrace.events import Phase, Role

_grad_enabled = torch.is_grad_enabled
_set_grad = torch._C._set_grad_enabled


@dataclass(frozen=True, slots=True)
class Place:
    """A module as its hooks know it: what to call it, whether to record it, and whether it belongs to the model."""

    fqn: str
    selected: bool = True
    inside: bool = True


class CallRecorder:
    """Records inputs and outputs of module calls.

    Args:
        buffer: receives the rows.
        gradients: puts hooks on what will have a gradient.
        outermost: called before a call that no other call surrounds, outside backward.
        returned: called with what the model itself put out, when that is more than a tensor.
        failed: told when recording raised; the exception goes no further.

    Attributes:
        active: hooks do nothing while it is False.
        recording: whether calls are recorded in this step; without, they only tell when a step begins.
        entrances: modules that were called from outside of any other.
        model_called: whether the model was called in this step: what modules outside it do then belongs to the loss.
        unopened: classes of arguments and outputs that were not looked into.
        told: called when a module of the model begins its forward.
        unread: tensors that could not be read because a functorch transform or a tracer was at work.
    """

    def __init__(
        self,
        buffer: Buffer,
        gradients: GradientRecorder,
        outermost: Callable[[], object],
        returned: Callable[[Any], object],
        failed: Callable[[Exception], None],
    ) -> None:
        self.active = False
        self.recording = True
        self.entrances: set[str] = set()
        self.model_called = False
        self.unopened: set[str] = set()
        self.unread = 0
        self.told: Callable[[], None] | None = None
        self._buffer = buffer
        self._gradients = gradients
        self._outermost = outermost
        self._returned = returned
        self._failed = failed
        self._numbers = itertools.count(1)
        self._stacks: dict[int, list[tuple[Place, int, Phase]]] = {}

    def begin(self, place: Place, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A module is about to run."""
        try:
            stack = self._stack()
            in_backward = torch._C._current_graph_task_id() >= 0
            if not stack and not in_backward:
                self.entrances.add(place.fqn)
                self._outermost()
                stack = self._stack()
            call = next(self._numbers)
            phase = self._phase(place, in_backward, bool(stack))
            if place.inside and not in_backward and self.told is not None and self.recording:
                self.told()
            stack.append((place, call, phase))
            if not place.selected or not self.recording:
                return
            if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):  # most calls are like this
                self._record(place.fqn, phase, Role.INPUT, call, [("args[0]", args[0])])
            else:
                self._record(place.fqn, phase, Role.INPUT, call, self._arguments(args, kwargs))
        except Exception as error:
            self._failed(error)

    def end(self, place: Place, output: Any, late_kwargs: Mapping[str, Any] | None = None) -> None:
        """A module has run; `output` is None when it raised. `late_kwargs`: arguments that `begin` could not see."""
        try:
            stack = self._stack()
            frame = stack.pop() if stack and stack[-1][0] is place else self._unwind(stack, place)
            if place.fqn == "" and not isinstance(output, torch.Tensor):
                self._returned(output)
            if frame is None or not place.selected or not self.recording:
                return
            _, call, phase = frame
            if late_kwargs:
                self._record(place.fqn, phase, Role.INPUT, call, self._arguments((), late_kwargs))
            if output is not None:
                self._record(place.fqn, phase, Role.OUTPUT, call, tensors_in(output, "output", self.unopened))
        except Exception as error:
            self._failed(error)

    def outside(self) -> bool:
        """Whether a module outside the model runs on this thread."""
        stack = self._stack()
        return bool(stack) and not stack[-1][0].inside

    def forget_open_calls(self) -> None:
        """Drop calls that were left by an exception which hooks are not told of, such as KeyboardInterrupt."""
        self._stacks = {}

    def _stack(self) -> list[tuple[Place, int, Phase]]:
        ident = threading.get_ident()
        stack = self._stacks.get(ident)
        if stack is None:
            stack = self._stacks[ident] = []
        return stack

    def _unwind(self, stack: list[tuple[Place, int, Phase]], place: Place) -> tuple[Place, int, Phase] | None:
        """Take the innermost call of `place` off the stack, and with it calls inside that never ended."""
        for depth in range(len(stack) - 1, -1, -1):
            if stack[depth][0] is place:
                frame = stack[depth]
                del stack[depth:]
                return frame
        return None  # the user's own pre-hook raised before ours ran

    def _phase(self, place: Place, in_backward: bool, nested: bool) -> Phase:
        if in_backward:
            # Checkpointing recomputes with gradient mode on; a custom Function's backward calls modules with it off.
            return Phase.RECOMPUTE if torch.is_grad_enabled() else Phase.BACKWARD
        if place.inside:
            self.model_called = True
            return Phase.FORWARD
        return Phase.LOSS if self.model_called and not nested else Phase.FORWARD

    def _arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
        found = []
        for index, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                found.append((f"args[{index}]", value))
            elif value is not None:
                found += tensors_in(value, f"args[{index}]", self.unopened)
        if kwargs:
            found += tensors_in(dict(kwargs), "kwargs", self.unopened)
        return found

    def _record(self, fqn: str, phase: Phase, role: Role, call: int, found: list[tuple[str, torch.Tensor]]) -> None:
        if not found:
            return
        with_grad = _grad_enabled()
        awaits = with_grad and not (phase is Phase.RECOMPUTE and _recomputes_for_saved_tensors())
        if undisturbed():
            _set_grad(False)  # by hand: `Quiet` takes as long as reading a small tensor
            try:
                self._record_each(fqn, phase, role, call, found, awaits)
            finally:
                _set_grad(with_grad)
        elif unreadable():
            self.unread += len(found)
        else:
            with Quiet():
                self._record_each(fqn, phase, role, call, found, awaits)

    def _record_each(
        self, fqn: str, phase: Phase, role: Role, call: int, found: list[tuple[str, torch.Tensor]], awaits: bool
    ) -> None:
        gradients = self._gradients
        for slot, tensor in found:
            if tensor.dtype is torch.bool:
                continue
            if not (awaits and tensor.requires_grad):
                self._buffer.observe(fqn, phase, role, slot, tensor, call)
                continue
            # An output that nobody changed since is not read a second time as the next module's input. Writes that
            # bypass autograd's version counter (`tensor.data.mul_`) stay unseen until the next module's output.
            hook = gradients.hook_on(tensor)
            stats = self._buffer.observe(fqn, phase, role, slot, tensor, call, hook.stats if hook else None)
            gradient = Role.GRAD_INPUT if role is Role.INPUT else Role.GRAD_OUTPUT
            gradients.expect(tensor, hook, stats, (fqn, gradient, slot, call))


def _recomputes_for_saved_tensors() -> bool:
    """Whether non-reentrant checkpointing is at work: it throws away the graph of its recomputation."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = top(True) if top is not None else None
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_recomputation_hook")
