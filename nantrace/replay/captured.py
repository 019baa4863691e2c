"""A captured step: the state before the step, kept while it runs and written only if the step went nonfinite.

The file is `torch.save` of plain containers and tensors with a manifest, and is read with `weights_only=True` and in no
other way. It holds what the step began with: parameters, buffers (non-persistent ones too), gradients, modes, the given
optimizers and scaler, the batch, random streams and torch's switches. It holds no code: the step's function comes from
whoever replays it, and so do optimizers and data that were not handed to the tracer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import platform
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nantrace.capture.observers import Judgement
from nantrace.capture.surroundings import own_path, rank, warn_user
from nantrace.capture.targets import refuse_taken, refuse_unwritable
from nantrace.capture.tracer import Tracer
from nantrace.diagnosis.verdict import Verdict
from nantrace.errors import CaptureError, NantraceError
from nantrace.events import Trace
from nantrace.flow.links import fqn
from nantrace.flow.values import tensors_in
from nantrace.replay import surroundings
from nantrace.replay.snapshot import Snapshot, refuse_if_too_large, snapshot_bytes
from nantrace.replay.step import Step

_FORMAT, _VERSION = "nantrace capture", 1
_TABLES = ("parameters", "buffers", "gradients", "modes", "random", "settings", "manifest")
_NOT_KEPT = ("warning filters", "anomaly detection")  # the process's own business, not the step's numbers
_SHOWN = 10
_MOST_THREADS = 4096


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
        self._step = Step(_no_code, model, batch, optimizer=_several(optimizer), scaler=scaler)
        self.path: str | None = None
        self._given, self._overwrite = os.fspath(path), overwrite
        # Read here: a tracer reads everything else under modes of its own.
        self._modes = {n: v for n, v in surroundings.settings().items() if n == "grad mode" or "autocast" in n}
        self._kept: dict[str, Any] | None = None
        self._problem: str | None = None
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
        try:
            self._kept = _state(self._step)
            self._kept["settings"].update(self._modes)
        except NantraceError as error:
            self._problem = str(error)

    def step_ended(self, trace: Trace, verdict: Judgement | None) -> None:
        kept, self._kept = self._kept, None
        if verdict is None or not verdict.fault or self.written:
            return
        if kept is not None:
            kept["manifest"]["fault"] = verdict.sentence or ""
            self._problem = self._problem or _written(kept, self.path or self._given)
        self.written = self._problem is None
        if self._problem:
            warn_user(f"the step at fault was not captured: {self._problem}")


def _no_code() -> None:
    """Stands for the step's function, which a capture does not hold."""


def _several(optimizer: Any) -> list[Any]:
    if optimizer is None:
        return []
    return [optimizer] if hasattr(optimizer, "param_groups") else list(optimizer)


# ---------------------------------------------------------------------------------------------------- keeping
def _state(step: Step) -> dict[str, Any]:
    model = step.model
    tensors = [*model.parameters(), *model.buffers(), *(t for _, t in tensors_in(step.batch, "batch"))]
    refuse_if_too_large(snapshot_bytes(tensors))
    with torch.no_grad():
        return {
            "format": _FORMAT,
            "version": _VERSION,
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
            "manifest": _manifest(),
        }


def _manifest() -> dict[str, Any]:
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


def _as_was(state: Any) -> Any:
    if isinstance(state, dict):
        return state["array"].numpy().astype("uint32")
    return tuple(_as_was(item) for item in state) if isinstance(state, tuple) else state


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


