"""What was nonfinite before anybody computed with it: batch, parameters, state, literals, memory nobody wrote."""

from __future__ import annotations

from nantrace.diagnosis.causes.checks import locate, without_samples
from nantrace.diagnosis.causes.reading import size
from nantrace.diagnosis.causes.table import Explanation
from nantrace.diagnosis.causes.wording import between, counts, place, plural, sentence, shape, spot
from nantrace.lineage import Lineage, OpEvent

_CAUSE = {
    "batch": "bad_input",
    "param": "bad_param",
    "buffer": "bad_buffer",
    "moment": "bad_moment",
    "constant": "bad_constant",
}
_WHAT = {
    "batch": "a tensor of the batch",
    "param": "a parameter",
    "buffer": "a buffer",
    "moment": "a tensor of the optimizer state",
    "constant": "a tensor that the step did not compute",
}


def external(lineage: Lineage, event: OpEvent) -> Explanation:
    """A tensor that was nonfinite before the step, by its category."""
    category = event.category or ""
    if category not in _CAUSE:
        return _unobserved(event)
    facts = [held(event, _WHAT[category])]
    if event.samples and category == "batch":
        word = "Sample" if len(event.samples) == 1 else "Samples"
        named = ", ".join(str(index) for index in event.samples[:8]) + (", ..." if len(event.samples) > 8 else "")
        facts.append(f"{word} {named} along dimension 0 {'is' if len(event.samples) == 1 else 'are'} concerned.")
    if event.min is not None and event.max is not None:
        facts.append(f"Its finite elements are {between(event.min, event.max, size(event))}.")
    return Explanation(_CAUSE[category], tuple(facts), _checks(event))


def _unobserved(event: OpEvent) -> Explanation:
    """What an op outside the recorded region wrote."""
    bad = counts(event.nan, event.posinf, event.neginf)
    writer = event.op or "an op"
    fact = (
        f"{bad} came from {writer}, which ran where nothing was recorded{f' ({event.module})' if event.module else ''}."
    )
    advice = ("Record ops in the whole step, not in a part of it: the cause lies before the part that was recorded.",)
    return Explanation("unknown", (sentence(fact),), advice)


def held(event: OpEvent, what: str) -> str:
    """ "batch.wav (float32, 3x6) held 6 NaN among 18 elements before the step, the first at [1, 0]." """
    name = event.tensor or sentence(what)
    first = index(event)
    at = f", the first at {list(first)}" if first else ""
    bad = counts(event.nan, event.posinf, event.neginf)
    return (
        f"{name} ({event.dtype}, {shape(event.shape)}) held {bad} among {plural(size(event), 'element')} before the "
        f"step{at}."
    )


def index(event: OpEvent) -> tuple[int, ...]:
    """The index of the first nonfinite element, from its flat index; () where it was not recorded."""
    if not event.shape or min(event.shape) <= 0 or not 0 <= event.first_bad < size(event):
        return ()
    rest, found = event.first_bad, []
    for extent in reversed(event.shape):
        rest, position = divmod(rest, extent)
        found.append(position)
    return tuple(reversed(found))


def _checks(event: OpEvent) -> tuple[str, ...]:
    name = event.tensor or "that tensor"
    if event.category == "batch":
        return (
            f"Check {name} with torch.isfinite where the dataset reads it, and again after each transform.",
            without_samples(event),
        )
    if event.category == "constant":
        return (
            "Print torch.isfinite(t).all() for each tensor that the step makes from outside data, before its "
            "first use.",
            "Pass such tensors in the batch and repeat: then the nonfinite one is named.",
        )
    if event.category == "param":
        return (
            f"Print {name} right after the model is built, and again after the checkpoint is loaded: which "
            "one is nonfinite?",
            f"Initialise {name} anew (torch.nn.init) and see whether the step stays finite; torch.empty "
            "leaves whatever "
            "was in memory.",
        )
    if event.category == "buffer":
        return (
            f"Print {name} in the last checkpoints and find the first one in which it is nonfinite.",
            f"Reset {name} to its initial value and see whether the step stays finite.",
        )
    return (
        f"Print {name} in the last checkpoints and find the step after which it is nonfinite: trace that step.",
        "Start the optimizer with empty state from the same weights and see whether the step stays finite.",
    )


def uninitialised(lineage: Lineage, event: OpEvent) -> Explanation:
    """torch.empty and its kin: the memory holds whatever was there."""
    fact = (
        f"{place(event)} returns memory that nobody has written; it held "
        f"{counts(event.nan, event.posinf, event.neginf)}."
    )
    advice = (
        f"Replace it by torch.zeros at {event.where or spot(event)} and see whether the nonfinite values vanish.",
        "Run with torch.use_deterministic_algorithms(True): it fills such memory with NaN, so that each read shows.",
    )
    return Explanation("uninitialised_memory", (fact,), advice)


def sentinel(lineage: Lineage, event: OpEvent) -> Explanation:
    """A literal infinity or NaN that left the place where it was meant to stay."""
    bad = counts(event.nan, event.posinf, event.neginf)
    if event.kind == "inserted":
        fact = (
            f"{place(event)} inserted {bad} from a literal in the code, and that reached a value that training keeps."
        )
    else:
        fact = f"{place(event)} made {bad} out of an infinity that had been inserted on purpose."
    advice = (
        f"Replace the literal by a large finite number (torch.finfo(torch.{event.dtype}).min) and see what "
        "the loss becomes.",
        locate(event, "the target or the selected element", "lies under the mask"),
    )
    return Explanation("sentinel_escaped", (fact,), advice)
