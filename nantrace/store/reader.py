"""`load`: a trace out of a file that may be killed, damaged, foreign or hostile.

Knows the format and what not to trust: links, layouts, sizes and references are checked before anything is read.
Values come through HDF5's own types; nothing is ever unpickled. The format is specified in `nantrace.store.schema`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from nantrace.errors import NantraceError, TraceFormatError
from nantrace.events import EVENT, ModuleEntry, Phase, Raised, Role, Site, Trace
from nantrace.lineage import Lineage
from nantrace.steps import STEP
from nantrace.store.lines import Refused, steps_of
from nantrace.store.plain import from_json
from nantrace.store.schema import FORMAT_MAJOR, FORMAT_MINOR, NULL, TABLE_VERSION, TABLES, join_names, unescape

BLOCK = 65_536  # rows of events read at once
_LARGEST_CHUNK = 64 * 2**20  # bytes; HDF5 allocates a filtered chunk whole
_LARGEST_RATIO = 1100  # deflate makes at most 1032 bytes out of one
_ODD = object()
_PHASES = {int(phase): phase for phase in Phase}
_ROLES = {int(role): role for role in Role}
#: From blocks of valid rows, the number of rows that the file names, and their table: a trace's events.
Gather = Callable[[Iterator[npt.NDArray[np.void]], int, h5py.Dataset], Any]
_REQUIRED = ("names", "sites", "events")


def load(path: str | os.PathLike[str], progress: Callable[[str], None] | None = None) -> Trace:
    """Reads a trace.

    A file whose writer was killed or still runs is read as well: it ends with the last event that was flushed, and its
    `complete` is False.

    Args:
        path: a file that `nantrace.trace` wrote.
        progress: told a line after each block of events.

    Raises:
        TraceFormatError: the file is not a trace, is damaged, or has a newer format than this version reads.
        NantraceError: there is no such file, or it cannot be opened.
        TypeError: `path` is not a path.
    """
    with opened(path, _together, progress) as trace:
        return trace


@contextlib.contextmanager
def opened(
    path: str | os.PathLike[str], gather: Gather, progress: Callable[[str], None] | None = None
) -> Iterator[Trace]:
    """A trace as `load` reads it, with its file open, and for events what `gather` makes of them."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        shown = f"a {type(path).__name__}" if len(repr(path)) > 60 else repr(path)
        raise TypeError(f"load got {shown}: pass the path of a trace that nantrace.trace wrote")
    path = os.fspath(path)
    _check_openable(path)
    with contextlib.ExitStack() as exits:
        yield _told(path, exits, gather, progress)


def _told(path: str, exits: contextlib.ExitStack, gather: Gather, progress: Callable[[str], None] | None) -> Trace:
    try:
        return _read(exits.enter_context(_open(path)), path, gather, progress)
    except Refused as refused:
        raise TraceFormatError(f"{path} {refused}.") from None
    except MemoryError:
        raise TraceFormatError(f"{path} declares more than fits into memory: open it on a larger machine.") from None
    except Exception as error:  # HDF5 raises whatever a damaged file leads it into
        what = str(error).split("\n")[0][:200]
        if _is_hdf5(path):
            advice = "it is damaged or cut short: copy it again, or trace the step again"
        else:
            advice = "it is not an HDF5 file: pass the .h5 file that nantrace.trace wrote"
        raise TraceFormatError(f"{path} cannot be read as a trace ({what}), {advice}.") from error


def is_trace(path: str | os.PathLike[str]) -> bool:
    """Whether a file says of itself that it is a trace, of whatever version."""
    try:
        with _open(os.fspath(path)) as file:
            group = file.get("meta") if isinstance(file.get("meta", getlink=True), h5py.HardLink) else None
            return isinstance(group, h5py.Group) and "format_version" in group.attrs
    except Exception:  # HDF5 raises whatever a foreign file leads it into
        return False


def _check_openable(path: str) -> None:
    if "\0" in path:  # HDF5 would end the name there
        raise NantraceError(f"{path!r} cannot be opened, it holds a NUL: pass the path of a trace.")
    if os.path.exists(path) and not os.path.isfile(path):
        raise NantraceError(f"{path} is not a file: pass the path of a trace that nantrace.trace wrote.")
    try:
        with open(path, "rb"):
            pass
    except FileNotFoundError:
        raise NantraceError(f"{path} does not exist: pass the path of a trace that nantrace.trace wrote.") from None
    except OSError as error:
        raise NantraceError(
            f"{path} cannot be opened ({error.strerror}): pass a trace file that you may read."
        ) from None


