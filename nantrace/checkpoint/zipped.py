"""What `torch.save` writes: zip files, and the older form. Knows how to load them without running what they name.

A zip file is mapped, not read: each tensor's pages are dropped once it was looked at. The older form has to be loaded
whole.
"""

from __future__ import annotations

import os
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import torch

from nantrace.checkpoint import pages
from nantrace.checkpoint.entries import CheckpointError, Contents, Piece, StoredNumber, StoredTensor
from nantrace.checkpoint.roles import identity, parameter_names
from nantrace.checkpoint.stand_ins import load_inert
from nantrace.checkpoint.tree import Leaf, Walked, walk

_BIG = 1 << 30  # bytes
_LEGACY_PICKLES = 5  # magic number, protocol, system, the object, the keys of its storages


def zip_contents(path: str) -> Contents:
    """A zip file of `torch.save`.

    Raises:
        CheckpointError: it is another zip file, damaged, or refused.
    """
    record = _pickle_record(path)
    mapped: dict[int, int] = {}

    def keep(storage: torch.UntypedStorage, _location: str) -> torch.UntypedStorage:
        if storage.data_ptr():
            mapped[storage.data_ptr()] = storage.nbytes()
        return storage

    def load() -> Any:
        try:
            return _load(path, mmap=True, map_location=keep)
        except RuntimeError as error:
            if "map_location" not in str(error):
                raise
            mapped.clear()  # tensor subclasses take no function: their pages stay
            return _load(path, mmap=True, map_location="cpu")

    def pickles() -> Iterator[IO[bytes]]:
        with zipfile.ZipFile(path) as archive, archive.open(record) as stream:
            yield stream

    root = _sentences(lambda: load_inert(load, pickles))
    return _contents("torch", walk(root), mapped if sys.byteorder == "little" else {})


def legacy_contents(path: str) -> Contents:
    """A file of `torch.save` from before PyTorch 1.6, or written with `_use_new_zipfile_serialization=False`.

    Raises:
        CheckpointError: it is no such file, damaged, or refused.
    """

    def pickles() -> Iterator[IO[bytes]]:
        with open(path, "rb") as stream:
            for _ in range(_LEGACY_PICKLES):
                yield stream

    root = _sentences(lambda: load_inert(lambda: _load(path, map_location="cpu"), pickles))
    size = os.path.getsize(path)
    big = f"It is no zip file and had to be loaded whole: {size / 2**30:.1f} GiB at once; saving it anew mends that."
    return _contents("torch (legacy)", walk(root), {}, (big,) if size > _BIG else ())


def stream_root(stream: IO[bytes]) -> Any:
    """What one zip file of `torch.save` inside another file holds; read, not mapped.

    Raises:
        CheckpointError: as above.
    """

    def load() -> Any:
        stream.seek(0)
        return _load(stream, map_location="cpu")

    def pickles() -> Iterator[IO[bytes]]:
        stream.seek(0)
        with zipfile.ZipFile(stream) as archive:
            for name in archive.namelist():
                if name.endswith("/data.pkl"):
                    with archive.open(name) as inner:
                        yield inner

    return _sentences(lambda: load_inert(load, pickles))


def _pickle_record(path: str) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError):
        raise CheckpointError("is a zip file that was cut short or damaged: save or copy it again") from None
    if any(name.endswith("/constants.pkl") for name in names):
        raise CheckpointError(
            "is a TorchScript archive, which holds code: save the module's state_dict() and check that"
        )
    found = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
    if not found:
        raise CheckpointError("is a zip file, but not one of torch.save: pass a checkpoint")
    return found[0]


def _load(source: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on pickle protocols, deprecated storages: nothing that changes a value
        return torch.load(source, weights_only=True, **options)


def _sentences(load: Callable[[], Any]) -> Any:
    """Whatever torch makes of a damaged file becomes one sentence."""
    try:
        return load()
    except (CheckpointError, OSError, MemoryError):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() if isinstance(error, RuntimeError) else []  # torch's own words
        said = f" ({lines[0].split('. ')[0][:120].rstrip('.')})" if lines else ""
        raise CheckpointError(f"is no checkpoint, or one that was cut short or damaged{said}") from None


def _contents(form: str, walked: Walked, mapped: dict[int, int], notes: tuple[str, ...] = ()) -> Contents:
    """The leaves of a tree, each memory once.

    Args:
        form: name of the format.
        walked: the tree.
        mapped: address and bytes of storages that map the file.
        notes: what else is to be said.
    """
    groups: dict[Any, list[Leaf]] = {}
    for leaf in walked.tensors:
        groups.setdefault(identity(leaf.value), []).append(leaf)
    parameters = _parameters(walked)
    names = tuple(leaf.name for leaf in walked.tensors)
    again = (
        f"{name} is the same object as {first}: it was read once."
        for name, first in walked.same
        if first == "(the file)" or any(each == first or each.startswith(f"{first}.") for each in names)
    )
    return Contents(
        form,
        tuple(stored(leaves, parameters, mapped) for leaves in groups.values()),
        tuple(StoredNumber(leaf.name, leaf.role, leaf.value) for leaf in walked.numbers),
        tuple(walked.objects),
        (*notes, *again),
    )


def _parameters(walked: Walked) -> dict[str, str]:
    """Parameter by the beginning of names in an optimizer's state: "optimizer.state.0."."""
    found = {}
    for place, optimizer in walked.optimizers:
        for key, name in parameter_names(optimizer, walked.state_dicts).items():
            found[f"{place}.state.{key}." if place else f"state.{key}."] = name
    return found


def stored(leaves: Sequence[Leaf], parameters: Mapping[str, str], mapped: Mapping[int, int]) -> StoredTensor:
    """One memory of a tree as a tensor that can be read.

    Args:
        leaves: those that show it, at least one; the first gives its name and role.
        parameters: name of a parameter by the beginning of names in an optimizer's state.
        mapped: address and bytes of storages that map the file.
    """
    first = leaves[0]
    tensor: torch.Tensor = first.value

    def done() -> None:
        address = _address(tensor)
        if address in mapped:
            pages.drop(address, mapped[address])

    shape = _shape(tensor)
    return StoredTensor(
        name=first.name,
        role=first.role,
        pieces=(Piece(lambda: getattr(tensor, "_local_tensor", tensor), done=done),),  # of a DTensor, its shard
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=shape,
        aliases=tuple(leaf.name for leaf in leaves[1:]),
        parameter=parameters.get(first.name.rpartition(".")[0] + ".") if first.role == "optimizer" else None,
    )


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    try:
        return tuple(size if type(size) is int else -1 for size in tensor.shape)
    except RuntimeError:  # a nested tensor has none
        return ()


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
