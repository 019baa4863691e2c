"""`TraceWriter`: puts a trace into a file while the step runs, so that a killed process leaves what it had flushed.

Knows the life of the file. Not thread-safe: one thread appends. The format is specified in `nantrace.store.schema`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from nantrace.errors import NantraceError, TraceExistsError
from nantrace.events import EVENT, ModuleEntry, Raised, Site
from nantrace.lineage import Lineage
from nantrace.steps import STEP, packed
from nantrace.store.plain import to_json
from nantrace.store.schema import (
    BYTE,
    FORMAT_MAJOR,
    FORMAT_MINOR,
    LINE,
    MODULE,
    NAME,
    NULL,
    SITE,
    escape,
    split_name,
)
from nantrace.store.tables import WRITING, Tables, type_in_file

_LONGEST_FIXED = 60_000  # bytes; HDF5 takes attributes of up to 64 KiB
_RAISED = 1024  # bytes that are kept free for the exception that ends the block
_RESERVED = ("complete", "format_version", "verdict", "raised")


def rank_path(path: str | os.PathLike[str], rank: int) -> str:
    """The path for one rank of a distributed run: "step.h5" becomes "step.r00001.h5" for rank 1."""
    stem, suffix = os.path.splitext(os.fspath(path))
    return f"{stem}.r{rank:05d}{suffix}"


def set_verdict(path: str | os.PathLike[str], verdict: Mapping[str, Any]) -> None:
    """Stores a verdict, as `Verdict.to_dict` words it, in a trace that is complete.

    Raises:
        NantraceError: the file cannot be written.
    """
    try:
        with h5py.File(path, "r+", **WRITING) as file:
            file["meta"].attrs.create("verdict", _attribute(verdict))
    except OSError as error:
        raise NantraceError(
            f"The verdict cannot be stored in {os.fspath(path)} ({_reason(error)}): what was traced stays readable."
        ) from error


class TraceWriter:
    """Writes one trace.

    Sites come before the events that use them; a site's id is its position among all that were added. Rows are safe
    from SIGKILL once `flush` (or `close`) returned. A process forked from the writer's never touches the file: there
    every method does nothing. After the first error, which is raised once, every method does nothing as well, what was
    flushed stays readable, and the file is never marked complete.

    Args:
        path: file to create.
        modules: the traced model's modules, parents before children.
        meta: what holds for the whole trace; kept as attributes of `/meta`. No host names, no absolute paths.
        overwrite: replace an existing file, at the moment when the new one stands.

    Attributes:
        path: the file, as given.
        error: what ended the writing early, or None.

    Raises:
        TraceExistsError: the path is taken and `overwrite` is False.
        NantraceError: the file cannot be created.

    Example:
        >>> with TraceWriter("step.h5") as writer:
        ...     writer.add_sites([site])
        ...     writer.append(rows)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        modules: Sequence[ModuleEntry] = (),
        meta: Mapping[str, Any] = {},
        overwrite: bool = False,
    ) -> None:
        self.path = os.fspath(path)
        self.error: Exception | None = None
        self._pid = os.getpid()
        self._names: dict[str, int] = {}
        self._name_rows = 0
        self._new_names: list[bytes] = []
        self._sites = 0
        self._steps = 0
        self._seq = 0
        self._file = _create(self.path, _attributes(meta), overwrite)
        self._closed = False
        try:
            self._tables = Tables(self._file)
            self._add_modules(modules)
            self.flush()
        except BaseException:
            _close(self._file)
            raise

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def add_sites(self, sites: Sequence[Site]) -> None:
        """Appends sites to the site table."""
        if self._idle():
            return
        rows = np.array([self._site(site) for site in sites], SITE)
        self._sites += len(rows)
        self._write("sites", rows)

    def append(self, rows: npt.NDArray[np.void]) -> None:
        """Appends events, a structured array of `nantrace.events.EVENT`; in memory up to `flush` or a full chunk.

        Raises:
            ValueError: `seq` does not continue the trace, or a site was not added before.
            NantraceError: the file cannot be written any more.
        """
        if self._idle() or not len(rows):
            return
        self._check(rows)
        self._seq += len(rows)
        self._write("events", rows)

    def add_step(self, step: Mapping[str, Any], whole: bool = True) -> None:
        """Appends one step to the ledger: its numbers, and all that is known of it if it is to be `whole`."""
        if self._idle():
            return
        if whole:
            self._add_line(self._steps, step)
        self._write("steps", np.array([packed(step)], STEP))
        self._steps += 1

    def complete_step(self, place: int, step: Mapping[str, Any]) -> None:
        """Says later all that is known of a step: `place` counts the calls of `add_step` before its own."""
        if not self._idle():
            self._add_line(place, step)

    def _add_line(self, place: int, step: Mapping[str, Any]) -> None:
        self._write("ledger", _line(to_json(step)))
        self._write("lines", np.array([place], LINE))

    def set_lineage(self, lineage: Lineage) -> None:
        """Stores the flow of nonfinite values; the last call counts."""
        if not self._idle():
            self._write("lineage", _line(lineage.to_json()))

    def set_raised(self, raised: Raised) -> None:
        """Stores what ended the traced block early; a message that does not fit is left out."""
        if self._idle():
            return
        said = {"error": raised.error, "message": raised.message, "step": raised.step}
        text = next((t for t in (to_json(said), to_json({**said, "message": ""})) if len(t) + 5 < _RAISED), "")
        self._guard(lambda: self._file["meta"].attrs.modify("raised", _fixed(f"json:{text}" if text else "", _RAISED)))

    def flush(self) -> None:
        """Hands everything to the operating system: afterwards it survives SIGKILL (not a power failure)."""
        if self._idle():
            return
        self._guard(self._commit)

    def close(self) -> None:
        """Flushes, marks the trace complete and closes the file; does nothing the second time."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        try:
            if self.error is None:
                self._guard(self._finish)
        finally:
            _close(self._file)

    def _idle(self) -> bool:
        return self._closed or self.error is not None or os.getpid() != self._pid

    def _check(self, rows: npt.NDArray[np.void]) -> None:
        if rows.dtype != EVENT:
            raise ValueError(f"events of dtype {rows.dtype} cannot be appended to {self.path}: pass rows of EVENT")
        first = self._seq + 1
        if not np.array_equal(rows["seq"], np.arange(first, first + len(rows), dtype=np.uint64)):
            raise ValueError(
                f"seq of the appended events does not run from {first} by ones, in {self.path}: number them so"
            )
        if rows["site"].max() >= self._sites:
            raise ValueError(
                f"site {rows['site'].max()} is unknown to {self.path}, which has {self._sites}: add sites before events"
            )

    def _name(self, text: str | None) -> int:
        if text is None:
            return NULL
        known = self._names.get(text)
        if known is None:
            pieces = split_name(text)
            known = self._names[text] = self._name_rows
            self._name_rows += len(pieces)
            self._new_names += pieces
        return known

    def _site(self, site: Site) -> tuple[int, ...]:
        texts = (site.slot, site.dtype, to_json(list(site.shape)), site.op, site.node, site.where)
        return (self._name(site.module), int(site.phase), int(site.role), *map(self._name, texts))

    def _add_modules(self, modules: Sequence[ModuleEntry]) -> None:
        rows = []
        for module in modules:
            aliases = to_json(list(module.aliases)) if module.aliases else None
            rows.append((self._name(module.fqn), self._name(module.cls), self._name(aliases)))
        self._write("modules", np.array(rows, MODULE))

    def _write(self, table: str, rows: npt.NDArray[Any]) -> None:
        if self._new_names:
            names, self._new_names = np.array(self._new_names, NAME), []
            self._guard(lambda: self._tables.append("names", names))
        self._guard(lambda: self._tables.append(table, rows))

    def _commit(self) -> None:
        self._tables.commit()
        if hasattr(os, "pwrite") and os.fstat(self._file.id.get_vfd_handle()).st_nlink == 0:
            raise OSError("the file was removed or replaced by another")

    def _finish(self) -> None:
        self._commit()
        self._tables.trim()
        self._file["meta"].attrs.modify("complete", np.bool_(True))

    def _guard(self, write: Any) -> None:
        """Runs one write; the first that fails ends the writing."""
        try:
            write()
        except Exception as error:
            self.error = error
            raise NantraceError(
                f"Writing the trace {self.path} failed ({_reason(error)}): it ends here, what was flushed before stays "
                "readable; make room or choose another path."
            ) from error


def _create(path: str, attributes: Mapping[str, Any], overwrite: bool) -> h5py.File:
    """A file with its whole layout in place, flushed."""
    if not overwrite:
        return _lay_out(path, path, attributes)
    # The new file is built beside the old one, which it replaces in one step.
    folder, name = os.path.split(path)
    new = os.path.join(folder, f".{name}.{os.getpid()}.new")
    _close(_lay_out(new, path, attributes))
    try:
        os.replace(new, path)
        return h5py.File(path, "r+", **WRITING)
    except OSError as error:
        Path(new).unlink(missing_ok=True)
        raise _cannot_create(path, error) from error


def _lay_out(place: str, path: str, attributes: Mapping[str, Any]) -> h5py.File:
    if "\0" in path:  # HDF5 would end the name there
        raise NantraceError(f"{path!r} cannot be created, it holds a NUL: choose another path.")
    try:
        file = h5py.File(place, "x", **WRITING)
    except FileExistsError as error:
        raise TraceExistsError(
            f"{place} exists already: choose another path, or pass overwrite=True to replace it."
        ) from error
    except (OSError, ValueError) as error:
        raise _cannot_create(path, error) from error
    try:
        meta = file.create_group("meta")
        for name, value in attributes.items():
            meta.attrs.create(name, value, dtype=_type_in_file(value))
        Tables(file)
        file.flush()
    except Exception as error:
        _close(file)
        Path(place).unlink(missing_ok=True)
        raise _cannot_create(path, error) from error
    return file


def _cannot_create(path: str, error: Exception) -> NantraceError:
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        return NantraceError(
            f"{path} cannot be created, there is no folder {folder}: create it or choose another path."
        )
    return NantraceError(f"{path} cannot be created ({_reason(error)}): choose a path that can be written.")


def _reason(error: Exception) -> str:
    """The system's word for an error out of HDF5, without its internals."""
    found = re.search(r"errno = (\d+)|\[Errno (\d+)\]", str(error))
    return os.strerror(int(found[1] or found[2])) if found else str(error).split("\n")[0][:200]


