"""What a reader calls the rows and modules of a trace, and how many elements of a tensor are nonfinite."""

from __future__ import annotations

import numpy as np

from nantrace.diagnosis.modules.seen import Seen
from nantrace.events import Role, TensorStats


def index(stats: TensorStats) -> tuple[int, ...] | None:
    """Where the first nonfinite element is, one integer a dimension."""
    flat = stats.first_bad
    if flat is None or flat < 0 or flat >= int(np.prod(stats.shape, dtype=np.int64)):
        return None
    return tuple(int(i) for i in np.unravel_index(flat, stats.shape))


def tensor_of(seen: Seen, row: int) -> str:
    """What a reader calls the tensor of a row: gradients are of something."""
    gradient = int(seen.role[row]) in (Role.GRAD, Role.GRAD_INPUT, Role.GRAD_OUTPUT)
    return f"gradient of {seen.name(row)}" if gradient else seen.name(row)


def counts(stats: TensorStats) -> str:
    """ "37 of 48 elements: 37 +inf; first at [0, 0, 1]"."""
    parts = [(stats.nan, "nan"), (stats.posinf, "+inf"), (stats.neginf, "-inf")]
    held = ", ".join(f"{count:,} {what}" for count, what in parts if count)
    place = index(stats)
    where = f", first at {list(place)}" if place else ""
    return f"{held} of {stats.numel:,} elements{where}"


def named(module: str | None) -> str:
    """How a sentence calls a module."""
    return "code outside every module" if module is None else module or "the model"
