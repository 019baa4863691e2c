"""The state before a step, kept so that the step can run again and nobody can tell.

Kept and restored bit for bit: parameters, buffers (also non-persistent ones, and ones replaced by new tensors), their
`.grad` objects and values, `requires_grad`, attributes and `training` flags of modules; the state and groups of
optimizers, scalers and learning-rate schedulers; the batch, with its containers; tensors, modules, optimizers and
generators that the step's function reaches through its closure or its globals; Python's, NumPy's, torch's and CUDA's
random streams; torch's switches (see `surroundings`). State that only the step creates is gone again.

Plain Python values outside of model and batch (counters, lists, attributes of the user's objects) are the world that
the step runs in: `restore` leaves them, so that two runs show whether the step depends on them, and `leave` puts them
back at the very end, with iterators of builtin containers and files that are only read. Not restored, and named when
met: other iterators and files, objects without attributes. Not seen: tensor hooks, `__slots__`, other processes, files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from nantrace.capture.lifecycle import StepListener
from nantrace.errors import ReplayError
from nantrace.replay import surroundings
from nantrace.replay.reach import Reached, changes, holds_the_same, put_back
from nantrace.replay.step import Step

_T = TypeVar("_T")


class Snapshot:
    """What a step found when it began. Takes it when made; `restore` may be called any number of times.

    Attributes:
        bytes: how many bytes the copies take, by device.
        opaque: name -> type of each object that cannot be wound back; whether that matters, a replay shows.

    Raises:
        ReplayError: the model has parameters that are not initialised yet, or memory does not suffice.
    """

    def __init__(self, step: Step) -> None:
        _refuse_uninitialised(step.model)
        self._settings = surroundings.settings()
        self._random = surroundings.random_state()
        self._reached = _reach(step)
        self.bytes = snapshot_bytes(self._reached.tensors.values())
        refuse_if_too_large(self.bytes)
        self._main = _Kept(self._reached)
        self._found: list[_Kept] = []
        self.opaque = dict(self._reached.opaque)

    def listener(self) -> StepListener:
        """Adds optimizers and scalers at first sight in the step, before they change anything."""
        return _Finder(self)

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for kept in [self._main, *self._found]:
                kept.restore()
        self._found = []  # if they live on, the next replay finds them again, in this state
        surroundings.restore_settings(self._settings)
        surroundings.restore_random_state(self._random)

    def leave(self) -> None:
        """Put back also what lies outside of model and batch. The last thing to do with a step."""
        for holder in self._reached.watched:
            if not holds_the_same(holder):
                put_back(holder)
        for position in self._reached.positions:
            with contextlib.suppress(OSError, ValueError):  # closed by the step
                position.put_back()

    def differences(self) -> tuple[str, ...]:
        """What differs from the state when it was taken, by name; empty after `restore`."""
        found = self._main.differences()
        found += [f"{name} has moved on" for name in surroundings.changed_random_state(self._random)]
        found += surroundings.changed_settings(self._settings)
        return tuple(found)

    def untouched(self) -> tuple[str, ...]:
        """Changes in plain Python state outside of model and batch, which `restore` leaves: "x: 2, was 1"."""
        return tuple(change for holder in self._reached.watched for change in changes(holder))

    def settings_changed(self) -> tuple[str, ...]:
        """Which of torch's switches the step has changed for its process."""
        return tuple(surroundings.changed_settings(self._settings))

    def names(self) -> dict[int, str]:
        """The name of every tensor reached, by `id`."""
        return dict(self._reached.names)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor reached, by name."""
        return dict(self._reached.tensors)

    def objects(self, kind: type[_T] | tuple[type[_T], ...]) -> list[_T]:
        """Every object of that kind that was reached."""
        return [found for found in self._reached.seen.values() if isinstance(found, kind)]

    def find(self, thing: Any, name: str) -> None:
        """Keep an optimizer or scaler too, as it is now."""
        if id(thing) in self._reached.seen or any(id(thing) in kept.reached.seen for kept in self._found):
            return
        reached = Reached(names=self._reached.names, seen=dict(self._reached.seen))
        reached.walk(thing, name, owned=True)
        self._found.append(_Kept(reached))


class _Finder(StepListener):
    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        with torch._C._DisableTorchDispatch():  # a recorder may be listening to every op
            self.snapshot.find(optimizer, "optimizer")

    def scaler_seen(self, scaler: torch.amp.GradScaler) -> None:
        with torch._C._DisableTorchDispatch():
            self.snapshot.find(scaler, "scaler")


def _reach(step: Step) -> Reached:
    reached = Reached()
    reached.walk(step.model, "", owned=True)
    reached.walk(step.batch, "batch", owned=True, in_batch=True)
    reached.walk(step.optimizer, "optimizer", owned=True)
    reached.walk(step.scaler, "scaler", owned=True)
    reached.walk(step.run, getattr(step.run, "__name__", "the step"), owned=False)
    return reached


def _refuse_uninitialised(model: torch.nn.Module) -> None:
    lazy = [name for name, p in model.named_parameters() if isinstance(p, torch.nn.parameter.UninitializedParameter)]
    if lazy:
        raise ReplayError(f"Parameter {lazy[0]} is not initialised yet; run one forward pass before the replay.")


class _Kept:
    """Copies of what was reached."""

    def __init__(self, reached: Reached) -> None:
        self.reached = reached
        self.storages: dict[int, _Storage] = {}
        self.tensors = {
            name: _keep(tensor, self.storages) for name, tensor in reached.tensors.items() if not _unreadable(tensor)
        }
        self.arrays = {name: array.copy() for name, array in reached.arrays.items()}
        self.generators = {name: _generator_state(g) for name, g in reached.generators.items()}

    def restore(self) -> None:
        for holder in self.reached.owned:
            if not holds_the_same(holder):
                put_back(holder)
        for tensor in self.tensors.values():
            tensor.restore_geometry()
        for tensor in self.tensors.values():
            tensor.restore_gradient()
        for storage in self.storages.values():
            storage.restore()
        for tensor in self.tensors.values():
            tensor.restore_values()
        for name, copy in self.arrays.items():
            array = self.reached.arrays[name]
            if array.flags.writeable:
                np.copyto(array, copy)
        for name, state in self.generators.items():
            _set_generator_state(self.reached.generators[name], state)

    def differences(self) -> list[str]:
        found = [change for holder in self.reached.owned for change in changes(holder)]
        changed = {key for key, storage in self.storages.items() if storage.differs()}
        found += [f"{name or 'the model'}: {what}" for name, t in self.tensors.items() if (what := t.differs(changed))]
        found += [n for n, copy in self.arrays.items() if self.reached.arrays[n].tobytes() != copy.tobytes()]
        found += [
            f"{name} has moved on"
            for name, state in self.generators.items()
            if not surroundings.equal_state(_generator_state(self.reached.generators[name]), state)
        ]
        return found


class _Storage:
    """A storage and a copy of its bytes."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.copy: torch.UntypedStorage = storage.clone()  # type: ignore[no-untyped-call]

    def restore(self) -> None:
        if self.storage.nbytes() != self.copy.nbytes():  # freed or grown by the step
            self.storage.resize_(self.copy.nbytes())
        self.storage.copy_(self.copy)  # under autograd's radar: no version counter moves

    def differs(self) -> bool:
        if self.storage.nbytes() != self.copy.nbytes():
            return True
        return not torch.equal(_raw(self.storage), _raw(self.copy))


