"""What the ledger adds up over the steps, and what it hears of a step besides its updates.

Losses without their scale, norms of gradients, clipping, schedulers, checkpoints and decisions. `StepRecorder` says
which step is open; what is heard between two steps goes to the next. Reads no tensor of a module.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from nantrace.capture.ledger.norms import norms_of, total
from nantrace.capture.ledger.open_step import Clip, OpenStep, detached, number
from nantrace.capture.ledger.updates import Registry, Updates
from nantrace.capture.ledger.weights import WeightSample, is_sampled
from nantrace.capture.lifecycle import parameters_of
from nantrace.capture.raised import without_folders

Named = Sequence[tuple[str, torch.Tensor]]
#: Updates attempted, committed and skipped.
Counts: TypeAlias = tuple[int, int, int]

_OUTSIDE, _MODEL = "(outside)", "(model)"
_NOTE_KEYS = 32
_LOSSES = 64  # scaled ones that are remembered until backward begins


class Books:
    """The ledger over all steps of a trace. Everything here is called within `Quiet`.

    Attributes:
        updates: what became of each optimizer's updates.
        losses: named scalars that the model's last output held beside or as its loss.
    """

    def __init__(self) -> None:
        self.updates = Registry()
        self.losses: dict[str, torch.Tensor] = {}
        self._scaled: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        self._scale: torch.Tensor | None = None  # on the losses since the last backward
        self._waiting: list[Mapping[str, Any]] = []
        self._checkpoint: Mapping[str, Any] | None = None
        self._weight_names: tuple[str, ...] = ()
        self._with_gradient: set[str] = set()  # parameters that had one in some step
        self._taken: set[str] = set()  # those of which an optimizer took it

    def opened(self, step: OpenStep) -> None:
        """A step begins: what was put on record since the last one belongs to it."""
        step.decisions += self._waiting
        self._waiting = []
        self.losses = {}

    def loss_scaled(self, step: OpenStep | None, scale: torch.Tensor | None, given: Any, scaled: Any) -> None:
        """A scaler multiplied a loss, or several."""
        self._scale = scale
        if step is not None and step.scale is None:
            step.scale = scale
        del self._scaled[:-_LOSSES]
        pairs = [(given, scaled)] if isinstance(scaled, torch.Tensor) else _pairs(given, scaled)
        self._scaled += [(weakref.ref(after), detached(before)) for before, after in pairs]

    def backward(self, step: OpenStep, roots: Sequence[torch.Tensor]) -> None:
        """Backward begins from `roots`; the last scalar is the loss."""
        if step.scale is None:
            step.scale = self._scale
        for root in roots:
            if root.numel() == 1:
                step.take_root(self._without_scale(root))
        step.losses.update(self.losses)
        self._scaled, self._scale, self.losses = [], None, {}

    def _without_scale(self, root: torch.Tensor) -> torch.Tensor:
        for scaled, given in self._scaled:
            if scaled() is root:
                return given
        value = root.detach().clone()
        return value if self._scale is None else value.double() / self._scale.to(value.device).double()

    def gradients(self, step: OpenStep, key: int, named: Named) -> None:
        """Gradients stand as an optimizer is given them; key 0 where none takes them."""
        found = step.norms[key] = norms_of(named)
        self._with_gradient.update(found.names, found.unread)
        if key:
            self._taken.update(found.names, found.unread)

    def clipped(self, step: OpenStep, max_norm: Any, norm: torch.Tensor) -> None:
        step.clips.append(Clip(float(max_norm), norm.detach().clone(), step.scale is None or bool(step.unscaled)))

    def scheduled(self, step: OpenStep, scheduler: Any) -> None:
        """A scheduler stepped."""
        _, _, steps = step.schedulers.get(id(scheduler), ("", None, 0))
        position = getattr(scheduler, "last_epoch", None)
        step.schedulers[id(scheduler)] = (
            type(scheduler).__name__,
            int(position) if isinstance(position, (int, float)) else None,
            steps + 1,
        )

    def before_update(self, step: OpenStep, parameters: Callable[[], Named], optimizer: Any) -> None:
        """An update is about to begin; `parameters` gives those that are trained."""
        if step.weights is None and not step.updated and is_sampled(step.number):
            step.weights = WeightSample(parameters())
        if step.weights is not None:
            step.weights.hold(parameters_of(optimizer))

    def after_update(self, step: OpenStep) -> None:
        if step.weights is not None:
            step.weights.updated()

    def note(self, step: OpenStep | None, kind: str, reason: str | None, facts: Mapping[str, Any]) -> None:
        """Put a decision on record: in the open step, or in the next."""
        said = {"kind": kind, **({} if reason is None else {"reason": without_folders(reason)})}
        said.update({name: _plain(name, value) for name, value in list(facts.items())[:_NOTE_KEYS]})
        if kind == "checkpoint":
            self._checkpoint = {name: value for name, value in said.items() if name != "kind"}
        (self._waiting if step is None else step.decisions).append(said)

    def has_notes(self) -> bool:
        """Whether something was put on record that no step has taken."""
        return bool(self._waiting)

    def row(self, step: OpenStep, ended: bool) -> dict[str, Any]:
        """What stands in the ledger beside the step's own row. Waits for the device.

        Args:
            step: the step.
            ended: it is over: its updates are added up.
        """
        row = {**self._totals(step, ended), **_gradient_row(step), **self._weights_row(step)}
        if self._checkpoint is not None:
            row["checkpoint"] = self._checkpoint
        return row

    def _totals(self, step: OpenStep, ended: bool) -> dict[str, Any]:
        outcomes = step.outcomes()
        if ended:
            for key, counts in outcomes.items():
                self.updates.of(key).add(*counts)
        open_ = {} if ended else outcomes  # what is not added up yet
        known = self.updates.all()
        before = sum(updates.started_at() for updates in known)
        row: dict[str, Any] = {
            "attempted_total": before + sum(u.attempted for u in known) + sum(o[0] for o in open_.values()),
            "committed_total": before + sum(u.committed for u in known) + sum(o[1] for o in open_.values()),
            "skipped_total": sum(u.skipped for u in known) + sum(o[2] for o in open_.values()),
        }
        if len(known) > 1 and outcomes:
            row["optimizers"] = [
                _one_of_several(self.updates.of(key), counts, open_.get(key, (0, 0, 0)))
                for key, counts in outcomes.items()
            ]
        if any(updates.before is not None for updates in known):
            row["totals_from"] = "the optimizer's state"
        return row

    def _weights_row(self, step: OpenStep) -> dict[str, Any]:
        """Of a sampled step the norm of each gradient and the relative size of its update, in one fixed order."""
        if step.weights is None:
            return {}
        whole = {name: norm for found in step.norms.values() for name, norm in found.by_name()}
        relative = step.weights.relative(whole)
        if relative is None:
            return {}
        # Of a parameter that no optimizer took only the gradient of the sample is known.
        norms = {**step.weights.slopes(), **dict(_unscaled(step))}
        names = step.weights.names
        told: dict[str, Any] = {
            "gradient": [_rounded(norms.get(name)) for name in names],
            "update": [None if size != size else _rounded(size) for size in relative.tolist()],
            "size": [_rounded(size) for size in step.weights.sizes().tolist()],
            "not_held": [name for name in step.weights.not_held() if name not in self._taken],
            # No norm here, and yet not without a gradient: in this step or in another.
            "had_gradient": [name for name in names if name not in norms and name in self._with_gradient],
        }
        if names != self._weight_names:
            self._weight_names = names
            told["names"] = list(names)
        return {"weights": told}


def _one_of_several(updates: Updates, counts: Counts, open_: Counts) -> dict[str, Any]:
    """An optimizer's share of a step; `open_` is what of it is not added up yet."""
    before = updates.started_at()
    return {
        "name": updates.name,
        "attempted": counts[0],
        "committed": counts[1],
        "skipped": counts[2],
        "attempted_total": before + updates.attempted + open_[0],
        "committed_total": before + updates.committed + open_[1],
        "skipped_total": updates.skipped + open_[2],
        **({} if updates.before is None else {"committed_before": before}),
    }


