"""What a step held that was nonfinite and is no news: put in on purpose, or computed beside training, as for a log.

Says what put it there and where, so that a reader can agree.
"""

from __future__ import annotations

from collections.abc import Sequence

from nantrace.diagnosis.causes.reading import size
from nantrace.diagnosis.causes.wording import counts, place, plural
from nantrace.diagnosis.roots import Roots
from nantrace.lineage import Lineage, OpEvent

_SHOWN = 3
_OUTSIDE = ("loss", "post_backward")  # phases of code outside of the model that is no update
#: What is said of values that `are_beside_training`.
BESIDE = (
    "It was computed outside of the model, and no module, loss, gradient or update read it, as is usual of a number "
    "for the log (a perplexity, an accuracy)."
)


def told(lineage: Lineage) -> tuple[str, ...]:
    """A sentence for each place that put nonfinite values in, the first few, and that nothing came of them."""
    made = [event for event in lineage.events if event.kind != "propagated"]
    places: dict[tuple[object, ...], OpEvent] = {}
    for event in made:
        places.setdefault((event.op, event.module, event.where, event.tensor, event.category), event)
    said = [_sentence(event) for event in list(places.values())[:_SHOWN]]
    if len(places) > _SHOWN:
        said.append(f"{plural(len(places) - _SHOWN, 'more place')} did the same.")
    if said:
        said.append("No loss, gradient, parameter, moment or buffer was harmed by it.")
    return tuple(said)


def are_beside_training(roots: Roots, births: Sequence[OpEvent]) -> bool:
    """Whether training neither keeps nor reads any of these values, nor what came of them.

    Made outside of the model, never turned into something finite that could be used, and never tested by the step: a
    number that was only printed or stored. The caller knows that no sink holds them.
    """
    if not births or not roots.lineage.backwards:
        return False
    made = {id for event in births for id in roots.descendants(event.id)}
    tested = {id for _, ids, raw in roots.lineage.guard_reads if not raw for id in ids}
    return made.isdisjoint(tested) and all(_is_unused(roots.event(id)) for id in made)


def _is_unused(event: OpEvent) -> bool:
    read_elsewhere = [reader for reader in event.readers if reader not in _OUTSIDE]
    return event.phase in _OUTSIDE and not event.absorbed_by and not read_elsewhere


def _sentence(event: OpEvent) -> str:
    bad = counts(event.nan, event.posinf, event.neginf)
    single = size(event) == 1
    held = (
        f"{bad.removeprefix('1 ')} ({event.dtype})"
        if single
        else (f"{bad} among {plural(size(event), 'element')} ({event.dtype})")
    )
    if event.kind == "external":
        verb = "was" if single else "held"
        return f"{event.tensor or 'A tensor from outside the step'} {verb} {held} before the step."
    where = f" at {event.where}" if event.where else ""
    return f"{place(event)}{where} put out {held}."
