"""Rows that wait to become events: what was seen since the last drain, as plain numbers in one array.

A row of a tensor that was finite is five numbers and nothing that the garbage collector has to visit; any other keeps
its statistics in a list beside them. Knows nothing of tensors, sites or devices.
"""

from __future__ import annotations

import itertools
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nantrace.events import EVENT, Columns

_WIDTH = 5  # site, call, numel, min, max
_FINITE = int(Columns.FIRST_BAD)  # the columns of a row that is told by its extremes
_STATISTICS = list(EVENT.names[4:])  # type: ignore[index]
_STATISTICS_ROW = np.dtype([(name, EVENT[name]) for name in _STATISTICS])
# Packed straight into this layout: numpy needs several times as long to assign a tuple of 13 fields.
_PACK = struct.Struct("<QQQQQdddqIIIB")
assert _PACK.size == _STATISTICS_ROW.itemsize


class Rows:
    """Rows in order of execution. Any thread may add.

    Every number is exact as a float64: sites and calls are 32 bits wide, and no tensor has 2**53 elements.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._numbers = array("d")
        self._other: dict[int, Any] = {}
        self._next = itertools.count(1)
        self._extend = self._numbers.extend

    def __len__(self) -> int:
        return len(self._numbers) // _WIDTH

    def add(self, site: int, call: int, stats: Any) -> None:
        """`stats` is a tuple in the order of `EVENT` from "numel" on, or whatever `drain` can have resolved."""
        if type(stats) is tuple and stats[0] == stats[1] and stats[12] == _FINITE and stats[0]:
            # One call into C that runs no Python code: rows of several threads do not mix.
            self._extend((site, call, stats[0], stats[5], stats[6]))
        else:
            key = next(self._next)
            self._other[key] = stats
            self._extend((site, call, -key, 0.0, 0.0))

    def sites(self, begin: int, end: int) -> list[int]:
        """The sites of the rows from `begin` up to `end`."""
        return [int(site) for site in self._numbers[begin * _WIDTH : end * _WIDTH : _WIDTH]]

    def set_sites(self, begin: int, sites: Sequence[int]) -> None:
        """Give the rows from `begin` on other sites."""
        for index, site in enumerate(sites, begin):
            self._numbers[index * _WIDTH] = site

    def drain(self, step: int, resolve: Callable[[Any], tuple[Any, ...]]) -> npt.NDArray[np.void]:
        """The rows as an array of dtype `EVENT`, numbered from 1; none are left.

        Args:
            step: number of the step that they belong to.
            resolve: makes a tuple of statistics out of anything else that was added.
        """
        numbers, other = np.array(self._numbers), self._other
        self._clear()
        sites, calls, numels, lows, highs = numbers.reshape(-1, _WIDTH).T
        events = np.zeros(len(sites), EVENT)
        events["seq"] = np.arange(1, len(events) + 1)
        events["step"], events["site"], events["call"] = step, sites, calls
        events["numel"] = events["finite"] = np.maximum(numels, 0)
        events["min"], events["max"], events["absmin"] = lows, highs, np.nan
        events["first_bad"], events["columns"] = -1, _FINITE
        (odd,) = np.nonzero(numels < 0)
        if len(odd):
            packed = bytearray()
            for key in numels[odd]:
                stats = other[-int(key)]
                packed += _PACK.pack(*(stats if type(stats) is tuple else resolve(stats)))
            events[_STATISTICS][odd] = np.frombuffer(packed, _STATISTICS_ROW)
        return events
