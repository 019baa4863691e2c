"""Where a birth may lie that no row shows: submodules that were left out, and a model whose own call was not seen.

Knows which modules were called under observation; gives no blame.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import re

import numpy as np

from nantrace.diagnosis.modules.backward import is_tame
from nantrace.diagnosis.modules.parents import enclosing, upwards
from nantrace.diagnosis.modules.seen import LARGEST, Call, Seen
from nantrace.events import ModuleEntry, Phase, Role, distinct

#: Modules that hold others and are never called.
_HOLDERS = ("ModuleDict", "ModuleList", "ParameterDict", "ParameterList")
_IGNORED_LABEL = -100  # the default of `ignore_index` in PyTorch's cross entropy
_MOST = 8
#: PyTorch's modules that have weights: outside the model these are not looked at.
_WEIGHTED = re.compile(
    r"<(.*Linear|.*Conv(Transpose)?[123]d|.*Norm[123]?d?|Embedding.*|.*(RNN|LSTM|GRU).*|Bilinear|.*Transformer.*)>"
)


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


def beside_outputs(seen: Seen, loss: int) -> bool:
    """Whether a loss has a nonfinite term that did not come through the model's output.

    Such as an auxiliary loss, which a module may have computed in its forward and kept as an attribute: the gradient is
    finite at every output of the model, and nonfinite elsewhere inside.
    """
    step = int(seen.step[loss])
    arrived = [r for call in seen.outermost(step) if not call.foreign for r in call.grad_outputs if r > loss]
    if not arrived or any(seen.bad[r] for r in arrived) or takes_labels(seen, loss):
        return False
    inside = seen.rows(step, Role.GRAD, Role.GRAD_OUTPUT, phases=[Phase.BACKWARD])
    return bool(seen.bad[inside[inside > loss]].any())


def transformed(seen: Seen, step: int) -> bool:
    """Whether modules ran inside a functorch transform, where no tensor of theirs can be read."""
    return any("functorch" in str(note) for note in seen.ledger.get(step, {}).get("notes", ()))


def uncleared(seen: Seen, row: int) -> bool:
    """Whether backward added to gradients that lay in `.grad` before the step: they may have been nonfinite."""
    return bool(seen.ledger.get(int(seen.step[row]), {}).get("uncleared"))


def unseen_words(seen: Seen) -> str:
    """Why no call of the model is there."""
    if seen.trace.meta.get("modules"):
        return "No call of the model itself was recorded: it is not among the chosen modules."
    return "No call of the model itself was seen: calling model.forward, or another of its methods, runs no hooks."


def came_in(seen: Seen, row: int) -> bool:
    """Whether `row` is an argument that data comes in by: the batch, or what was made of it.

    Of the model itself, or of the first call of a step, if that was called from outside.
    """
    call = seen.call_of(row)
    if seen.role[row] != Role.INPUT or call is None or call.parent is not None:
        return False
    return call.module == "" or not called_before(seen, row)


def called_before(seen: Seen, row: int) -> bool:
    """Whether a call of the step had returned before `row`."""
    return any(other.last < row for other in seen.calls(int(seen.step[row])).values())


def finite_batch(seen: Seen, row: int) -> bool:
    """Whether the batch was handed to the trace, and found finite, though `row` came into the model nonfinite."""
    batch = [r for r in seen.rows(int(seen.step[row]), Role.INPUT) if seen.call[r] == 0]
    return bool(batch) and came_in(seen, row) and not any(seen.bad[r] for r in batch)


def numbers_given(seen: Seen, row: int) -> bool:
    """Whether the batch of the step of `row` was handed to the trace, with floating-point numbers in it."""
    given = (int(r) for r in seen.rows(int(seen.step[row]), Role.INPUT) if seen.call[r] == 0)
    return any("float" in seen.site(r).dtype for r in given)


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


def updates_before(seen: Seen) -> bool:
    """Whether updates were made under observation before the first step that the trace holds: one step of many."""
    if not int(seen.step[0]):  # what an optimizer did before it was watched does not count
        return False
    row = seen.ledger.get(int(seen.step[0]), {})
    return int(row.get("attempted_total") or 0) > int(row.get("attempted") or 0)


def left_out(seen: Seen, row: int) -> bool:
    """Whether no gradient came to the outermost call around `row`, though one came to another call of that module."""
    calls = seen.calls(int(seen.step[row]))
    call = seen.call_of(row)
    while call is not None and call.parent is not None:
        call = calls[call.parent]
    if call is None or call.grad_outputs:
        return False
    every = (other for step in distinct(seen.step) for other in seen.calls(int(step)).values())
    return any(other.grad_outputs and other.module == call.module for other in every)


def seen_after_backward(seen: Seen, row: int) -> bool:
    """Whether the gradient of `row` was looked at when backward had accumulated it, earlier in the step."""
    rows = seen.rows(int(seen.step[row]), Role.GRAD, phases=[Phase.BACKWARD])
    return any(r < row and seen.name(int(r)) == seen.name(row) for r in rows)


def may_hide(seen: Seen, row: int) -> float | None:
    """The largest magnitude that the forward behind a gradient read, if exp of it leaves the range of its dtype.

    Such an infinity may have been clamped or masked away before anybody saw it, and backward trips over it: then it
    was not born in backward. Linear maps hide nothing.
    """
    call = enclosing(seen, row)
    if call is not None and (is_tame(seen, call) or call.children):
        return None
    if call is None:
        calls = [call for call in seen.outermost(int(seen.step[row])) if not call.foreign]
        read = [r for each in calls for r in each.outputs]
    else:
        read = list(call.inputs)
    for r in read:
        size, largest = seen.absmax(r), LARGEST.get(seen.site(r).dtype)
        if r < row and largest is not None and size > math.log(largest):
            return size
    return None


def weights_unseen(seen: Seen, row: int) -> bool:
    """Whether a module outside the model, of a kind that has weights, put out what its inputs do not explain."""
    call = enclosing(seen, row)
    return call is not None and bool(_WEIGHTED.fullmatch(call.module))


def turned_negative(seen: Seen, row: int) -> int | None:
    """The row of a parameter that an update made negative for the first time, in the module whose own code made NaN."""
    call, step = enclosing(seen, row), int(seen.step[row])
    if call is None or not seen.nan[row]:
        return None
    low = seen.trace.events["min"]
    for now in seen.rows(step, Role.PARAM, phases=[Phase.FORWARD]):
        if seen.site(int(now)).module != call.module or not low[now] < 0 or now > row:
            continue
        rows = seen.rows_of_name[int(Role.PARAM), seen.name(int(now))]
        before = rows[(rows < now) & ((seen.step[rows] < step - 1) | (seen.phase[rows] == Phase.FORWARD))]
        if before.size and (low[before] > 0).all():
            return int(now)
    return None


def may_be_data(seen: Seen, row: int) -> bool:
    """Whether the first argument that a module's own code hands on may be data that it took from elsewhere.

    Nothing that it was given, or got from a module inside, need be in it.
    """
    call, around = seen.call_of(row), enclosing(seen, row)
    if seen.role[row] != Role.INPUT or call is None or around is None:
        return False
    return around.children[:1] == (call.key,)
