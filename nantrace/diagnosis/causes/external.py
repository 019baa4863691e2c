"""What was nonfinite before anybody computed with it: batch, parameters, state, literals, memory nobody wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nantrace.diagnosis.causes.checks import locate, some_samples, without_samples
from nantrace.diagnosis.causes.reading import operation, parents, size
from nantrace.diagnosis.causes.table import Explanation
from nantrace.diagnosis.causes.wording import between, counts, line, place, plural, round_of, sentence, shape
from nantrace.diagnosis.ranks import OTHER_RANKS
from nantrace.lineage import Lineage, OpEvent

_CAUSE = {
    "batch": "bad_input",
    "param": "bad_param",
    "buffer": "bad_buffer",
    "moment": "bad_moment",
    "grad": "bad_gradient",
    "constant": "bad_constant",
}
#: Ops that take single elements out of a row, as a target does.
_TARGETS = re.compile(r"gather|index|select|take|nll_loss")
_WHAT = {
    "batch": "a tensor of the batch",
    "param": "a parameter",
    "buffer": "a buffer",
    "moment": "a tensor of the optimizer state",
    "grad": "a gradient of an earlier backward",
    "constant": "a tensor from outside the step",
}


def external(lineage: Lineage, event: OpEvent) -> Explanation:
    """A tensor that was nonfinite before the step, by its category."""
    category = event.category or ""
    if category == "received":
        return _received(event)
    if category not in _CAUSE:
        return _unobserved(event)
    facts = [held(lineage, event, _WHAT[category])]
    if event.samples and category == "batch":
        facts.append(f"{_samples(event)} concerned.")
    if event.min is not None and event.max is not None:
        facts.append(f"Its finite elements are {between(event.min, event.max, size(event))}.")
    if category == "constant":
        facts.append(
            "No op that was watched wrote it: it came from a dataset, a file, numpy or a variable of the code around."
        )
    if category == "constant" or (category == "batch" and not (event.tensor or "").startswith("batch")):
        facts += _first_reader(lineage, event)
    sparse = any("sparse" in (e.op or "") for e in _readers(lineage, event))
    return Explanation(_CAUSE[category], tuple(facts), _checks(event, sparse))


def _samples(event: OpEvent) -> str:
    single, count = len(event.samples) == 1, len(event.samples)
    if not single and (count,) == event.shape[:1]:
        return f"Every sample along dimension 0 (all {count:,}) is"
    named = ", ".join(str(index) for index in event.samples[:8]) + (", ..." if count > 8 else "")
    return f"{'Sample' if single else 'Samples'} {named} along dimension 0 {'is' if single else 'are'}"


def _received(event: OpEvent) -> Explanation:
    """What a collective filled, where this process had given it finite values alone."""
    name = f"The {event.tensor}" if (event.tensor or "").startswith("gradient") else event.tensor or "A tensor"
    at = f" at {event.where}" if event.where else ""
    bad = counts(event.nan, event.posinf, event.neginf)
    held = f"held {bad} among {size(event)} elements" if size(event) > 1 else f"was {bad.removeprefix('1 ')}"
    facts = [
        f"{name} ({event.dtype}, {shape(event.shape)}) {held} after {event.op}{at}.",
        "No op of this process wrote them, and what it gave to that collective was finite there: they came from "
        f"another rank{'' if event.nan else ', or the sum over the ranks left the range'}.",
    ]
    overflow = (
        "If every rank was finite before that, divide by the number of ranks before the sum: does it stay finite?"
    )
    advice = (OTHER_RANKS, *((overflow,) if not event.nan else ()))
    return Explanation("other_rank", tuple(facts), advice)


def _readers(lineage: Lineage, event: OpEvent) -> Iterator[OpEvent]:
    return (e for e in lineage.events if event.id in (*e.nan_parents, *e.inf_parents))


def _first_reader(lineage: Lineage, event: OpEvent) -> list[str]:
    """A tensor without a name is known by the line that used it first."""
    first = next(_readers(lineage, event), None)
    if first is None or not first.op:
        return []
    at = f" at {first.where}" if first.where else ""
    return [f"{place(first)}{at} was the first to compute with its nonfinite elements."]


def _unobserved(event: OpEvent) -> Explanation:
    """What an op outside the recorded region wrote."""
    bad = counts(event.nan, event.posinf, event.neginf)
    writer = event.op or "an op"
    fact = (
        f"{bad} came from {writer}, which ran where nothing was recorded{f' ({event.module})' if event.module else ''}."
    )
    advice = ("Record ops in the whole step, not in a part of it: the cause lies before the part that was recorded.",)
    return Explanation("unknown", (sentence(fact),), advice)


def held(lineage: Lineage, event: OpEvent, what: str) -> str:
    """ "batch.wav (float32, 3x6) held 6 NaN among 18 elements before the step, the first at [1, 0]." """
    name = event.tensor or sentence(what)
    first = index(event)
    at = f", the first at {list(first)}" if first else ""
    bad = counts(event.nan, event.posinf, event.neginf)
    one = size(event) == 1
    bad = f"was {bad.removeprefix('1 ')}" if one else f"held {bad} among {plural(size(event), 'element')}"
    at = "" if one else at
    return (
        f"{name} ({event.dtype}, {shape(event.shape)}) {bad} before "
        f"{'the step' if event.iteration <= 1 else f'{round_of(lineage, event.iteration)} read it'}{at}."
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


def _checks(event: OpEvent, sparse: bool) -> tuple[str, ...]:
    name = event.tensor or "that tensor"
    if event.category == "batch":
        return _checks_of_batch(event, name, sparse)
    if event.category == "constant":
        where = f"that {event.where} reads" if event.where else "that the step makes of outside data"
        return (
            f"Print torch.isfinite(t).all() for each tensor {where}: which one is not finite, and where is it loaded "
            "or made?",
            "If it is loaded data, hand it over (batch=...) and repeat: then the nonfinite tensor is named.",
        )
    if event.category == "param":
        return (
            f"Print {name} right after the model is built, and again after the checkpoint is loaded: which one is "
            "nonfinite?",
            f"Initialise {name} anew (torch.nn.init) and see whether the step stays finite"
            f"{'; torch.empty leaves whatever was in memory' if event.nan else ''}.",
        )
    if event.category == "buffer":
        return _checks_of_buffer(event, name)
    if event.category == "grad":
        return (
            "Call optimizer.zero_grad() before this step's backward and see whether it stays finite: backward adds to "
            "what lies in .grad.",
            f"Trace the step before, or whatever else wrote {name}: a step that a check left out keeps its gradients.",
        )
    return (
        f"Print {name} in the last checkpoints and find the step after which it is nonfinite: trace that step.",
        "Start the optimizer with empty state from the same weights and see whether the step stays finite.",
    )


def _checks_of_batch(event: OpEvent, name: str, sparse: bool) -> tuple[str, ...]:
    values = ".values()" if sparse and len(event.shape) == 1 else ""
    whole = "Repeat the step on another batch and see whether it stays finite."
    log = f"If {name} is made by a logarithm, keep its input above 0 (clamp at 1e-6) and compare."
    only_neginf = event.neginf and not event.nan and not event.posinf
    return (
        f"Check {name}{values} with torch.isfinite where the dataset reads it, and again after each transform.",
        *((log,) if only_neginf else ()),
        without_samples(event) if some_samples(event) else whole,
    )


def _checks_of_buffer(event: OpEvent, name: str) -> tuple[str, ...]:
    classes = f"If {name} weighs classes, print how often each occurs: a weight of 1 / 0 is infinite."
    return (
        f"Print {name} right after it is made and in the last checkpoints: where is it nonfinite first?",
        *((classes,) if name.endswith("weight") and event.posinf else ()),
        f"Replace the nonfinite elements of {name} by finite ones and see whether the step stays finite.",
    )


def uninitialised(lineage: Lineage, event: OpEvent) -> Explanation:
    """torch.empty and its kin: the memory holds whatever was there."""
    fact = (
        f"{place(event)} returns memory that nobody has written; it held "
        f"{counts(event.nan, event.posinf, event.neginf)}."
    )
    advice = (
        f"Replace it by torch.zeros at {line(event)} and see whether the nonfinite values vanish.",
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
    if event.nan or (event.posinf and event.kind == "inserted"):  # no mask is made of these
        advice: tuple[str, ...] = (
            f"Print the numbers that {line(event)} computes with: which one is not finite, and where does it come "
            "from?",
        )
    else:
        spread = _spread(lineage, event)
        if spread is not None:
            return _shared_out(event, fact, spread)
        advice = (
            f"Replace the literal by a large finite number (torch.finfo(torch.{event.dtype}).min) and see what "
            "the loss becomes.",
            locate(event, "the target or the selected element", "lies under the mask"),
        )
    return Explanation("sentinel_escaped", (fact,), advice)


def _spread(lineage: Lineage, event: OpEvent) -> OpEvent | None:
    """The sum or product that took the -inf of a log_softmax, no element of which had been selected by a target."""
    if any(_TARGETS.search(operation(each)) for each in _readers(lineage, event)):
        return None
    found, waiting, seen = None, [event], {event.id}
    while waiting:
        at = waiting.pop()
        name = operation(at)
        if _TARGETS.search(name):
            return None
        if name in ("sum", "mean", "mul", "sub"):
            found = at
        if name == "_log_softmax":
            return found
        new = [each for each in parents(lineage, at) if each.id not in seen]
        seen |= {each.id for each in new}
        waiting += new
    return None


def _shared_out(event: OpEvent, fact: str, spread: OpEvent) -> Explanation:
    """Of label smoothing and soft targets: each class has a share in the loss, those under the mask too."""
    took = (
        f"{spread.op} took the log-probabilities of whole rows, not of a target alone: label smoothing and soft "
        "targets give each class a share, those under the mask too, and a share of -inf is infinite."
    )
    advice = (
        f"Run {line(event)} without label smoothing, or with hard targets, and see whether the loss is finite.",
        "Give the share to the classes outside the mask only: torch.where(mask, 0, log_probabilities) before they are "
        "weighted and added up; a weight of 0 is not enough, 0 * -inf is NaN.",
    )
    return Explanation("sentinel_escaped", (fact, took), advice)
