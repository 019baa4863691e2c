"""How a birth came about, as far as rows of modules show it: the cause and the sentence that gives the reason."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nantrace.diagnosis import growth
from nantrace.diagnosis.modules import suspects
from nantrace.diagnosis.modules.backward import differentiated_before, made_elsewhere, weights_changed
from nantrace.diagnosis.modules.births import is_external, overflowed
from nantrace.diagnosis.modules.parents import enclosing, parents
from nantrace.diagnosis.modules.seen import LARGEST, Call, Seen
from nantrace.diagnosis.modules.words import counts, named
from nantrace.diagnosis.verdict import Stage
from nantrace.events import Phase, Role
from nantrace.steps import figures, is_nonfinite, rates

BAD_STATE = {Role.PARAM: "bad_param", Role.BUFFER: "bad_buffer", Role.STATE: "bad_moment"}


def cause(seen: Seen, row: int, stage: Stage | None) -> str | None:
    """A short identifier where rows of modules are enough to know it."""
    if stage == "input":
        return None if suspects.finite_batch(seen, row) else "bad_input"
    if is_external(seen, row):
        return BAD_STATE[Role(int(seen.role[row]))]
    if stage == "optimizer" and nonfinite_rates(seen, row):
        return "nonfinite_learning_rate"
    if stage == "update" and growth.exploded(seen, row):  # what then overflowed is the messenger
        return "exploding_update"
    if seen.infinite[row] and overflowed(seen, row):
        return "overflow"
    if suspects.ignored_labels(seen, row) is not None:
        return "nothing_to_average"
    return None


def nonfinite_rates(seen: Seen, row: int) -> list[float]:
    """The learning rates of the row's step that are infinite or NaN, as the ledger holds them."""
    return [rate for rate in rates(seen.ledger.get(int(seen.step[row]), {})) if is_nonfinite(rate)]


def what_happened(seen: Seen, row: int, cause: str | None) -> str:
    if is_external(seen, row):
        finite = seen_finite(seen, row)
        since = "" if finite is None else f" It was finite {finite}: something wrote it since."
        sound = None if finite is not None else last_sound_step(seen, row)
        if sound is not None:
            since = f" The loss of step {sound} was still finite: something wrote it since."
        return f"{seen.name(row)} was nonfinite before the step used it: {counts(seen.stats(row))}.{since}"
    return _reason(seen, row, cause)


def seen_finite(seen: Seen, row: int) -> str | None:
    """When state that is nonfinite was last seen finite: "when step 3 ended"; None if it never was."""
    before = seen.before(row, Role(int(seen.role[row])), seen.name(row))
    if before is None or seen.bad[before] or seen.role[row] == Role.INPUT:
        return None
    step = int(seen.step[before])
    return f"when step {step} ended" if seen.phase[before] == Phase.UPDATE else f"when step {step} began"


def last_sound_step(seen: Seen, row: int) -> int | None:
    """The last step whose rows were not kept and whose loss was finite, before a parameter was first seen nonfinite.

    A loss that reads the parameter cannot have been finite then. None if the step of `row` is not the first with rows,
    or if nothing came of the parameter there either.
    """
    step = int(seen.step[row])
    read = is_nonfinite(seen.ledger.get(step, {}).get("loss"))
    if seen.role[row] != Role.PARAM or step != int(seen.step[0]) or not read:
        return None
    sound = [
        int(number or 0)
        for number, loss in figures(seen.trace.steps, "loss")
        if number is not None and number < step and isinstance(loss, float) and math.isfinite(loss)
    ]
    return sound[-1] if sound else None


def _reason(seen: Seen, row: int, cause: str | None) -> str:
    role, call = Role(int(seen.role[row])), enclosing(seen, row)
    if role is Role.LOSS:
        return _loss_reason(seen, row, parents(seen, row))
    if role is Role.GRAD:
        return _gradient_reason(seen, row)
    if seen.phase[row] == Phase.UPDATE:
        bad = nonfinite_rates(seen, row) if cause == "nonfinite_learning_rate" else []
        if bad:
            return f"The learning rate of the step was {bad[0]}; {seen.name(row)} is nonfinite after the update."
        return f"{seen.name(row)} is nonfinite after the update, while its gradient and its value before were finite."
    if call is None:
        return _arrival_reason(seen, row)
    if weights_changed(seen, row):
        what = "NaN" if seen.nan[row] else "infinities"
        return (
            f"{named(call.module)} put out {what}, which its input and its weights cannot give as they were seen: they "
            "are finite and far from overflow. Its weights were written since the step began, or a hook changed its "
            "output."
        )
    if seen.phase[row] == Phase.BACKWARD:
        outside = "" if role is Role.GRAD_INPUT else " to a module inside"
        name = named(call.module)
        return f"The gradients that reached {name} are finite, the one that its backward passed on{outside} is not."
    if role is Role.INPUT:
        return _handed_on_reason(seen, row, named(call.module))
    return _output_reason(seen, row, call, cause)


