"""A trace whose events stay in their file and are read some at a time: for what walks through more than memory holds.

Everything else of the trace is read as `load` reads it, and as much is checked. Only the columns that say where each
row belongs are kept.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from nantrace.events import EVENT, Trace
from nantrace.store.reader import BLOCK, events_of, opened

_KEPT = ("step", "site")


class StoredEvents:
    """Stands where a trace has its array of events: has a length, slices, and the columns `step` and `site`.

    A slice is read from the file each time it is asked for. The file must be open.
    """

    def __init__(self, table: h5py.Dataset, columns: dict[str, npt.NDArray[Any]]) -> None:
        self._table, self._columns = table, columns

    def __len__(self) -> int:
        return len(self._columns["step"])

    def __getitem__(self, chosen: str | slice) -> npt.NDArray[Any]:
        if isinstance(chosen, str):
            return self._columns[chosen]
        begin, end, _ = chosen.indices(len(self))
        rows = np.empty(max(0, end - begin), EVENT)
        for at in range(0, len(rows), BLOCK):  # HDF5 takes as much again for what it reads at once
            part = rows[at : at + BLOCK]
            part[:] = events_of(self._table, begin + at, begin + at + len(part))
        return rows


@contextlib.contextmanager
def opened_lazily(path: str | os.PathLike[str], progress: Callable[[str], None] | None = None) -> Iterator[Trace]:
    """A trace for `compare`, 8 bytes an event in memory; good as long as the file is open.

    Args:
        path: a file that `nantrace.trace` wrote.
        progress: told a line after each block of events, as they are checked.

    Raises:
        TraceFormatError, NantraceError, TypeError: as `load`.
    """
    with opened(path, _checked, progress) as trace:
        yield trace


def _checked(blocks: Iterator[npt.NDArray[np.void]], length: int, table: h5py.Dataset) -> Any:
    """The columns that are kept, of the blocks of valid rows."""
    columns = {name: np.empty(length, EVENT[name]) for name in _KEPT}
    count = 0
    for block in blocks:
        for name, column in columns.items():
            column[count : count + len(block)] = block[name]
        count += len(block)
    return StoredEvents(table, {name: column[:count] for name, column in columns.items()})
