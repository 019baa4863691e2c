"""Rows that wait to become events: what was seen since the last drain, as plain numbers in one array.

A row of a tensor that was finite is five packed numbers and nothing that the garbage collector has to visit; any other
keeps its statistics in a dict beside them. Knows nothing of tensors, sites or devices.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nantrace.events import EVENT, Columns

_FINITE = int(Columns.FIRST_BAD)  # the columns of a row that is told by its extremes
_NUMBERS = np.dtype([("site", "<i8"), ("call", "<i8"), ("numel", "<i8"), ("min", "<f8"), ("max", "<f8")])
_STATISTICS = list(EVENT.names[4:])  # type: ignore[index]
_STATISTICS_ROW = np.dtype([(name, EVENT[name]) for name in _STATISTICS])
# Packed straight into these layouts: numpy needs several times as long to assign a tuple of 13 fields.
_PACK_NUMBERS = struct.Struct("<qqqdd")
_PACK_STATISTICS = struct.Struct("<QQQQQdddqIIIB")
assert (_PACK_NUMBERS.size, _PACK_STATISTICS.size) == (_NUMBERS.itemsize, _STATISTICS_ROW.itemsize)
_WIDTH = _NUMBERS.itemsize
_pack = _PACK_NUMBERS.pack


class Rows:
    """Rows in order of execution. Any thread may add."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._numbers = bytearray()
        self._other: dict[int, Any] = {}
        self._next = itertools.count(1)
        self._extend = self._numbers.extend  # one call into C that runs no Python code: rows of threads do not mix

    def __len__(self) -> int:
        return len(self._numbers) // _WIDTH

    def add_finite(self, site: int, call: int, extremes: tuple[int, float, float]) -> None:
        """`extremes` is (numel, min, max) of a tensor whose elements are all finite."""
        self._extend(_pack(site, call, *extremes))

    def add(self, site: int, call: int, stats: Any) -> None:
        """`stats` is a tuple in the order of `EVENT` from "numel" on, or whatever `drain` can have resolved."""
        if type(stats) is tuple and stats[0] == stats[1] and stats[12] == _FINITE and stats[0]:
            self.add_finite(site, call, (stats[0], stats[5], stats[6]))
        else:
            key = next(self._next)
            self._other[key] = stats
            self._extend(_pack(site, call, -key, 0.0, 0.0))

    def sites(self, begin: int, end: int) -> list[int]:
        """The sites of the rows from `begin` up to `end`."""
        found: list[int] = self._between(begin, end)["site"].tolist()
        return found

    def set_sites(self, begin: int, sites: Sequence[int]) -> None:
        """Give the rows from `begin` on other sites."""
        rows = self._between(begin, begin + len(sites))
        rows["site"] = sites
        self._numbers[begin * _WIDTH : (begin + len(sites)) * _WIDTH] = rows.tobytes()

    def _between(self, begin: int, end: int) -> npt.NDArray[np.void]:
        """A copy: a view would keep other threads from adding."""
        return np.frombuffer(self._numbers[begin * _WIDTH : end * _WIDTH], _NUMBERS)

    def drain(self, step: int, resolve: Callable[[Any], tuple[Any, ...]]) -> npt.NDArray[np.void]:
        """The rows as an array of dtype `EVENT`, numbered from 1; none are left.

        Args:
            step: number of the step that they belong to.
            resolve: makes a tuple of statistics out of anything else that was added.
        """
        numbers, other = self._between(0, len(self)), self._other
        self._clear()
        numels = numbers["numel"]
        events = np.zeros(len(numbers), EVENT)
        events["seq"] = np.arange(1, len(events) + 1)
        events["step"], events["site"], events["call"] = step, numbers["site"], numbers["call"]
        events["numel"] = events["finite"] = np.maximum(numels, 0)
        events["min"], events["max"], events["absmin"] = numbers["min"], numbers["max"], np.nan
        events["first_bad"], events["columns"] = -1, _FINITE
        (odd,) = np.nonzero(numels < 0)
        if len(odd):
            packed = bytearray()
            for key in numels[odd].tolist():
                stats = other[-key]
                packed += _PACK_STATISTICS.pack(*(stats if type(stats) is tuple else resolve(stats)))
            events[_STATISTICS][odd] = np.frombuffer(packed, _STATISTICS_ROW)
        return events
