"""Module hooks: what is called around each forward, how it is put there and taken away.

Hooks hold a weak reference to the recorder and return None always. A copy of a hooked module that is made meanwhile (an
EMA model, a module that is pickled as a whole) carries in their place a function of the standard library that does
nothing: an entry cannot be left out of a copied dict, but the copy works, and loads, where nantrace is not installed.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.modules import module as module_internals
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from nantrace.capture.calls import CallRecorder, Place
from nantrace.capture.sites import Watched, is_wrapper


class _Inert:
    """What copying and pickling turn a hook into: `nullcontext().__exit__` takes any arguments and returns None."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class BeforeForward(_Inert):
    """Pre-hook of one module of the model."""

    __slots__ = ("place", "recorder")

    def __init__(self, recorder: weakref.ref[CallRecorder], place: Place) -> None:
        self.recorder = recorder
        self.place = place

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder = self.recorder()
        if recorder is not None and recorder.active:
            recorder.begin(self.place, args, kwargs)


class AfterForward(_Inert):
    """Forward hook of one module of the model; also called when the module raised."""

    __slots__ = ("place", "recorder")

    def __init__(self, recorder: weakref.ref[CallRecorder], place: Place) -> None:
        self.recorder = recorder
        self.place = place

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        recorder = self.recorder()
        if recorder is not None and recorder.active:
            recorder.end(self.place, output)


class EveryModule:
    """Global hooks: for modules that must not have hooks of their own, and for modules outside the model.

    A module outside the model is "<ClassName>", and only the outermost of them is recorded. Global pre-hooks see no
    keyword arguments, so these are read when the call has ended.
    """

    def __init__(self, recorder: CallRecorder, watched: Sequence[Watched]) -> None:
        self._recorder = weakref.ref(recorder)
        self._watched = watched  # keeps the modules alive, and so their ids their own
        self._hooked = {id(entry.module) for entry in watched if entry.hookable}
        self._places = {id(entry.module): Place(entry.fqn, entry.selected) for entry in watched if not entry.hookable}

    def before(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if id(module) in self._hooked:
            return
        recorder = self._recorder()
        if recorder is not None and recorder.active:
            place = self._place(module)
            if place is not None and (place.inside or not recorder.outside()):
                recorder.begin(place, args, {})

    def after(self, module: torch.nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        """`rest` is (kwargs, output), or only (output,) when PyTorch calls it for a module that raised."""
        if id(module) in self._hooked:
            return
        recorder = self._recorder()
        place = self._place(module)
        if recorder is not None and recorder.active and place is not None:
            raised = len(rest) == 1
            recorder.end(place, None if raised else rest[1], None if raised else rest[0])

    def _place(self, module: torch.nn.Module) -> Place | None:
        """None for wrappers, which the user does not mean when speaking of a model."""
        place = self._places.get(id(module))
        if place is None and is_wrapper(module):
            return None
        if place is None or not (place.inside or place.fqn == f"<{type(module).__name__}>"):
            place = self._places[id(module)] = Place(f"<{type(module).__name__}>", inside=False)
        return place


class Hooks:
    """The hooks of one trace: on the watched modules and, `everywhere`, around all others.

    Between two steps that are recorded in detail hooks stay only where a step may begin; one that did nothing would
    still cost every call of a module some microseconds.
    """

    def __init__(self, recorder: CallRecorder, watched: Sequence[Watched], everywhere: bool = True) -> None:
        reference = weakref.ref(recorder)
        self._hookable = [entry for entry in watched if entry.hookable]
        places = [Place(entry.fqn, entry.selected) for entry in self._hookable]
        self._pairs = [(BeforeForward(reference, place), AfterForward(reference, place)) for place in places]
        self._placed: dict[int, list[Any]] = {}  # handles, by the place in `_hookable`
        self._every = EveryModule(recorder, watched) if everywhere else None
        self._elsewhere = {entry.fqn for entry in watched if not entry.hookable}
        self._undo_every: list[Callable[[], object]] = []
        self._complete = False

    def listen(self) -> None:
        """Put every hook in its place that is not there."""
        if self._complete:
            return
        for number, (entry, (before, after)) in enumerate(zip(self._hookable, self._pairs, strict=True)):
            if number not in self._placed:
                self._placed[number] = [
                    entry.module.register_forward_pre_hook(before, with_kwargs=True),
                    entry.module.register_forward_hook(after, with_kwargs=True, always_call=True),
                ]
        if self._every is not None and not self._undo_every:
            self._undo_every = _around_every_module(self._every)
        self._complete = True

    def leave(self, entrances: set[str]) -> None:
        """Take the hooks away but for those of the model itself and of these modules."""
        if not self._complete:
            return
        kept = entrances | {""}
        for number in list(self._placed):
            if self._hookable[number].fqn not in kept:
                self._take_away(number)
        if not self._elsewhere & kept:
            self._leave_every_module()
        self._complete = False

    def remove(self) -> None:
        """Take all hooks away."""
        for number in list(self._placed):
            self._take_away(number)
        self._leave_every_module()
        self._complete = False

    def _take_away(self, number: int) -> None:
        for handle in self._placed.pop(number):
            handle.remove()

    def _leave_every_module(self) -> None:
        for undo in self._undo_every:
            undo()
        self._undo_every = []


def _around_every_module(every: EveryModule) -> list[Callable[[], object]]:
    """Global hooks; returns what undoes them."""
    before = register_module_forward_pre_hook(every.before)
    after = register_module_forward_hook(every.after, with_kwargs=True, always_call=True)
    # Removing the handle leaves an entry that makes compiled modules warn of global hooks for ever after.
    forgotten = functools.partial(module_internals._global_forward_hooks_with_kwargs.pop, after.id, None)
    return [before.remove, after.remove, forgotten]
