"""Checking checkpoints: which format a file has, and its tensors one after the other. Knows no format from within."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from nantrace.checkpoint.distributed import METADATA, distributed_contents
from nantrace.checkpoint.entries import CheckpointError, Contents
from nantrace.checkpoint.expected import with_expected
from nantrace.checkpoint.measure import measured
from nantrace.checkpoint.result import CheckedFile, CheckedFiles, CheckedNumber, SkippedObject
from nantrace.checkpoint.roles import is_state
from nantrace.checkpoint.safetensors_file import START, looks_like, safetensors_contents
from nantrace.checkpoint.zipped import legacy_contents, zip_contents


def check_checkpoint(*paths: str | os.PathLike[str], progress: Callable[[str], None] | None = None) -> CheckedFiles:
    """Check checkpoints for nonfinite values, tensor by tensor, in the stored dtype.

    Nothing in a file is run: `.pt`, `.pth` and `.bin` are loaded with `weights_only`, objects beyond tensors are named
    and not rebuilt. Needs the memory of one tensor, but for files of `torch.save` that are no zip files.

    Args:
        paths: files of `torch.save` or safetensors, or folders of `torch.distributed.checkpoint`.
        progress: called with one line before each tensor.

    Returns:
        What was found, file by file. A file that cannot be read has its `error`, and the others are checked.

    Raises:
        ValueError: no path is given.
    """
    if not paths:
        raise ValueError("check_checkpoint got no path: pass the files to check.")
    return CheckedFiles(tuple(_checked(os.fspath(path), progress) for path in paths))


def _checked(path: str, progress: Callable[[str], None] | None) -> CheckedFile:
    size, modified = 0, 0.0
    try:
        size, modified = _on_disk(path)
        contents = _contents(path)
        checked = []
        for place, stored in enumerate(contents.tensors, 1):
            if progress is not None:
                progress(f"{path}: tensor {place:,} of {len(contents.tensors):,}, {stored.name}")
            checked.append(measured(stored))
    except CheckpointError as error:
        return CheckedFile(path, bytes=size, modified=modified, error=f"{path} {error}.")
    except MemoryError:
        error_text = f"{path} needs more memory than there is: check it on a larger machine."
        return CheckedFile(path, bytes=size, modified=modified, error=error_text)
    except OSError as error:
        error_text = f"{path} cannot be read ({error.strerror or error}): check the path."
        return CheckedFile(path, bytes=size, modified=modified, error=error_text)
    numbers = [number for number in contents.numbers if not math.isfinite(number.value)]
    return CheckedFile(
        path,
        format=contents.format,
        bytes=size,
        modified=modified,
        tensors=with_expected(checked),
        numbers=tuple(CheckedNumber(n.name, n.role, n.value, is_state(n.name, n.role)) for n in numbers),
        counted=len(contents.numbers),
        objects=tuple(SkippedObject(name, kind) for name, kind in contents.objects),
        notes=contents.notes,
    )


def _on_disk(path: str) -> tuple[int, float]:
    """Bytes and time of the last change; of a folder the sum of its files, and the time of its metadata."""
    if not os.path.isdir(path):
        status = os.stat(path)
        return status.st_size, status.st_mtime
    size = sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
    metadata = os.path.join(path, METADATA)
    return size, os.stat(metadata if os.path.exists(metadata) else path).st_mtime


def _contents(path: str) -> Contents:
    """By what the file begins with, not by its name.

    Raises:
        CheckpointError: it is of no known format, empty, damaged or refused.
    """
    if os.path.isdir(path):
        return distributed_contents(path)
    if not os.path.isfile(path):
        raise CheckpointError("is neither a file nor a folder: pass a checkpoint")
    if path.endswith((".distcp", METADATA)):
        folder = os.path.dirname(path) or "."
        raise CheckpointError(f"is a part of a torch distributed checkpoint: pass its folder, {folder}")
    with open(path, "rb") as file:
        start = file.read(START)
    if not start:
        raise CheckpointError("is empty: save or copy it again")
    if start.startswith(b"PK\x03\x04"):
        return zip_contents(path)
    if looks_like(start) or path.endswith(".safetensors"):
        return safetensors_contents(path)
    return legacy_contents(path)
