"""The births from which nonfinite rows came: followed over their parents, NaN and infinities apart.

Which of them can be damage: infinities that were put in as marks are not. Says nothing of faults.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nantrace.diagnosis.marks import reads_masks
from nantrace.diagnosis.modules.backward import same_gradient
from nantrace.diagnosis.modules.parents import STATE, enclosing, parents
from nantrace.diagnosis.modules.seen import LARGEST, Seen
from nantrace.events import Phase, Role

NAN, INF = "nan", "inf"
Root = tuple[int, str]


def births(seen: Seen, rows: Iterable[int]) -> dict[tuple[int, str], frozenset[Root]]:
    """(row, "nan" | "inf") -> the (row, class) pairs from which its elements of that class came.

    Parents precede their children, so one pass over ascending `rows` is enough; `rows` holds every nonfinite row of
    the steps concerned. NaN explains NaN; where no parent holds NaN, only a real infinity excuses one: a mask's does
    not.
    """
    roots: dict[tuple[int, str], frozenset[Root]] = {}
    for row in rows:
        above = parents(seen, row)
        nans = [p for p in above if seen.nan[p]]
        infs = [p for p in above if seen.infinite[p]]
        if seen.infinite[row]:
            roots[row, INF] = (
                _union(roots, infs, INF) or _union(roots, nans, NAN) or frozenset({(_first(seen, row), INF)})
            )
        if seen.nan[row]:
            found = _union(roots, nans, NAN)
            if not found:
                found = frozenset(root for root in _union(roots, infs, INF) if is_real(seen, root))
            roots[row, NAN] = found or frozenset({(_first(seen, row), NAN)})
    return roots


def _first(seen: Seen, row: int) -> int:
    """The row that stands for a birth: the gradient of one tensor has several, a recomputed tensor one in forward."""
    return _in_forward(seen, same_gradient(seen, row)[0])


def _in_forward(seen: Seen, row: int) -> int:
    """The row of forward that a recomputed one repeats, element for element; `row` itself if there is none.

    Forward may have dropped the value, so that its second copy alone reaches a sink; it was born before that.
    """
    if seen.phase[row] != Phase.RECOMPUTE:
        return row
    events, copy = seen.trace.events, seen.trace.events[row]
    for earlier in seen.rows(int(seen.step[row]), Role(int(seen.role[row])), phases=[Phase.FORWARD]):
        same = all(events[field][earlier] == copy[field] for field in ("nan", "posinf", "neginf", "first_bad"))
        if same and seen.name(int(earlier)) == seen.name(row):
            return int(earlier)
    return row


def _union(roots: dict[tuple[int, str], frozenset[Root]], rows: list[int], kind: str) -> frozenset[Root]:
    return frozenset().union(*(roots.get((row, kind), {(row, kind)}) for row in rows))


def died(seen: Seen, row: int) -> bool:
    """Whether modules read this output of a forward, and all that they put out of it was finite: a ReLU of -inf.

    Code outside of these modules may still have read it.
    """
    if seen.role[row] != Role.OUTPUT or seen.phase[row] != Phase.FORWARD:
        return False
    calls = seen.calls(int(seen.step[row])).values()
    readers = [call for call in calls if any(row in parents(seen, given) for given in call.inputs if seen.bad[given])]
    return bool(readers) and not any(seen.bad[out] for call in readers for out in call.outputs)


def is_external(seen: Seen, row: int) -> bool:
    """A birth that is no birth: the batch, or state that was nonfinite when it was first seen."""
    role = int(seen.role[row])
    if role == Role.INPUT:
        return seen.call_of(row) is None
    return role in STATE and seen.phase[row] != Phase.UPDATE


def is_real(seen: Seen, root: Root) -> bool:
    """Whether a root can be damage. Infinities that are all negative are taken for marks, unless they cannot be."""
    row, kind = root
    if kind == NAN or not seen.mark[row]:
        return True
    if is_external(seen, row):
        return seen.role[row] == Role.INPUT and _datalike(seen, row)
    return overflowed(seen, row) or row in misread_marks(seen)


def misread_marks(seen: Seen) -> frozenset[int]:
    """Rows of -inf, where they were put in, that a module which is meant to read no mask turned into NaN or +inf."""
    if not seen.misread:
        found: set[int] = set()
        for row in np.flatnonzero((seen.nan | seen.positive) & np.isin(seen.role, [int(Role.INPUT), int(Role.OUTPUT)])):
            call, above = enclosing(seen, int(row)), parents(seen, int(row))
            if call is None or not all(seen.mark[p] for p in above):
                continue
            for read in (p for p in above if p in call.inputs):
                meant, sources = reads_masks(seen, call, read), put_in(seen, read)
                # Code that hands -inf to a module of unknown kind is nearer to blame than a module that put it out.
                made_around = all(seen.role[p] == Role.INPUT and not is_external(seen, p) for p in sources)
                if meant is False or (meant is None and made_around):
                    found |= sources
        seen.misread.append(frozenset(found))
    return seen.misread[0]


def put_in(seen: Seen, row: int) -> set[int]:
    """The earliest rows of -inf from which the -inf of `row` came."""
    waiting, found, known = [row], set(), set()
    while waiting:
        at = waiting.pop()
        above = [p for p in parents(seen, at) if p not in known]
        known.update(above)
        waiting += above
        if not parents(seen, at):
            found.add(at)
    return found


def overflowed(seen: Seen, row: int) -> bool:
    """Infinities that can only have left the range of their dtype: out of a linear map, or beside values near it."""
    if not seen.infinite[row]:
        return False
    site = seen.site(row)
    largest = LARGEST.get(site.dtype)
    if largest is not None and seen.absmax(row) > largest / 4:
        return True
    cls = seen.classes.get(site.module or "", "")
    return seen.role[row] == Role.OUTPUT and not seen.nan[row] and ("Linear" in cls or "Conv" in cls)


def _datalike(seen: Seen, row: int) -> bool:
    """At least two different nonzero finite values: features, not a 0 / -inf mask."""
    low, high = float(seen.trace.events["min"][row]), float(seen.trace.events["max"][row])
    return low < high and low != 0 and high != 0
