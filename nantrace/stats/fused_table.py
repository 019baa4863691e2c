"""The table of rows that the fused kernel fills on a CUDA device.

Knows tensors, slots and threads; not what the kernel does, nor how streams are kept apart. A tensor that is plain
memory is launched as soon as that is clear (`_quick`); what hides its values, or is the first of its kind to be
launched, takes the longer way (`_put`).
"""

from __future__ import annotations

import functools
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from nantrace.stats.deferred import DeviceTable
from nantrace.stats.exact import KERNEL, Row, Tally
from nantrace.stats.formats import FLOAT_FORMATS, byte_format
from nantrace.stats.fused import DIMS, FAR, FORMATS, UNTOUCHED
from nantrace.stats.fused_launch import BATCHED, FLAT, launch, launch_batch, relaunch
from nantrace.stats.host import strided_row, unread_row
from nantrace.stats.layout import Layout, lay_out, row_major
from nantrace.stats.rows import Rows
from nantrace.stats.unwrap import PLAIN, check_readable, quiet, resolved, unwrapped

_ROWS = 1024  # of the table that are allocated at once


class _Measured(NamedTuple):
    """A tensor whose row the kernel writes: where, and what turns it into the tensor's statistics.

    `layout` is None if the tensor is contiguous.
    """

    slot: int
    dtype: torch.dtype
    elements: int  # in memory: expanded ones count once
    walk: int = 0
    layout: Layout | None = None

    def row(self, numbers: list[int], full: bool) -> Row:
        nan, posinf, neginf, low, high, least, first, zero, subnormal, saturated = numbers
        layout, repeats = self.layout, self.layout.repeats if self.layout else 1
        bad = nan + posinf + neginf
        finite = self.elements - bad
        tally = Tally(finite, nan, posinf, neginf, zero=zero, subnormal=subnormal, saturated=saturated)
        if tally.finite:
            tally.see(_number(self.dtype, low), _number(self.dtype, high))
        if least < FAR:
            tally.absmin = _number(self.dtype, least)
        if bad:
            tally.first_bad = first if layout is None or self.walk == 1 else layout.flat_index(np.array([first]))
        counted = tally.row(full, repeats)
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
        device: with its index.
        skipped: tensors that were not measured because a CUDA graph was being captured.
        failure: why the kernel is not used any more; None while it is.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._cuda = self.device.type == "cuda"
        if self._cuda and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.skipped = 0
        self.failure: str | None = None
        self._index = self.device.index if self._cuda else -1  # as of Tensor.get_device
        self._keys = _plain_keys(self.device)
        self._others = DeviceTable(self.device)
        self._lock = threading.RLock()  # again by the same thread: what Python collects may run hooks of the user's
        self._rows = Rows(self.device, _ROWS, UNTOUCHED)
        self._slots: list[tuple[bool, Row | _Measured | int]] = []  # an int is a slot of the other table

    def add(self, tensor: torch.Tensor, full: bool) -> int:
        """Launches the measurement of a tensor; its index in what `drain` returns next. Never raises."""
        try:
            place = self._quick(tensor, full)
        except Exception:  # the longer way may know better
            place = None
        if place is not None:
            return place
        try:
            with quiet(), self._here():
                return self._put(tensor, full)
        except Exception:  # no values, or no kernel for them: no reason to stop a training step
            return self._keep(full, unread_row(tensor))

    def add_all(self, tensors: list[torch.Tensor], full: bool) -> list[int]:
        """The same of many tensors, such as parameters, with one launch for all small ones of a dtype."""
        places: list[int] = [-1] * len(tensors)
        small: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
        with quiet():
            for i, tensor in enumerate(tensors):
                if self._is_plain(tensor) and _is_small(tensor):
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
            written = self._rows.written()
        others = self._others.drain()
        with self._here():
            numbers = self._rows.fetch(written)
        with self._lock:
            self._rows.reuse(written)
        rows: list[Row] = []
        for full, put in slots:
            if isinstance(put, int):
                rows.append(others[put])
            else:
                rows.append(put.row(numbers[put.slot], full) if isinstance(put, _Measured) else put)
        return rows

    def _quick(self, tensor: torch.Tensor, full: bool) -> int | None:
        """Launches what takes no preparation; None if it does. Runs nothing that a mode of the user's would see."""
        if self.failure or torch._C._is_torch_function_mode_enabled() or not self._is_plain(tensor):
            return None
        if self._cuda and (torch.cuda.current_device() != self._index or self._capturing()):
            return None
        reach, count, walk, numbers, layout = _plan(tensor)
        if walk is None or (tensor.storage_offset() + reach) * tensor.itemsize > tensor.untyped_storage().nbytes():
            return None
        dtype, address = tensor.dtype, tensor.data_ptr()
        with self._lock:
            slot, block = self._rows.take(1)
            if not relaunch(dtype, address, count, self._index, block.address, slot % _ROWS, walk, numbers):
                self._rows.give_back(1)
                return None
            self._rows.wrote(block)
            self._slots.append((full, _Measured(slot, dtype, count, walk, layout)))
            return len(self._slots) - 1

    def _put(self, tensor: torch.Tensor, full: bool) -> int:
        if self._capturing():
            self.skipped += 1
            return self._keep(full, unread_row(tensor))
        tensor = unwrapped(tensor)
        if self.failure or tensor.is_nested or tensor.layout is not torch.strided or tensor.dtype not in FORMATS:
            return self._keep(full, self._others.add(tensor, full))
        check_readable(tensor)
        tensor = tensor.detach()
        if tensor.numel() == 0 or tensor._is_zerotensor():  # known without reading
            return self._keep(full, strided_row(tensor, full))
        tensor = resolved(tensor)
        _, count, walk, numbers, layout = _plan(tensor)
        if walk is None:
            return self._keep(full, self._others.add(tensor, full))
        with self._lock:
            slot, block = self._rows.take(1)
            try:
                launch(tensor, count, block.rows, slot % _ROWS, walk, numbers)
            except Exception as error:
                self._give_up(error)
                return self._keep(full, self._others.add(tensor, full))
            self._rows.wrote(block)
            return self._keep(full, _Measured(slot, tensor.dtype, count, walk, layout))

    def _keep(self, full: bool, put: Row | _Measured | int) -> int:
        with self._lock:
            self._slots.append((full, put))
            return len(self._slots) - 1

    def _give_up(self, error: Exception) -> None:
        """The kernel cannot run here: what comes goes through the other table."""
        reason = str(error).strip().split("\n")[0][:200]
        self.failure = f"{type(error).__name__}: {reason}" if reason else type(error).__name__

    def _add_group(self, group: list[tuple[int, torch.Tensor]], full: bool) -> list[tuple[int, int]]:
        """Measures plain tensors of one dtype with one launch; pairs of (index, slot)."""
        with quiet(), self._here():
            if not self.failure and not self._capturing():
                with self._lock:
                    begin = self._launched_together([tensor for _, tensor in group], full)
                if begin is not None:
                    return [(i, begin + k) for k, (i, _) in enumerate(group)]
        return [(i, self.add(tensor, full)) for i, tensor in group]

    def _launched_together(self, tensors: list[torch.Tensor], full: bool) -> int | None:
        """The place of the first of consecutive ones; None if the launch failed."""
        try:
            first, block = self._rows.take(len(tensors))
            launch_batch(tensors, block.rows, first % _ROWS)
        except Exception as error:
            self._give_up(error)
            return None
        self._rows.wrote(block)
        begin = len(self._slots)
        self._slots.extend(
            (full, _Measured(first + k, tensor.dtype, tensor.numel())) for k, tensor in enumerate(tensors)
        )
        return begin

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is nothing but floats of a known format in this device's memory, if that was not freed.

        Its dispatch keys tell it from all that is lazy, wrapped, sparse or without values.
        """
        try:
            return (
                type(tensor) in PLAIN
                and tensor.dtype in FORMATS
                and torch._C._dispatch_keys(tensor).raw_repr() in self._keys
                and tensor.get_device() == self._index
                and tensor.numel() > 0
            )
        except Exception:  # a tensor that cannot be asked
            return False

    def _here(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self._cuda else nullcontext()  # Triton launches on the current device

    def _capturing(self) -> bool:
        return self._cuda and torch.cuda.is_current_stream_capturing()


def _is_small(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor can share a launch."""
    count = tensor.numel()
    return (
        count <= BATCHED
        and tensor.is_contiguous()
        and (tensor.storage_offset() + count) * tensor.itemsize <= tensor.untyped_storage().nbytes()
    )


