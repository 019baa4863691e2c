"""Whether a value was made while the data were prepared: before the step's first module call, and read by the model.

Arithmetic on the batch runs outside of every module, as a loss does. What reads it tells the two apart: a target or a
weight that is made just as early, and that the loss alone reads, is the loss's.
"""

from __future__ import annotations

from nantrace.diagnosis.roots import Roots
from nantrace.lineage import Lineage, OpEvent, Sink


def is_prepared_data(roots: Roots, event: OpEvent, sink: Sink | None) -> bool:
    """Whether an op outside of every module made data for the model.

    Args:
        roots: of the lineage.
        event: the birth.
        sink: what it reached; None: nothing that training keeps, and then whatever the model reads counts.
    """
    if event.phase not in ("loss", "post_backward") or event.module is not None or event.kind == "external":
        return False
    of_batch = any((operand.tensor or "").startswith("batch") for operand in event.operands)
    early = event.phase == "loss" and _is_before_every_call(roots.lineage, event)
    return (early or of_batch) and _is_read_by_the_model(roots, event, sink)


def _is_before_every_call(lineage: Lineage, event: OpEvent) -> bool:
    """Whether no module had been called in the round of the event.

    A round that a scaler skipped has no update that would show its end: what it left in the gradients is later than
    its calls. A call takes no time of its own: it has that of the op before it.
    """
    ended = [time for time in lineage.step_times if time < event.time]
    ended += [sink.time for sink in lineage.sinks if sink.iteration < event.iteration and sink.time < event.time]
    return not any(max(ended, default=0) <= time < event.time for time in lineage.round_times)


def _is_read_by_the_model(roots: Roots, event: OpEvent, sink: Sink | None) -> bool:
    """Whether an op of the model lies on a way from the event to the sink."""
    made = set(roots.descendants(event.id))
    if sink is None:
        return any(_in_model(roots.event(id)) or "forward" in roots.event(id).readers for id in made)
    return any(_in_model(roots.event(id)) for id in made & roots.ancestors(id for id, _ in sink.starts))


def _in_model(event: OpEvent) -> bool:
    return event.phase == "forward"