def _open(path: str) -> h5py.File:
    try:
        # Without a lock, or a running writer would keep its file to itself.
        return h5py.File(path, "r", locking=False)
    except OSError:
        # HDF5 wants the flags that a writer in this very process opened the file with.
        return h5py.File(path, "r")


def _is_hdf5(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(8) == b"\x89HDF\r\n\x1a\n"


def _read(file: h5py.File, path: str, gather: Gather, progress: Callable[[str], None] | None) -> Trace:
    meta = _meta(file)
    _check_version(meta.pop("format_version", None))
    complete = meta.pop("complete", False) is True
    raised = _raised(meta.pop("raised", None))
    tables = {name: _table(file, name) for name in TABLES}
    missing = [name for name in _REQUIRED if tables[name] is None]
    if missing:
        raise Refused(f"has no dataset /{missing[0]}, so it is not a whole trace: trace the step again")
    counts = _committed(file)
    size = os.path.getsize(path)
    has_rows = tables["steps"] is not None and tables["lines"] is not None  # since format 1.1
    found = {name: _rows(table, name, counts.get(name), size) for name, table in tables.items() if name != "events"}
    names = join_names(found["names"].tolist())
    sites = _sites(found["sites"].tolist(), names)
    table = tables["events"]
    assert table is not None
    length = _length(table, "events", counts.get("events"), size)
    return Trace(
        events=gather(_valid(table, length, len(sites), progress), length, table),
        sites=sites,
        modules=tuple(_module(row, number, names) for number, row in enumerate(found["modules"].tolist())),
        steps=steps_of(found["ledger"], found["steps"], found["lines"] if has_rows else None, path),
        meta=meta,
        lineage=_lineage(found["lineage"].tobytes()),
        complete=complete,
        path=path,
        raised=raised,
    )


# Opening: hard links only, and no dataset whose values lie elsewhere.


def _object(file: h5py.File, name: str) -> Any:
    link = file.get(name, getlink=True)
    if link is None:
        return None
    if not isinstance(link, h5py.HardLink):
        raise Refused(f"has a link at /{name} that leads elsewhere, which is not followed: trace the step again")
    return file[name]


def _dataset(file: h5py.File, name: str) -> h5py.Dataset | None:
    dataset = _object(file, name)
    if dataset is None:
        return None
    if not isinstance(dataset, h5py.Dataset):
        raise Refused(
            f"has a {type(dataset).__name__.lower()} at /{name} where a dataset belongs: trace the step again"
        )
    plist = dataset.id.get_create_plist()
    inside = plist.get_layout() in (h5py.h5d.COMPACT, h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED)
    if not inside or plist.get_external_count():
        raise Refused(f"keeps the values of /{name} in another file, which is not followed: trace the step again")
    version = _plain_attribute(dataset, "version")
    if isinstance(version, int) and version > TABLE_VERSION:
        raise Refused(
            f"has version {version} of /{name}, and this nantrace reads up to {TABLE_VERSION}: update nantrace"
        )
    return dataset


def _table(file: h5py.File, name: str) -> h5py.Dataset | None:
    dataset = _dataset(file, name)
    if dataset is None or (name == "steps" and _is_of_format_1_0(dataset)):
        return None
    if len(dataset.shape or ()) != 1:
        raise Refused(f"has shape {dataset.shape} at /{name} where a list of rows belongs: trace the step again")
    _check_dtype(dataset.dtype, TABLES[name][0], name)
    chunks = dataset.chunks
    if chunks and chunks[0] * dataset.dtype.itemsize > _LARGEST_CHUNK:
        raise Refused(f"has chunks of {chunks[0]} rows at /{name}, larger than a reader takes: trace the step again")
    return dataset


def _is_of_format_1_0(steps: h5py.Dataset) -> bool:
    return not set(STEP.names or ()).issubset(steps.dtype.names or ())


def _check_dtype(found: np.dtype[Any], expected: np.dtype[Any], name: str) -> None:
    if expected.names is None:
        right = found.kind == expected.kind and found.itemsize == expected.itemsize and found.subdtype is None
        if not right or h5py.check_vlen_dtype(found) is not None:
            raise Refused(f"has {_short(found)} at /{name} where {expected} belongs: trace the step again")
        return
    for field in expected.names:
        if found.names is None or field not in found.names:
            raise Refused(f"has no column {field} in /{name}: trace the step again")
        if not _numbers_fit(found[field], expected[field]):
            raise Refused(f"has {_short(found[field])} in {name}.{field}, not {expected[field]}: trace the step again")


def _numbers_fit(found: np.dtype[Any], expected: np.dtype[Any]) -> bool:
    return found.kind in "iuf" and found.subdtype is None and np.can_cast(found, expected, "safe")


def _short(dtype: np.dtype[Any]) -> str:
    return str(dtype) if len(str(dtype)) <= 60 else str(dtype)[:60] + "..."


# Metadata.


def _meta(file: h5py.File) -> dict[str, Any]:
    group = _object(file, "meta")
    if not isinstance(group, h5py.Group):
        raise Refused(
            "is an HDF5 file without the group /meta, so not a trace: pass the file that nantrace.trace wrote"
        )
    values = {unescape(name): _plain_attribute(group, name) for name in group.attrs}
    return {name: value for name, value in values.items() if value is not _ODD}


def _plain_attribute(owner: Any, name: str) -> Any:
    """An attribute that is one number or text; `_ODD` if it is missing or what a writer of this format never makes."""
    if name not in owner.attrs:
        return _ODD
    id = owner.attrs.get_id(name)
    if id.shape != () or (id.dtype.kind not in "biufS" and h5py.check_string_dtype(id.dtype) is None):
        return _ODD
    value = owner.attrs[name]
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        return from_json(value[5:]) if value.startswith("json:") else unescape(value)
    return value.item() if isinstance(value, np.generic) else _ODD


def _raised(found: Any) -> Raised | None:
    """None for an empty text, and for what no writer makes."""
    if not isinstance(found, dict) or not isinstance(found.get("error"), str):
        return None
    message, step = found.get("message"), found.get("step")
    return Raised(found["error"], message if isinstance(message, str) else "", step if type(step) is int else None)


def _check_version(version: Any) -> None:
    match = re.fullmatch(r"(\d{1,9})\.(\d{1,9})", version) if isinstance(version, str) else None
    if match is None:
        raise Refused(
            f"has format_version {version!r:.40}, so it is not a trace: pass the file that nantrace.trace wrote"
        )
    if int(match[1]) > FORMAT_MAJOR:
        raise Refused(
            f"has format {version}, and this nantrace reads up to {FORMAT_MAJOR}.{FORMAT_MINOR}: update nantrace"
        )


def _committed(file: h5py.File) -> dict[str, int]:
    record = _dataset(file, "committed")
    if record is None:
        return {}
    fields = [name for name in TABLES if record.dtype.names and name in record.dtype.names]
    if record.shape != () or not fields or any(record.dtype[name].kind not in "iu" for name in fields):
        raise Refused(f"has {_short(record.dtype)} at /committed, not one row of counts: trace the step again")
    values = record.fields(fields)[()]
    return {name: max(0, int(values[name])) for name in fields}


# Rows.


def _length(table: h5py.Dataset, name: str, committed: int | None, size: int) -> int:
    """How many rows to read; refuses more than a file of this size can hold."""
    rows = int(table.shape[0])
    if committed is not None:
        rows = min(rows, committed)
    ratio = _LARGEST_RATIO if table.id.get_create_plist().get_nfilters() else 1
    if rows * table.dtype.itemsize > size * ratio:
        raise Refused(f"declares {rows} rows in /{name} but has only {size} bytes: trace the step again")
    return rows


def _rows(table: h5py.Dataset | None, name: str, committed: int | None, size: int) -> npt.NDArray[Any]:
    if table is None:
        return np.empty(0, TABLES[name][0])
    return _slice(table, name, 0, _length(table, name, committed, size))


def _slice(table: h5py.Dataset, name: str, begin: int, end: int) -> npt.NDArray[Any]:
    expected = TABLES[name][0]
    if table.dtype == expected or expected.names is None:
        return np.asarray(table[begin:end]).astype(expected, copy=False)
    found = table.fields(list(expected.names))[begin:end]  # only these: a column nobody knows may hold anything
    rows = np.empty(len(found), expected)
    for field in expected.names:
        rows[field] = found[field]
    return rows


def events_of(table: h5py.Dataset, begin: int, end: int) -> npt.NDArray[np.void]:
    """Some rows of the table of events."""
    return _slice(table, "events", begin, end)


def _valid(
    table: h5py.Dataset, length: int, sites: int, progress: Callable[[str], None] | None
) -> Iterator[npt.NDArray[np.void]]:
    """Blocks of the longest prefix with `seq` rising from 1 by ones and sites that exist."""
    for begin in range(0, length, BLOCK):
        block = events_of(table, begin, min(begin + BLOCK, length))
        expected = np.arange(begin + 1, begin + len(block) + 1, dtype=np.uint64)
        valid = (block["seq"] == expected) & (block["site"] < sites)
        if not valid.all():
            yield block[: int(np.argmin(valid))]
            return
        yield block
        if progress is not None:
            progress(f"read {begin + len(block):,} of {length:,} events")


def _together(blocks: Iterable[npt.NDArray[np.void]], length: int, table: h5py.Dataset) -> npt.NDArray[np.void]:
    rows = np.empty(length, EVENT)  # one array that is filled: blocks to join would be held twice
    count = 0
    for block in blocks:
        rows[count : count + len(block)] = block
        count += len(block)
    return rows if count == length else rows[:count].copy()


def _text(names: dict[int, str], reference: int, what: str) -> str | None:
    if reference == NULL:
        return None
    if reference not in names:
        raise Refused(f"has {what} with name {reference}, where no name begins: it is damaged, trace the step again")
    return names[reference]


def _required(names: dict[int, str], reference: int, what: str) -> str:
    text = _text(names, reference, what)
    if text is None:
        raise Refused(f"has {what} without a name that it needs: it is damaged, trace the step again")
    return text


def _sites(rows: list[tuple[int, ...]], names: dict[int, str]) -> tuple[Site, ...]:
    texts: dict[int, str | None] = {**names, NULL: None}
    found = []
    for number, row in enumerate(rows):
        module, phase, role, slot, dtype, shape, op, node, where = row
        try:  # a lookup each: a large model has tens of thousands of sites
            site = Site(
                texts[module],
                _PHASES[phase],
                _ROLES[role],
                names[slot],
                names[dtype],
                _shape(names[shape]),
                texts[op],
                texts[node],
                texts[where],
            )
        except KeyError:
            site = _site(row, number, names)  # says what is wrong
        found.append(site)
    return tuple(found)


def _site(row: tuple[int, ...], number: int, names: dict[int, str]) -> Site:
    module, phase, role, slot, dtype, shape, op, node, where = row
    what = f"site {number}"
    return Site(
        module=_text(names, module, what),
        phase=_member(Phase, phase, what),
        role=_member(Role, role, what),
        slot=_required(names, slot, what),
        dtype=_required(names, dtype, what),
        shape=_shape(_required(names, shape, what)),
        op=_text(names, op, what),
        node=_text(names, node, what),
        where=_text(names, where, what),
    )


def _member(kind: Any, value: int, what: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        label = kind.__name__.lower()
        raise Refused(f"has {what} in {label} {value}, which this version does not know: update nantrace") from None


@functools.lru_cache(4096)  # a trace has many sites and few shapes
def _shape(text: str) -> tuple[int, ...]:
    shape = from_json(text)
    if not isinstance(shape, tuple) or not all(type(size) is int for size in shape):
        raise Refused(f"has a site of shape {text!r:.40}: it is damaged, trace the step again")
    return shape


def _module(row: tuple[int, ...], number: int, names: dict[int, str]) -> ModuleEntry:
    what = f"module {number}"
    aliases = _text(names, row[2], what)
    found = () if aliases is None else from_json(aliases)
    if not isinstance(found, tuple) or not all(isinstance(alias, str) for alias in found):
        raise Refused(f"has {what} with aliases {aliases!r:.40}: it is damaged, trace the step again")
    return ModuleEntry(_required(names, row[0], what), _required(names, row[1], what), found)


def _lineage(text: bytes) -> Lineage | None:
    lines = text.split(b"\n")[:-1]  # behind the last line feed: nothing, or a line that was not finished
    if not lines:
        return None
    lineage = Lineage.from_json(lines[-1].decode("ascii"))
    known = len(lineage.events)
    if [event.id for event in lineage.events] != list(range(1, known + 1)):
        raise Refused("has a lineage whose events are not numbered from 1 by ones: it is damaged, trace the step again")
    parents = [id for event in lineage.events for id in (*event.nan_parents, *event.inf_parents)]
    lost = [id for id in (*parents, *(id for sink in lineage.sinks for id, _ in sink.starts)) if not 1 <= id <= known]
    if lost:
        raise Refused(f"has a lineage that refers to event {lost[0]} of {known}: it is damaged, trace the step again")
    return lineage
