"""Blame from a trace of modules: which module, tensor or update the damage came from.

Sees inputs, outputs, gradients and state; not which op inside a module did it, nor a value that was born and died
inside one. The rules are those of the op level as far as rows of modules can carry them; what they cannot carry is
said in the evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nantrace.diagnosis import growth
from nantrace.diagnosis.contained import still_open
from nantrace.diagnosis.modules import evidence, suspects
from nantrace.diagnosis.modules.advice import advice, advice_for_state, of_scaler
from nantrace.diagnosis.modules.backward import made_elsewhere, weights_changed
from nantrace.diagnosis.modules.births import (
    INF,
    NAN,
    Root,
    births,
    died,
    is_external,
    is_real,
    overflowed,
    put_in,
)
from nantrace.diagnosis.modules.given_up import bad_outputs, differentiated, given_up, tells
from nantrace.diagnosis.modules.parents import enclosing, is_used, parents
from nantrace.diagnosis.modules.reason import cause as cause_of
from nantrace.diagnosis.modules.seen import Seen
from nantrace.diagnosis.modules.words import index, tensor_of
from nantrace.diagnosis.standstill import stands_still
from nantrace.diagnosis.verdict import Origin, Stage, Status, Verdict
from nantrace.events import Phase, Role, Trace, distinct

_SINKS = (Role.LOSS, Role.GRAD, Role.PARAM, Role.STATE, Role.BUFFER)


@dataclass(frozen=True)
class Blame:
    """What was decided: the root, the sink it reached (None if none) and the rows considered."""

    status: Status
    root: Root
    sink: int | None
    stage: Stage | None
    others: tuple[Root, ...] = ()
    why: str | None = None


def by_module(trace: Trace) -> Verdict:
    """Judge a trace without ops. Pure; looks at nothing but the rows, the site table and the ledger."""
    seen = Seen.of(trace)
    if not seen.bad.any():
        silent = growth.zeroed_gradients(seen)
        return silent if silent is not None else Verdict("clean", evidence=evidence.clean(seen))
    blame = _first_fault(seen) or _kept_damage(seen) or _given_up(seen) or _contained(seen)
    if blame is None:
        return _absorbed_state(seen) or _unread_state(seen) or Verdict("expected", evidence=evidence.expected(seen))
    return _verdict(seen, blame)


def left_out_fault(seen: Seen) -> Verdict | None:
    """The fault that steps without a backward show, whatever the loop made of them."""
    blame = _kept_damage(seen) or _given_up(seen)
    return None if blame is None else _verdict(seen, blame)


def _first_fault(seen: Seen) -> Blame | None:
    """The first sink in time that holds damage which nothing excuses, and where its values came from."""
    for step in distinct(seen.step[seen.bad]):
        for sink in _sinks(seen, int(step)):
            excused = _excused(seen, sink)
            if excused and seen.role[sink] != Role.LOSS:
                continue
            roots = _roots(seen, sink)
            if excused and not any(_is_kept(seen, root) for root in roots):
                continue
            real = [root for root in roots if is_real(seen, root)]
            if real and not _is_own_content(seen, sink, real):
                return _fault(seen, sink, real)
            if not real and int(seen.role[sink]) in (Role.LOSS, Role.GRAD):
                return _fault(seen, sink, [_escape(seen, sink, roots)])
    return None


def _kept_damage(seen: Seen) -> Blame | None:
    """State that was nonfinite before a step, and what the model put out of it in a step that had no backward.

    A check in the loop may throw such a step away; what training keeps stays as it is.
    """
    for step in distinct(seen.step[seen.bad]):
        if differentiated(seen, int(step)):
            continue
        for sink in bad_outputs(seen, int(step)):
            kept = [root for root in _roots(seen, sink) if _is_kept(seen, root)]
            if kept and tells(seen):
                over = given_up(seen)
                return _fault(seen, sink, kept, over.said if over is not None and over.stands_still else None)
    return None


def _is_kept(seen: Seen, root: Root) -> bool:
    """Whether a root is damage that lies in a parameter or a buffer."""
    state = seen.role[root[0]] in (Role.PARAM, Role.BUFFER)
    return state and is_external(seen, root[0]) and is_real(seen, root)


def _given_up(seen: Seen) -> Blame | None:
    """Every step at the end of the trace failed and was left out: nothing is learnt."""
    over = given_up(seen)
    if over is None or not over.stands_still or over.sink is None:
        return None
    roots = [root for root in _roots(seen, over.sink) if is_real(seen, root)]
    return _fault(seen, over.sink, roots, over.said) if roots else None


def _sinks(seen: Seen, step: int) -> list[int]:
    """Nonfinite rows of what training keeps, in order."""
    kept = seen.rows(step, *_SINKS)
    after = (seen.phase[kept] == Phase.UPDATE) | np.isin(seen.role[kept], [int(Role.LOSS), int(Role.GRAD)])
    kept = kept[after & seen.bad[kept]]
    if seen.rows(step, Role.GRAD, phases=[Phase.OPTIMIZER, Phase.POST_BACKWARD]).size:
        # What backward accumulated counts as what the optimizer, or the end of the step, found of it.
        kept = kept[(seen.role[kept] != Role.GRAD) | (seen.phase[kept] != Phase.BACKWARD)]
    if not seen.has_backward and not seen.checked:
        kept = np.array([row for call in seen.outermost(step) for row in call.outputs if seen.bad[row]], dtype=np.int64)
    return sorted((int(row) for row in kept), key=lambda row: (_first_bad(seen, row), row))


def _first_bad(seen: Seen, sink: int) -> int:
    """When this tensor was first seen nonfinite in its step: optimizers read gradients in an order of their own."""
    rows = seen.rows_of_name.get((int(Role.GRAD), seen.name(sink))) if seen.role[sink] == Role.GRAD else None
    if rows is None:
        return sink
    mine = rows[(seen.step[rows] == seen.step[sink]) & seen.bad[rows]]
    return int(mine[0])


def _excused(seen: Seen, sink: int) -> bool:
    role, step = int(seen.role[sink]), int(seen.step[sink])
    if role == Role.GRAD:
        return seen.phase[sink] != Phase.OPTIMIZER and evidence.skipped(seen, step)
    if role == Role.LOSS:
        return step not in seen.standstill and (evidence.skipped(seen, step) or _thrown_away(seen, sink))
    if role == Role.BUFFER:
        return seen.mark[sink] or not _is_new(seen, sink)
    return False


def _thrown_away(seen: Seen, loss: int) -> bool:
    """A nonfinite loss whose gradients were cleared before the optimizer saw any, as a check in the loop does."""
    step = int(seen.step[loss])
    gradients = seen.rows(step, Role.GRAD, phases=[Phase.BACKWARD])
    consumed = seen.rows(step, Role.GRAD, phases=[Phase.OPTIMIZER])
    losses = seen.rows(step, Role.LOSS)
    later = losses[losses > loss]
    return bool(
        consumed.size
        and not seen.bad[consumed].any()
        and seen.bad[gradients].any()
        and later.size
        and not seen.bad[later[-1]]
    )


def _is_new(seen: Seen, row: int) -> bool:
    before = seen.before(row, Role(int(seen.role[row])), seen.name(row))
    if before is None or not seen.bad[before]:
        return True
    return bool(seen.nan[row] and not seen.nan[before])


def _is_own_content(seen: Seen, sink: int, roots: Sequence[Root]) -> bool:
    """An unused row of a parameter that was nonfinite before the step and is rewritten with it.

    Or a moment that no update of the step read, as its parameter had no gradient.
    """
    if seen.role[sink] != Role.PARAM and (seen.role[sink] != Role.STATE or is_used(seen, sink)):
        return False
    return all(is_external(seen, row) and seen.name(row) == seen.name(sink) for row, _ in roots)


def _roots(seen: Seen, sink: int) -> list[Root]:
    """Where the nonfinite values of a row came from, through earlier steps if state carried them over."""
    found = births(seen, _bad_rows(seen, sink))
    roots = found.get((sink, NAN), frozenset()) | found.get((sink, INF), frozenset())
    first = seen.bounds(int(seen.step[sink]))[0]
    now = {root for root in roots if root[0] >= first or is_external(seen, root[0])}
    earlier = (_roots(seen, row) for row, _ in roots - now)
    return sorted(now.union(*earlier))


def _bad_rows(seen: Seen, last: int) -> list[int]:
    """Nonfinite rows of the step of row `last`, up to it."""
    first = seen.bounds(int(seen.step[last]))[0]
    return [int(row) for row in first + np.flatnonzero(seen.bad[first : last + 1])]


def _fault(seen: Seen, sink: int, roots: Sequence[Root], over: str | None = None) -> Blame:
    """`over`: why it is a fault although the step was left out."""
    external = [root for root in roots if is_external(seen, root[0])]
    root = (external or [root for root in roots if not died(seen, root[0])] or list(roots))[0]
    stage = _stage(seen, root[0])
    why = None
    if seen.role[sink] == Role.BUFFER and evidence.skipped(seen, int(seen.step[sink])):
        stage, why = "update", evidence.poisoned_buffers(seen, sink)
    elif seen.role[sink] == Role.BUFFER and suspects.left_out(seen, root[0]):
        given = suspects.came_in(seen, root[0])  # bad data is that, whatever was made of it
        stage, why = stage if given else "update", evidence.written_buffers(seen, sink)
    elif not external:
        why = growth.exploded(seen, root[0])
        stage = "update" if why else stage
    if why is None and int(seen.step[sink]) in seen.standstill:
        why = stands_still(seen.standstill)
    why = over if why is None else why
    return Blame("fault", root, sink, stage, tuple(r for r in roots if r != root), why)


def _escape(seen: Seen, sink: int, roots: Sequence[Root]) -> Root:
    """A mark that reached the loss: the first row on its way that is no longer a mark, else where it was put in."""
    way = _way(seen, roots[0][0], sink)
    turned = [row for row in way if row != sink and not seen.mark[row]]
    return (turned[0], NAN if seen.nan[turned[0]] else INF) if turned else roots[0]


def _contained(seen: Seen) -> Blame | None:
    """Nonfinite values that reached nothing that training keeps, or only a step that was skipped."""
    excused: Blame | None = None
    for step in distinct(seen.step[seen.bad]):
        first, last = seen.bounds(int(step))
        rows = first + np.flatnonzero(seen.bad[first:last])
        if excused is not None and growth.exploded(seen, int(rows[0])) is None:
            continue
        if seen.mark[rows].all() and not any(overflowed(seen, int(row)) for row in rows):
            continue
        found = births(seen, _bad_rows(seen, last - 1))
        roots = sorted({root for some in found.values() for root in some})
        # What state carried over from an earlier step was judged there.
        born = [root for root in roots if root[0] >= first and not is_external(seen, root[0])]
        real = [root for root in born if is_real(seen, root)]
        sinks = _sinks(seen, int(step))
        reached = [s for s in sinks if seen.role[s] != Role.BUFFER]
        at_sinks = {r for s in reached for kind in (NAN, INF) for r in found.get((s, kind), ())}
        chosen = [root for root in real if root in at_sinks] or real
        if not chosen:
            continue
        if all(_is_dropped_data(seen, int(row)) for row in rows):
            continue
        root = chosen[0]
        why = growth.exploded(seen, root[0])
        if why is not None:
            return Blame("fault", root, reached[0] if reached else None, "update", (), why)
        if excused is None:
            others = tuple(r for r in real if r != root)
            excused = Blame("contained", root, reached[0] if reached else None, _stage(seen, root[0]), others)
    return excused


def _is_dropped_data(seen: Seen, row: int) -> bool:
    """Whether a row is data that the model was given, in a step in which its outputs were seen.

    Where no other row of the step is nonfinite, the model read no such element or replaced it, as it does of padding.
    """
    step = int(seen.step[row])
    outputs = [r for call in seen.outermost(step) for r in call.outputs]
    return bool(outputs) and seen.role[row] == Role.INPUT and (is_external(seen, row) or suspects.came_in(seen, row))


def _absorbed_state(seen: Seen) -> Verdict | None:
    """A parameter, a moment or a running variance that holds NaN or +inf and is read, but shows in no result."""
    for row in np.flatnonzero(seen.bad & ~seen.mark):
        if is_external(seen, int(row)) and _is_read(seen, int(row)):
            origin = _origin(seen, (int(row), NAN if seen.nan[row] else INF))
            cause = cause_of(seen, int(row), "state")
            said = evidence.absorbed(seen, int(row), _is_passed_on(seen, int(row)))
            return Verdict("contained", "state", cause, origin, said, advice_for_state(seen, int(row)))
    return None


def _is_passed_on(seen: Seen, row: int) -> bool:
    """Whether an output of its step holds what came of it."""
    found = births(seen, _bad_rows(seen, seen.bounds(int(seen.step[row]))[1] - 1))
    return any(other != row and (row, kind) in some for (other, _), some in found.items() for kind in (NAN, INF))


def _unread_state(seen: Seen) -> Verdict | None:
    """State that holds NaN or +inf, in a trace in which no module was called and no gradient arrived."""
    row = next((int(r) for r in np.flatnonzero(seen.bad & ~seen.mark) if is_external(seen, int(r))), None)
    if row is None or seen.role[row] == Role.INPUT or seen.call.any() or seen.has_backward:
        return None
    origin = _origin(seen, (row, NAN if seen.nan[row] else INF))
    said = evidence.unread(seen, row)
    cause = cause_of(seen, row, "state")
    return Verdict("inconclusive", "state", cause, origin, said, advice_for_state(seen, row))


def _is_read(seen: Seen, row: int) -> bool:
    """Whether arithmetic reads it: what selects or compares (a cut-off, an observer) cannot be told apart here."""
    role = int(seen.role[row])
    site = seen.site(row)
    if role == Role.STATE:
        return is_used(seen, row)
    called = any(call.module == site.module for call in seen.calls(int(seen.step[row])).values())
    batch_norm = site.slot in ("running_var", "running_mean")
    return called and (role == Role.PARAM or (role == Role.BUFFER and batch_norm))


def _stage(seen: Seen, row: int) -> Stage | None:
    role, phase = Role(int(seen.role[row])), Phase(int(seen.phase[row]))
    unseen = suspects.model_unseen(seen, int(seen.step[row]))
    if is_external(seen, row):
        if role is Role.INPUT:
            return "input"
        if seen.before(row, role, seen.name(row)) is not None:
            return "update"
        return None if suspects.updates_before(seen) else "state"
    if phase is Phase.UPDATE:
        return "forward" if role is Role.BUFFER else "optimizer"
    if role is Role.LOSS:
        hidden = suspects.transformed(seen, int(seen.step[row])) or suspects.beside_outputs(seen, row)
        return None if unseen or hidden else "loss"
    if role is Role.GRAD:
        if phase is Phase.BACKWARD:
            summed = seen.trace.meta.get("sharded") and made_elsewhere(seen, row)  # over the ranks, before it was seen
            if summed:
                return "gradients"
            return None if suspects.uncleared(seen, row) and made_elsewhere(seen, row) else "backward"
        return "gradients" if suspects.seen_after_backward(seen, row) else None
    if role in (Role.GRAD_OUTPUT, Role.GRAD_INPUT) or phase in (Phase.RECOMPUTE, Phase.BACKWARD):
        return None if suspects.may_hide(seen, row) is not None else "backward"
    if weights_changed(seen, row):
        before = seen.rows(int(seen.step[row]), Role.GRAD)
        return "gradients" if before.size and before[0] < row else None
    around = enclosing(seen, row)
    if around is not None:
        if (
            suspects.may_be_data(seen, row)
            or suspects.weights_unseen(seen, row)
            or suspects.turned_negative(seen, row) is not None
        ):
            return None
        return "loss" if around.foreign else "forward"
    if unseen:
        return None
    if suspects.called_before(seen, row):
        # What the model itself is called with next may be the next batch as well as what was made of its output.
        return None if suspects.came_in(seen, row) else "loss"
    return None if suspects.finite_batch(seen, row) else "input"


def _verdict(seen: Seen, blame: Blame) -> Verdict:
    row = blame.root[0]
    origin = _origin(seen, blame.root)
    cause = cause_of(seen, row, blame.stage)
    said = evidence.sentences(seen, blame.status, row, blame.sink, cause)
    if blame.why:
        said = (said[0], blame.why, *said[1:])
    path = _path(seen, row, blame.sink)
    step = int(seen.step[row])
    scaled = blame.status == "contained" and blame.stage == "backward" and cause == "overflow"
    if scaled and evidence.skipped(seen, step):
        checks = of_scaler(seen, step)
    else:
        checks = advice(seen, row, blame.stage, cause, blame.sink)
    return Verdict(
        blame.status,
        blame.stage,
        cause,
        origin,
        said,
        still_open(checks) if blame.status == "contained" and blame.sink is None else checks,
        _others(seen, blame),
        path,
        region=suspects.region(seen, row),
    )


def _others(seen: Seen, blame: Blame) -> tuple[Origin, ...]:
    """One origin for each other module or tensor that the sink's values came from, at most three."""
    found = {(_origin(seen, blame.root).module, is_external(seen, blame.root[0]))}
    others = []
    for row, kind in (*_change(seen, blame), *blame.others):
        origin = _origin(seen, (row, kind))
        key = (origin.module, is_external(seen, row))
        if key not in found:
            found.add(key)
            others.append(origin)
    return tuple(others[:3])


