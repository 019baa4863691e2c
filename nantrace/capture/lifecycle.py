"""The life of a step, seen from outside the model: backward roots, optimizers, scalers, clipping and schedulers.

PyTorch has hooks for optimizers but none for the root of a backward pass, for clipping, for schedulers, nor for
`GradScaler`, which calls no hook at all when it skips an update. Those are wrapped while somebody watches, once for the
whole process however many watch, and put back when the last one leaves. The wrappers pass every argument, result and
exception through unchanged.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters that an optimizer holds, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


class StepListener:
    """What can be heard. Override what you need; nothing here does anything.

    Called on the thread that entered the `Lifecycle`, only for what happens on that thread. An exception that a
    listener raises goes to its own `recorder_failed` and never reaches the user's step.
    """

    def backward_begins(self, roots: tuple[torch.Tensor, ...], accumulates: bool, nested: bool) -> None:
        """`.backward()` (accumulates) or `autograd.grad`; nested: called from inside another backward pass."""

    def backward_ends(self, accumulates: bool, nested: bool, failed: bool) -> None: ...

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None: ...

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """Not called when the optimizer raised. Called for a fused optimizer whose kernel skipped: see `found_inf`."""

    def gradients_cleared(self, optimizer: torch.optim.Optimizer) -> None:
        """Before `optimizer.zero_grad()`: what runs around it trains."""

    def scaler_seen(self, scaler: torch.amp.GradScaler) -> None:
        """Before the first change that a scaler goes through while watched."""

    def loss_scaled(self, scaler: torch.amp.GradScaler, given: Any, scaled: Any) -> None:
        """After `scaled = scaler.scale(given)`: a tensor, or an iterable of them."""

    def gradients_unscaled(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """After `scaler.unscale_(optimizer)`, also where `scaler.step` called it."""

    def clipping_begins(self, parameters: Any) -> None:
        """Before `clip_grad_norm_` changes the gradients of these."""

    def gradients_clipped(self, parameters: Any, max_norm: float, total_norm: torch.Tensor) -> None:
        """After `clip_grad_norm_`; `total_norm` (on the device, unread) is the norm before."""

    def values_clipped(self, gradients: list[torch.Tensor], clip_value: float) -> None:
        """Before `clip_grad_value_` changes these gradients."""

    def scheduler_stepped(self, scheduler: LRScheduler) -> None:
        """After `scheduler.step()`, but not for the one with which a scheduler sets itself up."""

    def scale_read(self, scaler: torch.amp.GradScaler) -> None:
        """After `scaler.get_scale()`: somebody may now scale or unscale by hand."""

    def scaler_steps(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Before `scaler.step(optimizer)`."""

    def scaler_step_left(self, scaler: torch.amp.GradScaler) -> None:
        """After `scaler.step`, also when it raised."""

    def scaler_stepped(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, found_inf: tuple[torch.Tensor, ...]
    ) -> None:
        """After `scaler.step(optimizer)`. Skipped if any of `found_inf` (on the device, unread) is positive."""

    def scaler_updates(self, scaler: torch.amp.GradScaler) -> None:
        """Before `scaler.update()`."""

    def scaler_updated(self, scaler: torch.amp.GradScaler) -> None: ...

    def recorder_failed(self, error: Exception) -> None:
        """A method of this listener raised."""

    def to_raise(self) -> Exception | None:
        """What the user is to get instead of a return: asked when a backward, optimizer or scaler is done.

        All listeners have been told by then, and what was called has done all of its work.
        """
        return None


