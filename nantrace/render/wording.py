"""The words of a report, whatever shows them: where it began, what it held and read, which way it went.

Sentences and short phrases without layout, width or markup; names stand in them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nantrace.diagnosis.causes.roles import role
from nantrace.diagnosis.causes.wording import counts, put_out, read
from nantrace.diagnosis.ranks import ranks
from nantrace.diagnosis.verdict import Origin, Verdict
from nantrace.events import Role, Site, TensorStats, Trace, distinct
from nantrace.lineage import Operand

_HEADLINE = {
    "contained": "CONTAINED",
    "expected": "EXPECTED: nonfinite values that training does not feel, no fault.",
    "clean": "CLEAN: nothing nonfinite was seen.",
    "not_reproduced": "NOT REPRODUCED: the replayed step stayed finite.",
    "inconclusive": "INCONCLUSIVE",
}
#: Statuses whose first evidence sentence stands in the headline.
_TOLD = ("fault", "contained", "inconclusive")
OUTSIDE = "(outside the modules)"  # where code ran that is in no module
_OPERANDS = 8  # operands of an op that are shown


def headline(verdict: Verdict) -> str:
    """The verdict in a line: status, stage and cause, and the first sentence of what proves it."""
    if verdict.status not in _TOLD:
        return _HEADLINE[verdict.status]
    stage = f" in {verdict.stage}" if verdict.stage else ""
    cause = f": {verdict.cause.replace('_', ' ')}" if verdict.cause else ""
    word = "FAULT" if verdict.status == "fault" else _HEADLINE[verdict.status]
    first = f" {verdict.evidence[0]}" if verdict.evidence else ""
    return f"{word}{stage}{cause}.{first}"


def evidence(verdict: Verdict) -> list[str]:
    """The sentences that the headline and the facts of the origin do not say already."""
    told = told_by_numbers(verdict.origin)
    left = verdict.evidence[1:] if verdict.status in _TOLD else verdict.evidence
    return [sentence for sentence in left if sentence not in told]


def header(trace: Trace) -> str:
    """Where the trace came from, with what, and how much it holds."""
    return "   ".join(header_words(trace))


def header_words(trace: Trace) -> list[str]:
    """The same, a phrase each."""
    meta = trace.meta
    steps = len(trace.steps) or (len(distinct(trace.events["step"])) if len(trace) else 0)
    parts = [f"torch {meta['torch']}" if "torch" in meta else "", str(meta.get("device", ""))]
    found = ranks(trace)
    parts += [f"rank {found[0]} of {found[1]}"] if found is not None else []
    if meta.get("user_mode") == "compiled" and meta.get("executed") == "eager":
        parts.append("compiled code run eagerly")
    parts += [plural(steps, "step"), plural(len(trace), "event")]
    ended = f"ended by {trace.raised.error}" if trace.raised else "complete"
    parts.append(ended if trace.complete else "incomplete: the writer did not close it")
    return [trace.path or "trace in memory", ", ".join(part for part in parts if part)]


def place_words(origin: Origin, stage: str | None = None) -> list[str]:
    """When, in which module, which op or tensor, of what dtype and shape: a phrase each."""
    # Both counted from 0; a step that is replayed op by op may hold several iterations.
    counted = origin.round or ("iteration" if origin.op else "step")
    words = [f"{counted} {origin.step}"] if origin.step else []
    # The tensor was so before anybody computed with it.
    given = not origin.op and (origin.phase is None or stage in ("input", "state"))
    words.append("before the step" if given else phase_word(origin, stage))
    if origin.module is not None and not (given and origin.tensor):
        words.append(origin.module or "(model)")
    if given and not origin.tensor and origin.module is None:
        words.append("a tensor without a name")
    if origin.op:
        words.append(origin.op)
    if origin.tensor and (not origin.op or stage == "gradients") and origin.tensor != origin.module:
        words.append(_without(origin.tensor, origin.module))
    if origin.node:
        words.append(f"node {origin.node}")
    output = origin.output
    shape = f" {list(_field(output, 'shape'))}" if _field(output, "shape") is not None else ""
    if origin.dtype:
        words.append(f"{origin.dtype}{shape}")
    return words


def phase_word(origin: Origin, stage: str | None) -> str:
    """When: its phase, but for an op that prepared data, which runs outside the modules as the code of a loss does.

    What no op of the step made, was there before it.
    """
    if stage == "input" and origin.op:
        return "before the model"
    return origin.phase or ("unknown phase" if origin.op else "before the step")


def place_of(origin: Origin) -> str:
    """The place in one phrase, with the user's line."""
    return ", ".join(place_words(origin)) + (f", at {origin.where}" if origin.where else "")


def _without(tensor: str, module: str | None) -> str:
    """A site's tensor without the module that stands beside it: "block.1 output[0]" is "output[0]"."""
    for front in (f"{module} ", "(model) "):
        if module is not None:
            tensor = tensor.removeprefix(front).replace(f"gradient of {front}", "gradient of ")
    return tensor


def facts_of(origin: Origin) -> list[str]:
    """What the first nonfinite tensor held, on which line it was made, out of what."""
    facts: list[str] = []
    output = origin.output
    if output is not None and _field(output, "numel"):
        facts.append(_held(output, origin.first_bad))
    if origin.where:
        facts.append(f"{_line_is(origin)} {origin.where}")
    shape = _field(output, "shape")
    if origin.samples and shape and 1 < len(origin.samples) == shape[0]:
        facts.append(f"every sample of the batch (all {shape[0]:,})")
    elif origin.samples:
        shown = ", ".join(str(sample) for sample in origin.samples[:12])
        facts.append(f"samples of the batch: {shown}{', ...' if len(origin.samples) > 12 else ''}")
    for operand in origin.inputs[:_OPERANDS]:
        facts.append(_operand(operand, origin.op))
    if len(origin.inputs) > _OPERANDS:
        facts.append(f"and {plural(len(origin.inputs) - _OPERANDS, 'more input')}")
    return facts


