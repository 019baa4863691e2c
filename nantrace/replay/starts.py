"""What a captured step may have begun with: a batch, and random streams as they were at a moment.

Handed over at the top of a loop, batch and streams are those that the step began with. Else nobody knows when the
step began: after the update before it, or with its first call. Both are kept, and a replay shows which it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nantrace.events import Phase, Role, Trace
from nantrace.flow.values import tensors_in
from nantrace.replay import surroundings
from nantrace.replay.snapshot import refuse_if_too_large, snapshot_bytes

HANDED_OVER, ENTRY, UPDATE, CALL = (
    "when tracer.batch was called",
    "at the beginning of the block",
    "after the update before it",
    "at its first call",
)
_MOST = 8  # batches of one step


@dataclass
class Starts:
    """The possible starts of the step that is open.

    Attributes:
        kept: what is written of each, the likeliest first.
        batches: how many the step read that were handed over.
    """

    before: Mapping[str, Any] | None = None  # random streams
    since: str = ENTRY
    kept: list[dict[str, Any]] = field(default_factory=list)
    batches: int = 0

    def add(self, batch: Any, handed_over: bool) -> None:
        """The step reads `batch`.

        Raises:
            ReplayError: there is no room for a copy.
        """
        self.batches += handed_over
        if self.batches > _MOST:
            return
        refuse_if_too_large(snapshot_bytes([tensor for _, tensor in tensors_in(batch, "batch")]))
        kept = {
            "batch": copied(batch) if is_plain(batch) else None,
            "batch_tensors": {path: clone(tensor) for path, tensor in tensors_in(batch, "batch")},
        }
        now = surroundings.random_state()
        if handed_over:
            self.kept.append({**kept, "when": HANDED_OVER, "random": _plain_random(now)})
            return
        if self.before is not None and not surroundings.equal_state(list(self.before.values()), list(now.values())):
            self.kept.append({**kept, "when": self.since, "random": _plain_random(self.before)})
        self.kept.append({**kept, "when": CALL, "random": _plain_random(now)})


def read_elsewhere(trace: Trace, start: Mapping[str, Any]) -> str | None:
    """What the model was called with, if the batch has a tensor of its kind that holds other values; else None."""
    rows, sites = trace.events, trace.sites
    called = [row for row in rows if _is_read(sites[int(row["site"])])]
    for row in called[:1]:
        site = sites[int(row["site"])]
        alike = [t for t in start["batch_tensors"].values() if _kind(t) == (site.dtype, site.shape)]
        if alike and not any(_holds(tensor, row) for tensor in alike):
            nonfinite = int(row["numel"]) - int(row["finite"])
            held = f"{nonfinite:,} nonfinite of {int(row['numel']):,} elements, {row['min']:.4g} to {row['max']:.4g}"
            return f"{site.module or '(model)'} read a tensor, {site.dtype} {list(site.shape)}, {held}"
    return None


def _is_read(site: Any) -> bool:
    return site.role is Role.INPUT and site.phase is Phase.FORWARD and site.module == "" and "args" in site.slot


def _kind(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _holds(tensor: torch.Tensor, row: Any) -> bool:
    if not tensor.is_floating_point():
        return True
    values = tensor.detach().double().flatten()
    finite = values[torch.isfinite(values)]
    if finite.numel() != int(row["finite"]):
        return False
    ends: Sequence[float] = (float(finite.min()), float(finite.max())) if finite.numel() else (np.nan, np.nan)
    return bool(np.allclose(ends, (float(row["min"]), float(row["max"])), rtol=1e-6, atol=0, equal_nan=True))


def clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def is_plain(value: Any) -> bool:
    """Only what `weights_only` lets through again."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(is_plain(k) and is_plain(v) for k, v in value.items())
    if type(value) in (list, tuple):
        return all(is_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str, torch.Tensor, torch.dtype, torch.nn.Parameter)


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return clone(value)
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([copied(item) for item in value])
    return value


def _plain_random(streams: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _as_plain(value) for name, value in streams.items()}


def _as_plain(state: Any) -> Any:
    """NumPy's stream holds an array, which `weights_only` refuses."""
    if hasattr(state, "tobytes"):
        return {"array": torch.tensor(state.astype("int64"))}
    return tuple(_as_plain(item) for item in state) if isinstance(state, tuple) else state
