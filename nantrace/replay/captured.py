"""Reads a captured step and puts its state in place of the present one for a replay.

The file, which `capturing` wrote, is read with `weights_only=True` and in no other way: nothing in it is run. The
step's function comes from whoever replays it, and so does what was not handed to the tracer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nantrace.capture.surroundings import rank
from nantrace.diagnosis.standstill import STANDS_STILL
from nantrace.diagnosis.verdict import Verdict
from nantrace.errors import CaptureError, ReplayError
from nantrace.flow.links import fqn
from nantrace.flow.values import tensors_in
from nantrace.replay import surroundings
from nantrace.replay.capturing import FORMAT, SCALER, VERSION, manifest, several
from nantrace.replay.ends import Ends
from nantrace.replay.replays import Replays
from nantrace.replay.snapshot import Snapshot
from nantrace.replay.starts import HANDED_OVER
from nantrace.replay.step import Step

_TABLES = ("parameters", "buffers", "gradients", "modes", "random", "settings", "manifest")
_SHOWN = 10
_HAND_OVER = "pass optimizer= and scaler= to nantrace.trace, for the first step of a block too"
_MOST_THREADS = 4096
_KINDS = ("nan", "inf", "-inf")
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Captured:
    """A captured step as read from its file, and the step that replays it."""

    path: str
    kept: Mapping[str, Any]
    step: Step | None = None
    unused: tuple[str, ...] = ()  # classes of captured optimizers that the step has none for
    tried: tuple[tuple[str, Ends], ...] = ()  # starts of the step, and what a replay from there came to
    start: str = ""  # the one of them that is replayed

    def judged(self, verdict: Verdict) -> Verdict:
        """What a replay found, seen beside what is known of the captured step: it did fail."""
        evidence = (*verdict.evidence, *self.differs(), *self.unfilled())
        fault = self.kept["manifest"].get("fault") or "it was at fault"
        if verdict.status == "contained":
            stuck = STANDS_STILL in fault
            said = fault.partition(" See: ")[0].rstrip(".")
            of_run = f"{self._holds(stuck)}; of the run that it is from was said: {said}."
            evidence = (evidence[0], of_run, *evidence[1:]) if stuck and evidence else (*evidence, of_run)
            verdict = dataclasses.replace(verdict, status="fault" if stuck else "contained")
        replays = verdict.replays + len(self.tried)
        if verdict.status not in ("clean", "expected"):
            return dataclasses.replace(verdict, evidence=(*evidence, *self.started()), replays=replays)
        first = f"The captured step failed ({fault}); replayed from {self.path} it stayed finite."
        missing = tuple(sentence for sentence in recovery(self) if "missing" in sentence)
        evidence = (first, *evidence, *self.started(), *self.read_elsewhere(), *missing)
        return dataclasses.replace(
            verdict, status="not_reproduced", evidence=evidence, advice=self.way_on(), replays=replays
        )

    def _holds(self, stuck: bool) -> str:
        """Which step was kept, and what one of them cannot show."""
        step = self.kept["manifest"].get("step")
        alone = "One step alone cannot show whether training stands still"
        if not stuck:
            return alone
        which = "The captured step" if step is None else f"The captured step, step {step} of its run,"
        return f"{which} does no harm by itself. {alone}"

    def started(self) -> tuple[str, ...]:
        """From where the step was replayed, and what replays from elsewhere came to."""
        said = [f"with {name}: {ends.in_words()}" for name, ends in self.tried if name != self.start]
        batches = self.kept["manifest"].get("batches") or 0
        found = [f"It was replayed with {self.start}; {'; '.join(said)}."] if said else []
        if batches > 1:
            found.append(
                f"The step read {batches:,} batches one after the other: each was replayed alone, from the parameters, "
                f"buffers and gradients before the first."
            )
        return tuple(found)

    def read_elsewhere(self) -> tuple[str, ...]:
        """That the model was seen reading something else than the batch that was kept."""
        read = self.kept["manifest"].get("read")
        if not read:
            return ()
        return (f"The captured batch is not what the step read: {read}; the capture holds no such values.",)

    def way_on(self) -> tuple[str, ...]:
        """What to capture better where a replay did not fail again."""
        if self.kept["manifest"].get("when") == HANDED_OVER:
            return ()
        if not self.has_batch():
            what = "The capture holds no batch, so the replay read the step's own"
        elif self.kept["manifest"].get("read"):
            what = "The loop reads another batch than the one handed over as batch="
        else:
            what = "Batch and random streams were kept without knowing where the step begins"
        return (
            f"{what}: call tracer.batch(batch) at the top of the loop's body, with what the step is about to read "
            f"(or, for a single step, pass batch= to nantrace.trace), and capture again.",
        )

    def has_batch(self) -> bool:
        return self.kept.get("batch") is not None or bool(self.kept.get("batch_tensors"))

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
    others = kept.get("others", [])
    if not isinstance(others, list) or not all(
        isinstance(o, dict) and isinstance(o.get("random"), dict) for o in others
    ):
        broken.append("others")
    tensors = ("parameters", "buffers", "gradients")
    broken += [t for t in tensors if t not in broken and not all(isinstance(v, torch.Tensor) for v in kept[t].values())]
    if broken:
        raise CaptureError(f"{name} is damaged: {', '.join(broken)} cannot be read; capture the step again.")
    return Captured(name, kept)


@contextlib.contextmanager
def applied(
    step: Step, path: str | os.PathLike[str], *, most: int = 20, progress: Callable[[str], None] | None = None
) -> Iterator[Captured]:
    """The captured state in place of the present one, which comes back at the end, bit for bit.

    Args:
        step: the step it belongs to.
        path: of the capture.
        most: how many replays may be spent on finding out where the step began, if that was not said.
        progress: told one line about each of them.

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
            _apply(captured.kept, step, optimizers)
            ready = _begin(captured.kept, captured.kept, step)
            captured, ready = _from_where_it_fails(captured, step, ready, most, progress)
        except (CaptureError, ReplayError):
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


