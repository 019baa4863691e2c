"""Which sinks count: what was damaged, what was excused, and what only looks nonfinite.

An excuse is taken as recorded (the gradient scaler skipped; the value was only returned) or follows from the step's own
guard: it read a test of the value on the host and did not go on to an update.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from nantrace.diagnosis.roots import Roots
from nantrace.lineage import Lineage, OpEvent, Sink

#: What a gradient scaler does to a loss.
_SCALING = ("aten.mul", "aten.mul_")


@dataclass(frozen=True)
class Hit:
    """A sink, and the roots that are to blame for it."""

    sink: Sink
    roots: frozenset[int]


@dataclass(frozen=True)
class Damage:
    """All sinks of a step, sorted by what they mean; each list in order of time.

    Attributes:
        faults: reached and kept.
        contained: reached, and excused.
        escaped: hold a nonfinite value that nothing but an infinity inserted on purpose explains.
        births: births that could be seen, whether or not a sink holds them.
        standstill: the last iterations, if a scaler skipped each of them over a loss that was nonfinite before it was
            scaled; empty unless there are several.
    """

    faults: list[Hit] = field(default_factory=list)
    contained: list[Hit] = field(default_factory=list)
    escaped: list[Sink] = field(default_factory=list)
    births: list[OpEvent] = field(default_factory=list)
    standstill: list[int] = field(default_factory=list)


def damage(lineage: Lineage, roots: Roots) -> Damage:
    """Sort the sinks of a lineage."""
    result = Damage(births=roots.births())
    soft: list[Hit] = []
    skipped: dict[str, set[int]] = {}  # parameter -> roots that a scaler's skip excused in its gradient
    for recorded in sorted(lineage.sinks, key=lambda sink: sink.time):
        found = roots.of_sink(recorded)
        sink = _guarded(lineage, roots, recorded, found)
        if _was_so_before(roots, sink, found):
            continue
        real = frozenset(id for id in found if _counts(roots, roots.event(id), sink))
        if not real:
            if sink.kind != "buffer" and not sink.returned and sink.excuse is None:
                result.escaped.append(sink)
            continue
        if sink.excuse == "skip" and sink.kind == "grad":
            skipped.setdefault(sink.name, set()).update(real)
        if sink.left and sink.excuse is None and real <= skipped.get(sink.name, set()):
            sink = replace(sink, excuse="skip")  # it only lies in .grad; another optimizer's step went on meanwhile
        hits = soft if sink.excuse == "soft" else result.contained if sink.excuse else result.faults
        hits.append(Hit(sink, real))
    result.standstill.extend(_standstill(lineage, roots, result.contained))
    kept = [hit for hit in result.contained if hit.sink.kind == "loss" and hit.sink.iteration in result.standstill]
    result.faults.extend(hit for hit in kept if is_bad_unscaled(roots, hit))
    result.faults.sort(key=lambda hit: hit.sink.time)
    if result.faults:  # then a differentiated value may be the earlier witness
        result.faults.extend(soft)
        result.faults.sort(key=lambda hit: hit.sink.time)
    return result


def _standstill(lineage: Lineage, roots: Roots, contained: list[Hit]) -> list[int]:
    """Iterations since the last update, if each was skipped, over a loss that no scale can make finite.

    One such skip is what a scaler is for. Of several in a row nothing was learnt, and lowering the scale, which is all
    that a scaler does about it, changes nothing. Two optimizers that skip once each are one bad batch, not a row.
    """
    updates = [number for number, _, _, time in lineage.growth if time in lineage.step_times]
    last = sorted({number for number in lineage.skipped_iterations if number > max(updates, default=0)})
    bad = {hit.sink.iteration for hit in contained if is_bad_unscaled(roots, hit)}
    skipped = [
        (hit.sink.name, hit.sink.iteration)
        for hit in contained
        if hit.sink.kind == "grad" and hit.sink.excuse == "skip" and not hit.sink.left
    ]
    rounds: dict[str, set[int]] = {}
    for name, number in skipped:
        rounds.setdefault(name, set()).add(number)
    again = any(len(numbers.intersection(last)) > 1 for numbers in rounds.values())
    return last if len(last) > 1 and bad.issuperset(last) and again else []


def is_bad_unscaled(roots: Roots, hit: Hit) -> bool:
    """Whether a loss that a scaler's skip excused was nonfinite before the product with the scale."""
    if hit.sink.kind != "loss" or hit.sink.excuse != "skip":
        return False
    ends = {id for id, _ in hit.sink.starts}
    return any(id not in ends or (roots.event(id).op or "") not in _SCALING for id in hit.roots)


def _guarded(lineage: Lineage, roots: Roots, sink: Sink, found: frozenset[int]) -> Sink:
    """The sink, excused if the step itself looked at what reached it and gave the round up.

    What came of a parameter or a buffer that was nonfinite before is not: the next round reads it again. Reading the
    raw value is what logging does too: it counts only if another iteration of the step did update.
    """
    if any(_is_kept(roots.event(id)) and _counts(roots, roots.event(id), sink) for id in found):
        return sink
    for ids, raw in sink.guards:
        if raw and not lineage.step_times:
            continue
        if sink.excuse is None and any(roots.of(id, kind) & found for id in ids for kind in ("nan", "inf")):
            return replace(sink, excuse="guard")
    return sink


def _is_kept(event: OpEvent) -> bool:
    """Damage that lies in what training keeps, whatever becomes of one round."""
    return event.kind == "external" and event.category in ("param", "buffer")


def _was_so_before(roots: Roots, sink: Sink, found: frozenset[int]) -> bool:
    """A tensor that was nonfinite before the step, and that nothing else spoilt, is no effect of the step."""
    if sink.kind not in ("buffer", "param", "state") and not (sink.kind == "grad" and sink.left):
        return False
    if all(roots.event(id).kind == "external" for id, _ in sink.starts):
        return True
    own = all(roots.event(id).kind == "external" and roots.event(id).tensor == sink.name for id in found)
    return own and sink.kind != "state"


def _counts(roots: Roots, event: OpEvent, sink: Sink) -> bool:
    return roots.carries_blame(event) or (roots.is_bad_data(event) and any(kind == "nan" for _, kind in sink.starts))


def escaping_event(roots: Roots, sink: Sink) -> OpEvent:
    """Where an infinity inserted on purpose left its place: the op that turned -inf into +inf, else the insertion."""
    way = sorted(roots.ancestors(id for id, _ in sink.starts))
    for id in way:
        event = roots.event(id)
        parents = [roots.event(parent) for parent in event.inf_parents]
        born = event.kind in ("external", "inserted", "uninit")
        if not born and parents and event.posinf and not any(parent.posinf for parent in parents):
            return event
    return roots.event(way[0])
