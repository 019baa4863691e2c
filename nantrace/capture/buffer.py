"""Rows on their way to a trace: the site table, the statistics of each tensor seen, and the drain at the end of a step.

`Buffer.observe` is the one function through which every tensor goes. On a CPU the statistics are numbers at once; on
other devices they stay there until `drain` fetches them all in one copy. Knows nothing of hooks, steps or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from nantrace.capture.quiet import Quiet
from nantrace.capture.rows import Rows
from nantrace.events import Phase, Role, Site
from nantrace.stats import host
from nantrace.stats.together import extremes_together


class Pending:
    """Statistics that are still on a device: a slot in its table, and the numbers once they were fetched."""

    __slots__ = ("row", "slot", "table")

    def __init__(self, table: Any, slot: int) -> None:
        self.table = table
        self.slot = slot
        self.row: tuple[Any, ...] | None = None


#: (numel, min, max) of a finite tensor, the statistics in the order of `EVENT` from "numel" on, or where they will be.
Stats: TypeAlias = "tuple[int, float, float] | tuple[Any, ...] | Pending"


class Buffer:
    """The rows of the current step and the sites of the whole trace.

    Attributes:
        sites: the site table.
        rows: what was seen since the last drain. Any thread may add.
    """

    def __init__(self, full_on_host: bool = False, full_on_device: bool = True) -> None:
        self.sites: list[Site] = []
        self.rows = Rows()
        self._numbers: dict[Any, int] = {}
        self._tables: dict[torch.device, Any] = {}
        self._quick = _no_extremes if full_on_host else host.extremes
        self._full_on_host = full_on_host
        self._full_on_device = full_on_device

    def observe(
        self,
        module: str | None,
        phase: Phase,
        role: Role,
        slot: str,
        tensor: torch.Tensor,
        call: int = 0,
        stats: Stats | None = None,
    ) -> Stats:
        """Append a row. `stats` saves measuring a tensor whose statistics are known.

        Gradient mode must be off and no mode active.
        """
        if stats is None:
            stats = self._quick(tensor) or self.measure(tensor)
        try:
            shape = tensor.shape
        except RuntimeError:  # nested tensors in strided layout have none
            shape = torch.Size()
        key = (module, phase * 16 + role, slot, tensor.dtype, shape)  # the hash of an enum member is slow
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self.add_site(
                Site(module, phase, role, slot, str(tensor.dtype).removeprefix("torch."), tuple(shape))
            )
        if type(stats) is tuple and len(stats) == 3:
            self.rows.add_finite(number, call, stats)
        else:
            self.rows.add(number, call, stats)
        return stats

    def measure(self, tensor: torch.Tensor) -> Stats:
        """Statistics of a tensor: numbers, or where they will be."""
        if tensor.is_cpu or tensor.is_meta:
            return host.measure(tensor, self._full_on_host)[0]
        table = self._tables.get(tensor.device)
        if table is None:
            from nantrace.stats.policy import table_for  # pulls in kernels that a CPU run never needs

            table = self._tables[tensor.device] = table_for(tensor.device)
        with Quiet():
            return Pending(table, table.add(tensor, self._full_on_device))

    def measure_all(self, tensors: Sequence[torch.Tensor]) -> list[Stats | None]:
        """Statistics of tensors that exist together, such as parameters: small ones share what a reading costs.

        None for those that `observe` reads by themselves. Gradient mode must be off and no mode active.
        """
        found: list[Stats | None] = [None] * len(tensors)
        if not self._full_on_host:
            found = [*extremes_together(tensors)]
        for device, table in self._tables.items():
            there = [i for i, tensor in enumerate(tensors) if tensor.device == device]
            if not there:
                continue
            with Quiet():
                slots = table.add_all([tensors[i] for i in there], self._full_on_device)
            for i, slot in zip(there, slots, strict=True):
                found[i] = Pending(table, slot)
        return found

    @property
    def failures(self) -> dict[torch.device, str]:
        """What keeps the fused kernel from running on a device that should have it."""
        return {device: table.failure for device, table in self._tables.items() if table.failure}

    def add_site(self, site: Site) -> int:
        self.sites.append(site)
        return len(self.sites) - 1

    def number_of(self, site: Site) -> int:
        """Row of the site in the site table; a new one is added."""
        number = self._numbers.get(site)
        if number is None:
            number = self._numbers[site] = self.add_site(site)
        return number

    def relabel(self, begin: int, end: int, phase: Phase) -> None:
        """Give the rows from `begin` up to `end` another phase."""
        self.rows.set_sites(begin, [self._relabelled(number, phase) for number in self.rows.sites(begin, end)])

    def _relabelled(self, number: int, phase: Phase) -> int:
        key = ("relabelled", number, phase)
        if key not in self._numbers:
            self._numbers[key] = self.add_site(replace(self.sites[number], phase=phase))
        return self._numbers[key]

    def drain(self, step: int) -> npt.NDArray[np.void]:
        """The rows since the last drain as an array of dtype `EVENT`, numbered from 1; fetches what devices hold."""
        fetched = {id(table): table.drain() for table in self._tables.values()}
        return self.rows.drain(step, lambda pending: _resolve(pending, fetched))


def _no_extremes(tensor: torch.Tensor) -> None:
    """Where all columns are wanted, extremes alone do not serve."""


def _resolve(pending: Pending, fetched: Mapping[int, list[tuple[Any, ...]]]) -> tuple[Any, ...]:
    if pending.row is None:
        pending.row = fetched[id(pending.table)][pending.slot]
    return pending.row