# ---------------------------------------------------------------------------------------------------- reading
@dataclass(frozen=True)
class Captured:
    """A captured step as read from its file, and the step that replays it."""

    path: str
    kept: Mapping[str, Any]
    step: Step | None = None

    def judged(self, verdict: Verdict) -> Verdict:
        """What a replay found, seen beside what is known of the captured step: it did fail."""
        evidence = (*verdict.evidence, *self.differs())
        if verdict.status not in ("clean", "expected"):
            return dataclasses.replace(verdict, evidence=evidence)
        fault = self.kept["manifest"].get("fault") or "it was at fault"
        first = f"The captured step failed ({fault}); replayed from {self.path} it stayed finite."
        missing = tuple(sentence for sentence in recovery(self) if "missing" in sentence)
        return dataclasses.replace(verdict, status="not_reproduced", evidence=(first, *evidence, *missing))

    def differs(self) -> tuple[str, ...]:
        """What is other here than where the step was captured."""
        then, now = self.kept["manifest"], _manifest()
        return tuple(
            f"The step was captured under {name} {then[name]} and replayed under {now[name]}: bits may differ."
            for name in ("torch", "cpu")
            if name in then and then[name] != now[name]
        )


def read(path: str | os.PathLike[str]) -> Captured:
    """Read a captured step; runs no code that is in the file.

    Raises:
        CaptureError: there is no such file, it is no capture, or one of a version that cannot be read.
    """
    name = os.fspath(path)
    try:
        kept = torch.load(name, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CaptureError(f"There is no file {name!r}; give the path passed as capture= to nantrace.trace.") from None
    except Exception as error:  # unpickling a foreign or hostile file raises whatever it likes
        raise CaptureError(
            f"{name} is not a captured step that can be read safely ({type(error).__name__}); capture it again."
        ) from None
    if not isinstance(kept, dict) or kept.get("format") != _FORMAT:
        raise CaptureError(f"{name} is no captured step of nantrace; give a file that trace(capture=...) wrote.")
    if kept.get("version") != _VERSION:
        raise CaptureError(
            f"{name} has version {kept.get('version')!r}; this nantrace reads {_VERSION}: capture again."
        )
    broken = [table for table in _TABLES if not isinstance(kept.get(table), dict)]
    tensors = ("parameters", "buffers", "gradients")
    broken += [t for t in tensors if t not in broken and not all(isinstance(v, torch.Tensor) for v in kept[t].values())]
    if broken:
        raise CaptureError(f"{name} is damaged: {', '.join(broken)} cannot be read; capture the step again.")
    return Captured(name, kept)


def _is_capture(path: str) -> bool:
    try:
        kept = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # its tensors are not read
    except Exception:  # unpickling a foreign or hostile file raises whatever it likes
        return False
    return isinstance(kept, dict) and kept.get("format") == _FORMAT


@contextlib.contextmanager
def applied(step: Step, path: str | os.PathLike[str]) -> Iterator[Captured]:
    """The captured state in place of the present one, which comes back at the end, bit for bit.

    Raises:
        CaptureError: the file cannot be read, or does not belong to this model, optimizer or batch.
        ReplayError: the present state cannot be kept.
    """
    captured = read(path)
    _refuse_other_model(captured, step.model)
    before = Snapshot(step)
    try:
        try:
            ready = _apply(captured.kept, step)
        except CaptureError:
            raise
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise CaptureError(
                f"{captured.path} cannot be applied ({type(error).__name__}: {error}); it is damaged, or "
                f"that of another step: capture again."
            ) from None
        yield dataclasses.replace(captured, step=ready)
    finally:
        before.restore()


def _refuse_other_model(captured: Captured, model: torch.nn.Module) -> None:
    own: dict[str, dict[str, torch.Tensor]] = {
        "parameters": {fqn(name, model): t for name, t in model.named_parameters()},
        "buffers": {fqn(name, model): t for name, t in model.named_buffers()},
    }
    found = []
    for table, tensors in own.items():
        kept = captured.kept[table]
        found += [f"{name} is not in the model" for name in kept if name not in tensors]
        found += [f"{name} is not in the capture" for name in tensors if name not in kept]
        found += [
            f"{name} is {_kind(kept[name])}, in the model {_kind(tensors[name])}"
            for name in kept
            if name in tensors and _kind(kept[name]) != _kind(tensors[name])
        ]
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise CaptureError(
            f"{captured.path} is a step of another model: {'; '.join(found[:_SHOWN])}{more}. Give the model it was "
            f"captured from."
        )


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _apply(kept: Mapping[str, Any], step: Step) -> Step:
    """Write a captured state into the step's objects; the step with the captured batch."""
    model = step.model
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            table = "parameters" if isinstance(tensor, torch.nn.Parameter) else "buffers"
            tensor.detach().copy_(kept[table][fqn(name, model)])
    for name, parameter in model.named_parameters():
        gradient = kept["gradients"].get(fqn(name, model))
        parameter.grad = None if gradient is None else gradient.to(parameter.device)
    for name, module in model.named_modules():
        module.training = bool(kept["modes"].get(fqn(name, model), module.training))
    for optimizer, state in zip(_several(step.optimizer), kept.get("optimizers") or (), strict=False):
        optimizer.load_state_dict(state)
    if step.scaler is not None and kept.get("scaler"):
        step.scaler.load_state_dict(kept["scaler"])
    ready = dataclasses.replace(step, batch=_batch(kept, step))
    _apply_settings(kept["settings"])
    surroundings.restore_random_state({name: _as_was(value) for name, value in kept["random"].items()})
    return ready


def _apply_settings(settings: Mapping[str, Any]) -> None:
    threads = settings.get("number of threads", 1)
    if not isinstance(threads, int) or not 1 <= threads <= _MOST_THREADS:
        raise CaptureError(f"The capture asks for {threads!r} threads; it is damaged: capture the step again.")
    surroundings.restore_settings(dict(settings))


def _batch(kept: Mapping[str, Any], step: Step) -> Any:
    """The captured batch: as a whole where it is plain, else its tensors written into the step's own."""
    if step.batch is None:
        return None
    device = next((t.device for t in (*step.model.parameters(), *step.model.buffers())), torch.device("cpu"))
    own = dict(tensors_in(step.batch, "batch"))
    if kept.get("batch") is not None:
        devices = {path: tensor.device for path, tensor in own.items()}
        return _on_devices(kept["batch"], "batch", devices, device)
    tensors = kept.get("batch_tensors") or {}
    wrong = [path for path, tensor in tensors.items() if path not in own or _kind(own[path]) != _kind(tensor)]
    if wrong:
        raise CaptureError(f"The captured batch has other tensors than the step's: {', '.join(wrong[:_SHOWN])}.")
    for path, tensor in tensors.items():
        own[path].detach().copy_(tensor)
    return step.batch


def _on_devices(value: Any, path: str, devices: Mapping[str, torch.device], other: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(devices.get(path, other))
    if isinstance(value, dict):
        return {key: _on_devices(item, f"{path}.{key}", devices, other) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_on_devices(item, f"{path}[{i}]", devices, other) for i, item in enumerate(value)])
    return value


def recovery(capture: str | os.PathLike[str] | Captured) -> tuple[str, ...]:
    """What can be done from a capture, goal by goal, and what is missing for it.

    Raises:
        CaptureError: the file cannot be read.
    """
    captured = capture if isinstance(capture, Captured) else read(capture)
    kept = captured.kept
    batch = [] if kept.get("batch") is not None or kept.get("batch_tensors") else ["the batch"]
    optimizer = [] if kept.get("optimizers") else ["the optimizer's state"]
    held = f"{len(kept['parameters']):,} parameters, {len(kept['buffers']):,} buffers, modes, random streams"
    return (
        _goal("One forward and its loss", held, batch),
        _goal("Its backward", f"the same, and {len(kept['gradients']):,} gradients that lay there before", batch),
        _goal("One update", "the optimizer's state" if not optimizer else "no optimizer", batch + optimizer),
        _goal("The trajectory before it", "nothing of earlier steps", ["earlier states and batches"]),
    )


def _goal(goal: str, present: str, missing: list[str]) -> str:
    return f"{goal}: present are {present}; missing: {', '.join(missing)}." if missing else f"{goal}: {present}."