def _close(file: h5py.File) -> None:
    """Closes a file that may be beyond writing."""
    # HDF5 may fail to write what it still holds. The caller has been told by then; flushed rows do not depend on it.
    with contextlib.suppress(Exception):
        file.close()


def _attributes(meta: Mapping[str, Any]) -> dict[str, Any]:
    given = {escape(name): _attribute(value) for name, value in meta.items() if name not in _RESERVED}
    version = f"{FORMAT_MAJOR}.{FORMAT_MINOR}"
    ours = {"format_version": _fixed(version, 16), "complete": np.bool_(False), "raised": _fixed("", _RAISED)}
    return {**ours, **given}


def _attribute(value: Any) -> Any:
    if isinstance(value, (bool, np.bool_)):
        return np.bool_(value)
    if isinstance(value, (int, np.integer)) and -(2**63) <= value < 2**63:
        return np.int64(value)
    if isinstance(value, (float, np.floating)):
        return np.float64(value)
    if isinstance(value, str) and not value.startswith("json:"):
        return _fixed(escape(value))
    return _fixed("json:" + to_json(value))


def _fixed(text: str, width: int = 1) -> Any:
    """A text for an attribute, of fixed length where HDF5 has room for it; one of variable length lies in a heap."""
    return np.array(text, f"S{max(width, len(text))}") if len(text) <= _LONGEST_FIXED else text


def _type_in_file(value: Any) -> h5py.Datatype | None:
    """That of a text with NULs behind it; None leaves the rest to h5py."""
    padded = isinstance(value, np.ndarray) and len(value.item()) < value.dtype.itemsize
    return h5py.Datatype(type_in_file(value.dtype)) if padded else None


def _line(json: str) -> npt.NDArray[np.uint8]:
    return np.frombuffer(json.encode("ascii") + b"\n", BYTE)
