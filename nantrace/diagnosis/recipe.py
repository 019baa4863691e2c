"""The recipe of mixed precision: what a step did against it, out of the facts that its row of the ledger holds.

Speaks only of what those facts prove, and says nothing of whether the step went nonfinite: a departure is a fault in
waiting. Knows no torch. The recipe itself is PyTorch's ("Automatic Mixed Precision examples").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from nantrace.events import Trace
from nantrace.steps import told

Facts = Mapping[str, Any]

#: A bound for clipping is no bound for scaled gradients where it is below this share of the scale: what would be left
#: after unscaling has a norm that nobody wants.
_NO_BOUND = 0.005


@dataclass(frozen=True)
class Departure:
    """A rule that a step broke.

    Attributes:
        rule: its identifier.
        step: the first step that broke it.
        evidence: a sentence that proves it, with numbers.
        advice: the next thing to do.
        steps: how many steps of the trace broke it, of those whose conduct is on record: outside the sample (every=N),
            and of steps whose rows were let go, only the first one.
    """

    rule: str
    step: int
    evidence: str
    advice: str
    steps: int = 1

    @property
    def sentence(self) -> str:
        return f"step {self.step}: {self.evidence}; {self.advice}"

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON types only."""
        return asdict(self)


def recipe(trace: Trace) -> tuple[Departure, ...]:
    """Every rule that a step of the trace broke, once, in the order in which they were first broken."""
    return over_steps(told(trace.steps))


def over_steps(steps: Iterable[Mapping[str, Any]]) -> tuple[Departure, ...]:
    """The same of rows of the ledger."""
    found: dict[str, Departure] = {}
    for row in steps:
        for departure in of_step(row):
            first = found.get(departure.rule, departure)
            count = first.steps + 1 if departure.rule in found else 1
            found[departure.rule] = Departure(first.rule, first.step, first.evidence, first.advice, count)
    return tuple(found.values())