def _raw(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@dataclass
class _Tensor:
    """One tensor: which memory it shows and how, its gradient, and its values if its storage is not kept whole."""

    tensor: torch.Tensor
    alias: torch.Tensor | None  # the same memory under a second tensor; None for a composed tensor
    parts: tuple[_Tensor, ...]
    key: int | None  # of the storage
    values: torch.Tensor | None
    leaf: bool
    requires_grad: bool
    grad: torch.Tensor | None

    def restore_geometry(self) -> None:
        for part in self.parts:
            part.restore_geometry()
        if self.leaf and not self.tensor.is_leaf and not self.tensor._is_view():
            self.tensor.detach_()
        if self.alias is not None and not _same_memory(self.tensor, self.alias):
            self.tensor.data = self.alias
        if self.leaf and self.tensor.is_leaf and self.tensor.requires_grad != self.requires_grad:
            self.tensor.requires_grad_(self.requires_grad)

    def restore_gradient(self) -> None:
        """After the geometry of all: a gradient that the step cast fits its tensor only when both are back."""
        for part in self.parts:
            part.restore_gradient()
        if self.leaf and self.tensor.is_leaf and not self.tensor.is_inference() and self.tensor.grad is not self.grad:
            self.tensor.grad = self.grad

    def restore_values(self) -> None:
        for part in self.parts:
            part.restore_values()
        if self.values is not None:
            self.tensor.detach().copy_(self.values)

    def differs(self, storages: set[int]) -> str:
        """What differs, in words; "" if nothing does. `storages` are the keys of those whose bytes changed."""
        inner = next((what for part in self.parts if (what := part.differs(storages))), "")
        if inner:
            return inner
        if self.alias is not None and not _same_memory(self.tensor, self.alias):
            return "other memory, shape or dtype"
        if self.leaf and (not self.tensor.is_leaf or self.tensor.requires_grad != self.requires_grad):
            return f"requires_grad is {self.tensor.requires_grad}, was {self.requires_grad}"
        if self.key in storages or (self.values is not None and not _same_bits(self.tensor, self.values)):
            return "other values"
        if self.leaf and self.tensor.grad is not self.grad:
            return "another gradient"
        return ""


def _keep(tensor: torch.Tensor, storages: dict[int, _Storage]) -> _Tensor:
    leaf = tensor.is_leaf
    grad = tensor.grad if leaf else None
    parts = _parts(tensor)
    if parts:
        kept = tuple(_keep(part, storages) for part in parts)
        return _Tensor(tensor, None, kept, None, None, leaf, tensor.requires_grad, grad)
    storage = tensor.untyped_storage()
    key, values = None, None
    if _is_small_view(tensor):
        values = tensor.detach().clone()
    else:
        key = storage._cdata
        if key not in storages:
            storages[key] = _Storage(storage)
    return _Tensor(tensor, tensor.detach(), (), key, values, leaf, tensor.requires_grad, grad)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The plain tensors that a composed one consists of; none for a plain one."""
    if tensor.layout == torch.sparse_coo:
        plain = tensor.detach()
        return (plain._indices(), plain._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        plain = tensor.detach()
        return (plain.crow_indices(), plain.col_indices(), plain.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        plain = tensor.detach()
        return (plain.ccol_indices(), plain.row_indices(), plain.values())
    if tensor.is_nested and not hasattr(tensor, "__tensor_flatten__"):
        return (tensor.detach().values(),)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and hasattr(
        tensor, "__tensor_flatten__"
    ):
        names, _ = tensor.__tensor_flatten__()
        return tuple(getattr(tensor, name) for name in names)
    return ()


def _unreadable(tensor: torch.Tensor) -> bool:
    """No memory of its own to keep: meta and fake tensors, forward-mode zeros, oneDNN's layout."""
    from torch._subclasses.fake_tensor import FakeTensor

    return tensor.is_meta or isinstance(tensor, FakeTensor) or tensor._is_zerotensor() or tensor.is_mkldnn


def _is_small_view(tensor: torch.Tensor) -> bool:
    """A slice of a data set: keep what it shows, not all it was cut from. Overlapping memory cannot be written so."""
    size = tensor.numel() * tensor.element_size()
    overlapping = any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True))
    return 2 * size < tensor.untyped_storage().nbytes() and not overlapping and tensor.layout == torch.strided


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    return a.stride() == b.stride() and a.storage_offset() == b.storage_offset()


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    plain_a, plain_b = a.detach().contiguous(), b.detach().contiguous()
    if plain_a.dim() == 0:
        plain_a, plain_b = plain_a.reshape(1), plain_b.reshape(1)
    return torch.equal(plain_a.view(torch.uint8), plain_b.view(torch.uint8))


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate()


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, (torch.Generator, np.random.RandomState)):
        generator.set_state(state)
    else:
        generator.setstate(state)


