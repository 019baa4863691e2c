"""The evidence of a module-level verdict, sentence by sentence: numbers first, and what was not seen said as such."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nantrace.diagnosis import growth
from nantrace.diagnosis.modules import suspects
from nantrace.diagnosis.modules.backward import differentiated_before
from nantrace.diagnosis.modules.births import is_external
from nantrace.diagnosis.modules.parents import enclosing
from nantrace.diagnosis.modules.reason import what_happened
from nantrace.diagnosis.modules.seen import LARGEST, Seen
from nantrace.diagnosis.modules.words import counts, named, tensor_of
from nantrace.diagnosis.reached import reached
from nantrace.diagnosis.usual import left_its_usual_range
from nantrace.diagnosis.verdict import Status
from nantrace.events import Phase, Role, distinct
from nantrace.steps import likely, was_skipped


def skipped(seen: Seen, step: int) -> bool:
    """Whether a GradScaler skipped the update of this step."""
    return bool(seen.ledger.get(step, {}).get("skipped"))


def read_rows(seen: Seen, row: int) -> list[int]:
    """The rows of what the code that made `row` had read: inputs and own parameters of its call, or gradients."""
    call = enclosing(seen, row)
    if call is None:
        return []
    own = seen.own_parameters(call, int(seen.step[row]))
    if seen.phase[row] == Phase.BACKWARD:
        return [*(r for r in call.grad_outputs if r < row), *call.inputs, *own]
    return [*(r for r in call.inputs if r < row), *own]


def sentences(seen: Seen, status: Status, row: int, sink: int | None, cause: str | None) -> tuple[str, ...]:
    """What happened, what was seen before it, how it came about, what it reached, what was not seen."""
    said = [what_happened(seen, row, cause), _earlier(seen, row)]
    if not is_external(seen, row):
        before = growth.grew_by_block(seen, row) or growth.one_block_before(seen, row)
        said += [_labels(seen, row), *_magnitudes(seen, row), before or "", growth.huge_parameters(seen, row) or ""]
        said += [left_its_usual_range(seen, row) or "", _negative(seen, row), _hidden(seen, row)]
    said += [_fate(seen, status, row, sink), _unused(seen, status, sink)]
    return tuple(sentence for sentence in (*said, _gap(seen, row)) if sentence)


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
    of = f"{share:.1f} % of the range" if share >= 0.1 else f"far below the largest that {seen.site(row).dtype} holds"
    return [f"Its largest finite value is {size:.2e}, {of}."]


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
    of = f" of step {int(seen.step[sink])}" if seen.has_backward else ""
    return f"No backward and no update{of} were seen: whether anything used that output is not known."


def _skip(seen: Seen, row: int, step: int) -> str:
    """What became of a step whose update a GradScaler skipped."""
    entry = seen.ledger[step]
    skips = [int(entry["step"]) for entry in likely(seen.trace.steps, was_skipped) if entry.get("skipped")]
    stuck = len(skips) == len(seen.trace.steps) and len(skips) > 1
    tail = " Every traced step was skipped: training stands still." if stuck else ""
    attempted = int(entry.get("attempted") or 1)
    which = f"{entry['skipped']} of the {attempted} updates" if attempted > 1 else "the update"
    updated = seen.rows(step, Role.PARAM, Role.BUFFER, phases=[Phase.UPDATE])
    loose = _loose(seen, step)
    spoilt = loose or any(seen.bad[r] and not seen.mark[r] for r in updated)
    intact = "" if spoilt else ": parameters and buffers stayed finite"
    return f"GradScaler skipped {which} of step {step}{intact}.{loose}{_scaled(seen, row, entry)}{tail}"


def _loose(seen: Seen, step: int) -> str:
    """What a skip does not protect: nonfinite gradients that no optimizer of the trace was seen to read."""
    read = (seen.role == Role.GRAD) & np.isin(seen.phase, [int(Phase.POST_BACKWARD), int(Phase.OPTIMIZER)])
    held = {seen.name(int(r)) for r in np.flatnonzero(read)}
    rows = seen.rows(step, Role.GRAD, phases=[Phase.BACKWARD])
    names = list(dict.fromkeys(name for r in rows if seen.bad[r] and (name := seen.name(int(r))) not in held))
    if not names or not held:
        return ""
    which = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    return f" The gradient of {which} is nonfinite too, and no optimizer read it: the skip protects nothing from it."


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
    where = "" if unsure else " outside the modules"
    hidden = f", nor what forward{where} may have hidden" if seen.phase[row] == Phase.BACKWARD else ""
    if seen.role[row] == Role.LOSS and not unsure and not suspects.numbers_given(seen, row):
        return (
            f"Not seen: whether a target was nonfinite already, or which op{where} made it of finite ones (or inside a "
            "module that keeps it as an attribute)."
        )
    return f"Not seen: which op{where} made it{hidden}; a module trace holds no ops."


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
            f"{_dropped(seen, others)}"
        )
    said.append("No loss, gradient, parameter, moment or buffer was harmed by them.")
    return tuple(said)


def _dropped(seen: Seen, rows: npt.NDArray[np.int64]) -> str:
    if all(seen.role[row] == Role.INPUT for row in rows) and any(seen.call_of(int(row)) for row in rows):
        return "The model left them out or replaced them, as it does of padding; where, is not seen."
    return "Whether code inside a module reads them is not seen."


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


def absorbed(seen: Seen, row: int, passed_on: bool) -> tuple[str, ...]:
    """`passed_on`: a tensor that was seen later holds what came of it."""
    held = counts(seen.stats(row))
    if passed_on:
        harm = reached(seen, row, int(seen.step[row])) or "another tensor of the step"
        return (
            f"{seen.name(row)} was nonfinite before the step: {held}.",
            f"It reached {harm}; what was made of that, and is kept, is finite or was excused.",
        )
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