def departures(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a tracer says of a step that has ended: a rule and a sentence each."""
    return [(departure.rule, departure.sentence) for departure in of_step(row)]


def of_step(row: Mapping[str, Any]) -> list[Departure]:
    """The rules that one step broke."""
    facts = row.get("conduct")
    if not isinstance(facts, Mapping):
        return []
    found = []
    for rule, (check, advice) in _RULES.items():
        evidence = check(facts)
        if evidence is not None:
            found.append(Departure(rule, int(row.get("step", 0)), evidence, advice))
    return found


def _loss_outside_autocast(facts: Facts) -> str | None:
    losses = facts.get("half_losses")
    if not losses:
        return None
    node, dtype = losses[0]
    return (
        f"the loss {_loss(node)} was computed in {dtype}, outside of the autocast region in which the model ran: "
        f"within it autocast computes that loss in float32"
    )


def _probabilities(facts: Facts) -> str | None:
    dtype = facts.get("half_probabilities")
    if dtype is None:
        return None
    return (
        f"binary_cross_entropy read probabilities that autocast computed in {dtype}: there all above "
        f"1 - 1/{_ulps(dtype)} are 1, and log(1 - p) is -inf before it is clamped"
    )


def _clip_before_unscale(facts: Facts) -> str | None:
    for clip in facts.get("clips", ()):
        if 0 < clip["bound"] < _NO_BOUND * clip["scale"]:
            what = "norm" if clip["call"] == "clip_grad_norm_" else "value"
            return (
                f"{clip['call']} clipped {_gradients(clip['gradients'])} to {clip['bound']:g} while they were still "
                f"multiplied by the scale {clip['scale']:,g}, which leaves a {what} of at most "
                f"{clip['bound'] / clip['scale']:.2g}"
            )
    return None


def _around_the_scaler(facts: Facts) -> str | None:
    for optimizer, count in facts.get("bypassed", {}).items():
        return (
            f"{optimizer}.step() was called directly with {_gradients(count)} that are still multiplied by the scale"
            f"{_scale(facts)}"
        )
    return None


def _update_inside(facts: Facts) -> str | None:
    mixed = facts.get("updated_early")
    if mixed is None:
        return None
    return (
        f"scaler.update() was called while {_gradients(mixed['parameters'])} held the sum of "
        f"{_passes(mixed['passes'])} and a further one was added before the optimizer used it: both parts can have a "
        f"different scale"
    )


def _unscale_inside(facts: Facts) -> str | None:
    mixed = facts.get("unscaled_early")
    if mixed is None:
        return None
    return (
        f"unscale_ divided {_gradients(mixed['parameters'])} after {_passes(mixed['passes'])}, and a further backward "
        f"pass added gradients that are multiplied by the scale{_scale(facts)}"
    )


def _scaled_by_hand(facts: Facts) -> str | None:
    for hand in facts.get("by_hand", ()):
        what = "divided" if hand["divided"] else "multiplied"
        effect = "scaled by nothing" if hand["divided"] else "scaled twice"
        return (
            f"the loss was {what} by the scale {hand['scale']:,g} by hand {hand['side']} scaler.scale, so that its "
            f"gradients are {effect} and unscale_ does not restore them"
        )
    for optimizer, count in facts.get("never_scaled", {}).items():
        return (
            f"backward began at a loss that scaler.scale did not return, and {_gradients(count)} of {optimizer} were "
            f"divided by the scale{_scale(facts)} all the same"
        )
    return None


def _backward_under_autocast(facts: Facts) -> str | None:
    dtype = facts.get("backward_autocast")
    return None if dtype is None else f"backward() ran inside of an autocast region of {dtype}"


def _scheduler(facts: Facts) -> str | None:
    for moved in facts.get("schedulers", ()):
        attempted = moved["attempted"]
        what = "the update was" if attempted == 1 else f"all {attempted:,} updates were"
        return (
            f"{moved['scheduler']}.step() moved the learning rate on although {what} skipped since its last move "
            f"(attempted {attempted:,}, committed {moved['committed']:,})"
        )
    return None


def _half_model(facts: Facts) -> str | None:
    for group in facts.get("groups", ()):
        count = group["dtypes"].get("float16")
        if count and group["scaled"]:
            return (
                f"{count:,} {'parameter' if count == 1 else 'parameters'} of {group['optimizer']} "
                f"(param_groups[{group['group']}]) are float16 themselves and are updated under a GradScaler, which "
                f"expects float32 parameters"
            )
    return None


def _bfloat16(facts: Facts) -> str | None:
    """Where anything of the model is float16 the scaler has work to do."""
    if not facts.get("scaled_optimizers"):
        return None
    dtypes = {dtype for group in facts.get("groups", ()) for dtype in group["dtypes"]}
    autocast = set(facts.get("autocast", ()))
    if (autocast == {"bfloat16"} and "float16" not in dtypes) or (not autocast and dtypes == {"bfloat16"}):
        where = "autocast ran in bfloat16" if autocast else "the parameters are bfloat16"
        return (
            f"{where}, which has the range of float32, while a GradScaler multiplied the loss by {_number(facts)} and "
            f"can skip updates for it"
        )
    return None


def _eps(facts: Facts) -> str | None:
    for group in facts.get("groups", ()):
        eps, count = group.get("eps"), group["dtypes"].get("float16")
        if count and eps and float(np.float16(eps)) == 0.0:
            return (
                f"eps={eps:g} of {group['optimizer']} (param_groups[{group['group']}]) is 0 in float16, the dtype of "
                f"{count:,} of its parameters: a gradient of 0 makes 0/0"
            )
    return None


#: Each rule, what proves it, and what to do.
_RULES: dict[str, tuple[Callable[[Facts], str | None], str]] = {
    "loss_outside_autocast": (
        _loss_outside_autocast,
        "compute the loss inside of the autocast region, or from outputs.float()",
    ),
    "bce_on_probabilities": (
        _probabilities,
        "pass logits to binary_cross_entropy_with_logits instead",
    ),
    "clip_before_unscale": (_clip_before_unscale, "call scaler.unscale_(optimizer) before clipping"),
    "step_around_scaler": (_around_the_scaler, "call scaler.step(optimizer) instead"),
    "update_inside_accumulation": (
        _update_inside,
        "call scaler.update() only after the step that ends the accumulation",
    ),
    "unscale_inside_accumulation": (
        _unscale_inside,
        "call scaler.unscale_ only after the last backward pass of the accumulation",
    ),
    "loss_scaled_by_hand": (_scaled_by_hand, "call backward on what scaler.scale(loss) returns, unchanged"),
    "backward_under_autocast": (_backward_under_autocast, "leave the autocast region before backward()"),
    "scheduler_after_skip": (
        _scheduler,
        "step the scheduler only if the scale did not fall in scaler.update()",
    ),
    "half_model_with_scaler": (_half_model, "keep the parameters in float32 and let autocast do the casting"),
    "scaler_with_bfloat16": (_bfloat16, "leave out the scaler, or pass GradScaler(enabled=False)"),
    "eps_vanishes": (_eps, "raise eps to 1e-4 or more, or keep the parameters in float32"),
}

RULES = tuple(_RULES)


def _loss(node: str) -> str:
    return node.removesuffix("Backward0")


def _ulps(dtype: str) -> str:
    return "4,096" if dtype == "float16" else "512"


def _gradients(count: int) -> str:
    return f"{count:,} gradient" if count == 1 else f"{count:,} gradients"


def _passes(count: int) -> str:
    return f"{count:,} backward pass" if count == 1 else f"{count:,} backward passes"


def _scale(facts: Facts) -> str:
    return f" {_number(facts)}" if facts.get("scales") else ""


def _number(facts: Facts) -> str:
    scales = facts.get("scales")
    return f"{scales[-1]:,g}" if scales else "its scale"