def _gradient_row(step: OpenStep) -> dict[str, Any]:
    """The norm of the gradients without their scale, whole and by top-level module, and where it was read."""
    norms: dict[str, list[float]] = {}
    if not step.detailed:
        whole = _whole_norm(step)
        if whole is None or (math.isfinite(whole) and not step.skipped()):
            return {} if whole is None else {"gradient_norm": whole}
    for name, norm in _unscaled(step):
        norms.setdefault(_top(name), []).append(norm)
    if not norms:
        return {}
    row: dict[str, Any] = {
        "gradient_norm": total([norm for found in norms.values() for norm in found]),
        "gradient_norms": {place: total(found) for place, found in norms.items()},
        "gradient_read": _read_where(step),
    }
    unread = [name for found in step.norms.values() for name in found.unread]
    if unread:
        row["gradient_norm_without"] = unread[:_NOTE_KEYS]
    return {**row, **_clip_row(step, row["gradient_norm"])}


def _whole_norm(step: OpenStep) -> float | None:
    """The norm alone, of a step of which no more will be kept."""
    found = [norms.values / _divisor(step, key) for key, norms in step.norms.items() if norms.names]
    return total([total(values.tolist()) for values in found]) if found else None


def _clip_row(step: OpenStep, norm: float) -> dict[str, Any]:
    """The last clipping. What it found may be a norm of another kind, but its factor says what stood there before."""
    if not step.clips:
        return {}
    last = step.clips[-1]
    found = number(last.norm)
    factor = min(1.0, last.max_norm / (found + 1e-6)) if found - found == 0 else 0.0
    return {
        "clip": {"max_norm": last.max_norm, "norm": found, "unscaled": last.unscaled},
        "gradient_norm_before_clipping": norm / factor if factor else found,
    }


