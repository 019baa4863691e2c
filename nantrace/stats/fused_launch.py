"""With what the fused kernel is launched: its grid, its arguments, and what makes two launches of one kind.

Knows dtypes, addresses and sizes; not what the kernel does with them, nor how it gets to the device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from nantrace.stats.fused import FORMATS, Codes, batch_kernel, row_kernel
from nantrace.stats.launches import ALIGNED, Launches

BATCHED = 1 << 16  # elements of the largest tensor that is worth sharing a launch
WARPS = 8
_PROGRAMS = 4  # a multiprocessor

_ROW, _BATCH = Launches(row_kernel, num_warps=WARPS), Launches(batch_kernel, num_warps=WARPS)
#: Sizes and steps of elements that lie one behind the other, which nobody reads.
FLAT = (1, 1, 1, 0, 0, 0, 0)


@dataclass(frozen=True)
class _Variant:
    """What the kernel is compiled for: a dtype's codes, and a walk."""

    bits: torch.dtype
    pair: bool
    block: int  # elements that a program reads at once
    constants: tuple[int | bool, ...]  # of `row_kernel`, in order


@functools.cache
def _variant(dtype: torch.dtype, walk: int) -> _Variant:
    codes, pair = FORMATS[dtype], dtype.is_complex
    block = _block(codes, walk)
    return _Variant(codes.bits, pair, block, (*codes.constants().values(), pair, walk, block))


def relaunch(
    dtype: torch.dtype,
    address: int,
    count: int,
    device: int,
    table: int,
    slot: int,
    walk: int = 0,
    numbers: tuple[int, ...] = FLAT,
) -> bool:
    """Does what `launch` does with a tensor at an address; false, and nothing done, if that takes Triton.

    `device` is the index of the current device, and `table` the address of the table.
    """
    variant = _variant(dtype, walk)
    programs = min(_programs(device), -(-count // variant.block))
    return _ROW.again(
        (dtype, walk, device, address % ALIGNED == 0, table % ALIGNED == 0),
        (programs, 1),
        device,
        (address, table, slot, count, *numbers, *variant.constants),
    )


def launch(
    tensor: torch.Tensor, count: int, table: torch.Tensor, slot: int, walk: int = 0, numbers: tuple[int, ...] = FLAT
) -> None:
    """Measures a tensor of a dtype in `FORMATS` into a row of `table`, on the current stream of the current device.

    Args:
        tensor: strided, without lazy conjugation or negation.
        count: its elements in memory, one or more.
        table: int64 of shape (rows, `WIDTH`), contiguous.
        slot: the row, which holds `UNTOUCHED`.
        walk: as in `_measure`.
        numbers: the last three sizes and all `DIMS` steps.
    """
    dtype, device = tensor.dtype, tensor.get_device()
    address, rows = tensor.data_ptr(), table.data_ptr()
    if relaunch(dtype, address, count, device, rows, slot, walk, numbers):
        return
    variant = _variant(dtype, walk)
    bits = (torch.view_as_real(tensor) if variant.pair else tensor).view(variant.bits)
    _ROW.through_triton(
        (dtype, walk, device, address % ALIGNED == 0, rows % ALIGNED == 0),
        (min(_programs(device), -(-count // variant.block)), 1),
        (bits, table, slot, count, *numbers, *variant.constants),
    )


def launch_batch(tensors: list[torch.Tensor], table: torch.Tensor, slot: int) -> None:
    """Measures contiguous tensors of one dtype and device with one launch, into consecutive rows from `slot` on."""
    first = tensors[0]
    variant, device = _variant(first.dtype, 0), first.get_device()
    numbers = [number for tensor in tensors for number in (tensor.data_ptr(), tensor.numel())]
    addresses = torch.tensor(numbers, dtype=torch.int64)
    if first.is_cuda:
        addresses = addresses.pin_memory().to(first.device, non_blocking=True)
    grid = (len(tensors), -(-max(numbers[1::2]) // (8 * variant.block)))
    *codes, pair, _, block = variant.constants
    after = (slot, *codes, pair, block)
    list_, rows = addresses.data_ptr(), table.data_ptr()
    key = (first.dtype, device, list_ % ALIGNED == 0, rows % ALIGNED == 0)
    if not _BATCH.again(key, grid, device, (list_, list_, rows, *after)):  # the sample is never read: any address does
        sample = torch.empty(1, dtype=variant.bits, device=first.device)
        _BATCH.through_triton(key, grid, (sample, addresses, table, *after))


def _block(codes: Codes, walk: int) -> int:
    """Elements that a program reads at once: as many as its registers hold."""
    return 512 if walk or codes.bits == torch.int64 else 1024


@functools.cache
def _programs(device: int) -> int:
    """The most programs of a launch on the CUDA device of that index; -1 is the interpreter's CPU."""
    if device < 0:
        return _PROGRAMS
    return _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
