"""Reads a captured step and puts its state in place of the present one for a replay.

The file, which `capturing` wrote, is read with `weights_only=True` and in no other way: nothing in it is run. The
step's function comes from whoever replays it, and so does what was not handed to the tracer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nantrace.diagnosis.verdict import Verdict
from nantrace.errors import CaptureError
from nantrace.flow.links import fqn
from nantrace.flow.values import tensors_in
from nantrace.replay import surroundings
from nantrace.replay.capturing import FORMAT, SCALER, VERSION, manifest, several
from nantrace.replay.snapshot import Snapshot
from nantrace.replay.step import Step

_TABLES = ("parameters", "buffers", "gradients", "modes", "random", "settings", "manifest")
_SHOWN = 10
_HAND_OVER = "pass optimizer= and scaler= to nantrace.trace, for the first step of a block too"
_MOST_THREADS = 4096


@dataclass(frozen=True)
class Captured:
    """A captured step as read from its file, and the step that replays it."""

    path: str
    kept: Mapping[str, Any]
    step: Step | None = None
    unused: tuple[str, ...] = ()  # classes of captured optimizers that the step has none for

    def judged(self, verdict: Verdict) -> Verdict:
        """What a replay found, seen beside what is known of the captured step: it did fail."""
        evidence = (*verdict.evidence, *self.differs(), *self.unfilled())
        fault = self.kept["manifest"].get("fault") or "it was at fault"
        if verdict.status == "contained":
            alone = "One step alone cannot show whether training stands still; of the run that it is from was said"
            evidence = (*evidence, f"{alone}: {fault.partition(' See: ')[0].rstrip('.')}.")
        if verdict.status not in ("clean", "expected"):
            return dataclasses.replace(verdict, evidence=evidence)
        first = f"The captured step failed ({fault}); replayed from {self.path} it stayed finite."
        missing = tuple(sentence for sentence in recovery(self) if "missing" in sentence)
        return dataclasses.replace(verdict, status="not_reproduced", evidence=(first, *evidence, *missing))

    def unfilled(self) -> tuple[str, ...]:
        """State that the replay took from the present, as the capture lacks it, or the step names nobody to take it."""
        names = [str(name) for name in self.kept["manifest"].get("unkept") or ()]
        said = [f"The capture lacks the state of {', '.join(names)}: {_HAND_OVER}."] if names else []
        if self.unused:
            said.append(
                f"The capture holds the state of {', '.join(self.unused)}, and the step names no such optimizer to "
                f"take it: hand it to nantrace.Step as optimizer=."
            )
        return tuple(said)

    def differs(self) -> tuple[str, ...]:
        """What is other here than where the step was captured."""
        then, now = self.kept["manifest"], manifest()
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
    if not isinstance(kept, dict) or kept.get("format") != FORMAT:
        raise CaptureError(f"{name} is no captured step of nantrace; give a file that trace(capture=...) wrote.")
    if kept.get("version") != VERSION:
        raise CaptureError(f"{name} has version {kept.get('version')!r}; this nantrace reads {VERSION}: capture again.")
    broken = [table for table in _TABLES if not isinstance(kept.get(table), dict)]
    tensors = ("parameters", "buffers", "gradients")
    broken += [t for t in tensors if t not in broken and not all(isinstance(v, torch.Tensor) for v in kept[t].values())]
    if broken:
        raise CaptureError(f"{name} is damaged: {', '.join(broken)} cannot be read; capture the step again.")
    return Captured(name, kept)


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
            optimizers = several(step.optimizer) or before.objects(torch.optim.Optimizer)
            ready = _apply(captured.kept, step, optimizers)
        except CaptureError:
            raise
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise CaptureError(
                f"{captured.path} cannot be applied ({type(error).__name__}: {error}); it is damaged, or "
                f"that of another step: capture again."
            ) from None
        kept = captured.kept["manifest"].get("optimizers") or ["an optimizer"] * len(captured.kept["optimizers"])
        yield dataclasses.replace(captured, step=ready, unused=tuple(kept[len(optimizers) :]))
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


def _apply(kept: Mapping[str, Any], step: Step, optimizers: list[Any]) -> Step:
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
    for optimizer, state in zip(optimizers, kept.get("optimizers") or (), strict=False):
        optimizer.load_state_dict(state)
    if step.scaler is not None and kept.get("scaler"):
        step.scaler.load_state_dict(kept["scaler"])
    ready = dataclasses.replace(step, batch=_batch(kept, step))
    _apply_settings(kept["settings"])
    surroundings.restore_random_state({name: _as_was(value) for name, value in kept["random"].items()})
    return ready


def _as_was(state: Any) -> Any:
    if isinstance(state, dict):
        return state["array"].numpy().astype("uint32")
    return tuple(_as_was(item) for item in state) if isinstance(state, tuple) else state


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
    unkept = kept["manifest"].get("unkept") or []
    without = [f"the state of {name}, which was not handed over and first seen in this step" for name in unkept]
    known = kept.get("optimizers") or any(name != SCALER for name in unkept)
    optimizer = [*([] if known else ["the optimizer's state"]), *without]
    held = f"{len(kept['parameters']):,} parameters, {len(kept['buffers']):,} buffers, modes, random streams"
    return (
        _goal("One forward and its loss", held, batch),
        _goal("Its backward", f"the same, and {len(kept['gradients']):,} gradients that lay there before", batch),
        _goal("One update", "the optimizer's state" if kept.get("optimizers") else "no optimizer", batch + optimizer),
        _goal("The trajectory before it", "nothing of earlier steps", ["earlier states and batches"]),
    )


def _goal(goal: str, present: str, missing: list[str]) -> str:
    return f"{goal}: present are {present}; missing: {', '.join(missing)}." if missing else f"{goal}: {present}."
