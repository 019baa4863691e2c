"""What a recording of a part of the step did not see: who wrote nonfinite values that reached a sink. Pure."""

from __future__ import annotations

from nantrace.lineage import Lineage


def unobserved(lineage: Lineage) -> tuple[str | None, ...]:
    """The modules in which something nonfinite was written that reached a sink, while nobody looked.

    What such values came to nothing, many nodes make inside and drop again, explains no sink.
    """
    todo = {id for sink in lineage.sinks for id, _ in sink.starts}
    seen: set[int] = set()
    found: dict[str | None, None] = {}
    while todo:
        number = todo.pop()
        if number in seen:
            continue
        seen.add(number)
        event = lineage.event(number)
        if event.category == "unobserved":
            found[event.module] = None
        todo.update(event.nan_parents, event.inf_parents)
    return tuple(found)
