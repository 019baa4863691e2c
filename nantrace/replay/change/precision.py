"""Other floating-point types for one run of a step: autocast elsewhere, tensors cast, single modules in float32.

Nothing of the user's is edited: `torch.autocast` is entered as always and set otherwise right behind it, tensors are
cast through `.data`, as `Module.to` casts them, and modules get hooks. Autocast and hooks are put back here; casts are
undone by the snapshot's `restore`, which gives each tensor its own memory back.

Not reached: casts that the step's code asks for (`.half()`, `.to(torch.float16)`), tensors that it makes of a stated
dtype, autocast inside compiled code, and `torch.set_autocast_enabled` called by hand.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from nantrace.capture.lifecycle import Lifecycle, StepListener
from nantrace.replay.snapshot import Snapshot

HALF = (torch.float16, torch.bfloat16)
FLOATING = (*HALF, torch.float32, torch.float64)
_DEVICES = ("cpu", "cuda")

#: What a region in which autocast is on becomes, by its dtype: another dtype, None for off.
Pick = Callable[[torch.dtype], torch.dtype | None]


@contextlib.contextmanager
def autocast_as(pick: Pick) -> Iterator[None]:
    """In here every region of autocast that the process is in or enters becomes what `pick` says."""
    owner: Any = torch.autocast
    original = owner.__enter__

    @functools.wraps(original)
    def nantrace_enter(self: Any, *args: Any, **kwargs: Any) -> Any:
        entered = original(self, *args, **kwargs)
        _set(self.device, pick)
        return entered

    with _autocast_kept():
        torch.clear_autocast_cache()  # casts of weights to the other dtype
        for device in _DEVICES:
            _set(device, pick)
        owner.__enter__ = nantrace_enter
        try:
            yield
        finally:
            owner.__enter__ = original
            torch.clear_autocast_cache()


@contextlib.contextmanager
def autocast_seen(found: list[torch.dtype]) -> Iterator[None]:
    """Notes the dtype of every region in which autocast is on, and changes nothing."""

    def note(dtype: torch.dtype) -> torch.dtype:
        found.append(dtype)
        return dtype

    with autocast_as(note):
        yield


def _set(device: str, pick: Pick) -> None:
    if not torch.is_autocast_enabled(device):
        return
    now = torch.get_autocast_dtype(device)
    wanted = pick(now)
    if wanted is None:
        torch.set_autocast_enabled(device, False)
    elif wanted is not now:
        torch.set_autocast_dtype(device, wanted)


@contextlib.contextmanager
def _autocast_kept() -> Iterator[None]:
    """Puts autocast back as it was; the step leaves its own regions itself."""
    before = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES]
    try:
        yield
    finally:
        for device, enabled, dtype in before:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)


# ---------------------------------------------------------------------------------------------------- tensors
def castable(snapshot: Snapshot, sources: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """The tensors among all that the step reaches which a cast of these dtypes concerns.

    Not the scale of a `GradScaler` and not an optimizer's count of steps: those are counters, of float32 always.
    """
    kept = {id(tensor) for scaler in snapshot.objects(torch.amp.GradScaler) for tensor in _own(scaler)}
    return [
        tensor
        for name, tensor in snapshot.tensors().items()
        if tensor.dtype in sources and id(tensor) not in kept and not _counts_steps(name, tensor) and tensor.is_leaf
    ]


def _own(scaler: Any) -> Iterator[torch.Tensor]:
    yield from (value for value in vars(scaler).values() if isinstance(value, torch.Tensor))


def _counts_steps(name: str, tensor: torch.Tensor) -> bool:
    return name.rpartition(".")[2] == "step" and not tensor.dim()


@contextlib.contextmanager
def cast(tensors: Iterable[torch.Tensor], sources: Sequence[torch.dtype], target: torch.dtype) -> Iterator[None]:
    """In here `tensors`, with their gradients and what optimizers keep for them, are of dtype `target`.

    They stay the same objects. The snapshot gives each its memory back; optimizer state that nobody knew of before is
    cast when its optimizer first steps.
    """
    chosen = list(tensors)
    for tensor in chosen:
        _retype(tensor, target)
    with Lifecycle(_StateAlong(chosen, sources, target)):
        yield


def _retype(tensor: torch.Tensor, target: torch.dtype) -> None:
    gradient = tensor.grad if tensor.is_leaf and not tensor.is_inference() else None
    if gradient is not None:
        tensor.grad = None
    if tensor.dtype is not target:
        tensor.data = tensor.detach().to(target)
    if gradient is not None:
        if gradient.dtype is not target:
            gradient.data = gradient.detach().to(target)
        tensor.grad = gradient


class _StateAlong(StepListener):
    """Casts the state of cast parameters too, before their optimizer reads it."""

    def __init__(self, tensors: Sequence[torch.Tensor], sources: Sequence[torch.dtype], target: torch.dtype) -> None:
        self._ids = {id(tensor) for tensor in tensors}
        self._sources, self._target = sources, target

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            for parameter, state in optimizer.state.items():
                if id(parameter) in self._ids and isinstance(state, dict):
                    for key, value in state.items():
                        self._along(key, value)

    def _along(self, key: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.dtype in self._sources and not _counts_steps(str(key), value):
            value.data = value.detach().to(self._target)


# ---------------------------------------------------------------------------------------------------- modules
class InFloat32:
    """Modules that compute in float32 while this is entered, with everything inside them. A context manager.

    Their half-precision parameters and buffers are cast, autocast is off within them, and half-precision inputs are
    cast on entry. What they put out stays float32: other modules with half-precision parameters cast it on their own
    entry, as autocast does op by op.

    Attributes:
        entered: how often one of the modules ran. A module that is not called as a module never runs in here.
    """

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        inside = {id(each) for module in modules for each in module.modules()}
        self._chosen = list({id(module): module for module in modules}.values())
        self._others = [each for each in model.modules() if id(each) not in inside and _half_dtype(each) is not None]
        owned = [t for m in self._chosen for t in (*m.parameters(), *m.buffers()) if t.dtype in HALF]
        self._tensors = list({id(tensor): tensor for tensor in owned}.values())
        self._outside: list[list[tuple[str, bool]]] = []  # autocast around each call that is open
        self._exits = contextlib.ExitStack()
        self.entered = 0

    def __enter__(self) -> InFloat32:
        with contextlib.ExitStack() as exits:
            exits.enter_context(cast(self._tensors, HALF, torch.float32))
            exits.enter_context(autocast_as(lambda dtype: None if self._outside else dtype))
            for module in self._chosen:
                exits.callback(module.register_forward_pre_hook(self._begins, with_kwargs=True).remove)
                exits.callback(module.register_forward_hook(self._ends, always_call=True).remove)
            for module in self._others:
                exits.callback(module.register_forward_pre_hook(_to_own_dtype, with_kwargs=True).remove)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._exits.__exit__(*error)

    def _begins(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.entered += 1
        self._outside.append([(device, torch.is_autocast_enabled(device)) for device in _DEVICES])
        for device in _DEVICES:
            torch.set_autocast_enabled(device, False)
        return _cast_all(args, HALF, torch.float32), _cast_all(kwargs, HALF, torch.float32)

    def _ends(self, *_: Any) -> None:
        for device, enabled in self._outside.pop():
            torch.set_autocast_enabled(device, enabled)


def _half_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype of a module's own half-precision parameters."""
    return next((p.dtype for p in module.parameters(recurse=False) if p.dtype in HALF), None)


def _to_own_dtype(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    own = _half_dtype(module)
    if own is None:
        return args, kwargs
    return _cast_all(args, (torch.float32,), own), _cast_all(kwargs, (torch.float32,), own)


def _cast_all(value: Any, sources: Sequence[torch.dtype], target: torch.dtype) -> Any:
    """`value` with the tensors in it cast; containers are made anew only where something in them changes."""
    if isinstance(value, torch.Tensor):
        return value.to(target) if value.dtype in sources else value
    if type(value) is dict:
        made: Any = {key: _cast_all(item, sources, target) for key, item in value.items()}
        return made if any(made[key] is not item for key, item in value.items()) else value
    if isinstance(value, (list, tuple)):
        items = [_cast_all(item, sources, target) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