def _unscaled(step: OpenStep) -> Iterator[tuple[str, float]]:
    for key, norms in step.norms.items():
        divisor = _divisor(step, key)
        yield from ((name, norm / divisor) for name, norm in norms.by_name())


def _divisor(step: OpenStep, key: int) -> float:
    """What the gradients are to be divided by: the scale, unless the scaler has taken it off."""
    if step.scale is None or key in step.unscaled:
        return 1.0
    return float(step.scale) or 1.0


def _read_where(step: OpenStep) -> str:
    read = "after backward" if set(step.norms) == {0} else "by the optimizer"
    if step.scale is not None:
        off = all(key in step.unscaled for key in step.norms)
        read += ", after unscale_" if off else ", before unscale_ and divided by the scale here"
    if step.clips:
        read += ", after clipping"
    return read


def _top(name: str) -> str:
    if name.startswith("param_groups["):
        return _OUTSIDE
    return name.split(".", 1)[0] if "." in name else _MODEL


def _rounded(value: float | None) -> float | None:
    """Four digits: the sampled rows hold two numbers a parameter."""
    return None if value is None else float(f"{value:.4g}")


def _pairs(given: Any, scaled: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Losses that were scaled together; nothing of what could only be read once."""
    if not isinstance(given, (list, tuple)) or not isinstance(scaled, Iterable):
        return []
    both = zip(given, scaled, strict=False)
    return [(a, b) for a, b in both if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)]


def _plain(name: str, value: Any) -> Any:
    """A fact of a note: of a path its last part, of a tensor its number, of any other object its text."""
    if isinstance(value, os.PathLike) or name == "path":
        return os.path.basename(os.fspath(value))
    if isinstance(value, str):
        return without_folders(value)
    if isinstance(value, torch.Tensor):
        return number(detached(value)) if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain("", part) for part in value]
    if isinstance(value, Mapping):
        return {str(key): _plain("", part) for key, part in value.items()}
    return without_folders(str(value))
