"""Which rows of a trace the verdict calls births. Reads a verdict, gives none."""

from __future__ import annotations

import numpy as np

from nantrace.diagnosis.verdict import Origin, Verdict
from nantrace.events import Trace, nonfinite_rows
from nantrace.render.wording import rows_of_path


def births(trace: Trace, verdict: Verdict | None) -> list[int]:
    """Rows where values were born: that of the verdict's origin first, then those of the other places it names."""
    if verdict is None or not len(trace):
        return []
    path = rows_of_path(trace, verdict)
    origins = [*([] if path or verdict.origin is None else [verdict.origin]), *verdict.also]
    found = [*path[:1], *(row for origin in origins if (row := _row(trace, origin)) is not None)]
    return list(dict.fromkeys(found))


def _row(trace: Trace, origin: Origin) -> int | None:
    """The first nonfinite row at the origin's place: of its op, of its tensor, else of its module in that phase."""
    if origin.op is not None:
        same = [
            n for n, s in enumerate(trace.sites) if (s.op, s.module, s.node) == (origin.op, origin.module, origin.node)
        ]
        named = same or _of_module(trace, origin)
    else:
        named = [n for n, s in enumerate(trace.sites) if origin.tensor in (s.tensor, s.slot)] or _of_module(
            trace, origin
        )
    if not named:
        return None
    rows = np.flatnonzero(np.isin(trace.events["site"], named) & nonfinite_rows(trace.events))
    return int(rows[0]) if rows.size else None


def _of_module(trace: Trace, origin: Origin) -> list[int]:
    if origin.module is None:
        return []
    return [
        n
        for n, site in enumerate(trace.sites)
        if site.module == origin.module and origin.phase in (None, site.phase.label)
    ]
