"""The table of rows that the fused kernel fills on a CUDA device.

Knows slots, streams and events; not what the kernel does.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nantrace.stats.deferred import DeviceTable
from nantrace.stats.exact import KERNEL, Row, Tally
from nantrace.stats.formats import FLOAT_FORMATS, byte_format
from nantrace.stats.fused import BATCHED, DIMS, FAR, FORMATS, UNTOUCHED, WIDTH, launch, launch_batch
from nantrace.stats.host import strided_row, unread_row
from nantrace.stats.layout import Layout, lay_out, row_major
from nantrace.stats.unwrap import PLAIN, check_readable, quiet, resolved, unwrapped

_ROWS = 1024  # of the table that are allocated at once


@dataclass(frozen=True)
class _Measured:
    """A tensor whose row the kernel writes: where, and what turns it into the tensor's statistics."""

    slot: int
    dtype: torch.dtype
    layout: Layout
    walk: int
    numel: int

    def row(self, numbers: list[int], full: bool) -> Row:
        nan, posinf, neginf, low, high, least, first, zero, subnormal, saturated = numbers
        bad, count = nan + posinf + neginf, self.numel // self.layout.repeats
        tally = Tally(count - bad, nan, posinf, neginf, zero=zero, subnormal=subnormal, saturated=saturated)
        if tally.finite:
            tally.see(_number(self.dtype, low), _number(self.dtype, high))
        if least < FAR:
            tally.absmin = _number(self.dtype, least)
        if bad:
            tally.first_bad = first if self.walk == 1 else self.layout.flat_index(np.array([first]))
        counted = tally.row(full, self.layout.repeats)
        return (*counted[:12], counted[12] | KERNEL)


def _number(dtype: torch.dtype, key: int) -> float:
    form = FLOAT_FORMATS.get(dtype)
    magnitude = form.value(abs(key)) if form else float(byte_format(dtype).values[abs(key), 0])
    return -magnitude if key < 0 else magnitude