def _arrival_reason(seen: Seen, row: int) -> str:
    """Of what came to a module from outside every call."""
    site = seen.site(row)
    if seen.phase[row] == Phase.BACKWARD:
        losses = seen.rows(int(seen.step[row]), Role.LOSS)
        finite = ", the loss is finite" if losses.size and not seen.bad[losses[losses < row]].any() else ""
        return f"The gradient that arrives at {site.module or 'the model'} is nonfinite{finite}."
    other = "; the batch of the trace is finite: it is other data, or made by code before"
    batch = other if suspects.finite_batch(seen, row) else ""
    return f"{site.tensor} was nonfinite when {site.module or 'the model'} was called with it{batch}."


def _handed_on_reason(seen: Seen, row: int, name: str) -> str:
    """Of what a module gave to one inside it."""
    if suspects.may_be_data(seen, row):
        return (
            f"The code of {name} itself handed it to its first submodule: made of finite arguments and weights, or "
            "read from elsewhere, such as a file, numpy or an attribute."
        )
    return f"The code of {name} itself made it, between its submodules, out of finite values."


def _output_reason(seen: Seen, row: int, call: Call, cause: str | None) -> str:
    name, dtype, above = named(call.module), seen.site(row).dtype, parents(seen, row)
    if cause == "overflow" or (cause == "exploding_update" and seen.infinite[row] and overflowed(seen, row)):
        largest = LARGEST.get(dtype)
        limit = f" ({largest:,.5g})" if largest and largest > 1e6 else f" ({largest:,.0f})" if largest else ""
        return f"Inputs and weights are finite; the result left {dtype}'s range{limit}."
    if not call.inputs:
        return f"{name} returned it; no tensor among its arguments was seen."
    if suspects.weights_unseen(seen, row):
        return f"{name} put it out of finite inputs. It is no part of the model: its own weights were not looked at."
    last = suspects.last_inside(seen, call, row)
    if last and not above:
        return f"Its own code after {last} made it: what {name} read and what its submodules put out is finite."
    return f"Inputs and weights of {name} are {'without NaN' if above else 'finite'}; its output is not."


def _loss_reason(seen: Seen, row: int, above: Sequence[int]) -> str:
    if suspects.transformed(seen, int(seen.step[row])):
        return "The loss is nonfinite. Modules ran inside a functorch transform, where no tensor of theirs can be read."
    if suspects.beside_outputs(seen, row):
        return (
            f"The loss is nonfinite{_though(above, 'everything that the modules returned to it was finite')}. Its "
            "gradient is finite at the model's output and nonfinite inside the model: a term of it came another way, "
            "made by code outside the modules, or by a module in its forward that keeps it as an attribute (an "
            "auxiliary loss)."
        )
    if not suspects.model_unseen(seen, int(seen.step[row])):
        return f"The loss is nonfinite{_though(above, 'everything that the modules returned to it was finite')}."
    return (
        f"The loss is nonfinite{_though(above, 'everything that modules were seen to put out was finite')}. It was "
        f"born in the model's own code or in the code after it. {suspects.unseen_words(seen)}"
    )


def _though(above: Sequence[int], what: str) -> str:
    return ", though it was given infinities" if above else f"; {what}"


def _gradient_reason(seen: Seen, row: int) -> str:
    if seen.phase[row] != Phase.BACKWARD and not suspects.seen_after_backward(seen, row):
        return (
            f"The gradient of {seen.name(row)} is nonfinite where it was first seen, at the optimizer: no backward was "
            "seen to write it, as with torch.func or a gradient set by hand. Backward, or code after it, made it."
        )
    if seen.phase[row] != Phase.BACKWARD:
        return f"The gradient of {seen.name(row)} was finite after backward and is not where the optimizer reads it."
    if made_elsewhere(seen, row):
        return _elsewhere(seen, row)
    return (
        f"The gradients that reached {named(seen.site(row).module or '')} are finite, that of {seen.name(row)} is not."
    )


def _elsewhere(seen: Seen, row: int) -> str:
    owner = seen.site(row).module or "the model"
    way = "its values or a gradient through it, as a penalty does" if differentiated_before(seen, row) else "it"
    old = ""
    if suspects.uncleared(seen, row):
        old = f". Or {seen.name(row)}.grad was nonfinite before: gradients lay there that nothing had cleared"
    return (
        f"The gradient of {seen.name(row)} is nonfinite, though {owner} cannot have made it: its inputs, weights and "
        "the gradients that reached it are finite and far from overflow. "
        f"Other code reads {way}, or a hook changed it{old}."
    )
