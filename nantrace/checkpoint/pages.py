"""Giving mapped memory of a file back once it was read. Knows addresses; a platform without `madvise` keeps it."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

_DONTNEED = getattr(mmap, "MADV_DONTNEED", None)


def drop(address: int, length: int) -> None:
    """Let go of the whole pages within a range that maps a file and was only read: a later read fetches them again.

    Args:
        address: of the first byte. Memory that maps no file would lose its content.
        length: in bytes.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + length) // mmap.PAGESIZE * mmap.PAGESIZE
    if _DONTNEED is not None and last > first:
        _madvise()(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(_DONTNEED))


def _madvise() -> Any:
    return getattr(ctypes.CDLL(None), "madvise", lambda *_: 0)
