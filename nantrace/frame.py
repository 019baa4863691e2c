"""A trace as a table with names in place of ids: the columns that notebooks and exports share, and the pandas frame.

Knows no file format. What was not measured, or is not there, is missing in every column, never a made-up number.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nantrace.errors import MissingExtraError
from nantrace.events import Columns, Site, Trace

if TYPE_CHECKING:
    import pandas

#: Columns that describe the site, in the order in which tables show them.
SITE_COLUMNS = ("module", "phase", "role", "slot", "dtype", "shape", "op", "node", "where")
#: Columns of `EVENT` that stand before and behind those.
BEFORE, BEHIND = (
    ("seq", "step"),
    ("call", "numel", "finite", "nan", "posinf", "neginf", "min", "max", "absmin", "first_bad")
    + ("zero", "subnormal", "saturated"),
)
_MASKED = {name: Columns[name.upper()] for name in ("absmin", "first_bad", "zero", "subnormal", "saturated")}


def present(events: npt.NDArray[np.void], name: str) -> npt.NDArray[np.bool_]:
    """In which rows a column of `EVENT` tells something: it was measured, and there was something to measure."""
    there = np.ones(len(events), np.bool_)
    if name in _MASKED:
        there &= (events["columns"] & np.uint8(_MASKED[name])) != 0
    if events.dtype[name].kind == "f":
        there &= ~np.isnan(events[name])
    if name == "first_bad":
        there &= events["first_bad"] >= 0
    return there


def site_values(site: Site) -> tuple[str | None, ...]:
    """The texts of `SITE_COLUMNS`; a shape as JSON: "[8, 3]"."""
    named = (site.module, site.phase.label, site.role.label, site.slot, site.dtype)
    return (*named, json.dumps(list(site.shape)), site.op, site.node, site.where)


def numbered(values: Sequence[str | None]) -> tuple[npt.NDArray[np.int32], list[str]]:
    """The different texts among values, and for each value the number of its text; None is -1."""
    numbers = {text: number for number, text in enumerate(dict.fromkeys(v for v in values if v is not None))}
    return np.array([-1 if v is None else numbers[v] for v in values], np.int32), list(numbers)


def to_frame(trace: Trace) -> pandas.DataFrame:
    """The events with the names of their sites, as `Trace.to_frame` documents it."""
    try:
        import pandas  # optional, and slow to import
    except ImportError as error:
        raise MissingExtraError("to_frame needs pandas, which cannot be imported: pip install pandas.") from error
    columns: dict[str, Any] = {name: trace.events[name] for name in BEFORE}
    table = [site_values(site) for site in trace.sites]
    for position, name in enumerate(SITE_COLUMNS):
        columns[name] = _categorical(trace, [row[position] for row in table])
    for name in BEHIND:
        columns[name] = _nullable(trace.events, name)
    return pandas.DataFrame(columns)


def _categorical(trace: Trace, values: list[str | None]) -> Any:
    """One small number a row and each text once: a frame of millions of rows stays near the size of its events."""
    import pandas

    numbers, texts = numbered(values)
    # dtype object: pandas' own text cannot hold a lone surrogate.
    kind = pandas.CategoricalDtype(pandas.Index(texts, dtype=object))
    codes = numbers[trace.events["site"]] if len(numbers) else np.zeros(0, np.int32)
    return pandas.Categorical.from_codes(codes, dtype=kind)


def _nullable(events: npt.NDArray[np.void], name: str) -> Any:
    import pandas

    values = np.ascontiguousarray(events[name])
    if name not in _MASKED:
        return values
    there = present(events, name)
    if values.dtype.kind == "f":
        return np.where(there, values, np.nan)
    return pandas.arrays.IntegerArray(values, ~there)
