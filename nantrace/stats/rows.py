"""Rows of numbers on a device that kernels write from any stream, and the order that this takes.

Knows blocks of rows, streams and events; not what a row says. Three things may never meet: the cleaning of a row, a
launch that writes it, and the copy that fetches it.

* A block is cleaned when it is allocated, which each stream waits for before it first writes to the block, and after
  each fetch, in the same stream and before the copy to the host that the fetch waits for: then it is over.
* A fetch waits for all that the writing streams were given until then. PyTorch's own streams live as long as the
  process and are remembered; one that the user made may be gone by then, hence an event after each launch on it.
* Memory of a block that is dropped without a fetch is not given away before PyTorch's streams that write it are done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nantrace.stats.unwrap import quiet


@dataclass(eq=False)
class Block:
    """Consecutive rows.

    Attributes:
        rows: int64 of shape (rows, columns).
        address: of the first row.
        clean: the event after which they may be written; None if that is over.
        streams: by their handles, those of PyTorch's streams that may write, and may have written.
        launches: events after the launches on streams that are not PyTorch's.
    """

    rows: torch.Tensor
    address: int
    clean: Any = None
    streams: dict[int, Any] = field(default_factory=dict)
    launches: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Written:
    """Rows that were taken between two fetches."""

    blocks: list[Block]
    used: int


class Rows:
    """Fresh rows of a device, all alike. One thread at a time; `fetch` alone may run beside the others.

    Each call is made with the table's device as the current one.
    """

    def __init__(self, device: torch.device, block_size: int, fresh: Sequence[int]) -> None:
        self._device, self._size, self._fresh = device, block_size, tuple(fresh)
        self._cuda = device.type == "cuda"
        # The handle of the current stream, without an object in between where that can be had.
        self._stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _handle)
        self._blocks: list[Block] = []
        self._spare: list[Block] = []
        self._used = 0

    def take(self, count: int) -> tuple[int, Block]:
        """Numbers of consecutive fresh rows of one block: the first one's, and the block, safe to write on this stream.

        Row number n is row `n % block_size` of its block.
        """
        first = self._used
        if first % self._size + count > self._size:
            first += self._size - first % self._size
        if first // self._size == len(self._blocks):
            self._blocks.append(self._spare.pop() if self._spare else self._allocated())
        block = self._blocks[first // self._size]
        if self._cuda and self._stream(self._device.index) not in block.streams:
            self._admit(block)
        self._used = first + count
        return first, block

    def give_back(self, count: int) -> None:
        """The rows that were taken last, if nothing was launched to write them."""
        self._used -= count

    def wrote(self, block: Block) -> None:
        """Call after each launch."""
        if self._cuda and self._stream(self._device.index) not in block.streams:
            block.launches.append(self._event())

    def written(self) -> Written:
        """What was taken since the last time; what is taken from now on lies elsewhere."""
        written = Written(self._blocks, self._used)
        self._blocks, self._used = [], 0
        return written

    def fetch(self, written: Written) -> list[list[int]]:
        """The numbers in the rows, by their number. Waits for the device, once."""
        if not written.used:
            return []
        if self._cuda:
            self._wait_for(written.blocks)
        with quiet():
            gathered = torch.cat([block.rows for block in written.blocks])
            for block in written.blocks:
                self._clean(block)
            numbers: list[list[int]] = gathered[: written.used].cpu().tolist()
        for block in written.blocks:
            block.clean = None
            block.streams.clear()
            block.launches.clear()
        return numbers

    def reuse(self, written: Written) -> None:
        """Takes the blocks back, once they were fetched."""
        self._spare.extend(written.blocks)

    def _allocated(self) -> Block:
        with quiet():
            with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
                rows = torch.empty(self._size, len(self._fresh), dtype=torch.int64, device=self._device)
            block = Block(rows, rows.data_ptr())
            self._clean(block)
        if self._cuda:
            block.clean = self._event()
        return block

    def _clean(self, block: Block) -> None:
        for column, value in enumerate(self._fresh):
            block.rows[:, column].fill_(value)

    def _event(self) -> Any:
        """After all that the current stream was given until now."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _admit(self, block: Block) -> None:
        """Has the current stream wait until a block is clean."""
        stream = torch.cuda.current_stream(self._device)
        if block.clean is not None:
            stream.wait_event(block.clean)
        if not _is_foreign(stream):
            with quiet():
                block.rows.record_stream(stream)
            block.streams[stream.cuda_stream] = stream

    def _wait_for(self, blocks: list[Block]) -> None:
        """Has the current stream wait for all that was launched to write the blocks."""
        here = torch.cuda.current_stream(self._device)
        for stream in {handle: stream for block in blocks for handle, stream in block.streams.items()}.values():
            if stream != here:
                here.wait_stream(stream)
        for block in blocks:
            for event in block.launches:
                here.wait_event(event)


def _handle(device: int) -> int:
    handle: int = torch.cuda.current_stream(device).cuda_stream
    return handle


def _is_foreign(stream: torch.cuda.Stream) -> bool:
    """Whether a stream is not one of PyTorch's: the id of such a one is its handle."""
    return stream.cuda_stream != 0 and stream.stream_id == stream.cuda_stream