def _plain_keys(device: torch.device) -> frozenset[int]:
    """The dispatch keys of a tensor that is nothing but memory of a device, as its two kinds have them."""
    keys = set()
    with quiet():
        for inference in (False, True):
            with torch.inference_mode(inference):
                keys.add(torch._C._dispatch_keys(torch.empty(0, device=device)).raw_repr())
    return frozenset(keys)


class _Plan(NamedTuple):
    """How the kernel goes through a tensor, which its shape and strides say.

    `walk` is None if the kernel cannot, and `numbers` are the sizes and steps of the walk.
    """

    reach: int  # elements of the memory from the tensor's first one to its last
    elements: int  # of them that are the tensor's
    walk: int | None
    numbers: tuple[int, ...]
    layout: Layout | None  # of no memory: it would stay alive until the rows are fetched


def _plan(tensor: torch.Tensor) -> _Plan | tuple[int, int, int, tuple[int, ...], None]:
    if tensor.is_contiguous():
        count = tensor.numel()
        return count, count, 0, FLAT, None
    return _plan_with_strides(tensor.shape, tensor.stride())


@functools.lru_cache(4096)
def _plan_with_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> _Plan:
    with quiet():
        layout, walk = _walk(torch.empty_strided(shape, stride, device="meta"))
        count, steps = layout.elements.numel(), layout.elements.stride() if walk == 2 else layout.places
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if walk == 0:
        return _Plan(reach, count, 0, FLAT, layout)
    if len(layout.sizes) > DIMS:
        return _Plan(reach, count, None, (), layout)
    gap = DIMS - len(layout.sizes)
    return _Plan(reach, count, walk, ((1,) * gap + layout.sizes)[1:] + (0,) * gap + steps, layout)


def _walk(tensor: torch.Tensor) -> tuple[Layout, int]:
    """How the kernel goes through a tensor: its layout with as few dimensions as possible, and the kind of walk."""
    layout = lay_out(tensor)
    if layout.elements.dim() == 1 and (layout.ordered or len(layout.sizes) == 1):
        gap = layout.elements.stride(0) != 1 and layout.elements.numel() > 1
        return layout, 2 if gap else 0
    if layout.elements.dim() == 1:
        return layout, 1
    return row_major(layout), 2
