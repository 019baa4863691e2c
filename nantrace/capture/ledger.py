"""What is known of one step as a whole: its loss, learning rates, scale, and whether its update was committed.

Values that live on a device are kept there until the step has ended. Knows nothing of hooks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nantrace.events import Role, Site


@dataclass
class OpenStep:
    """A step while it runs.

    Attributes:
        number: from 0.
        optimizers: those that began an update in it, by id.
        gradient_rows: where in the buffer the gradients stand that an optimizer was given, by its id.
        found_inf: what a scaler found for an optimizer, by its id: scalars on the device, unread.
        stepped_without_update: optimizers that a scaler skipped without calling them.
        closing: its last update has happened; the next forward or backward belongs to the next step.
    """

    number: int
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    optimizers: set[int] = field(default_factory=set)
    gradient_rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    found_inf: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    attempted: int = 0
    learning_rates: list[Any] = field(default_factory=list)
    scale_before: torch.Tensor | None = None
    scale_after: torch.Tensor | None = None
    backwards: int = 0
    updated: bool = False
    gradients_seen: bool = False
    closing: bool = False
    batch_id: Any = None
    lr: Any = None
    loss: Any = None

    def close(self) -> None:
        self.closing = True
        self.seconds = time.perf_counter() - self.started

    def skipped(self) -> set[int]:
        """Ids of optimizers whose update a scaler skipped. Waits for the device."""
        return {key for key, found in self.found_inf.items() if any(float(value) > 0 for value in found)}

    def row(
        self, rows: npt.NDArray[np.void], sites: Sequence[Site], unobserved: int, notes: Sequence[str]
    ) -> dict[str, Any]:
        """The ledger's mapping for this step, once its rows are drained; "first_seq" is set when they are written."""
        skipped = len(self.skipped())
        row: dict[str, Any] = {
            "step": self.number,
            "first_seq": 0,
            "events": len(rows),
            "attempted": self.attempted,
            "committed": self.attempted - skipped,
            "skipped": skipped,
            "seconds": self.seconds or time.perf_counter() - self.started,
            "unobserved": unobserved,
        }
        loss = recorded_loss(rows, sites) if self.loss is None else _number(self.loss)
        rates = self.learning_rates if self.lr is None else self.lr
        optional = {
            "loss": loss,
            "lr": [_number(rate) for rate in rates] if isinstance(rates, (list, tuple)) else _number(rates),
            "scale_before": _number(self.scale_before),
            "scale_after": _number(self.scale_after),
            "batch_id": self.batch_id,
            "notes": list(notes),
        }
        return {**row, **{name: value for name, value in optional.items() if value not in (None, [])}}


def recorded_loss(rows: npt.NDArray[np.void], sites: Sequence[Site]) -> float | None:
    """The value of the last scalar that backward started from, out of its statistics."""
    losses = [number for number, site in enumerate(sites) if site.role is Role.LOSS and site.slot.startswith("loss")]
    found = rows[np.isin(rows["site"], losses)] if losses else rows[:0]
    if not len(found) or found[-1]["numel"] != 1:
        return None
    last = found[-1]
    if last["finite"]:
        return float(last["min"])
    return float("nan") if last["nan"] else float("inf") if last["posinf"] else float("-inf")


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value
