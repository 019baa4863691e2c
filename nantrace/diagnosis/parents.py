"""Who can have given a row of a module trace its nonfinite values, and the births from which they came.

A trace of modules shows what went into a call and what came out, not what ran between. What explains a nonfinite row
is therefore what was nonfinite in its *scope*: the inputs of the call whose code made it, the outputs of the calls
inside, the state that the module holds; in backward the same from the other end. A row that its scope does not
explain is a birth. Says nothing of faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from nantrace.diagnosis.backward import asked_for, gradient_maker, same_gradient
from nantrace.diagnosis.marks import reads_masks
from nantrace.diagnosis.seen import LARGEST, Call, Handed, Seen
from nantrace.events import Phase, Role

NAN, INF = "nan", "inf"
Root = tuple[int, str]

_IN_OUT = (Role.INPUT, Role.OUTPUT)
_STATE = (Role.PARAM, Role.BUFFER, Role.STATE)
_GRADIENT_FLOW = (Role.GRAD_OUTPUT, Role.GRAD_INPUT)


def parents(seen: Seen, row: int) -> tuple[int, ...]:
    """The nonfinite rows that explain `row`, in order; empty for a birth and for what was nonfinite from the start."""
    if row not in seen.parents:
        seen.parents[row] = _parents(seen, row)
    return seen.parents[row]


def _parents(seen: Seen, row: int) -> tuple[int, ...]:
    role, phase = Role(int(seen.role[row])), Phase(int(seen.phase[row]))
    if role in _STATE and phase is not Phase.UPDATE:
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
    """The row that stands for a birth: the gradient of one tensor has several."""
    return same_gradient(seen, row)[0]


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
    return role in _STATE and seen.phase[row] != Phase.UPDATE


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
        for row in np.flatnonzero((seen.nan | seen.positive) & np.isin(seen.role, [int(r) for r in _IN_OUT])):
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
    made = _alive(seen, (step, None), lambda: _outermost(seen, step), row)
    return tuple(sorted({*_bad(seen, batch, row), *_bad(seen, asked_for(seen, row), row), *made}))


def _outermost(seen: Seen, step: int) -> list[Call]:
    outermost = [call for call in seen.calls(step).values() if call.parent is None]
    return sorted(outermost, key=lambda call: call.last)


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
    outermost = [call for call in seen.calls(step).values() if call.parent is None]
    gradients = [r for call in outermost if call.foreign for r in call.grad_inputs]
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