class Lifecycle:
    """Tells one listener what happens between `__enter__` and `__exit__`.

    Example:
        >>> with Lifecycle(listener):
        ...     loss.backward()
        ...     optimizer.step()
    """

    def __init__(self, listener: StepListener) -> None:
        self.listener = listener
        self.thread: int | None = None
        self.scalers: dict[int, torch.amp.GradScaler] = {}

    def __enter__(self) -> Lifecycle:
        self.thread = threading.get_ident()
        _watch(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _unwatch(self)

    def tell(self, what: str, *args: Any) -> None:
        if threading.get_ident() != self.thread:
            return
        try:
            getattr(self.listener, what)(*args)
        except Exception as error:
            self.listener.recorder_failed(error)

    def see(self, scaler: torch.amp.GradScaler) -> None:
        if id(scaler) not in self.scalers and threading.get_ident() == self.thread:
            self.scalers[id(scaler)] = scaler
            self.tell("scaler_seen", scaler)


# The wrappers are process-wide, and so is the list of those they report to.
_watching: list[Lifecycle] = []
_originals: dict[tuple[Any, str], Any] = {}
_handles: list[Any] = []
_stepping: set[int] = set()  # schedulers within their `step`
_lock = threading.Lock()


def _watch(lifecycle: Lifecycle) -> None:
    with _lock:
        if not _watching:
            scaler = torch.amp.GradScaler
            _wrap(torch.autograd, "_engine_run_backward", _backward)
            _wrap(scaler, "scale", _scaler_scale)
            _wrap(scaler, "unscale_", _scaler_unscale)
            _wrap(scaler, "get_scale", _scale_read)
            _wrap(scaler, "step", _scaler_step)
            _wrap(scaler, "update", _scaler_update)
            _wrap(torch.optim.Optimizer, "zero_grad", _zero_grad)
            # `clip_grad_norm_` itself is bound wherever it was imported, what it calls is looked up here.
            if hasattr(clip_grad, "_clip_grads_with_norm_"):
                _wrap(clip_grad, "_clip_grads_with_norm_", _clip)
            if hasattr(clip_grad, "_group_tensors_by_device_and_dtype"):
                _wrap(clip_grad, "_group_tensors_by_device_and_dtype", _clip_values)
            for cls in _schedulers():
                _wrap(cls, "step", _scheduler_step)
            _handles.append(register_optimizer_step_pre_hook(_optimizer_begins))
            _handles.append(register_optimizer_step_post_hook(_optimizer_ends))
        _watching.append(lifecycle)


def _unwatch(lifecycle: Lifecycle) -> None:
    with _lock:
        if lifecycle in _watching:
            _watching.remove(lifecycle)
        if not _watching:
            for (owner, name), original in _originals.items():
                setattr(owner, name, original)
            _originals.clear()
            while _handles:
                _handles.pop().remove()


def _wrap(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    _originals[owner, name] = original
    setattr(owner, name, functools.wraps(original)(make(original)))


def _tell_all(what: str, *args: Any) -> None:
    for lifecycle in tuple(_watching):
        lifecycle.tell(what, *args)


def _see_all(scaler: torch.amp.GradScaler) -> None:
    for lifecycle in tuple(_watching):
        lifecycle.see(scaler)


def _raise_what_waits() -> None:
    """Not within a backward pass: there the user's call has not come to its end."""
    if torch._C._current_graph_task_id() >= 0:
        return
    for lifecycle in reversed(_watching):
        error = lifecycle.listener.to_raise() if threading.get_ident() == lifecycle.thread else None
        if error is not None:
            raise error


def _optimizer_begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _tell_all("optimizer_begins", optimizer)


def _optimizer_ends(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """PyTorch calls it last of all in `optimizer.step`: what is raised here comes out of a step that was taken."""
    _tell_all("optimizer_ends", optimizer)
    _raise_what_waits()


def _zero_grad(original: Any) -> Callable[..., Any]:
    def nantrace_zero_grad(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        _tell_all("gradients_cleared", optimizer)
        return original(optimizer, *args, **kwargs)

    return nantrace_zero_grad


def _backward(original: Any) -> Callable[..., Any]:
    def nantrace_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        accumulates = bool(kwargs.get("accumulate_grad", args[-1] if args and isinstance(args[-1], bool) else True))
        nested = torch._C._current_graph_task_id() >= 0
        roots = tuple(root for root in t_outputs if isinstance(root, torch.Tensor))
        _tell_all("backward_begins", roots, accumulates, nested)
        failed = True
        try:
            result = original(t_outputs, *args, **kwargs)
            failed = False
        finally:
            _tell_all("backward_ends", accumulates, nested, failed)
        _raise_what_waits()
        return result

    return nantrace_backward


def _scaler_scale(original: Any) -> Callable[..., Any]:
    def nantrace_scale(self: torch.amp.GradScaler, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        _see_all(self)
        scaled = original(self, outputs, *args, **kwargs)
        if self.is_enabled():
            _tell_all("loss_scaled", self, outputs, scaled)
        return scaled

    return nantrace_scale


def _scaler_unscale(original: Any) -> Callable[..., Any]:
    def nantrace_unscale(
        self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        _see_all(self)
        result = original(self, optimizer, *args, **kwargs)
        if self.is_enabled():
            _tell_all("gradients_unscaled", self, optimizer)
        return result

    return nantrace_unscale


def _clip(original: Any) -> Callable[..., Any]:
    def nantrace_clip(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        _tell_all("clipping_begins", parameters)
        result = original(parameters, max_norm, total_norm, *args, **kwargs)
        _tell_all("gradients_clipped", parameters, max_norm, total_norm)
        return result

    return nantrace_clip


def _clip_values(original: Any) -> Callable[..., Any]:
    """All that clips groups tensors first; `clip_grad_value_` is known by its frame, and the bound stands there."""

    def nantrace_group(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        if caller.f_code.co_name == "clip_grad_value_":
            _tell_all("values_clipped", list(tensors[0]), caller.f_locals.get("clip_value", 0.0))
        return original(tensors, *args, **kwargs)

    return nantrace_group


def _scale_read(original: Any) -> Callable[..., Any]:
    def nantrace_get_scale(self: torch.amp.GradScaler) -> Any:
        result = original(self)
        if self.is_enabled():
            _tell_all("scale_read", self)
        return result

    return nantrace_get_scale


def _schedulers() -> list[type[LRScheduler]]:
    """Every scheduler class that is loaded and has a `step` of its own."""
    found, left = [], [LRScheduler]
    while left:
        cls = left.pop()
        left += cls.__subclasses__()
        if "step" in vars(cls) and cls not in found:
            found.append(cls)
    return found


def _scheduler_step(original: Any) -> Callable[..., Any]:
    def nantrace_scheduler_step(self: LRScheduler, *args: Any, **kwargs: Any) -> Any:
        inner = id(self) in _stepping  # a class whose `step` calls that of its parent
        # Not every class counts its steps, so its own count does not tell.
        setting_up = sys._getframe(1).f_code.co_name == "_initial_step"
        _stepping.add(id(self))
        try:
            result = original(self, *args, **kwargs)
        finally:
            if not inner:
                _stepping.discard(id(self))
        if not inner and not setting_up:
            _tell_all("scheduler_stepped", self)
        return result

    return nantrace_scheduler_step


def _scaler_step(original: Any) -> Callable[..., Any]:
    def nantrace_scaler_step(
        self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        _see_all(self)
        _tell_all("scaler_steps", self, optimizer)
        try:
            result = original(self, optimizer, *args, **kwargs)
        finally:
            _tell_all("scaler_step_left", self)
        state = self._per_optimizer_states.get(id(optimizer), {}) if self.is_enabled() else {}
        found = tuple(state.get("found_inf_per_device", {}).values())  # update() clears it
        _tell_all("scaler_stepped", self, optimizer, found)
        return result

    return nantrace_scaler_step


def _scaler_update(original: Any) -> Callable[..., Any]:
    def nantrace_scaler_update(self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
        _see_all(self)
        _tell_all("scaler_updates", self)
        result = original(self, *args, **kwargs)
        _tell_all("scaler_updated", self)
        _raise_what_waits()
        return result

    return nantrace_scaler_update
