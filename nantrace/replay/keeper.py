"""Keeps one op of a running step: its arguments before it runs, what it puts out, and the settings it ran under.

Everything kept is a plain container of tensors, numbers and texts, as `torch.load(weights_only=True)` lets through.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nantrace.flow.values import planes

_DEVICES = ("cpu", "cuda")


class Keeper(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts ops as the recorder does, and keeps one of them. Raises nothing into the step.

    Args:
        time: which op to keep, counted from 1.
        autocast: whether the step has autocast switched on, by device; see `watching_autocast`.

    Attributes:
        kept: what was kept; None if the op did not run, or could not be kept.
        problem: why it could not be kept, in words.
        name, overload: of the op.
        writes: positions of the arguments that it writes into.
    """

    def __init__(self, time: int, autocast: dict[str, bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._time, self._count, self._autocast = time, 0, autocast
        self.kept: dict[str, Any] | None = None
        self.problem = ""
        self.name = ""
        self.overload = ""
        self.writes: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._count += 1
        kwargs = kwargs or {}
        if self._count != self._time:
            return func(*args, **kwargs)
        kept = self._attempt(self._before, func, args, kwargs, torch.is_grad_enabled())
        out = func(*args, **kwargs)
        if kept is not None:
            self.kept = self._attempt(self._after, kept, args, out)
        return out

    def _attempt(self, do: Any, *args: Any) -> Any:
        try:
            with torch.no_grad():
                return do(*args)
        except Exception as error:
            self.problem = str(error) or type(error).__name__
            return None

    def _before(self, func: Any, args: Any, kwargs: Any, grad_mode: bool) -> dict[str, Any]:
        schema = func._schema
        self.name = schema.name.replace("::", ".")
        self.overload = f"{self.name}.{schema.overload_name or 'default'}"
        written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        self.writes = tuple(i for i in written if i < len(args))
        copies: dict[int, torch.Tensor] = {}
        return {
            "args": [_plain(value, copies) for value in args],
            "kwargs": {name: _plain(value, copies) for name, value in kwargs.items()},
            **_settings(),
            "grad_mode": grad_mode,
            "autocast": self._recorded_autocast(),
        }

    def _after(self, kept: dict[str, Any], args: Any, out: Any) -> dict[str, Any]:
        outputs = out if isinstance(out, (list, tuple)) else [out]
        written = [args[i] for i in self.writes]
        copies: dict[int, torch.Tensor] = {}
        return {**kept, "outputs": [_plain(tensor, copies) for tensor in flat((*outputs, *written))]}

    def _recorded_autocast(self) -> dict[str, Any]:
        states = {
            device: {"enabled": self._autocast.get(device, False), "dtype": str(torch.get_autocast_dtype(device))}
            for device in _DEVICES
        }
        return {**states, "cache": torch.is_autocast_cache_enabled()}


def flat(values: Any) -> list[torch.Tensor]:
    """The tensors of an op's results, in order."""
    inner = [item for value in values for item in (value if isinstance(value, (list, tuple)) else (value,))]
    return [item for item in inner if isinstance(item, torch.Tensor)]


@contextlib.contextmanager
def watching_autocast() -> Iterator[dict[str, bool]]:
    """Whether autocast is on, by device, as the step itself switches it.

    An op cannot be asked: it runs below autocast, which is off there.
    """
    on = {device: torch.is_autocast_enabled(device) for device in _DEVICES}
    original = torch.set_autocast_enabled

    @functools.wraps(original)
    def nantrace_set_autocast_enabled(*args: Any) -> Any:
        result = original(*args)
        if len(args) == 2:
            on[str(args[0])] = bool(args[1])
        return result

    setattr(torch, original.__name__, nantrace_set_autocast_enabled)
    try:
        yield on
    finally:
        setattr(torch, original.__name__, original)


def _settings() -> dict[str, Any]:
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state() if cuda else None,
        "threads": torch.get_num_threads(),
        "default_dtype": {"torch": str(torch.get_default_dtype()).removeprefix("torch.")},
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "precision": torch.get_float32_matmul_precision(),
    }


def _plain(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """A copy that says the same; constants of torch and generators as a dict with one key.

    Raises:
        TypeError: a value of a kind that cannot be kept.
    """
    if isinstance(value, torch.Tensor):
        if id(value) not in copies:
            copies[id(value)] = _copied(value)
        return copies[id(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.Generator):
        return {"generator": value.get_state(), "of": str(value.device)}
    if isinstance(value, (list, tuple)):
        return [_plain(item, copies) for item in value]
    raise TypeError(f"it takes a {type(value).__name__}, which cannot be kept in a file")


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, as kernels depend on them."""
    plain = tensor.detach()
    if plain.layout != torch.strided or not planes(plain):
        return plain.clone()
    if 0 in plain.stride():
        once = tuple(slice(0, 1) if stride == 0 and size else slice(None) for stride, size in _sides(plain))
        return plain[once].clone().expand(plain.shape)
    copy = torch.empty_strided(plain.size(), plain.stride(), dtype=plain.dtype, device=plain.device)
    return copy.copy_(plain)


def _sides(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    return zip(tensor.stride(), tensor.shape, strict=True)
