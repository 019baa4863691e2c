"""A part of a file as a file of its own. Knows bytes alone."""

from __future__ import annotations

import io
import os
from typing import Any


class Window(io.RawIOBase):
    """Reads `length` bytes of a file from `offset` on, as if there were no others."""

    def __init__(self, path: str, offset: int, length: int) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  closed by `close`
        self._offset, self._length, self._at = offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        room = min(len(view), max(self._length - self._at, 0))
        self._file.seek(self._offset + self._at)
        got = self._file.readinto(view[:room]) or 0
        self._at += got
        return got

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if start + position < 0:
            raise OSError("before the start of the window")
        self._at = start + position
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self._file.close()
        super().close()
