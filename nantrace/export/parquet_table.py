"""One row an event, as an Apache Parquet table: texts as dictionaries, null for what was not measured or is not there.

Here the model itself has the empty name, and null is no module, as in `Trace.to_frame`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nantrace.errors import MissingExtraError
from nantrace.events import EVENT, Trace
from nantrace.export.blocks import Progress, blocks, site_texts
from nantrace.frame import BEFORE, BEHIND, SITE_COLUMNS, numbered, present


def library() -> Any:
    """pyarrow, with its Parquet part.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import pyarrow  # optional, and slow to import
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError(
            "exporting to Parquet needs pyarrow, which cannot be imported: pip install pyarrow."
        ) from error
    return pyarrow


def write_parquet(trace: Trace, path: str, progress: Progress = None) -> int:
    """Writes the table, a row group a block, and returns the number of its rows."""
    pyarrow = library()
    table = site_texts(trace)
    named = [numbered([row[position] for row in table]) for position in range(len(SITE_COLUMNS))]
    schema = _schema(pyarrow)
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for events in blocks(trace, progress):
            columns = [_plain(pyarrow, events, name) for name in BEFORE]
            columns += [_texts(pyarrow, events, codes, texts) for codes, texts in named]
            columns += [_plain(pyarrow, events, name) for name in BEHIND]
            writer.write_batch(pyarrow.record_batch(columns, schema=schema))
    return len(trace)


def _schema(pyarrow: Any) -> Any:
    text = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    numbers = {name: pyarrow.from_numpy_dtype(EVENT[name]) for name in (*BEFORE, *BEHIND)}
    fields = [(name, numbers[name]) for name in BEFORE]
    fields += [(name, text) for name in SITE_COLUMNS]
    fields += [(name, numbers[name]) for name in BEHIND]
    return pyarrow.schema(fields)


def _plain(pyarrow: Any, events: npt.NDArray[np.void], name: str) -> Any:
    return pyarrow.array(np.ascontiguousarray(events[name]), mask=~present(events, name))


def _texts(pyarrow: Any, events: npt.NDArray[np.void], codes: npt.NDArray[np.int32], texts: list[str]) -> Any:
    found = codes[events["site"]]
    indices = pyarrow.array(found, mask=found < 0)
    return pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(texts, pyarrow.string()))
