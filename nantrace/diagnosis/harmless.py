"""What a step held that was nonfinite on purpose: what put it there and where, so that a reader can agree."""

from __future__ import annotations

from nantrace.diagnosis.causes.reading import size
from nantrace.diagnosis.causes.wording import counts, place, plural
from nantrace.lineage import Lineage, OpEvent

_SHOWN = 3


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