def snapshot_bytes(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """How many bytes copies of these tensors take, by device; memory that tensors share counts once."""
    seen: set[int] = set()
    total: dict[str, int] = {}
    todo = [tensor for tensor in tensors if not _unreadable(tensor)]
    while todo:
        tensor = todo.pop()
        parts = _parts(tensor)
        todo.extend(parts)
        if parts:
            continue
        storage = tensor.untyped_storage()
        small = _is_small_view(tensor)
        if not small and storage._cdata in seen:
            continue
        size = tensor.numel() * tensor.element_size() if small else storage.nbytes()
        if not small:
            seen.add(storage._cdata)
        total[str(tensor.device)] = total.get(str(tensor.device), 0) + size
    return total


def available_bytes(device: str) -> int | None:
    """How many bytes can still be had on a device; None if that cannot be told."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    if device != "cpu":
        return None
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def too_large(needed: dict[str, int]) -> tuple[str, int, int] | None:
    """The first device that cannot hold what is needed on it: its name, the bytes needed, those available."""
    for device, size in needed.items():
        free = available_bytes(device)
        if free is not None and size > free:
            return device, size, free
    return None


def refuse_if_too_large(needed: dict[str, int]) -> None:
    """Raise a `ReplayError` that names the bytes if a device cannot hold the copies."""
    found = too_large(needed)
    if found is not None:
        device, size, free = found
        raise ReplayError(
            f"Replaying this step needs {size:,} bytes on {device} for a copy of its state, and {free:,} are "
            f"available; free memory, or replay with a smaller batch or model."
        )