def _from_where_it_fails(
    captured: Captured, step: Step, ready: Step, most: int, progress: Callable[[str], None] | None
) -> tuple[Captured, Step]:
    """The start from which the step fails again, if there are several: as it failed, if there is such a one."""
    starts = [captured.kept, *(captured.kept.get("others") or ())]
    if len(starts) < 2 or most < 2 or rank() is not None:  # ranks would try different ones, and wait for each other
        return captured, ready
    names = _names(captured.kept, starts)
    tried: list[tuple[str, Ends]] = []
    for start, name in zip(starts[: most - 1], names, strict=False):
        with Replays(_begin(captured.kept, start, step), 1, _told(name, progress)) as replays:
            ends = replays.plain("the ends only")
        tried.append((name, ends))
        if ends.nonfinite and _is_alike(ends, captured.kept["manifest"]):
            break
    alike = [bool(ends.nonfinite) and _is_alike(ends, captured.kept["manifest"]) for _, ends in tried]
    failed = [bool(ends.nonfinite) for _, ends in tried]
    at = next((marks.index(True) for marks in (alike, failed) if True in marks), 0)
    return dataclasses.replace(captured, tried=tuple(tried), start=names[at]), _begin(captured.kept, starts[at], step)


def _names(kept: Mapping[str, Any], starts: list[Mapping[str, Any]]) -> list[str]:
    if (kept["manifest"].get("batches") or 0) > 1:
        return [f"batch {number} of the step" for number in range(1, len(starts) + 1)]
    whens = [kept["manifest"].get("when"), *(start.get("when") for start in starts[1:])]
    return [f"the random streams as they were {when}" for when in whens]


def _told(name: str, progress: Callable[[str], None] | None) -> Callable[[str], None] | None:
    return None if progress is None else lambda line: progress(f"replay with {name}: {line.rpartition(': ')[2]}")


def _is_alike(ends: Ends, manifest: Mapping[str, Any]) -> bool:
    """Whether a replay came to the loss that the step had, as far as both are known."""
    loss = manifest.get("loss")
    if not isinstance(loss, float) or len(ends.losses) != 1:
        return True
    text = ends.losses[0]
    if "0x" not in text:
        return text not in _KINDS or text == repr(loss)
    return math.isclose(float.fromhex(text), loss, rel_tol=_ROUNDING, abs_tol=1e-30)


def _begin(kept: Mapping[str, Any], start: Mapping[str, Any], step: Step) -> Step:
    """The step with a captured batch, in torch's captured switches, and the random streams as they were."""
    ready = dataclasses.replace(step, batch=_batch(start, step))
    _apply_settings(kept["settings"])
    surroundings.restore_random_state({name: _as_was(value) for name, value in start["random"].items()})
    return ready


def _apply(kept: Mapping[str, Any], step: Step, optimizers: list[Any]) -> None:
    """Write a captured state into the step's objects."""
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
    batch = [] if captured.has_batch() else ["the batch"]
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
