"""Keeps the state before each step of a traced block, and writes it once a step is at fault: a captured step.

The file is `torch.save` of plain containers and tensors with a manifest. It holds what the step began with: parameters,
buffers (non-persistent ones too), gradients, modes, optimizers, the given scaler, the batch, random streams and torch's
switches. Optimizers that were not handed over are known once they have stepped in the block: in the first step their
state, and a scaler's that was not handed over, is missing, and the file says so. It holds no code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pickle
import platform
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nantrace.capture.lifecycle import parameters_of
from nantrace.capture.observers import Judgement
from nantrace.capture.surroundings import own_path, rank, warn_user
from nantrace.capture.targets import refuse_taken, refuse_unwritable
from nantrace.capture.tracer import Tracer
from nantrace.errors import NantraceError
from nantrace.events import Trace
from nantrace.flow.links import fqn
from nantrace.flow.values import tensors_in
from nantrace.replay import surroundings
from nantrace.replay.snapshot import refuse_if_too_large, snapshot_bytes
from nantrace.replay.step import Step

FORMAT, VERSION = "nantrace capture", 1
#: What the manifest calls a scaler whose state was not kept.
SCALER = "GradScaler"
_NOT_KEPT = ("warning filters", "anomaly detection")  # the process's own business, not the step's numbers


class StepCapture:
    """Keeps the state before each step, and writes it for the first one at fault. An observer for `Tracer`.

    Args:
        model, optimizer, scaler, batch: of the step; optimizers may be several, all but the model None.
        path: file to write; each rank of a distributed run has a file of its own, as it has for a trace.
        overwrite: replace an existing capture, as a whole and not before a step is at fault.

    Attributes:
        path: the file of this rank, once the block has begun.
        written: whether a step was at fault and is in the file.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        scaler: Any,
        batch: Any,
        path: str | os.PathLike[str],
        overwrite: bool = False,
    ) -> None:
        self._step = Step(_no_code, model, batch, optimizer=several(optimizer), scaler=scaler)
        self.path: str | None = None
        self._given, self._overwrite = os.fspath(path), overwrite
        # Read here: a tracer reads everything else under modes of its own.
        self._modes = {n: v for n, v in surroundings.settings().items() if n == "grad mode" or "autocast" in n}
        self._kept: dict[str, Any] | None = None
        self._problem: str | None = None
        self._optimizers: Callable[[], list[torch.optim.Optimizer]] = list  # known by now
        self.written = False

    def block_begins(self) -> None:
        """Find out what may be wrong with the file before a step runs, not when one has failed."""
        path = own_path(self._given, rank())
        refuse_taken(path, self._overwrite, _is_capture, "a captured step")
        refuse_unwritable(path)
        self.path = path

    def step_begins(self, tracer: Tracer) -> None:
        if self.written or self._problem:
            return
        self._optimizers = functools.partial(_all_of, self._step.optimizer, tracer)
        try:
            self._kept = _state(dataclasses.replace(self._step, optimizer=self._optimizers()))
            self._kept["settings"].update(self._modes)
        except NantraceError as error:
            self._problem = str(error)

    def step_ended(self, trace: Trace, verdict: Judgement | None) -> None:
        kept, self._kept = self._kept, None
        if verdict is None or not verdict.fault or self.written:
            return
        if kept is not None:
            kept["manifest"]["fault"] = verdict.sentence or ""
            kept["manifest"]["unkept"] = self._unkept(kept, trace)
            self._problem = self._problem or _written(kept, self.path or self._given)
        self.written = self._problem is None
        if self._problem:
            warn_user(f"the step at fault was not captured: {self._problem}")

    def _unkept(self, kept: Mapping[str, Any], trace: Trace) -> list[str]:
        """What took part in the step without having been known when it began."""
        missing = [type(optimizer).__name__ for optimizer in self._optimizers()[len(kept["optimizers"]) :]]
        scaled = any(row.get("scale_before") is not None for row in trace.steps)
        return [*missing, *([SCALER] if scaled and self._step.scaler is None else [])]


def _all_of(given: list[Any], tracer: Tracer) -> list[Any]:
    """The given optimizers and those that the tracer met, but for ones that a given one stands around."""
    held = {id(parameter) for optimizer in given for parameter in parameters_of(optimizer)}
    return [*given, *(met for met in tracer.optimizers if not held.issuperset(map(id, parameters_of(met))))]


def _no_code() -> None:
    """Stands for the step's function, which a capture does not hold."""


def several(optimizer: Any) -> list[Any]:
    """One optimizer, a sequence of them, or None, as a list."""
    if optimizer is None:
        return []
    return [optimizer] if hasattr(optimizer, "param_groups") else list(optimizer)


def _state(step: Step) -> dict[str, Any]:
    model = step.model
    tensors = [*model.parameters(), *model.buffers(), *(t for _, t in tensors_in(step.batch, "batch"))]
    refuse_if_too_large(snapshot_bytes(tensors))
    with torch.no_grad():
        return {
            "format": FORMAT,
            "version": VERSION,
            "parameters": {fqn(name, model): _clone(p) for name, p in model.named_parameters()},
            "buffers": {fqn(name, model): _clone(b) for name, b in model.named_buffers()},
            "gradients": {fqn(n, model): _clone(p.grad) for n, p in model.named_parameters() if p.grad is not None},
            "modes": {fqn(name, model): module.training for name, module in model.named_modules()},
            "optimizers": [_copied(optimizer.state_dict()) for optimizer in step.optimizer],
            "scaler": None if step.scaler is None else _copied(step.scaler.state_dict()),
            "batch": _copied(step.batch) if _is_plain(step.batch) else None,
            "batch_tensors": {path: _clone(t) for path, t in tensors_in(step.batch, "batch")},
            "random": {name: _as_plain(value) for name, value in surroundings.random_state().items()},
            "settings": {n: v for n, v in surroundings.settings().items() if n not in _NOT_KEPT and _is_plain(v)},
            "manifest": {**manifest(), "optimizers": [type(optimizer).__name__ for optimizer in step.optimizer]},
        }


def manifest() -> dict[str, Any]:
    """What else decides over bits."""
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _is_plain(value: Any) -> bool:
    """Only what `weights_only` lets through again."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    if type(value) in (list, tuple):
        return all(_is_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str, torch.Tensor, torch.dtype, torch.nn.Parameter)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _clone(value)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_copied(item) for item in value])
    return value


def _as_plain(state: Any) -> Any:
    """NumPy's stream holds an array, which `weights_only` refuses."""
    if hasattr(state, "tobytes"):
        return {"array": torch.tensor(state.astype("int64"))}
    return tuple(_as_plain(item) for item in state) if isinstance(state, tuple) else state


def _written(kept: dict[str, Any], path: str) -> str | None:
    """Write all or nothing. What went wrong, or None."""
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(path)), suffix=".partial")
        with os.fdopen(handle, "wb") as file:
            torch.save(kept, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError, pickle.PicklingError, AttributeError, TypeError) as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        return f"{path} cannot be written ({error})"
    return None


def _is_capture(path: str) -> bool:
    try:
        kept = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # its tensors are not read
    except Exception:  # unpickling a foreign or hostile file raises whatever it likes
        return False
    return isinstance(kept, dict) and kept.get("format") == FORMAT
