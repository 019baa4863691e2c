"""The files that a tracer is about to write: whether it may, before anything is placed or written, and the trace's."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from nantrace.errors import NantraceError, TraceExistsError

if TYPE_CHECKING:
    from nantrace.capture.finished import Writer


def refuse_taken(path: str, overwrite: bool, is_ours: Callable[[str], bool], what: str) -> None:
    """Let pass a path that is free, and with `overwrite` one that holds what would be replaced by its like.

    Args:
        path: of the new file.
        overwrite: as the user said.
        is_ours: whether an existing file is of the kind that would replace it; an empty file always is.
        what: that kind, with its article.

    Raises:
        TraceExistsError: the path is taken.
    """
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise TraceExistsError(f"{path} exists already: choose another path, or pass overwrite=True to replace it.")
    empty = os.path.isfile(path) and os.path.getsize(path) == 0
    if os.path.exists(path) and not empty and not is_ours(path):
        raise TraceExistsError(
            f"{path} is not {what}, and overwrite=True replaces nothing else: choose another path, or remove it first."
        )


def open_trace(path: str, *, modules: Any, meta: Any, overwrite: bool) -> Writer:
    """Begin a trace file.

    Raises:
        TraceExistsError: the path is taken.
        NantraceError: the file cannot be written.
    """
    from nantrace.store.reader import is_trace
    from nantrace.store.writer import TraceWriter  # needs h5py, which a trace in memory does not

    refuse_taken(path, overwrite, is_trace, "a trace")
    return TraceWriter(path, modules=modules, meta=meta, overwrite=overwrite)


def refuse_unwritable(path: str) -> None:
    """Let pass a path in whose folder a file can be made.

    Raises:
        NantraceError: there is no such folder, or nothing can be written there.
    """
    folder = os.path.dirname(path) or "."
    try:
        with tempfile.TemporaryFile(dir=folder):  # permissions alone do not tell of a read-only or a full disk
            pass
    except (OSError, ValueError) as error:
        if not os.path.isdir(folder):
            raise NantraceError(
                f"{path} cannot be created, there is no folder {folder}: create it or choose another path."
            ) from None
        reason = getattr(error, "strerror", None) or error
        raise NantraceError(f"{path} cannot be created ({reason}): choose a path that can be written.") from None


def refuse_written_twice(paths: Iterable[str], others: Iterable[str]) -> None:
    """Let pass paths that differ from each other and from what other tracers write meanwhile.

    Raises:
        NantraceError: a file would be written twice.
    """
    written = {os.path.realpath(path) for path in others}
    mine: set[str] = set()
    for path in paths:
        real = os.path.realpath(path)
        if real in written:
            raise NantraceError(f"{path} is being written by another tracer whose block goes on: choose another path.")
        if real in mine:
            raise NantraceError(f"{path} was given for both the trace and the captured step: choose two paths.")
        mine.add(real)
