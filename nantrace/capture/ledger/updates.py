"""What became of each optimizer's updates since it was made: attempted, committed, skipped.

Counts from the optimizer's own step counter where it keeps one, else from the beginning of the trace.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Updates:
    """The updates of one optimizer over all steps so far.

    Attributes:
        name: its class, with a number behind it from the second of that class on.
        before: how many it had committed before it was first seen, a tensor while that lies on a device; None if it
            does not count them itself.
        attempted, committed, skipped: since then.
    """

    name: str
    before: Any
    attempted: int = 0
    committed: int = 0
    skipped: int = 0

    def add(self, attempted: int, committed: int, skipped: int) -> None:
        self.attempted += attempted
        self.committed += committed
        self.skipped += skipped

    def started_at(self) -> int:
        """Updates committed before the trace. Waits for the device the first time."""
        if isinstance(self.before, torch.Tensor):
            self.before = int(self.before)
        return self.before or 0


class Registry:
    """The optimizers seen so far. Holds none of them alive."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[Any], Updates]] = {}
        self._seen: dict[str, int] = {}

    def see(self, optimizer: Any) -> None:
        """Take an optimizer in before its first update. Call within `Quiet`."""
        known = self._by_id.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            return
        cls = type(optimizer).__name__
        count = self._seen[cls] = self._seen.get(cls, 0) + 1
        name = cls if count == 1 else f"{cls} {count}"
        self._by_id[id(optimizer)] = (weakref.ref(optimizer), Updates(name, steps_taken(optimizer)))

    def __len__(self) -> int:
        return len(self._by_id)

    def of(self, key: int) -> Updates:
        """By the id of an optimizer that was seen."""
        return self._by_id[key][1]

    def all(self) -> list[Updates]:
        return [updates for _, updates in self._by_id.values()]


def steps_taken(optimizer: Any) -> int | torch.Tensor | None:
    """The largest "step" in an optimizer's state: an integer, a tensor where it lies on a device, None without one."""
    largest: int | None = None
    there: list[torch.Tensor] = []
    for state in getattr(optimizer, "state", {}).values():
        step = state.get("step") if isinstance(state, dict) else None
        if isinstance(step, torch.Tensor) and step.numel() == 1 and not step.is_cpu:
            there.append(step.detach().reshape(()).float())
        elif isinstance(step, (int, float)) or (isinstance(step, torch.Tensor) and step.numel() == 1):
            largest = max(largest or 0, int(step))
    if not there or any(step.device != there[0].device for step in there):
        return largest
    return torch.stack(there).max()
