"""The loss functions that PyTorch computes in one op: what they need of targets, weights and lengths."""

from __future__ import annotations

from nantrace.diagnosis.causes.arithmetic import beyond_bound
from nantrace.diagnosis.causes.checks import in_wider, locate, without_samples
from nantrace.diagnosis.causes.dtypes import is_narrow
from nantrace.diagnosis.causes.reading import absmax, all_finite, argument, elements, has_inf, product, size
from nantrace.diagnosis.causes.table import Explanation
from nantrace.diagnosis.causes.wording import described, figure, label, line, outcome, place, plural, read
from nantrace.lineage import Lineage, Operand, OpEvent


def likelihood(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """nll_loss and its 2d form, which cross_entropy ends in: a weighted mean over the targets that are not ignored."""
    weight, target = argument(event, "weight"), argument(event, "target")
    if has_inf(weight):
        return infinite_weight(event, weight)
    scores = argument(event, "self", "input")
    if event.kind != "nan" or has_inf(scores):
        return None
    if not event.operands and not event.scalars:
        return None
    ignored = event.scalars.get("ignore_index")
    if weight is None:
        return _all_ignored(event, target, ignored)
    if weight is not None and weight.min is not None and weight.min <= 0:
        fact = f"{place(event)} divided by the total weight of the targets, which was 0: {described(weight, event.op)}."
        return _nothing(event, fact, "Print the total weight of the targets, weight[target].sum(), in each batch.")
    return None


def _all_ignored(event: OpEvent, target: Operand | None, ignored: object) -> Explanation | None:
    check = "Print how many targets count, (target != ignore_index).sum(), in each batch."
    if target is None or target.min is None:
        if not all_finite(event):
            return None
        fact = f"{place(event)} made NaN of finite scores without a weight, as it does when no target counts."
        return _nothing(event, fact, check)
    if not target.min == target.max == ignored:
        return None
    fact = (
        f"Each of the {plural(elements(target), 'target')} of {place(event)} equals ignore_index = {ignored}: the mean "
        "runs over nothing, 0 / 0."
    )
    return _nothing(event, fact, check)


def _nothing(event: OpEvent, fact: str, check: str) -> Explanation:
    advice = (
        check,
        f"Use reduction='sum' and divide by max(count, 1) at {line(event)}: does the loss stay finite?",
        without_samples(event) if event.samples else "Repeat the step on another batch and compare the loss.",
    )
    return Explanation("nothing_to_average", (fact, outcome(event)), advice)


def infinite_weight(event: OpEvent, weight: Operand | None) -> Explanation | None:
    """A class or sample weight that is infinite, for example 1 / count of a class that never occurs."""
    if weight is None:
        return None
    count = weight.posinf + weight.neginf
    fact = f"{place(event)} was given a weight with {count:,} infinite {'entry' if count == 1 else 'entries'}."
    advice = (
        f"Print which entries of {label(weight, event.op)} are infinite, and how often each of those classes occurs.",
        f"Clamp {label(weight, event.op)} to a finite maximum before {line(event)} and see whether the loss stays "
        "finite.",
    )
    return Explanation("infinite_weight", (fact, read(weight, event.op), outcome(event)), advice)


def alignment(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """ctc_loss is infinite when a target does not fit into its input, blanks between repeated labels included."""
    scores = argument(event, "log_probs")
    lost = argument(event, "neg_log_likelihood")
    if event.kind != "inf" and not has_inf(lost):
        return None
    too_long = _too_long(event.scalars.get("input_lengths"), event.scalars.get("target_lengths"))
    if too_long:
        index, target, frames = too_long[0]
        more = f"; {plural(len(too_long), 'sample')} in all" if len(too_long) > 1 else ""
        fact = (
            f"Sample {index} has a target of length {target} and an input of {frames} frames: no alignment "
            f"exists{more}."
        )
    elif has_inf(scores) and lost is None:
        return None
    else:
        fact = _unaligned(event)
    advice = (
        f"Print input_length - target_length - repeats for each sample at {line(event)}; it must not be negative.",
        "Repeat the step with zero_infinity=True and see whether it stays finite: that drops these samples.",
        without_samples(event) if event.samples else "Repeat the step without the samples whose target is too long.",
    )
    known = (read(scores, event.op),) if scores is not None else ()
    return Explanation("no_alignment", (fact, *known, outcome(event)), advice)


def _unaligned(event: OpEvent) -> str:
    """What is known of lengths that were recorded as ranges only."""
    who = f"sample {event.first_bad}" if len(event.shape) == 1 and event.first_bad >= 0 else "a sample"
    targets, frames = argument(event, "target_lengths"), argument(event, "input_lengths")
    if targets is None or frames is None or not absmax(targets) or not absmax(frames):
        known = ""
    else:
        known = (
            f" Targets have up to {plural(int(targets.max or 0), 'label')}, inputs at most {int(frames.max or 0):,} "
        )
        known += f"frame{'s' * (frames.max != 1)}."
    return (
        f"{place(event)} found no alignment for {who}: its target is longer than its input, counting the blank that "
        f"two equal neighbours need.{known}"
    )


def _too_long(inputs: object, targets: object) -> list[tuple[int, int, int]]:
    """(sample, target length, input length) where the target is longer, if both lists were recorded."""
    if not isinstance(inputs, (list, tuple)) or not isinstance(targets, (list, tuple)):
        return []
    pairs = enumerate(zip(targets, inputs, strict=False))
    return [
        (index, target, frames)
        for index, (target, frames) in pairs
        if isinstance(target, int) and isinstance(frames, int) and target > frames
    ]


def binary(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """binary_cross_entropy: bounded by itself, so an infinite weight or a lost 1e-12 in its backward is left."""
    weight = argument(event, "weight", "pos_weight")
    if has_inf(weight):
        return infinite_weight(event, weight)
    probability = argument(event, "self")
    if not all_finite(event) or probability is None or not is_narrow(event.dtype):
        return None
    at_edge = [edge for edge in (0.0, 1.0) if edge in (probability.min, probability.max)]
    if not at_edge:
        return None
    where = " and ".join(figure(edge) for edge in at_edge)
    fact = f"{place(event)} divides by p * (1 - p), held above 1e-12, which is 0 in {event.dtype}; p reached {where}."
    advice = (
        in_wider(event),
        f"Use binary_cross_entropy_with_logits on the logits at {line(event)} and compare.",
        locate(event, label(probability, event.op), f"is {where.replace(' and ', ' or ')}"),
    )
    return Explanation("eps_underflow", (fact, read(probability, event.op), outcome(event)), advice)


def squared_error(lineage: Lineage, event: OpEvent) -> Explanation | None:
    """mse_loss: the square of the difference must fit, and their sum."""
    if event.kind != "inf":
        return None
    output, target = argument(event, "self", "input"), argument(event, "target")
    high, low = absmax(output), absmax(target)
    bound = None
    if output is not None and high is not None and low is not None:
        terms = max(elements(output) // max(size(event), 1), 1)
        bound = product(high + low, high + low, terms)
    return beyond_bound(event, bound, "The squared differences may add up to", output, target)