class FusedTable:
    """Rows of statistics that the kernel leaves on a CUDA device until they are fetched. Any thread may add.

    Integers, float4, float8_e8m0fnu and views of too many dimensions go through `DeviceTable`, in several passes.
    So does everything once the kernel could not be compiled or launched.

    Attributes:
        skipped: tensors that were not measured because a CUDA graph was being captured.
        failure: why the kernel is not used any more; None while it is.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.skipped = 0
        self.failure: str | None = None
        self._others = DeviceTable(device)
        self._cuda = self.device.type == "cuda"
        self._lock = threading.Lock()
        self._blocks: list[tuple[torch.Tensor, Any]] = []  # rows, and the event after which they may be written
        self._used = 0
        self._slots: list[tuple[bool, Row | _Measured | int]] = []  # an int is a slot of the other table
        self._written: dict[Any, Any] = {}  # stream -> event after its last launch

    def add(self, tensor: torch.Tensor, full: bool) -> int:
        """Launches the measurement of a tensor; its index in what `drain` returns next. Never raises."""
        try:
            with quiet(), self._here():
                put = self._put(tensor, full)
        except Exception:  # no values, or no kernel for them: no reason to stop a training step
            put = unread_row(tensor)
        with self._lock:
            self._slots.append((full, put))
            return len(self._slots) - 1

    def add_all(self, tensors: list[torch.Tensor], full: bool) -> list[int]:
        """The same of many tensors, such as parameters, with one launch for all small ones of a dtype."""
        places: list[int] = [-1] * len(tensors)
        small: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
        for i, tensor in enumerate(tensors):
            if type(tensor) in PLAIN and tensor.dtype in FORMATS and self._is_small(tensor):
                small.setdefault(tensor.dtype, []).append((i, tensor))
            else:
                places[i] = self.add(tensor, full)
        for group in small.values():
            for begin in range(0, len(group), _ROWS):
                for i, place in self._add_group(group[begin : begin + _ROWS], full):
                    places[i] = place
        return places

    def drain(self) -> list[Row]:
        """The rows since the last drain, in the form of `nantrace.stats.host.row`. Waits for the device, once."""
        with self._lock:
            slots, self._slots = self._slots, []
            used, self._used = self._used, 0
        others, numbers = self._others.drain(), []
        if used:
            with quiet(), self._here():
                numbers = self._fetch(used)
        rows: list[Row] = []
        for full, put in slots:
            if isinstance(put, int):
                rows.append(others[put])
            else:
                rows.append(put.row(numbers[put.slot], full) if isinstance(put, _Measured) else put)
        return rows

    def _put(self, tensor: torch.Tensor, full: bool) -> Row | _Measured | int:
        if self._capturing():
            self.skipped += 1
            return unread_row(tensor)
        tensor = unwrapped(tensor)
        if self.failure or tensor.is_nested or tensor.layout is not torch.strided or tensor.dtype not in FORMATS:
            return self._others.add(tensor, full)
        check_readable(tensor)
        tensor = tensor.detach()
        if tensor.numel() == 0 or tensor._is_zerotensor():  # known without reading
            return strided_row(tensor, full)
        tensor = resolved(tensor)
        layout, walk = _walk(tensor)
        if len(layout.sizes) > DIMS:
            return self._others.add(tensor, full)
        slot = self._take(1)
        steps = layout.elements.stride() if walk == 2 else layout.places
        try:
            launch(layout.elements, self._rows(slot), slot % _ROWS, walk, layout.sizes, steps)
        except Exception as error:
            self._give_up(error)
            return self._others.add(tensor, full)
        self._wrote()
        return _Measured(slot, tensor.dtype, layout, walk, tensor.numel())

    def _give_up(self, error: Exception) -> None:
        """The kernel cannot run here: what comes goes through the other table."""
        reason = str(error).strip().split("\n")[0][:200]
        self.failure = f"{type(error).__name__}: {reason}" if reason else type(error).__name__

    def _add_group(self, group: list[tuple[int, torch.Tensor]], full: bool) -> list[tuple[int, int]]:
        """Measures plain contiguous tensors of one dtype with one launch; pairs of (index, slot)."""
        dtype = group[0][1].dtype
        if self._capturing() or self.failure:
            return [(i, self.add(tensor, full)) for i, tensor in group]
        with quiet(), self._here():
            first = self._take(len(group))
            put = [
                _Measured(first + k, dtype, lay_out(tensor.detach()), 0, tensor.numel())
                for k, (_, tensor) in enumerate(group)
            ]
            try:
                launch_batch([tensor for _, tensor in group], self._rows(first), first % _ROWS)
            except Exception as error:
                self._give_up(error)
                return [(i, self.add(tensor, full)) for i, tensor in group]
            self._wrote()
        with self._lock:
            begin = len(self._slots)
            self._slots.extend((full, measured) for measured in put)
        return [(i, begin + k) for k, (i, _) in enumerate(group)]

    def _is_small(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of no subclass can share a launch."""
        try:
            with quiet():
                if unwrapped(tensor) is not tensor or tensor.device != self.device or tensor.is_nested:
                    return False
                check_readable(tensor)
                lazy = tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()
                return tensor.is_contiguous() and 0 < tensor.numel() <= BATCHED and not lazy
        except Exception:  # sparse, freed, fake
            return False

    def _here(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self._cuda else nullcontext()  # Triton launches on the current device

    def _capturing(self) -> bool:
        return self._cuda and torch.cuda.is_current_stream_capturing()

    def _take(self, count: int) -> int:
        """The first of `count` consecutive fresh rows, all in one block."""
        with self._lock:
            if self._used % _ROWS + count > _ROWS:
                self._used += _ROWS - self._used % _ROWS
            first, self._used = self._used, self._used + count
            if first // _ROWS == len(self._blocks):
                with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
                    untouched = torch.empty(_ROWS, WIDTH, dtype=torch.int64, device=self.device)
                self._blocks.append((untouched, None))
                self._clean(len(self._blocks) - 1)
            return first

    def _clean(self, block: int) -> None:
        rows, _ = self._blocks[block]
        for column, value in enumerate(UNTOUCHED):
            rows[:, column].fill_(value)
        event = None
        if self._cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
        self._blocks[block] = (rows, event)

    def _rows(self, slot: int) -> torch.Tensor:
        """The block of a row, safe to write on the current stream."""
        rows, clean = self._blocks[slot // _ROWS]
        if clean is not None:
            torch.cuda.current_stream(self.device).wait_event(clean)
        return rows

    def _wrote(self) -> None:
        if self._cuda:
            stream = torch.cuda.current_stream(self.device)
            event = self._written.get(stream)
            if event is None:
                event = self._written[stream] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)

    def _fetch(self, used: int) -> list[list[int]]:
        blocks = -(-used // _ROWS)
        if self._cuda:  # rows were written by several streams; this one waits for each
            stream = torch.cuda.current_stream(self.device)
            for event in self._written.values():
                stream.wait_event(event)
            self._written.clear()
        numbers: list[list[int]] = torch.cat([rows for rows, _ in self._blocks[:blocks]])[:used].cpu().tolist()
        for block in range(blocks):
            self._clean(block)
        return numbers


def _walk(tensor: torch.Tensor) -> tuple[Layout, int]:
    """How the kernel goes through a tensor: its layout with as few dimensions as possible, and the kind of walk."""
    layout = lay_out(tensor)
    if layout.elements.dim() == 1 and (layout.ordered or len(layout.sizes) == 1):
        gap = layout.elements.stride(0) != 1 and layout.elements.numel() > 1
        return layout, 2 if gap else 0
    if layout.elements.dim() == 1:
        return layout, 1
    return row_major(layout), 2
