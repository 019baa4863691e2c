"""A torch distributed checkpoint: a folder with `.metadata` and `.distcp` files, read chunk by chunk.

Needs no process group and no torch.distributed: what lies where is taken from the metadata, each chunk is loaded by
itself with `weights_only`. Compressed or encrypted chunks cannot be read, and are told.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import os
from collections.abc import Sequence
from typing import Any

import torch

from nantrace.checkpoint.entries import CheckpointError, Contents, Piece, StoredNumber, StoredTensor
from nantrace.checkpoint.metadata import Chunk, Item, Place, read_metadata
from nantrace.checkpoint.roles import named_role
from nantrace.checkpoint.tree import Leaf, Walked, walk
from nantrace.checkpoint.window import Window
from nantrace.checkpoint.zipped import stored, stream_root

METADATA = ".metadata"


def distributed_contents(folder: str) -> Contents:
    """The entries of a distributed checkpoint.

    Raises:
        CheckpointError: the folder is no such checkpoint, is incomplete, or its metadata is refused.
    """
    path = os.path.join(folder, METADATA)
    if not os.path.isfile(path):
        raise CheckpointError(
            f"is a folder without {METADATA}, so no torch distributed checkpoint: pass the files in it"
        )
    with open(path, "rb") as stream:
        items = read_metadata(stream)
    _check_files(folder, items)
    tensors: list[StoredTensor] = []
    notes: list[str] = []
    walked = Walked()
    for item in items:
        if item.dtype is None:
            notes += _object(folder, item, tensors, walked)
        else:
            tensors.append(_tensor(folder, item))
            notes += _gaps(item)
    numbers = tuple(StoredNumber(leaf.name, leaf.role, leaf.value) for leaf in walked.numbers)
    return Contents("torch distributed", tuple(tensors), numbers, tuple(walked.objects), tuple(notes))


def _check_files(folder: str, items: Sequence[Item]) -> None:
    """Every file is there and long enough, and inside the folder."""
    ends: dict[str, int] = {}
    for place in (chunk.place for item in items for chunk in item.chunks if chunk.place is not None):
        ends[place.file] = max(ends.get(place.file, 0), place.offset + place.length)
        if place.offset < 0 or place.length < 0:
            raise CheckpointError(f"has a {METADATA} that points before the start of {place.file}: it was not read")
    for file, end in ends.items():
        path = os.path.normpath(file)
        if os.path.isabs(path) or path.split(os.sep)[0] == os.pardir:
            raise CheckpointError(f"has a {METADATA} that points outside the folder, to {file}: it was not read")
        if not os.path.isfile(os.path.join(folder, path)):
            raise CheckpointError(f"is incomplete: {file} is missing; copy it again")
        held = os.path.getsize(os.path.join(folder, path))
        if held < end:
            raise CheckpointError(f"was cut short: {file} has {held:,} bytes of {end:,}; copy it again")


def _tensor(folder: str, item: Item) -> StoredTensor:
    pieces = tuple(
        Piece(functools.partial(_read, folder, item, chunk, chunk.place), chunk.offsets)
        for chunk in item.chunks
        if chunk.place is not None and not chunk.place.transformed
    )
    return StoredTensor(item.name, named_role(item.name), pieces, str(item.dtype).removeprefix("torch."), item.shape)


def _gaps(item: Item) -> list[str]:
    said = []
    ways = sorted({way for chunk in item.chunks if chunk.place is not None for way in chunk.place.transformed})
    if ways:
        said.append(f"{item.name} is stored transformed ({', '.join(ways)}), which cannot be read here: not checked.")
    stored = sum(math.prod(chunk.sizes) for chunk in item.chunks if chunk.place is not None)
    if stored < math.prod(item.shape):
        said.append(f"{item.name} is incomplete: {stored:,} of {math.prod(item.shape):,} elements are stored.")
    return said


def _read(folder: str, item: Item, chunk: Chunk, place: Place) -> torch.Tensor:
    root = _root(folder, place)
    if not isinstance(root, torch.Tensor) or tuple(root.shape) != chunk.sizes or root.dtype != item.dtype:
        what = f"{root.dtype} {list(root.shape)}" if isinstance(root, torch.Tensor) else f"a {type(root).__name__}"
        raise CheckpointError(
            f"contradicts itself: {item.name} at {list(chunk.offsets)} should be {item.dtype} {list(chunk.sizes)}, "
            f"but {place.file} holds {what} there; save it again"
        )
    return root


def _root(folder: str, place: Place) -> Any:
    with Window(os.path.join(folder, place.file), place.offset, place.length) as window:
        start = window.read(4)
        if start != b"PK\x03\x04":
            raise CheckpointError(f"stores chunks in {place.file} in a form that is not torch.save's: cannot be read")
        return stream_root(io.BufferedReader(window))


def _object(folder: str, item: Item, tensors: list[StoredTensor], walked: Walked) -> list[str]:
    """An object beside the tensors: files its leaves, gives what is to be said."""
    place = item.chunks[0].place
    if place is None or place.transformed:
        return [f"{item.name} is not stored in a form that can be read here: not checked."]
    with Window(os.path.join(folder, place.file), place.offset, place.length) as window:
        start = window.read(4)
    if start != b"PK\x03\x04":
        return [f"{item.name} in {place.file} is not in torch.save's form: not checked."]
    inner = walk({item.name: _root(folder, place)})
    walked.numbers += [_by_name(leaf) for leaf in inner.numbers]
    walked.objects += inner.objects
    tensors += [stored([_by_name(leaf)], {}, {}) for leaf in inner.tensors]
    return []


def _by_name(leaf: Leaf) -> Leaf:
    """A leaf of one object with the role that its whole name gives."""
    return dataclasses.replace(leaf, role=named_role(leaf.name))
