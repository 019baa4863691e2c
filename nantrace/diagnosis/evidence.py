"""The sentences, causes and advice of a module-level verdict: numbers first, and what was not seen said as such."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nantrace.diagnosis import growth, suspects
from nantrace.diagnosis.backward import differentiated_before, made_elsewhere, weights_changed
from nantrace.diagnosis.parents import enclosing, is_external, overflowed, parents
from nantrace.diagnosis.reached import reached
from nantrace.diagnosis.seen import LARGEST, Call, Seen
from nantrace.diagnosis.usual import left_its_usual_range
from nantrace.diagnosis.verdict import Stage, Status
from nantrace.events import Phase, Role, TensorStats, distinct
from nantrace.steps import is_nonfinite, likely, rates, was_skipped

BAD_STATE = {Role.PARAM: "bad_param", Role.BUFFER: "bad_buffer", Role.STATE: "bad_moment"}


def skipped(seen: Seen, step: int) -> bool:
    """Whether a GradScaler skipped the update of this step."""
    return bool(seen.ledger.get(step, {}).get("skipped"))


def index(stats: TensorStats) -> tuple[int, ...] | None:
    """Where the first nonfinite element is, one integer a dimension."""
    flat = stats.first_bad
    if flat is None or flat < 0 or flat >= int(np.prod(stats.shape, dtype=np.int64)):
        return None
    return tuple(int(i) for i in np.unravel_index(flat, stats.shape))


def tensor_of(seen: Seen, row: int) -> str:
    """What a reader calls the tensor of a row: gradients are of something."""
    gradient = int(seen.role[row]) in (Role.GRAD, Role.GRAD_INPUT, Role.GRAD_OUTPUT)
    return f"gradient of {seen.name(row)}" if gradient else seen.name(row)


def counts(stats: TensorStats) -> str:
    """ "37 of 48 elements: 37 +inf; first at [0, 0, 1]"."""
    parts = [(stats.nan, "nan"), (stats.posinf, "+inf"), (stats.neginf, "-inf")]
    held = ", ".join(f"{count:,} {what}" for count, what in parts if count)
    place = index(stats)
    where = f", first at {list(place)}" if place else ""
    return f"{held} of {stats.numel:,} elements{where}"


def read_rows(seen: Seen, row: int) -> list[int]:
    """The rows of what the code that made `row` had read: inputs and own parameters of its call, or gradients."""
    call = enclosing(seen, row)
    step = int(seen.step[row])
    if call is None:
        return []
    own = [
        int(r) for r in seen.rows(step, Role.PARAM, phases=[Phase.FORWARD]) if seen.site(int(r)).module == call.module
    ]
    if seen.phase[row] == Phase.BACKWARD:
        return [*(r for r in call.grad_outputs if r < row), *call.inputs, *own]
    return [*(r for r in call.inputs if r < row), *own]


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


def sentences(seen: Seen, status: Status, row: int, sink: int | None, cause: str | None) -> tuple[str, ...]:
    """What happened, what was seen before it, how it came about, what it reached, what was not seen."""
    said = [_what(seen, row, cause), _earlier(seen, row)]
    if not is_external(seen, row):
        before = growth.grew_by_block(seen, row) or growth.one_block_before(seen, row)
        said += [_labels(seen, row), *_magnitudes(seen, row), before or "", growth.huge_parameters(seen, row) or ""]
        said += [left_its_usual_range(seen, row) or "", _negative(seen, row), _hidden(seen, row)]
    said += [_fate(seen, status, row, sink), _unused(seen, status, sink)]
    return tuple(sentence for sentence in (*said, _gap(seen, row)) if sentence)


def _what(seen: Seen, row: int, cause: str | None) -> str:
    if is_external(seen, row):
        finite = seen_finite(seen, row)
        since = "" if finite is None else f" It was finite {finite}: something wrote it since."
        return f"{seen.name(row)} was nonfinite before the step used it: {counts(seen.stats(row))}.{since}"
    return _reason(seen, row, cause)


def seen_finite(seen: Seen, row: int) -> str | None:
    """When state that is nonfinite was last seen finite: "when step 3 ended"; None if it never was."""
    before = seen.before(row, Role(int(seen.role[row])), seen.name(row))
    if before is None or seen.bad[before] or seen.role[row] == Role.INPUT:
        return None
    step = int(seen.step[before])
    return f"when step {step} ended" if seen.phase[before] == Phase.UPDATE else f"when step {step} began"


def _reason(seen: Seen, row: int, cause: str | None) -> str:
    role, site, call = Role(int(seen.role[row])), seen.site(row), enclosing(seen, row)
    above = parents(seen, row)
    if role is Role.LOSS:
        return _loss_reason(seen, row, above)
    if role is Role.GRAD:
        return _gradient_reason(seen, row)
    if seen.phase[row] == Phase.UPDATE:
        bad = nonfinite_rates(seen, row) if cause == "nonfinite_learning_rate" else []
        if bad:
            return f"The learning rate of the step was {bad[0]}; {seen.name(row)} is nonfinite after the update."
        return f"{seen.name(row)} is nonfinite after the update, while its gradient and its value before were finite."
    if call is None:
        if seen.phase[row] == Phase.BACKWARD:
            losses = seen.rows(int(seen.step[row]), Role.LOSS)
            finite = ", the loss is finite" if losses.size and not seen.bad[losses[losses < row]].any() else ""
            return f"The gradient that arrives at {site.module or 'the model'} is nonfinite{finite}."
        batch = (
            "; the batch of the trace is finite: it is other data, or made by code before"
            if suspects.finite_batch(seen, row)
            else ""
        )
        return f"{site.tensor} was nonfinite when {site.module or 'the model'} was called with it{batch}."
    name = named(call.module)
    if weights_changed(seen, row):
        what = "NaN" if seen.nan[row] else "infinities"
        return (
            f"{name} put out {what}, which its input and its weights cannot give as they were seen: they are finite "
            "and far from overflow. Its weights were written since the step began, or a hook changed its output."
        )
    if seen.phase[row] == Phase.BACKWARD:
        outside = "" if role is Role.GRAD_INPUT else " to a module inside"
        return f"The gradients that reached {name} are finite, the one that its backward passed on{outside} is not."
    if role is Role.INPUT:
        if suspects.may_be_data(seen, row):
            return (
                f"The code of {name} itself handed it to its first submodule: made of finite arguments and weights, or "
                "read from elsewhere, such as a file, numpy or an attribute."
            )
        return f"The code of {name} itself made it, between its submodules, out of finite values."
    if cause == "overflow" or (cause == "exploding_update" and seen.infinite[row] and overflowed(seen, row)):
        largest = LARGEST.get(site.dtype)
        limit = f" ({largest:,.5g})" if largest and largest > 1e6 else f" ({largest:,.0f})" if largest else ""
        return f"Inputs and weights are finite; the result left {site.dtype}'s range{limit}."
    if not call.inputs:
        return f"{name} returned it; no tensor among its arguments was seen."
    if suspects.weights_unseen(seen, row):
        return f"{name} put it out of finite inputs. It is no part of the model: its own weights were not looked at."
    last = suspects.last_inside(seen, call, row)
    if last and not above:
        return f"Its own code after {last} made it: what {name} read and what its submodules put out is finite."
    return f"Inputs and weights of {name} are {'without NaN' if above else 'finite'}; its output is not."


def _negative(seen: Seen, row: int) -> str:
    turned = suspects.turned_negative(seen, row)
    if turned is None:
        return ""
    low, high = float(seen.trace.events["min"][turned]), float(seen.trace.events["max"][turned])
    held = f"{low:.3g}" if low == high else f"from {low:.3g} to {high:.3g}"
    return (
        f"{seen.name(turned)}, positive in every step before, is {held} since the last update: a logarithm, a root or "
        "a power of it is NaN."
    )


def _hidden(seen: Seen, row: int) -> str:
    size = suspects.may_hide(seen, row) if seen.phase[row] == Phase.BACKWARD else None
    if size is None:
        return ""
    return (
        f"Forward read values up to {size:.3g}, of which exp is infinite: where() or a clamp may have hidden that from "
        "the loss, but not from backward."
    )


def _labels(seen: Seen, row: int) -> str:
    given = suspects.ignored_labels(seen, row)
    if given is None:
        return ""
    count = int(seen.trace.events["numel"][given])
    return f"Each of the {count:,} values of {seen.name(given)} is -100, which cross entropy ignores: 0 / 0."


def _loss_reason(seen: Seen, row: int, above: Sequence[int]) -> str:
    if suspects.transformed(seen, int(seen.step[row])):
        return "The loss is nonfinite. Modules ran inside a functorch transform, where no tensor of theirs can be read."
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


def named(module: str | None) -> str:
    """How a sentence calls a module."""
    return "code outside every module" if module is None else module or "the model"


def _earlier(seen: Seen, row: int) -> str:
    earlier = int(seen.bad[:row].sum())
    if row == 0:
        return "It is the first tensor that was looked at."
    if earlier == 0:
        each = f"Each of the {row:,} tensors" if row > 1 else "The one tensor"
        return f"{each} seen before it was finite."
    marks = int(seen.mark[:row].sum())
    if marks == earlier:
        return f"{earlier:,} of the {row:,} tensors seen before it hold -inf only, as masks do; the rest were finite."
    return f"{earlier:,} of the {row:,} tensors seen before it were nonfinite, none of which explains it."


def _magnitudes(seen: Seen, row: int) -> list[str]:
    largest = LARGEST.get(seen.site(row).dtype)
    size = seen.absmax(row)
    if not size or largest is None or not seen.infinite[row]:
        return []
    share = 100 * size / largest
    return [f"Its largest finite value is {size:.2e}" + (f", {share:.1f} % of the range." if share >= 0.1 else ".")]


def _fate(seen: Seen, status: Status, row: int, sink: int | None) -> str:
    step = int(seen.step[row if sink is None else sink])
    harm = reached(seen, row, step)
    if status != "contained":
        return f"It reached {harm}." if harm else ""
    if skipped(seen, step):
        return _skip(seen, row, step)
    if sink is not None:
        return f"It reached {harm}; the optimizer was given finite gradients: they were cleared or put right before."
    if harm:
        return f"It reached {harm}; no loss, gradient, parameter or buffer that was seen."
    return "It reached no loss, gradient, parameter or buffer that was seen."


def _unused(seen: Seen, status: Status, sink: int | None) -> str:
    if status != "fault" or sink is None or seen.role[sink] != Role.OUTPUT:
        return ""
    return "No backward and no update were seen: whether anything used that output is not known."


def _skip(seen: Seen, row: int, step: int) -> str:
    """What became of a step whose update a GradScaler skipped."""
    entry = seen.ledger[step]
    skips = [int(entry["step"]) for entry in likely(seen.trace.steps, was_skipped) if entry.get("skipped")]
    stuck = len(skips) == len(seen.trace.steps) and len(skips) > 1
    tail = " Every traced step was skipped: training stands still." if stuck else ""
    attempted = int(entry.get("attempted") or 1)
    which = f"{entry['skipped']} of the {attempted} updates" if attempted > 1 else "the update"
    updated = seen.rows(step, Role.PARAM, Role.BUFFER, phases=[Phase.UPDATE])
    intact = "" if any(seen.bad[r] and not seen.mark[r] for r in updated) else ": parameters and buffers stayed finite"
    return f"GradScaler skipped {which} of step {step}{intact}.{_scaled(seen, row, entry)}{tail}"


def _scaled(seen: Seen, row: int, entry: Mapping[str, Any]) -> str:
    """What a lower loss scale can do about it."""
    if seen.role[row] == Role.LOSS and not seen.nan[row]:
        scale = entry.get("scale_before")
        times = f" ({scale:,.6g})" if isinstance(scale, float) else ""
        return f" What backward began with is the loss times the scale{times}: the loss itself may have been finite."
    if seen.phase[row] in (Phase.FORWARD, Phase.LOSS):
        return " It was born before backward: no loss scale can remove it."
    return ""


def _gap(seen: Seen, row: int) -> str:
    if is_external(seen, row) or seen.phase[row] == Phase.UPDATE:
        return ""
    call = enclosing(seen, row)
    unseen = suspects.region(seen, row)
    if unseen:
        more = f"{unseen[0]} and {len(unseen) - 1} more" if len(unseen) > 1 else unseen[0]
        return f"Not seen: submodules of {named(call.module if call else None)} ({more}); it may have been born in one."
    if call is not None:
        name = named(call.module)
        hidden = f", nor what forward inside {name} may have hidden" if seen.phase[row] == Phase.BACKWARD else ""
        return f"Not seen: which op inside {name} made it{hidden}; a module trace holds no ops."
    if suspects.came_in(seen, row) and suspects.finite_batch(seen, row):
        return "Not seen: which code before the call made it, or which data it came from."
    if suspects.came_in(seen, row):
        return "Not seen: whether the batch held it already or code before the call made it."
    unsure = suspects.model_unseen(seen, int(seen.step[row])) or differentiated_before(seen, row)
    return f"Not seen: which op{'' if unsure else ' outside the modules'} made it; a module trace holds no ops."


def as_mapping(seen: Seen, row: int) -> dict[str, Any]:
    """One row of `verdict.path`."""
    site, stats = seen.site(row), seen.stats(row)
    return {
        "seq": int(seen.trace.events["seq"][row]),
        "step": int(seen.step[row]),
        "phase": site.phase.label,
        "module": site.module,
        "role": site.role.label,
        "slot": site.slot,
        "dtype": site.dtype,
        "nan": stats.nan,
        "posinf": stats.posinf,
        "neginf": stats.neginf,
    }


def clean(seen: Seen) -> tuple[str, ...]:
    steps = len(distinct(seen.step))
    said = f"None of the {len(seen.bad):,} tensors seen in {steps} step{'s' * (steps != 1)} holds a nonfinite value."
    # What any module trace leaves out, in one sentence: most of those who read it have a healthy run.
    stepped = bool((seen.phase == Phase.OPTIMIZER).any())
    after = "code after the last optimizer step" if stepped else "code after backward"
    dies = f"Not seen: a value that dies inside a module, settings of the optimizer, {after}."
    unseen = len(seen.bad) and any(suspects.model_unseen(seen, int(step)) for step in distinct(seen.step))
    return (said, dies, suspects.unseen_words(seen)) if unseen else (said, dies)


def expected(seen: Seen) -> tuple[str, ...]:
    marks, others = np.flatnonzero(seen.mark), np.flatnonzero(seen.bad & ~seen.mark)
    said = []
    if marks.size:
        hold = "holds" if marks.size == 1 else "hold"
        which = _names(seen, marks)
        said.append(f"{marks.size:,} of {len(seen.bad):,} tensors {hold} -inf only, as masks do: {which}.")
    if others.size:
        hold = "holds" if others.size == 1 else "hold"
        more = "more " if marks.size else f"of {len(seen.bad):,} tensors "
        said.append(
            f"{others.size:,} {more}{hold} nonfinite values that show in no later tensor: {_names(seen, others)}. "
            f"Whether code inside a module reads them is not seen."
        )
    said.append("No loss, gradient, parameter, moment or buffer was harmed by them.")
    return tuple(said)


def _names(seen: Seen, rows: npt.NDArray[np.int64]) -> str:
    """The first few tensors of these rows, each once."""
    names = list(dict.fromkeys(tensor_of(seen, int(row)) for row in rows[:200]))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def unread(seen: Seen, row: int) -> tuple[str, ...]:
    return (
        f"{seen.name(row)} was nonfinite when the trace began: {counts(seen.stats(row))}.",
        "No call of a module and no backward was seen: whether anything reads it is unknown.",
    )


def absorbed(seen: Seen, row: int) -> tuple[str, ...]:
    held = counts(seen.stats(row))
    return (
        f"{seen.name(row)} was nonfinite before the step: {held}.",
        "No output, gradient or update shows it: what reads it turned it into finite values (dividing by inf gives 0).",
        "What depends on those elements carries no information and does not train.",
    )


def poisoned_buffers(seen: Seen, sink: int) -> str:
    return (
        f"GradScaler skipped the update, but not the buffers that forward had written: {_buffers(seen, sink)} stayed "
        "nonfinite."
    )


def written_buffers(seen: Seen, sink: int) -> str:
    return (
        f"No backward followed that forward, as when a check in the loop leaves the update out; {_buffers(seen, sink)} "
        "kept what it had written."
    )


def _buffers(seen: Seen, sink: int) -> str:
    rows = seen.rows(int(seen.step[sink]), Role.BUFFER, phases=[Phase.UPDATE])
    names = [seen.name(int(row)) for row in rows if seen.bad[row] and not seen.mark[row]]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def advice(seen: Seen, row: int, stage: Stage | None, cause: str | None, kept: int | None = None) -> tuple[str, ...]:
    """The next controlled checks, at most three. `kept`: the row of what holds the damage, if anything does."""
    if is_external(seen, row):
        return advice_for_state(seen, row)
    call: Call | None = enclosing(seen, row)
    name, dtype = named(call.module if call else None), seen.site(row).dtype
    found = []
    if stage == "update" and cause == "exploding_update":
        found.append("Repeat the steps with a tenth of the learning rate, or with gradients clipped before the update.")
    elif stage == "update" or (kept is not None and seen.role[kept] == Role.BUFFER and suspects.left_out(seen, row)):
        found.append(
            "Keep the running statistics of a step whose update is skipped: restore them, or normalise in float32."
        )
    if cause == "overflow":
        read = f"the inputs and the weights of {name}" if call is not None else "what the loss is computed from"
        found.append(f"Print the largest magnitude of {read}: which of them is large, and since which step?")
        if dtype == "float16":
            what = name if call is not None else "what follows the model, up to the loss,"
            found.append(f"Run {what} in float32 (or bfloat16) and see whether the step stays finite.")
    elif cause == "nonfinite_learning_rate":
        found.append("Print the learning rate after each scheduler.step(): where does it become nonfinite?")
    elif suspects.came_in(seen, row) and not suspects.finite_batch(seen, row):
        found.append("Hand the batch to nantrace.trace(..., batch=batch): is it nonfinite before the model sees it?")
    elif stage == "optimizer":
        found.append(f"Check the optimizer's eps and learning rate: an eps below the smallest {dtype} value is 0.")
    elif stage == "gradients":
        found.append(
            "Print the gradients after each thing between backward and optimizer.step: unscale, clip, all-reduce."
        )
    if suspects.takes_labels(seen, row):
        found.append("Print how many labels count, (labels != -100).sum(): a mean over none of them is NaN.")
    if call is not None and seen.nan[row] and "Attention" in seen.classes.get(call.module, ""):
        found.append(f"Look for a sample of which the mask given to {name} hides every key: its softmax is NaN.")
    found.append("Replay the step to find the op and its line: `nantrace bisect FILE.py:step`.")
    return tuple(found[:3])


def advice_for_state(seen: Seen, row: int) -> tuple[str, ...]:
    role, name = int(seen.role[row]), seen.name(row)
    if role == Role.INPUT:
        place = index(seen.stats(row))
        sample = f", sample {place[0]} first" if place else ""
        return (f"Look where {name} is made{sample}: divisions, logs and missing values in the dataset.",)
    finite = seen_finite(seen, row)
    if finite is not None:
        return (
            f"Look at what wrote {name}, finite {finite}, before step {int(seen.step[row])} used it: an average of "
            "weights (EMA, a teacher), a copy or a load.",
            f"Print whether {name} is finite after each line of the loop that writes it.",
        )
    if role == Role.PARAM:
        return (f"Look at how {name} is initialised, and at the checkpoint that it was loaded from.",)
    if role == Role.STATE:
        return (f"Look at {name} in the checkpoint, and trace the step that last wrote it.",)
    return (f"Reset {name} and trace the steps that write it: which one leaves it nonfinite?",)
