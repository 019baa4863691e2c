"""Growing HDF5 tables that survive SIGKILL: allocation ahead of the rows, and chunks written straight into it.

Knows HDF5's behaviour and the names of the tables, not what their rows mean. Three facts carry this module: a chunk
that is written directly goes past HDF5's cache into the file; one that was allocated early changes no metadata by it;
and HDF5 writes the superblock, which states the end of the file, last of all.
"""

from __future__ import annotations

import errno
import os
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from nantrace.store.schema import COMMITTED, TABLE_VERSION, TABLES

#: Arguments of `h5py.File` for writing: a superblock that opens after a crash, and no chunk cache beside our own.
WRITING = {"libver": ("earliest", "v108"), "rdcc_nbytes": 0}

_SUPERBLOCK_0 = b"\x89HDF\r\n\x1a\n\x00"
_INDEX_BYTES = 128  # more than one chunk costs in the index: nodes of 2096 bytes, at least half full of 64 entries
_SPARE_BYTES = 16_384  # for new levels of the index
_END_OF_FILE_AT = 40  # offset of the end-of-file address in a superblock of version 0 with 8-byte addresses


class Table:
    """One dataset that grows.

    Attributes:
        chunk, chunk_bytes: rows and bytes of one chunk.
        rows: how many rows were appended.
        capacity: how many rows have space in the file.
    """

    def __init__(self, file: h5py.File, name: str) -> None:
        row, self.chunk = TABLES[name]
        self.name = name
        self.rows = 0
        self.capacity = self.chunk
        self._id = file[name].id if name in file else self._create(file, row)
        self._tail = np.zeros(self.chunk, row)  # the chunk that is being filled, as it is to stand in the file
        self._pending = False
        self.chunk_bytes = self._tail.nbytes

    def _create(self, file: h5py.File, row: np.dtype[Any]) -> Any:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((self.chunk,))
        plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        space = h5py.h5s.create_simple((self.capacity,), (h5py.h5s.UNLIMITED,))
        id = h5py.h5d.create(file.id, self.name.encode(), type_in_file(row), space, plist)
        h5py.Dataset(id).attrs["version"] = np.int64(TABLE_VERSION)
        return id

    def resize(self, rows: int) -> None:
        self._id.set_extent((rows,))
        self.capacity = rows

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Takes rows up and writes each chunk that they fill; the caller has seen to the capacity."""
        begin = 0
        while begin < len(rows):
            at = self.rows % self.chunk
            part = rows[begin : begin + self.chunk - at]
            self._tail[at : at + len(part)] = part
            self._pending = True
            begin += len(part)
            self.rows += len(part)
            if self.rows % self.chunk == 0:
                self.write()
                self._tail[:] = np.zeros((), self._tail.dtype)

    def write(self) -> None:
        """Writes the chunk that is being filled. Its earlier rows are written again, with the same bytes."""
        if self._pending:
            begin = (self.rows - 1) // self.chunk * self.chunk
            self._id.write_direct_chunk((begin,), self._tail.tobytes())
            self._pending = False


def type_in_file(row: np.dtype[Any]) -> Any:
    """The HDF5 type of a row: enums keep their labels, and viewers end a text at its first NUL.

    h5py's own type of a text counts each NUL behind it as one of its characters, and h5dump prints them all. The bytes
    in the file are the same.
    """
    found = h5py.h5t.py_create(row, logical=True)
    if row.kind == "S":
        found.set_strpad(h5py.h5t.STR_NULLTERM)
    return found


class Tables:
    """All tables of one file, and the commit record."""

    def __init__(self, file: h5py.File) -> None:
        self._file = file
        self._tables = {name: Table(file, name) for name in TABLES}
        self._counts = np.zeros((), COMMITTED)
        if "committed" not in file:
            file.create_dataset("committed", data=self._counts).attrs["version"] = np.int64(TABLE_VERSION)
        self._committed = file["committed"].id
        self._commit_type = h5py.h5t.py_create(COMMITTED)

    def append(self, name: str, rows: npt.NDArray[Any]) -> None:
        table = self._tables[name]
        needed = table.rows + len(rows)
        if needed > table.capacity:
            self._grow(table, needed)
        table.append(rows)

    def commit(self) -> None:
        """Writes everything appended so far, then the record that declares it whole.

        The chunks go into the file at once and the record follows them, so a killed process leaves no count that is
        ahead of its rows.
        """
        for name, table in self._tables.items():
            table.write()
            self._counts[name] = table.rows
        self._committed.write(h5py.h5s.ALL, h5py.h5s.ALL, self._counts, self._commit_type)
        self._file.flush()

    def trim(self) -> None:
        """Gives back the space ahead of the rows."""
        for table in self._tables.values():
            table.resize(table.rows)
        self._file.flush()

    def _grow(self, table: Table, needed: int) -> None:
        """Makes room for `needed` rows, and a quarter more than there was.

        A million rows cost some thirty changes of metadata this way, and a killed file holds at most a quarter of
        empty space. The disk's space is claimed first: were it missing when HDF5 writes the index, the file were lost.
        Then the end of the file is raised by hand. HDF5 writes it after the index: killed in between, the index would
        point behind the end and the file would not open.
        """
        chunks = max(-(-needed // table.chunk), table.capacity // table.chunk * 5 // 4)
        added = chunks - table.capacity // table.chunk
        descriptor = self._file.id.get_vfd_handle()
        _claim(descriptor, self._file.id.get_filesize(), added * (table.chunk_bytes + _INDEX_BYTES) + _SPARE_BYTES)
        table.resize(chunks * table.chunk)
        if os.pread(descriptor, len(_SUPERBLOCK_0), 0) == _SUPERBLOCK_0:
            end = self._file.id.get_filesize()
            os.pwrite(descriptor, end.to_bytes(8, "little"), _END_OF_FILE_AT)
        self._file.flush()


def _claim(descriptor: int, end: int, size: int) -> None:
    """Extends the file by `size` bytes of zeros that the disk is sure to have; leaves it alone if it has not."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, end, size)
            return
    except OSError as error:
        os.ftruncate(descriptor, end)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
    os.ftruncate(descriptor, end + size)  # a file system that cannot reserve
