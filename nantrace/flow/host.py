"""What the step itself looks at: host reads of values, and of tests of values, that come from nonfinite ones.

A user's guard (`if not torch.isfinite(loss): continue`) is a chain of bool and int tensors that ends in a host read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nantrace.flow.calls import Call
from nantrace.flow.memory import Look
from nantrace.flow.values import FLOATS, storage_key


class HostReads:
    """Follows tests of nonfinite values, and remembers which nonfinite numbers Python holds."""

    def __init__(self) -> None:
        self._aware: dict[
            int, tuple[torch.UntypedStorage, frozenset[int]]
        ] = {}  # the storage is held: its key stays its own
        self._numbers: list[Look] = []

    def hit(self, call: Call) -> frozenset[int]:
        """Events whose values, or tests of whose values, this op read."""
        hit = call.read_ids()
        if self._aware:
            for argument in call.arguments:
                if argument.tensor.dtype not in FLOATS:
                    known = self._aware.get(storage_key(argument.tensor) or -1)
                    hit = hit | known[1] if known else hit
        return hit

    def __bool__(self) -> bool:
        return bool(self._aware)

    def spread(self, outputs: list[tuple[int, Tensor]], hit: frozenset[int]) -> None:
        """The bool and int results of an op know what its inputs knew."""
        for _, tensor in outputs:
            key = storage_key(tensor) if tensor.dtype not in FLOATS else None
            if key is not None:
                self._aware[key] = (tensor.untyped_storage(), hit)

    def remember(self, call: Call) -> None:
        """Python now holds a nonfinite number."""
        self._numbers += [look for _, look in call.bad]

    def behind_literal(self, call: Call) -> Look | None:
        """A nonfinite Python number that was read from a tensor before is that tensor's doing, not a literal."""
        for look in reversed(self._numbers) if call.nan_literal or call.inf_literal else ():
            if (call.nan_literal and look.nan) or (call.inf_literal and look.posinf + look.neginf):
                return look
        return None