def _change(seen: Seen, blame: Blame) -> list[Root]:
    """Where an infinity became NaN on its way to the sink, or where the infinity came in that a NaN was made of."""
    row, kind = blame.root
    if kind == NAN:
        return [(source, INF) for above in parents(seen, row) for source in sorted(put_in(seen, above))]
    way = [] if blame.sink is None else _way(seen, row, blame.sink)
    return [(r, NAN) for r in way if seen.nan[r]][:1]


def _origin(seen: Seen, root: Root) -> Origin:
    row, _ = root
    site, stats = seen.site(row), seen.stats(row)
    around = enclosing(seen, row)
    flow = site.role in (Role.INPUT, Role.OUTPUT, Role.GRAD_INPUT, Role.GRAD_OUTPUT)
    module = site.module if not flow else (around.module if around is not None else None)
    consumed = site.role is Role.GRAD and site.phase is not Phase.BACKWARD
    outside = consumed or site.role is Role.LOSS or _stage(seen, row) == "optimizer"
    if outside or made_elsewhere(seen, row) or weights_changed(seen, row):
        module = None
    return Origin(
        step=int(seen.step[row]),
        phase=site.phase.label,
        module=module,
        tensor=tensor_of(seen, row),
        kind=_kind(seen, row),
        dtype=site.dtype,
        inputs=tuple(seen.operand(r) for r in evidence.read_rows(seen, row)),
        output=stats,
        first_bad=index(stats),
    )


def _kind(seen: Seen, row: int) -> str:
    return ("nan" if seen.nan[row] else "") + ("inf" if seen.infinite[row] else "")


def _way(seen: Seen, root: int, sink: int) -> list[int]:
    """Rows from `root` to `sink`, each a parent of the next: from the sink always back to the latest that holds it."""
    reached = {root}
    for row in _bad_rows(seen, sink):
        if row > root and not reached.isdisjoint(parents(seen, row)):
            reached.add(row)
    way = [sink]
    while way[-1] != root:
        before = [row for row in parents(seen, way[-1]) if row in reached]
        if not before:  # it came through an earlier step
            return [root, *reversed(way)]
        way.append(max(before))
    return way[::-1]


def _path(seen: Seen, root: int, sink: int | None) -> tuple[dict[str, object], ...]:
    rows = [root] if sink is None else _way(seen, root, sink)
    return tuple(evidence.as_mapping(seen, row) for row in rows)
