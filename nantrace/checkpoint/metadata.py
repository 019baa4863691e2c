"""The `.metadata` of a torch distributed checkpoint: a pickle, read so that nothing in it is imported or called.

Knows the classes that torch writes there by name, and takes from them which tensor lies where. Whatever else the pickle
names becomes inert.
"""

from __future__ import annotations

import collections
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch

from nantrace.checkpoint.entries import CheckpointError
from nantrace.checkpoint.stand_ins import StandIn, asks_to_run, refusal, stand_in

_DAMAGED = "has a .metadata that is damaged or of another form{}: save or copy it again"


@dataclass(frozen=True)
class Place:
    """Where bytes lie: a file beside `.metadata`, first byte, length in bytes, and whether they were transformed."""

    file: str
    offset: int
    length: int
    transformed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: where it begins and its sizes, one integer a dimension each; None where it is not stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place | None


@dataclass(frozen=True)
class Item:
    """An entry of the checkpoint: a tensor in chunks, or an object (`dtype` is None) in one place."""

    name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class _Inert(pickle.Unpickler):
    """An unpickler whose only classes are `StandIn`s, tuples, dicts, lists and dtypes.

    All that a pickle can call comes out of `find_class`, and the answers of this one do nothing.
    """

    def find_class(self, module: str, name: str) -> Any:
        if asks_to_run(module, name):
            raise refusal(module, name)
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        return stand_in(f"{module}.{name}")

    def persistent_load(self, _: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside")


def read_metadata(stream: IO[bytes]) -> tuple[Item, ...]:
    """The entries of a checkpoint, in the order of its metadata.

    Raises:
        CheckpointError: it asks to run something, is damaged, or is of another form.
    """
    try:
        root = _Inert(stream).load()
    except CheckpointError:
        raise
    except Exception as error:  # whatever the bytes make of it
        raise CheckpointError(_DAMAGED.format(f" ({type(error).__name__})")) from None
    try:
        fields = _fields(root, "Metadata")
        places = _places(fields["storage_data"])
        return tuple(_item(str(name), entry, places) for name, entry in fields["state_dict_metadata"].items())
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(_DAMAGED.format("")) from None


def _fields(given: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(given, StandIn) or not given.kind.endswith(f".{kind}"):
        raise ValueError(kind)
    fields: dict[str, Any] = {}
    for part in given.parts:
        if isinstance(part, Mapping):
            fields |= part
    return fields


def _places(storage_data: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], Place]:
    places = {}
    for index, information in storage_data.items():
        key, where = _fields(index, "MetadataIndex"), _fields(information, "_StorageInfo")
        offset = key.get("offset")
        place = Place(
            str(where["relative_path"]),
            int(where["offset"]),
            int(where["length"]),
            tuple(str(each) for each in where.get("transform_descriptors") or ()),
        )
        places[str(key["fqn"]), None if offset is None else tuple(offset)] = place
    return places


def _item(name: str, entry: Any, places: Mapping[tuple[str, tuple[int, ...] | None], Place]) -> Item:
    if isinstance(entry, StandIn) and entry.kind.endswith(".BytesStorageMetadata"):
        place = places.get((name, None))
        return Item(name, None, (), (Chunk((), (), place),))
    fields = _fields(entry, "TensorStorageMetadata")
    dtype = next(part for part in _state(fields["properties"]) if isinstance(part, torch.dtype))
    chunks = []
    for given in fields["chunks"]:
        chunk = _fields(given, "ChunkStorageMetadata")
        offsets, sizes = tuple(chunk["offsets"]), tuple(chunk["sizes"])
        chunks.append(Chunk(offsets, sizes, places.get((name, offsets)) or places.get((name, None))))
    return Item(name, dtype, tuple(fields["size"]), tuple(chunks))


def _state(given: Any) -> tuple[Any, ...]:
    """What the pickle made `TensorProperties` of: a tuple by its `__getstate__`, a mapping in older versions."""
    parts = tuple(given.parts)
    inner = [part for part in parts if isinstance(part, (tuple, Mapping))]
    for part in inner:
        parts += tuple(part.values()) if isinstance(part, Mapping) else part
    return parts
