"""From an event of a lineage to what a verdict shows of it: an `Origin`, or a step on the path to a sink."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from nantrace.diagnosis.causes.hyperparameters import settings_made_of
from nantrace.diagnosis.verdict import Origin
from nantrace.events import TensorStats
from nantrace.lineage import Lineage, OpEvent, Sink

#: What a tensor is called that the step had from elsewhere: a file, a queue, numpy, a closure.
UNNAMED = "a tensor from outside the step"


def as_read(lineage: Lineage, event: OpEvent) -> OpEvent:
    """Data from outside, placed where the step first computed with it: its line, and the iteration that it was for.

    A loader runs between an update and the forward that it serves, which the count of iterations takes for the end of
    the one before. Other events come back as they are.
    """
    if event.kind != "external" or event.category not in ("batch", "constant"):
        return event
    reader = next((e for e in lineage.events if event.id in (*e.nan_parents, *e.inf_parents) and e.where), None)
    where = event.where or (reader.where if reader is not None else None)
    settings = settings_made_of(lineage).get(event.id)
    if settings:
        return dataclasses.replace(event, tensor=event.tensor or settings[0].place, where=where)
    updated = max((time for time in lineage.step_times if time <= event.time), default=None)
    begun = updated is None or any(updated < time <= event.time for time in lineage.round_times)
    follows = any(time > event.time for time in lineage.round_times)
    late = 0 if begun or not follows else 1
    if reader is not None and not any(event.time < time <= reader.time for time in lineage.round_times):
        late = max(late, reader.iteration - event.iteration)  # what was made of it is told with what it was for
    return dataclasses.replace(event, iteration=event.iteration + late, where=where)


def named_by_sink(event: OpEvent, sink: Sink | None) -> OpEvent:
    """What a collective brought has the name of the gradient or parameter that it became."""
    if event.category != "received" or event.tensor or sink is None or sink.kind not in ("grad", "param"):
        return event
    gradient = sink.kind == "grad" or event.phase in ("backward", "post_backward")
    return dataclasses.replace(event, tensor=f"gradient of {sink.name}" if gradient else sink.name)


def origin_of(event: OpEvent) -> Origin:
    """The event as a place: of an external tensor its name and owner, of an op where it ran and what it was given."""
    external = event.kind == "external" and event.category not in ("unobserved", "received")
    return Origin(
        step=event.iteration - 1,
        phase=None if external else event.phase,
        module=_owner(event) if external else event.module,
        op=None if external else event.op,
        node=None if external else event.node,
        tensor=event.tensor or (UNNAMED if event.category == "constant" else None),
        kind=_kind(event),
        dtype=event.dtype,
        where=event.where,
        own_line=event.own_line,
        inputs=event.operands,
        output=_output(event),
        first_bad=_index(event.first_bad, event.shape),
        samples=event.samples or None if event.category in (None, "batch", "unobserved") else None,
    )


def step_on_path(event: OpEvent) -> Mapping[str, Any]:
    """The event as one step on the way from the origin to a sink."""
    return {
        "op": event.op,
        "module": event.module,
        "node": event.node,
        "where": event.where,
        "phase": event.phase,
        "tensor": event.tensor,
        "dtype": event.dtype,
        "shape": event.shape,
        "nan": event.nan,
        "posinf": event.posinf,
        "neginf": event.neginf,
    }


def _kind(event: OpEvent) -> str:
    if event.nan and (event.posinf or event.neginf):
        return "naninf"
    return "nan" if event.nan else "inf"


def _owner(event: OpEvent) -> str | None:
    """The module that holds a parameter or buffer."""
    return (event.tensor or "").rpartition(".")[0] if event.category in ("param", "buffer") else None


def _output(event: OpEvent) -> TensorStats:
    numel = math.prod(event.shape)
    nan, posinf, neginf = (a + b for a, b in zip((event.nan, event.posinf, event.neginf), event.beside, strict=True))
    return TensorStats(
        dtype=event.dtype,
        shape=event.shape,
        numel=numel,
        finite=numel - nan - posinf - neginf,
        nan=nan,
        posinf=posinf,
        neginf=neginf,
        min=event.min,
        max=event.max,
        first_bad=event.first_bad,
    )


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Row-major index of a flat position."""
    if flat < 0:
        return None
    index: list[int] = []
    for size in reversed(shape):
        flat, rest = divmod(flat, size) if size else (0, 0)
        index.append(rest)
    return tuple(reversed(index))
