"""Where a birth may lie that no row shows: submodules that were left out, and a model whose own call was not seen.

Knows which modules were called under observation; gives no blame.
"""

from __future__ import annotations

import fnmatch
import itertools

import numpy as np

from nantrace.diagnosis.parents import enclosing, upwards
from nantrace.diagnosis.seen import Call, Seen
from nantrace.events import ModuleEntry, Role

#: Modules that hold others and are never called.
_HOLDERS = ("ModuleDict", "ModuleList", "ParameterDict", "ParameterList")
_IGNORED_LABEL = -100  # the default of `ignore_index` in PyTorch's cross entropy
_MOST = 8


def region(seen: Seen, row: int) -> tuple[str, ...]:
    """The modules that were left out of the trace and may have run within the code that made `row`.

    Not those inside a module that was observed: what that one put out was seen. None where every module was watched:
    then one that has no call was not called.
    """
    call = enclosing(seen, row)
    if call is None or call.foreign:
        return ()
    called = {call.module for call in seen.calls(int(seen.step[row])).values()}
    prefix = f"{call.module}." if call.module else ""
    inside = (e for e in seen.trace.modules if e.fqn and e.fqn.startswith(prefix) and e.cls not in _HOLDERS)
    left_out = (entry.fqn for entry in inside if not _was_watched(seen, entry))
    fits = (fqn for fqn in left_out if next((a for a in upwards(fqn) if a in called), None) == call.module != fqn)
    return tuple(itertools.islice(fits, _MOST))


def _was_watched(seen: Seen, entry: ModuleEntry) -> bool:
    """Whether the options of the trace chose this module; unknown options chose nothing."""
    meta = seen.trace.meta
    if "modules" not in meta:
        return False
    names = (entry.fqn, *entry.aliases)
    shallow = meta.get("depth") is None or any(name.count(".") + 1 <= meta["depth"] for name in names)
    patterns = meta["modules"]
    return shallow and (patterns is None or any(fnmatch.fnmatch(n, pattern) for n in names for pattern in patterns))


def model_unseen(seen: Seen, step: int) -> bool:
    """Whether the step shows no call of the model itself, though it can be called: what its own code did is unknown."""
    if seen.classes.get("", _HOLDERS[0]) in _HOLDERS:
        return False
    return all(call.module != "" for call in seen.calls(step).values())


def unseen_words(seen: Seen) -> str:
    """Why no call of the model is there."""
    if seen.trace.meta.get("modules"):
        return "No call of the model itself was recorded: it is not among the chosen modules."
    return "No call of the model itself was seen: calling model.forward, or another of its methods, runs no hooks."


def came_in(seen: Seen, row: int) -> bool:
    """Whether `row` is an argument of a call from outside, the first of its step: the batch, or what was made of it."""
    call = seen.call_of(row)
    if seen.role[row] != Role.INPUT or call is None or call.parent is not None:
        return False
    return not any(other.last < row for other in seen.calls(int(seen.step[row])).values())


def finite_batch(seen: Seen, row: int) -> bool:
    """Whether the batch was handed to the trace, and found finite, though `row` came into the model nonfinite."""
    batch = [r for r in seen.rows(int(seen.step[row]), Role.INPUT) if seen.call[r] == 0]
    return bool(batch) and came_in(seen, row) and not any(seen.bad[r] for r in batch)


def last_inside(seen: Seen, call: Call, row: int) -> str | None:
    """The submodule that was the last to return to the code of `call` before `row`."""
    calls = seen.calls(int(seen.step[row]))
    before = [calls[key] for key in call.children if calls[key].last < row]
    return before[-1].module if before else None


def ignored_labels(seen: Seen, row: int) -> int | None:
    """The row of integers that are all -100, where `row` is a single NaN such as a mean over no label gives."""
    if not seen.nan[row] or int(seen.trace.events["numel"][row]) != 1:
        return None
    low, high = seen.trace.events["min"], seen.trace.events["max"]
    for given in seen.rows(int(seen.step[row]), Role.INPUT):
        integers = seen.site(int(given)).dtype.startswith("int")
        if given < row and integers and low[given] == high[given] == _IGNORED_LABEL:
            return int(given)
    return None


def takes_labels(seen: Seen, row: int) -> bool:
    """Whether `row` is a single NaN and some integer that was given before is -100, as ignored labels are."""
    if not seen.nan[row] or int(seen.trace.events["numel"][row]) != 1:
        return False
    given = seen.rows(int(seen.step[row]), Role.INPUT)
    return bool(np.any(seen.trace.events["min"][given[given < row]] == _IGNORED_LABEL))
