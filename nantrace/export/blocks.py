"""A trace in blocks of rows, and its sites as texts that are safe to hand on. Knows no format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from nantrace.events import Trace
from nantrace.frame import site_values
from nantrace.render.cells import harmless

_ROWS = 65_536  # rows turned into Python's or a library's objects at once: some 50 MB


#: Told a line about how far the work is; None if nobody wants to know.
Progress = Callable[[str], None] | None


def blocks(trace: Trace, progress: Progress = None) -> Iterator[npt.NDArray[np.void]]:
    """The events, in order; tells after each block how many were taken."""
    for begin in range(0, len(trace), _ROWS):
        events = trace.events[begin : begin + _ROWS]
        yield events
        if progress is not None:
            progress(f"wrote {begin + len(events):,} of {len(trace):,} events")


def site_texts(trace: Trace) -> list[tuple[str | None, ...]]:
    """For each site the texts of `SITE_COLUMNS`, with escapes for what a terminal would obey or hide."""
    return [tuple(None if text is None else harmless(text) for text in site_values(site)) for site in trace.sites]
