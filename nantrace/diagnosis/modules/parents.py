"""Who can have given a row of a module trace its nonfinite values.

A trace of modules shows what went into a call and what came out, not what ran between. What explains a nonfinite row
is therefore what was nonfinite in its *scope*: the inputs of the call whose code made it, the outputs of the calls
inside, the state that the module holds; in backward the same from the other end. A row that its scope does not
explain is a birth. Says nothing of faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from nantrace.diagnosis.modules.backward import asked_for, gradient_maker, same_gradient
from nantrace.diagnosis.modules.seen import Call, Handed, Seen
from nantrace.events import Phase, Role

STATE = (Role.PARAM, Role.BUFFER, Role.STATE)
_GRADIENT_FLOW = (Role.GRAD_OUTPUT, Role.GRAD_INPUT)


def parents(seen: Seen, row: int) -> tuple[int, ...]:
    """The nonfinite rows that explain `row`, in order; empty for a birth and for what was nonfinite from the start."""
    if row not in seen.parents:
        seen.parents[row] = _parents(seen, row)
    return seen.parents[row]


def _parents(seen: Seen, row: int) -> tuple[int, ...]:
    role, phase = Role(int(seen.role[row])), Phase(int(seen.phase[row]))
    if role in STATE and phase is not Phase.UPDATE:
        return _same_before(seen, row, role)
    if phase is Phase.UPDATE:
        return _of_update(seen, row, role)
    if role is Role.GRAD:
        return _of_gradient(seen, row, phase)
    if role in _GRADIENT_FLOW:
        return _of_gradient_flow(seen, row)
    call = seen.call_of(row)
    if call is None:
        return () if role is Role.INPUT else _outside(seen, row)
    if role is Role.INPUT:
        return _around(seen, call, row)
    return _inside(seen, call, row)


def enclosing(seen: Seen, row: int) -> Call | None:
    """The call whose own code made this row; None outside every call."""
    if int(seen.role[row]) in _GRADIENT_FLOW:
        return gradient_maker(seen, row)
    call = seen.call_of(row)
    if call is None or seen.role[row] == Role.OUTPUT:
        return call
    return seen.calls(int(seen.step[row])).get(call.parent) if call.parent is not None else None


def _same_before(seen: Seen, row: int, role: Role) -> tuple[int, ...]:
    """The row in which the same tensor turned nonfinite, if it has been so ever since."""
    rows = seen.rows_of_name.get((int(role), seen.name(row)), np.array([], dtype=np.int64))
    earlier = rows[rows < row]
    finite = np.flatnonzero(~seen.bad[earlier])
    since = earlier[int(finite[-1]) + 1 :] if finite.size else earlier
    return (int(since[0]),) if since.size else ()


def _bad(seen: Seen, rows: Iterable[int], before: int) -> list[int]:
    return [row for row in rows if row < before and seen.bad[row]]


def _inside(seen: Seen, call: Call, row: int) -> tuple[int, ...]:
    """What an output of `call` was made of."""
    step = int(seen.step[row])
    calls = seen.calls(step)
    made = _alive(seen, (step, call.key), lambda: [calls[key] for key in call.children], row)
    return tuple(sorted({*_bad(seen, call.inputs, row), *made, *_state(seen, call.module, row)}))


def _around(seen: Seen, call: Call, row: int) -> tuple[int, ...]:
    """What an input of `call` was made of, by the code around the call."""
    step = int(seen.step[row])
    calls = seen.calls(step)
    if call.parent is None:
        return _outside(seen, row)
    around = calls[call.parent]
    made = _alive(seen, (step, around.key), lambda: [calls[key] for key in around.children], row)
    return tuple(sorted({*_bad(seen, around.inputs, row), *made, *_state(seen, around.module, row)}))


def _outside(seen: Seen, row: int) -> tuple[int, ...]:
    """What code outside every module can have read: the batch, what the outermost calls returned, and gradients."""
    step = int(seen.step[row])
    batch = [int(r) for r in seen.rows(step, Role.INPUT) if seen.call[r] == 0]
    made = _alive(seen, (step, None), lambda: sorted(seen.outermost(step), key=lambda call: call.last), row)
    return tuple(sorted({*_bad(seen, batch, row), *_bad(seen, asked_for(seen, row), row), *made}))


def _alive(seen: Seen, scope: tuple[int, int | None], calls: Callable[[], list[Call]], row: int) -> list[int]:
    """Nonfinite outputs of `calls` before `row`; if any is left, without those that the next call did not get to see.

    `calls` are those of one scope, named by step and enclosing call, in order of time; they do not overlap. Calls in
    one scope mostly hand on to each other: an overflow that was clamped away shows in no later input. What a call
    read and put out again stands for all that was alive before it, so that a row of a long chain has few parents.
    """
    if scope not in seen.handed:
        seen.handed[scope] = _handed(seen, calls())
    handed = seen.handed[scope]
    past = int(np.searchsorted(handed.last, row))
    alive = np.flatnonzero(~(handed.finite[:past] & (handed.read[:past] < row)))
    if not alive.size:
        alive = np.arange(past)
    outputs = handed.outputs[alive]
    kept = np.zeros(len(alive), dtype=bool)
    for holds, passed in ((seen.nan, handed.passed_nan), (seen.infinite, handed.passed_infinite)):
        (stand_in,) = np.nonzero(passed[alive])
        since = stand_in[-1] if stand_in.size else 0
        kept[since:] |= holds[outputs[since:]]
    return [int(r) for r in outputs[kept].tolist()]


def _handed(seen: Seen, calls: list[Call]) -> Handed:
    """What the calls of a scope handed on: kept, since every later row of the scope asks for it."""
    found: list[tuple[int, int, int, bool, bool, bool]] = []
    read, finite = len(seen.bad), False  # the next call that has inputs: its first row, whether they were finite
    for call in reversed(calls):
        nan, infinite = (any(kind[row] for row in call.inputs) for kind in (seen.nan, seen.infinite))
        dead = finite and not _is_differentiated(seen, call)
        found += [
            (row, call.last, read, dead, bool(nan and seen.nan[row]), bool(infinite and seen.infinite[row]))
            for row in reversed(call.outputs)
            if seen.bad[row]
        ]
        if call.inputs:
            read, finite = call.first, not any(seen.bad[row] for row in call.inputs)
    columns = np.array(found[::-1], dtype=np.int64).reshape(-1, 6).T
    return Handed(*columns[:3], *(column.astype(bool) for column in columns[3:]))


def _is_differentiated(seen: Seen, call: Call) -> bool:
    """Whether every element of what `call` put out had a gradient: what was masked or clamped away has 0."""
    low, high = seen.trace.events["min"], seen.trace.events["max"]
    return any(not seen.bad[row] and (low[row] > 0 or high[row] < 0) for row in call.grad_outputs)


def _state(seen: Seen, module: str, row: int) -> list[int]:
    """Nonfinite parameters and buffers that the code of `module` can have read, as they were last seen."""
    if module.startswith("<"):
        return []
    step = int(seen.step[row])
    found = []
    for first, _, rows in seen.bad_state:
        if first >= row:
            break
        last = int(rows[np.searchsorted(rows, row) - 1])
        owner = seen.site(last).module or ""
        if seen.bad[last] and (owner == module or _reads_elsewhere(seen, step, owner, module, last)):
            found.append(last)
    return found


def _reads_elsewhere(seen: Seen, step: int, owner: str, module: str, row: int) -> bool:
    return _read_around(seen, step, owner, module, seen.name(row)) or _shares(seen, step, module, row)


def _shares(seen: Seen, step: int, module: str, row: int) -> bool:
    """Whether a linear layer without a weight of its own multiplies by that of another: a tensor is recorded once."""
    site = seen.site(row)
    if seen.classes.get(module) != "Linear" or site.role is not Role.PARAM or len(site.shape) != 2:
        return False
    own = seen.rows_of_name.get((int(Role.PARAM), f"{module}.weight"))
    if own is not None and (seen.step[own] == step).any():
        return False
    mine = [call for call in seen.calls(step).values() if call.module == module]
    shapes = [(seen.site(o).shape[-1:], seen.site(i).shape[-1:]) for c in mine for o in c.outputs for i in c.inputs]
    return (site.shape[:1], site.shape[1:]) in shapes


def _read_around(seen: Seen, step: int, owner: str, module: str, name: str) -> bool:
    """Whether `module` may read state of a module below it that is itself never called."""
    called = {call.module for call in seen.calls(step).values()}
    nearest = next((around for around in upwards(owner) if around in called), None)
    return nearest == module != owner and _has_gradient(seen, step, name)


def _has_gradient(seen: Seen, step: int, name: str) -> bool:
    """Whether backward reached a parameter: those of a module that is never called may be read by the one around."""
    rows = seen.rows_of_name.get((int(Role.GRAD), name))
    return rows is not None and bool((seen.step[rows] == step).any())


def _of_gradient_flow(seen: Seen, row: int) -> tuple[int, ...]:
    """What explains the gradient of a tensor: whatever explains it at one of the modules that made or read it."""
    group = same_gradient(seen, row)
    found = {r for member in group for r in _of_one_end(seen, member, Role(int(seen.role[member])))}
    return tuple(sorted(r for r in found if r < group[0]))


def _of_one_end(seen: Seen, row: int, role: Role) -> tuple[int, ...]:
    call = seen.call_of(row)
    if call is None:
        return ()
    if role is Role.GRAD_INPUT:
        return _backward_inside(seen, call, row)
    if call.parent is None:
        return _backward_outside(seen, row)
    return _backward_inside(seen, seen.calls(int(seen.step[row]))[call.parent], row)


def _backward_inside(seen: Seen, call: Call, row: int) -> tuple[int, ...]:
    """Gradients that reached the backward of `call`, and the values of its forward, which backward reads again."""
    calls = seen.calls(int(seen.step[row]))
    inner = [calls[key] for key in call.children]
    gradients = [*call.grad_outputs, *(r for c in inner for r in c.grad_inputs)]
    values = [*call.inputs, *call.outputs, *(r for c in inner for r in c.outputs)]
    for again in (c for c in calls.values() if c.key < 0 and c.module == call.module):
        values += [*again.outputs, *(r for key in again.children for r in calls[key].outputs)]
    state = _state(seen, call.module, row)
    return tuple(sorted({*_bad(seen, gradients, row), *_bad(seen, values, row), *state}))


def _backward_outside(seen: Seen, row: int) -> tuple[int, ...]:
    step = int(seen.step[row])
    gradients = [r for call in seen.outermost(step) if call.foreign for r in call.grad_inputs]
    losses = [int(r) for r in seen.rows(step, Role.LOSS)]
    # A later pass through the same step's model differentiates only what was computed since the last loss.
    return tuple(sorted({*_bad(seen, gradients, row), *_bad(seen, losses[-1:], row), *_outside(seen, row)}))


def _of_gradient(seen: Seen, row: int, phase: Phase) -> tuple[int, ...]:
    step = int(seen.step[row])
    if phase in (Phase.POST_BACKWARD, Phase.OPTIMIZER):
        before = _accumulated_before(seen, row)
        spread = [int(r) for r in seen.rows(step, Role.GRAD) if r < row and seen.phase[r] < phase and seen.bad[r]]
        return before or tuple(spread)
    owner = seen.site(row).module or ""
    calls = seen.calls(step)
    for module in upwards(owner):
        mine = [call for call in calls.values() if call.module == module]
        if mine:
            found = {r for call in mine for r in _backward_inside(seen, call, row) if r < row}
            if found:
                return tuple(sorted(found))
            break
    return _anything_before(seen, row) or _accumulated_before(seen, row)


def _accumulated_before(seen: Seen, row: int) -> tuple[int, ...]:
    before = seen.before(row, Role.GRAD, seen.name(row))
    return (before,) if before is not None and seen.bad[before] and seen.step[before] == seen.step[row] else ()


def upwards(module: str) -> Iterable[str]:
    """The module and those around it, innermost first."""
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""


def _anything_before(seen: Seen, row: int) -> tuple[int, ...]:
    """For a parameter that somebody other than its owner uses: gradients on their way, else a nonfinite loss."""
    step = int(seen.step[row])
    on_the_way = _bad(seen, (int(r) for r in seen.rows(step, *_GRADIENT_FLOW)), row)
    if on_the_way:
        return tuple(on_the_way)
    return tuple(_bad(seen, (int(r) for r in seen.rows(step, Role.LOSS)), row))


def _of_update(seen: Seen, row: int, role: Role) -> tuple[int, ...]:
    name, step = seen.name(row), int(seen.step[row])
    if role is Role.BUFFER:
        return _same_before(seen, row, role) or _of_written_buffer(seen, row)
    found = _same_before(seen, row, role)
    parameter = name if role is Role.PARAM else parameter_of(seen, name)
    gradients = seen.rows(step, Role.GRAD)
    consumed = gradients[seen.phase[gradients] == Phase.OPTIMIZER]
    used = consumed if consumed.size else gradients
    used = used[seen.bad[used] & (used < row)]
    own = np.intersect1d(used, seen.rows_of_name.get((int(Role.GRAD), parameter or ""), used[:0]))
    explained = own if own.size or found else used
    return tuple(sorted({*found, *(int(r) for r in explained), *_moments(seen, parameter, row)}))


def parameter_of(seen: Seen, state: str) -> str | None:
    """The parameter to which an optimizer's state of that name belongs: the longest name that it contains."""
    fits = [name for role, name in seen.rows_of_name if role == Role.PARAM and name in state]
    return max(fits, key=len) if fits else None


def is_used(seen: Seen, row: int) -> bool:
    """Whether an update of the step can have read this state of an optimizer: its parameter had a gradient."""
    parameter = parameter_of(seen, seen.name(row))
    return parameter is None or _has_gradient(seen, int(seen.step[row]), parameter)


def _moments(seen: Seen, parameter: str | None, row: int) -> list[int]:
    if parameter is None:
        return []
    found = []
    for (role, name), rows in seen.rows_of_name.items():
        if role == Role.STATE and seen.bad[rows].any() and parameter_of(seen, name) == parameter:
            earlier = rows[(rows < row) & seen.bad[rows] & (seen.phase[rows] != Phase.UPDATE)]
            found += [int(r) for r in earlier[-1:]]
    return found


def _of_written_buffer(seen: Seen, row: int) -> tuple[int, ...]:
    step, owner = int(seen.step[row]), seen.site(row).module or ""
    mine = [call for call in seen.calls(step).values() if call.module == owner]
    found = {r for call in mine for r in (*_bad(seen, call.inputs, row), *_inside(seen, call, row))}
    found |= {r for call in mine for r in _bad(seen, call.outputs, row)} if not found else set()
    return tuple(sorted(found))
