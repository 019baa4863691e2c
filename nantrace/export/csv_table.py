"""One row an event, as comma-separated values in UTF-8.

An empty cell is what was not measured or is not there. The model itself, whose name is empty, is "(model)". A text
that a spreadsheet would take for a formula gets an apostrophe in front, and so does one that begins with an apostrophe:
take one away from texts that begin with it to have the name again. Numbers are left alone.
"""

from __future__ import annotations

import csv
from typing import Any

import numpy as np
import numpy.typing as npt

from nantrace.events import Trace
from nantrace.export.blocks import Progress, blocks, site_texts
from nantrace.frame import BEFORE, BEHIND, SITE_COLUMNS, present

#: What begins a formula in a spreadsheet, some in East Asian settings only; and the mark that says it is text.
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", "'")


def write_csv(trace: Trace, path: str, progress: Progress = None) -> int:
    """Writes the table and returns the number of its rows, without the head."""
    cells = np.array([_cells(texts) for texts in site_texts(trace)], object).reshape(-1, len(SITE_COLUMNS))
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*BEFORE, *SITE_COLUMNS, *BEHIND])
        for events in blocks(trace, progress):
            named = cells[events["site"]]
            columns = [events[name].tolist() for name in BEFORE]
            columns += [named[:, number].tolist() for number in range(len(SITE_COLUMNS))]
            columns += [_numbers(events, name) for name in BEHIND]
            writer.writerows(zip(*columns, strict=True))
    return len(trace)


def guarded(text: str) -> str:
    """The text, with an apostrophe in front where a spreadsheet would compute it."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def _cells(texts: tuple[str | None, ...]) -> list[str]:
    module, *others = texts
    return [guarded("(model)" if module == "" else module or ""), *(guarded(text or "") for text in others)]


def _numbers(events: npt.NDArray[np.void], name: str) -> list[Any]:
    there = present(events, name)
    if there.all():
        return list(events[name].tolist())
    cells = events[name].astype(object)
    cells[~there] = ""
    return list(cells.tolist())
