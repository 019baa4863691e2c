"""Keeps the state before each step of a traced block, and writes it once a step is at fault: a captured step.

The file is `torch.save` of plain containers and tensors with a manifest. It holds what the step began with: parameters,
buffers (non-persistent ones too), gradients, modes, optimizers, the given scaler, torch's switches, the batch and the
random streams; of these two more than one where nobody said when the step began. Optimizers that were not handed over
are known once they have stepped in the block: in the first step their state, and a scaler's that was not handed over,
is missing, and the file says so. It holds no code.
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
from nantrace.replay import surroundings
from nantrace.replay.snapshot import refuse_if_too_large, snapshot_bytes
from nantrace.replay.starts import ENTRY, UPDATE, Starts, clone, copied, is_plain, read_elsewhere
from nantrace.replay.step import Step

FORMAT, VERSION = "nantrace capture", 1
#: What the manifest calls a scaler whose state was not kept.
SCALER = "GradScaler"
_NOT_KEPT = ("warning filters", "anomaly detection")  # the process's own business, not the step's numbers


class StepCapture:
    """Keeps the state before each step, and writes it for the first one at fault. An observer for `Tracer`.

    Args:
        model, optimizer, scaler: of the step; optimizers may be several, all but the model None.
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
        path: str | os.PathLike[str],
        overwrite: bool = False,
    ) -> None:
        self._step = Step(_no_code, model, optimizer=several(optimizer), scaler=scaler)
        self.path: str | None = None
        self._given, self._overwrite = os.fspath(path), overwrite
        # Read here: a tracer reads everything else under modes of its own.
        self._modes = {n: v for n, v in surroundings.settings().items() if n == "grad mode" or "autocast" in n}
        self._kept: dict[str, Any] | None = None
        self._starts = Starts()
        self._left: dict[str, Any] | None = None  # random streams, as the last update left them
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
        since = ENTRY if self._left is None else UPDATE
        self._starts, self._left = Starts(self._left or surroundings.random_state(), since), None

    def step_reads(self, batch: Any, handed_over: bool) -> None:
        if self._kept is None or self._problem:
            return
        try:
            self._starts.add(batch, handed_over)
        except NantraceError as error:
            self._problem = str(error)

    def step_closes(self) -> None:
        if not self.written:
            self._left = surroundings.random_state()

    def step_ended(self, trace: Trace, verdict: Judgement | None) -> None:
        kept, self._kept = self._kept, None
        self._left = self._left or surroundings.random_state()
        if verdict is None or not verdict.fault or self.written:
            return
        if kept is not None:
            kept["manifest"].update(fault=verdict.sentence or "", step=int(trace.steps[-1]["step"]))
            kept["manifest"]["unkept"] = self._unkept(kept, trace)
            self._add_starts(kept, trace)
            self._problem = self._problem or _written(kept, self.path or self._given)
        self.written = self._problem is None
        if self._problem:
            warn_user(f"the step at fault was not captured: {self._problem}")

    def _add_starts(self, kept: dict[str, Any], trace: Trace) -> None:
        if not self._starts.kept:  # nothing of the step was heard
            self._starts.add(None, True)
        first, *others = self._starts.kept
        kept.update(batch=first["batch"], batch_tensors=first["batch_tensors"], random=first["random"], others=others)
        row = trace.steps[-1]
        comparable = row.get("scale_before") is None and row.get("backwards") == 1
        kept["manifest"].update(
            when=first["when"],
            batches=self._starts.batches,
            read=read_elsewhere(trace, first) if self._starts.batches < 2 else None,
            loss=row.get("loss") if comparable else None,
        )

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
    tensors = [*model.parameters(), *model.buffers()]
    refuse_if_too_large(snapshot_bytes(tensors))
    with torch.no_grad():
        return {
            "format": FORMAT,
            "version": VERSION,
            "parameters": {fqn(name, model): clone(p) for name, p in model.named_parameters()},
            "buffers": {fqn(name, model): clone(b) for name, b in model.named_buffers()},
            "gradients": {fqn(n, model): clone(p.grad) for n, p in model.named_parameters() if p.grad is not None},
            "modes": {fqn(name, model): module.training for name, module in model.named_modules()},
            "optimizers": [copied(optimizer.state_dict()) for optimizer in step.optimizer],
            "scaler": None if step.scaler is None else copied(step.scaler.state_dict()),
            "settings": {n: v for n, v in surroundings.settings().items() if n not in _NOT_KEPT and is_plain(v)},
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