def _line_is(origin: Origin) -> str:
    """What the user's line is to the op: its own, or that of the forward whose backward it is."""
    if not origin.node:
        return "at"
    return "its backward runs at" if origin.own_line else "its forward ran at"


def _held(stats: Any, first: tuple[int, ...] | None) -> str:
    held = ", ".join(_kinds(stats))
    if _field(stats, "numel") == 1:
        return f"its one element is {held.removeprefix('1 ')}" if held else "its one element is finite"
    where = f"; first at {list(first)}" if first else ""
    return f"{held or 'no nonfinite elements'} of {_field(stats, 'numel'):,} elements{where}"


def _kinds(stats: Any) -> list[str]:
    """How many elements are nonfinite, a phrase for each kind that there is."""
    kinds = [(_field(stats, "nan"), "nan"), (_field(stats, "posinf"), "+inf"), (_field(stats, "neginf"), "-inf")]
    return [f"{count:,} {name}" for count, name in kinds if count]


def _operand(operand: Any, op: str | None) -> str:
    argument = _field(operand, "name")
    argument = role(op, argument) if op and argument else argument
    names = [name for name in (argument, _field(operand, "tensor")) if name]
    name = " = ".join(dict.fromkeys(names)) or "input"
    span = _span(_field(operand, "min"), _field(operand, "max"), _field(operand, "shape"))
    bad = "".join(f", {kind}" for kind in _kinds(operand))
    zero = _field(operand, "zero")
    zeros = f", {plural(zero, 'zero')}" if zero and span != "all 0" and span != "0" else ""
    return f"read {name}: {_field(operand, 'dtype')} {list(_field(operand, 'shape') or ())}, {span}{zeros}{bad}"


def _span(low: float | None, high: float | None, shape: Any) -> str:
    """The finite range; one value is said once."""
    if low is None or high is None:
        return "no finite element"
    if low != high:
        return f"{low:.3g} to {high:.3g}"
    return f"{low:.3g}" if shape is not None and not len(shape) else f"all {low:.3g}"


def told_by_numbers(origin: Origin | None) -> set[str]:
    """Sentences of the evidence that the statistics of the first nonfinite tensor show already."""
    if origin is None or origin.op is None:  # only what replays an op says these
        return set()
    told = {read(operand, origin.op) for operand in origin.inputs[:_OPERANDS] if isinstance(operand, Operand)}
    output = origin.output
    if isinstance(output, TensorStats):
        bad = counts(output.nan, output.posinf, output.neginf)
        told.add(put_out(origin.op, bad, output.numel, origin.dtype))
    return told


def way_of(verdict: Verdict) -> str:
    """Through which ops the values went from the origin to the sink, module by module."""
    steps = [step for step in verdict.path if "sink" in step or step.get("op")]
    if len(steps) < 3 or "sink" not in steps[-1]:
        return ""
    stops: list[tuple[str, list[str]]] = []
    for step in steps[:-1]:
        stop = _stop(step)
        if not stops or stops[-1][0] != stop:
            stops.append((stop, []))
        stops[-1][1].append(str(step["op"]).removeprefix("aten."))
    said = [f"{stop} ({', '.join(_ends(ops))})" for stop, ops in stops]
    return " -> ".join([*_ends(said), sink_name(steps[-1])])


def sink_name(step: Mapping[str, Any]) -> str:
    """What a way ended in: the name alone where it says what it is, else after the kind of sink."""
    sink, name = str(step["sink"]), str(step["name"])
    return name if sink in ("loss", "returned", "state") else f"{sink} {name}"


def _stop(step: Mapping[str, Any]) -> str:
    phase, module = step.get("phase"), step.get("module")
    place = "(model)" if module == "" else module
    if phase in ("forward", "loss"):
        return place or f"{phase} code"
    return f"{phase} of {place}" if place else f"{phase}"


def _ends(items: Sequence[str]) -> list[str]:
    """The first and last of many."""
    kept = list(items)
    return kept if len(kept) <= 4 else [*kept[:2], "...", *kept[-2:]]


def rows_of_path(trace: Trace, verdict: Verdict) -> list[int]:
    """The rows of the verdict's path that the trace holds; for an op the first row of that op in that place."""
    if not len(trace) or verdict.origin is None:
        return []
    seqs = np.array([step["seq"] for step in verdict.path if "seq" in step], dtype=np.int64)
    if seqs.size:
        rows = seqs - int(trace.events["seq"][0])
        return [int(row) for row in rows if 0 <= row < len(trace)]
    return _rows_of_op(trace, verdict.origin)[:1]


def _rows_of_op(trace: Trace, origin: Origin) -> list[int]:
    """The rows of an origin that is an op: of its own step, where steps are known, and of its line, if that has any."""
    here = (origin.op, origin.module, origin.node)
    sites = [n for n, s in enumerate(trace.sites) if s.role is Role.OP and (s.op, s.module, s.node) == here]
    found = np.isin(trace.events["site"], sites)
    if origin.round == "step":
        found &= trace.events["step"] == origin.step
    on_line = [n for n in sites if trace.sites[n].where == origin.where]
    narrower = found & np.isin(trace.events["site"], on_line)
    return [int(row) for row in np.flatnonzero(narrower if narrower.any() else found)]


def module_of(site: Site) -> str:
    """What a row of a table calls the site: the module, or the tensor where that names it better."""
    if site.role in (Role.PARAM, Role.BUFFER, Role.GRAD, Role.STATE) or site.module is None:
        return site.tensor
    return site.module or "(model)"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)
