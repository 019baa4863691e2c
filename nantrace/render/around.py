"""The rows of a trace around the culprit, as cells of text: what a reader looks at to believe a verdict."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nantrace.diagnosis.verdict import Verdict
from nantrace.events import Phase, Role, Site, Trace
from nantrace.render.wording import module_of, rows_of_path

_HEAD = ("", "step", "#", "module", "phase", "role", "dtype", "absmax", "nan", "inf")
_AROUND = 3  # rows of the table on each side of the culprit


def rows_around(trace: Trace, verdict: Verdict) -> tuple[list[list[str]], int]:
    """The rows around the culprit, and those of the path from it.

    Returns:
        A head and rows of as many cells, and the number of the culprit among them; no rows if the trace holds none.
    """
    path = rows_of_path(trace, verdict)
    if not path:
        return [], 0
    culprit = path[0]
    shown = sorted({*_earlier(trace, culprit), *_neighbours(trace, culprit), *path[:_AROUND]})
    rows = [list(_HEAD), *(_cells(trace, row, row == culprit) for row in shown)]
    if len({row[1] for row in rows[1:]}) == 1:  # one step: it is said above
        rows = [[row[0], "", *row[2:]] for row in rows]
    return rows, 1 + shown.index(culprit)


def _earlier(trace: Trace, culprit: int) -> list[int]:
    """The latest row of the same site in an earlier step: how large it was when all was well."""
    earlier = trace.events[:culprit]
    same = (earlier["site"] == trace.events["site"][culprit]) & (earlier["step"] < trace.events["step"][culprit])
    return [int(row) for row in np.flatnonzero(same)[-1:]]


def _neighbours(trace: Trace, culprit: int) -> Iterable[int]:
    """Rows before and after of the same step that pair with the culprit's phase, gradients and outputs before state."""
    site = trace.site(trace.events[culprit])
    step = trace.events["step"][culprit]
    roles = {Role.OUTPUT, Role.LOSS, site.role} if site.phase is not Phase.BACKWARD else set(Role)
    wanted = [row for row in range(max(culprit - 400, 0), min(culprit + 400, len(trace)))]
    kept = [
        row
        for row in wanted
        if row == culprit or (trace.events["step"][row] == step and trace.site(trace.events[row]).role in roles)
    ]
    place = kept.index(culprit)
    return kept[max(place - _AROUND, 0) : place + _AROUND + 1]


def _cells(trace: Trace, row: int, culprit: bool) -> list[str]:
    event = trace.events[row]
    site = trace.site(event)
    infinite = int(event["posinf"]) + int(event["neginf"])
    low, high = float(event["min"]), float(event["max"])
    size = "." if np.isnan(low) or np.isnan(high) else f"{max(abs(low), abs(high)):.2e}"
    nan = f"{int(event['nan']):,}" if event["nan"] else "."
    return [
        ">" if culprit else "",
        f"{int(event['step'])}",
        f"{int(event['seq'])}",
        module_of(site),
        site.phase.label,
        site.op if site.op is not None else f"{site.role.label}{_part(site)}",
        site.dtype,
        size,
        nan,
        f"{infinite:,}" if infinite else ".",
    ]


def _part(site: Site) -> str:
    """What of a slot its role does not say: "output[0].logits" is "[0].logits", "kwargs.mask" stays, apart."""
    if site.role in (Role.PARAM, Role.BUFFER, Role.GRAD, Role.STATE, Role.LOSS) or site.module is None:
        return ""
    rest = site.slot.removeprefix("output").removeprefix("args")
    return rest if rest.startswith(("[", ".")) or not rest else f" {rest}"
