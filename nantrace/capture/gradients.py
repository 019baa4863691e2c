"""Gradients of what modules read and put out, and of parameters, as backward computes them.

A tensor hook stands on each tensor once, however many calls put it out or read it; it closes over names, never over the
tensor. No module backward hooks: they insert views, break in-place ops and change gradients.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from nantrace.capture.buffer import Buffer, Stats
from nantrace.capture.quiet import Quiet, undisturbed, unreadable
from nantrace.events import Phase, Role


class GradientHook:
    """Stands on one tensor and waits for its gradient.

    Attributes:
        targets: (module, role, slot, call) of every site that this gradient belongs to, in forward order.
        version: the tensor's version when it was seen; after an in-place change it is another value with another
            gradient.
        stats: of the tensor itself, so that a consumer need not read an unchanged output again.
    """

    __slots__ = ("recorder", "stats", "targets", "version")
    __torch_unserializable__ = (
        True  # saving a tensor that carries this hook needs no warning: the hook is not the user's
    )

    def __init__(self, recorder: weakref.ref[GradientRecorder], version: int, stats: Stats) -> None:
        self.recorder = recorder
        self.version = version
        self.stats = stats
        self.targets: list[tuple[str, Role, str, int]] = []

    def __call__(self, gradient: torch.Tensor | None) -> None:
        recorder = self.recorder()
        if recorder is not None and recorder.active:
            recorder.arrived(self, gradient)


class ParameterHook:
    """Called when the gradient of one parameter was accumulated."""

    __slots__ = ("name", "owner", "recorder")

    def __init__(self, recorder: weakref.ref[GradientRecorder], owner: str, name: str) -> None:
        self.recorder = recorder
        self.owner = owner
        self.name = name

    def __call__(self, parameter: torch.Tensor) -> None:
        recorder = self.recorder()
        if recorder is not None and recorder.active:
            gradient = parameter.grad
            if gradient is not None:
                recorder.accumulated(self, gradient)


class GradientRecorder:
    """Puts hooks on tensors, writes a row when a gradient arrives, and knows which never did.

    Args:
        buffer: receives the rows.
        failed: told when recording raised; the exception goes no further.

    Attributes:
        active: hooks do nothing while it is False.
        awaiting: hooks of the current step whose gradient has not arrived.
    """

    def __init__(self, buffer: Buffer, failed: Callable[[Exception], None]) -> None:
        self.active = False
        self.awaiting: set[GradientHook] = set()
        self._buffer = buffer
        self._failed = failed
        self._reference = weakref.ref(self)
        self._placed: list[tuple[weakref.ref[dict[int, Any]], GradientHook]] = []  # with the hooks of the tensor
        self._parameters: dict[int, Any] = {}
        self._bare: list[tuple[weakref.ref[torch.Tensor], str]] = []  # leaves without a dict of hooks before ours

    def hook_on(self, tensor: torch.Tensor) -> GradientHook | None:
        """The hook that stands on this very value of the tensor."""
        hooks = tensor._backward_hooks
        if hooks:
            version = tensor._version
            for hook in hooks.values():
                if type(hook) is GradientHook and hook.recorder is self._reference and hook.version == version:
                    return hook
        return None

    def expect(
        self, tensor: torch.Tensor, hook: GradientHook | None, stats: Stats, target: tuple[str, Role, str, int]
    ) -> None:
        """Record the gradient of `tensor` at the site of `target` when backward computes it."""
        if hook is None:
            hook = GradientHook(self._reference, tensor._version, stats)
            if tensor.is_leaf and tensor._backward_hooks is None:
                self._bare.append((weakref.ref(tensor), "_backward_hooks"))
            self._placed.append((weakref.ref(_put(hook, tensor)), hook))
        hook.targets.append(target)
        self.awaiting.add(hook)

    def watch_parameter(self, parameter: torch.Tensor, owner: str, name: str) -> None:
        """Record the gradient of a parameter whenever backward has accumulated it; once a parameter."""
        if not (parameter.requires_grad and parameter.is_leaf):
            return
        handle = self._parameters.get(id(parameter))
        # Another parameter may have got the id of one that is gone.
        if handle is None or handle.hooks_dict_ref() is not parameter._post_accumulate_grad_hooks:
            hook = ParameterHook(self._reference, owner, name)
            if parameter._post_accumulate_grad_hooks is None:
                self._bare.append((weakref.ref(parameter), "_post_accumulate_grad_hooks"))
            self._parameters[id(parameter)] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def arrived(self, hook: GradientHook, gradient: torch.Tensor | None) -> None:
        """`gradient` is None for an unused output of an op with several: it stays awaited."""
        try:
            if gradient is None:
                return
            if not torch.is_grad_enabled() and undisturbed():
                self._write(hook, gradient)
            elif not unreadable():
                with Quiet():
                    self._write(hook, gradient)
        except Exception as error:
            self._failed(error)

    def accumulated(self, hook: ParameterHook, gradient: torch.Tensor) -> None:
        try:
            if not torch.is_grad_enabled() and undisturbed():
                self._buffer.observe(hook.owner, Phase.BACKWARD, Role.GRAD, hook.name, gradient)
            elif not unreadable():
                with Quiet():
                    self._buffer.observe(hook.owner, Phase.BACKWARD, Role.GRAD, hook.name, gradient)
        except Exception as error:
            self._failed(error)

    def _write(self, hook: GradientHook, gradient: torch.Tensor) -> None:
        stats: Stats | None = None
        # Backward reaches the last reader first and the module that made the tensor last.
        for module, role, slot, call in reversed(hook.targets):
            stats = self._buffer.observe(module, Phase.BACKWARD, role, slot, gradient, call, stats)
        self.awaiting.discard(hook)

    def never_came(self) -> list[tuple[str, Role, str, int]]:
        """Targets whose gradient did not arrive; forgets them, and the hooks of tensors that are gone."""
        missed = [target for hook in self.awaiting for target in hook.targets]
        self.awaiting = set()
        self._placed = [(hooks, hook) for hooks, hook in self._placed if hooks() is not None]
        self._bare = [(leaf, name) for leaf, name in self._bare if leaf() is not None]
        return missed

    def remove(self) -> None:
        for reference_to_hooks, hook in self._placed:
            hooks = reference_to_hooks()
            if hooks is not None:
                hooks.pop(id(hook), None)
        for handle in self._parameters.values():
            handle.remove()
        for reference, name in self._bare:  # PyTorch leaves an empty dict where the last hook was removed
            leaf = reference()
            if leaf is not None and not getattr(leaf, name):
                setattr(leaf, name, None)
        self._placed, self._parameters, self._bare, self.awaiting = [], {}, [], set()


def _put(hook: GradientHook, tensor: torch.Tensor) -> dict[int, Any]:
    """Put a hook on a tensor as `Tensor.register_hook` does, in a fifth of the time; returns the tensor's hooks.

    The handle that `register_hook` makes is what takes the time; handles count their keys from 0, far from any address.
    """
    hooks = tensor._backward_hooks
    if hooks is None:
        hooks = tensor._backward_hooks = OrderedDict()
        if tensor.grad_fn is not None:
            tensor.grad_fn._register_hook_dict(tensor)
    hooks[id(hook)] = hook
    return hooks
