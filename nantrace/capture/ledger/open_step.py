"""What is known of one step as a whole: loss, learning rates, scale, gradient norms, and what became of its updates.

Values that live on a device are kept there until the step has ended. Knows nothing of hooks.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from nantrace.capture.ledger.norms import Norms
from nantrace.capture.ledger.weights import WeightSample

_NAMES_SHOWN = 12  # parameters that one row names


class Clip(NamedTuple):
    """One clipping: what it was given and found. `unscaled`: no scale stood on the gradients then."""

    max_norm: float
    norm: torch.Tensor
    unscaled: bool


@dataclass
class OpenStep:
    """A step while it runs.

    Attributes:
        number: from 0.
        detailed: modules and state are recorded, not the ledger alone.
        optimizers: those that began an update in it, by id.
        gradient_rows: where in the buffer the gradients stand that an optimizer was given, by its id.
        found_inf: what a scaler found for an optimizer, by its id: scalars on the device, numbers once asked for.
        began, ended: updates that each optimizer began, and came to the end of, by its id.
        norms: of the gradients that an optimizer was given, by its id; under 0 those that no optimizer took.
        unscaled: ids of optimizers whose gradients were unscaled by their scaler.
        scale: that the first loss of the step was multiplied with; None without a scaler.
        clips: what was clipped.
        root: the value that the last backward began from, without the scale; once one was nonfinite, that one.
        losses: named parts of the loss.
        schedulers: by id, the name, position and calls of each that stepped.
        decisions: what the user put on record.
        left_out: how often gradients were cleared after a forward in it.
        touched: a forward, a backward or an update of it has begun.
        batches: how many were handed over for it while it ran.
        closing: its last update has happened; the next forward or backward belongs to the next step.
    """

    number: int
    detailed: bool = True
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    optimizers: set[int] = field(default_factory=set)
    gradient_rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    found_inf: dict[int, tuple[torch.Tensor | float, ...]] = field(default_factory=dict)
    began: Counter[int] = field(default_factory=Counter)
    ended: Counter[int] = field(default_factory=Counter)
    norms: dict[int, Norms] = field(default_factory=dict)
    unscaled: set[int] = field(default_factory=set)
    scale: torch.Tensor | None = None
    clips: list[Clip] = field(default_factory=list)
    root: torch.Tensor | None = None
    losses: dict[str, Any] = field(default_factory=dict)
    learning_rates: list[Any] = field(default_factory=list)
    scale_before: torch.Tensor | None = None
    scale_after: torch.Tensor | None = None
    schedulers: dict[int, tuple[str, int | None, int]] = field(default_factory=dict)
    decisions: list[Mapping[str, Any]] = field(default_factory=list)
    weights: WeightSample | None = None
    batch_check: list[Mapping[str, Any]] = field(default_factory=list)
    backwards: int = 0
    left_out: int = 0
    updated: bool = False
    gradients_seen: bool = False
    touched: bool = False
    batches: int = 0
    closing: bool = False
    batch_id: Any = None
    lr: Any = None
    loss: Any = None

    def close(self) -> None:
        self.closing = True
        self.seconds = time.perf_counter() - self.started

    @property
    def attempted(self) -> int:
        return sum(self.began.values())

    def skipped(self) -> set[int]:
        """Ids of optimizers whose update a scaler skipped. Waits for the device."""
        self.found_inf = {key: tuple(map(float, found)) for key, found in self.found_inf.items()}  # wait only once
        return {key for key, found in self.found_inf.items() if any(value > 0 for value in found)}

    def outcomes(self) -> dict[int, tuple[int, int, int]]:
        """(attempted, committed, skipped) by the id of the optimizer. An update that raised is only attempted.

        A fused optimizer comes to its end although its kernel skipped. Waits for the device.
        """
        skipped = self.skipped()
        return {
            key: (began, max(self.ended[key] - (key in skipped), 0), int(key in skipped))
            for key, began in self.began.items()
        }

    def take_root(self, root: torch.Tensor) -> None:
        """A backward began from this scalar; a later one hides no nonfinite one before it. Use within `Quiet`.

        Never waits: a value on another device, or of a subclass whose operations may communicate, is not compared.
        """
        before = self.root
        if before is not None and before.device == root.device and _is_real(before) and _is_real(root):
            before, root = before.reshape(()), root.reshape(())
            root = torch.where(torch.isfinite(before), root, before.to(root.dtype))
        self.root = root

    def take_losses(self, loss: Any) -> None:
        """What the user calls the loss: a number, a tensor, or named parts, of which "loss" or "total" is the whole."""
        if isinstance(loss, Mapping):
            self.losses = {str(name): detached(value) for name, value in loss.items() if _is_scalar(value)}
            loss = next((self.losses[name] for name in ("loss", "total") if name in self.losses), None)
        self.loss = detached(loss)

    def row(self, events: int, unobserved: int, notes: Sequence[str]) -> dict[str, Any]:
        """The ledger's mapping for this step; "first_seq" is set when its rows are written. Waits for the device."""
        outcomes = list(self.outcomes().values())
        row: dict[str, Any] = {
            "step": self.number,
            "first_seq": 0,
            "events": events,
            "attempted": self.attempted,
            "committed": sum(committed for _, committed, _ in outcomes),
            "skipped": sum(skipped for _, _, skipped in outcomes),
            "seconds": self.seconds or time.perf_counter() - self.started,
            "unobserved": unobserved,
            "backwards": self.backwards,
        }
        rates = self.learning_rates if self.lr is None else self.lr
        optional = {
            "loss": number(self.root if self.loss is None else self.loss),
            "losses": {name: number(value) for name, value in self.losses.items()},
            "lr": [number(rate) for rate in rates] if isinstance(rates, (list, tuple)) else number(rates),
            "scale_before": number(self.scale_before),
            "scale_after": number(self.scale_after),
            "skipped_by": self._skipped_by(),
            "detailed": None if self.detailed else False,
            "schedulers": [
                {"name": name, "position": position, "steps": steps}
                for name, position, steps in self.schedulers.values()
            ],
            "batch_id": self.batch_id,
            "batch_check": list(self.batch_check),
            "decisions": list(self.decisions),
            "notes": list(notes),
        }
        return {**row, **{name: value for name, value in optional.items() if value not in (None, [], {})}}

    def _skipped_by(self) -> list[str]:
        """Names of the parameters whose gradients made a scaler skip."""
        names = [
            name
            for key in sorted(self.skipped() & self.norms.keys(), key=list(self.norms).index)
            for name, norm in zip(self.norms[key].names, self.norms[key].values.tolist(), strict=True)
            if norm - norm != 0
        ]
        more = len(names) - _NAMES_SHOWN
        return names if more <= 0 else [*names[:_NAMES_SHOWN], f"and {more} more"]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _is_real(value: torch.Tensor) -> bool:
    return type(value) is torch.Tensor and value.is_floating_point()


def detached(value: Any) -> Any:
    """A copy of a tensor that keeps neither its graph nor what is written into it later; anything else itself."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def number(value: Any) -> Any:
    """The number in a tensor of one element; anything else as it is. Waits for the device."""
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def is_finite(value: torch.Tensor | None) -> bool:
    """Whether a scalar, if there is one, is finite. Waits for the device."""
    return value is None or math.isfinite(float(value))
