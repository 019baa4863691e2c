"""What a room for one format hands on: the leaves of a file, one at a time, and the error that ends one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from nantrace.checkpoint.result import Role
from nantrace.errors import NantraceError


class CheckpointError(NantraceError, ValueError):
    """A file cannot be read as a checkpoint. Its text follows the path: "is empty: save it again"."""


@dataclass(frozen=True)
class Piece:
    """A tensor, or a part of one that is stored in parts.

    Attributes:
        read: gives the values; called once, and the result dropped before the next piece is read.
        offsets: where the part begins, one integer a dimension; empty for a whole tensor.
        done: called when the values were read, to let go of memory.
    """

    read: Callable[[], torch.Tensor]
    offsets: tuple[int, ...] = ()
    done: Callable[[], None] = field(default=lambda: None)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor by name; `pieces` is empty where no part of it is stored."""

    name: str
    role: Role
    pieces: tuple[Piece, ...]
    dtype: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    parameter: str | None = None


@dataclass(frozen=True)
class StoredNumber:
    """A Python float by name."""

    name: str
    role: Role
    value: float


@dataclass(frozen=True)
class Contents:
    """What a file holds, before any value was read."""

    format: str
    tensors: tuple[StoredTensor, ...]
    numbers: tuple[StoredNumber, ...] = ()
    objects: tuple[tuple[str, str], ...] = ()  # name, class
    notes: tuple[str, ...] = ()
