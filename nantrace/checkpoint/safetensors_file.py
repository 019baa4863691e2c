"""The safetensors format, read as its specification words it: a length, a JSON header, the bytes of the tensors.

Source: https://github.com/huggingface/safetensors#format. Each tensor is read by itself.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

import torch

from nantrace.checkpoint.entries import CheckpointError, Contents, Piece, StoredTensor
from nantrace.checkpoint.roles import named_role

START = 9  # bytes: the length of the header and its brace
_LONGEST_HEADER = 100_000_000  # bytes, as in the reference implementation
_DTYPES = {
    **{"BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32"},
    **{"U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
    **{"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
}


def looks_like(start: bytes) -> bool:
    """Whether a file's first `START` bytes are the length of a header and its brace."""
    return len(start) == START and start[8:] == b"{" and 2 <= int.from_bytes(start[:8], "little") <= _LONGEST_HEADER


def safetensors_contents(path: str) -> Contents:
    """The tensors of a safetensors file.

    Raises:
        CheckpointError: the header is damaged, or says something about the data that is not so.
    """
    size = os.path.getsize(path)
    header, begin = _header(path, size)
    tensors, notes = [], []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, start, end = _entry(name, entry, size - begin)
        if dtype is None:
            notes.append(f"{name} is of dtype {entry['dtype']!r}, which this version cannot read: it was not checked.")
            tensors.append(StoredTensor(name, named_role(name), (), str(entry["dtype"]), shape))
            continue
        piece = Piece(_Reading(path, begin + start, end - start, dtype, shape))
        tensors.append(StoredTensor(name, named_role(name), (piece,), str(dtype).removeprefix("torch."), shape))
    return Contents("safetensors", tuple(tensors), notes=tuple(notes))


class _Reading:
    """Reads one tensor."""

    def __init__(self, path: str, start: int, length: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.path, self.start, self.length, self.dtype, self.shape = path, start, length, dtype, shape

    def __call__(self) -> torch.Tensor:
        if not self.length:
            return torch.empty(self.shape, dtype=self.dtype)
        content = bytearray(self.length)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.start)
            view, filled = memoryview(content), 0
            while filled < self.length:
                got = file.readinto(view[filled:])
                if not got:
                    raise CheckpointError("was cut short while it was read: copy it again")
                filled += got
        return torch.frombuffer(content, dtype=torch.uint8).view(self.dtype).view(self.shape)


def _header(path: str, size: int) -> tuple[dict[str, Any], int]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _LONGEST_HEADER):
            raise CheckpointError(
                f"was cut short: its header should have {length:,} bytes, {max(size - 8, 0):,} are there; copy it again"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointError("has a damaged safetensors header, which is no JSON: copy it again") from None
    if not isinstance(header, dict):
        raise CheckpointError("has a damaged safetensors header, which is no JSON object: copy it again")
    return header, 8 + length


def _entry(name: str, entry: Any, available: int) -> tuple[torch.dtype | None, tuple[int, ...], int, int]:
    """dtype (None if unknown), shape, first byte and end of a tensor, checked."""
    try:
        spelled, shape, (start, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, start, end))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole or end < start:
        raise CheckpointError(f"has a damaged safetensors header: the entry of {name!r} makes no sense; copy it again")
    if end > available:
        raise CheckpointError(
            f"was cut short: {name!r} should end at byte {end:,} of {available:,} bytes of data; copy it again"
        )
    dtype = getattr(torch, _DTYPES.get(spelled, ""), None)
    if dtype is not None and math.prod(shape) * dtype.itemsize != end - start:
        raise CheckpointError(
            f"has a damaged safetensors header: {name!r} is {spelled} {list(shape)}, but has {end - start:,} bytes"
        )
    return dtype, shape, start, end
