"""A trace and its verdict as text for a terminal: at most `width` columns, whatever the names hold."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nantrace.diagnosis.causes.wording import counts, put_out, read
from nantrace.diagnosis.verdict import Origin, Verdict
from nantrace.events import Phase, Role, Site, TensorStats, Trace
from nantrace.lineage import Operand
from nantrace.render.cells import columns, harmless, shorten, table, wrap

_STYLES = {"fault": "1;31", "contained": "1;33", "inconclusive": "1;33", "not_reproduced": "1;33"}
_HEADLINE = {
    "contained": "CONTAINED",
    "expected": "EXPECTED: nonfinite values on purpose, no fault.",
    "clean": "CLEAN: nothing nonfinite was seen.",
    "not_reproduced": "NOT REPRODUCED: the replayed step stayed finite.",
    "inconclusive": "INCONCLUSIVE",
}
_OPERANDS = 8  # operands of an op that are shown
_AROUND = 3  # rows of the table on each side of the culprit
_ADVICE = "Check next: "


def text(trace: Trace | None, verdict: Verdict, *, width: int = 80, colour: bool = False, ascii: bool = False) -> str:
    """The report that `nantrace report` prints.

    Args:
        trace: adds the header line and the rows around the failure; None shows the verdict alone.
        verdict: what `diagnose` or `bisect` said.
        width: columns of the terminal; names give way, numbers do not.
        colour: ANSI styles for the headline and the culprit.
        ascii: no character beyond ASCII.

    Returns:
        Lines joined by newlines, without one at the end; the last may be a command, which is never broken. Control
        characters in names are written as escapes.
    """
    page = _Page(max(width, 40), colour, ascii)
    if trace is not None:
        page.line(_header(trace))
        page.gap()
    if verdict.origin is not None:
        _first_nonfinite(page, verdict, verdict.origin)
    _headline(page, verdict)
    shown_above = _told_by_numbers(verdict.origin)
    for sentence in verdict.evidence[1:] if verdict.status in _TOLD else verdict.evidence:
        if sentence not in shown_above:
            page.paragraph(sentence, indent=4)
    way = _way(verdict)
    if way:
        page.paragraph(f"Way: {way}.", indent=4)
    if verdict.replays:
        page.paragraph(f"{verdict.replays} replay{'s' * (verdict.replays != 1)}.", indent=4)
    for other in verdict.also:
        page.paragraph(f"Also: {_place(other)}.", indent=4)
    if verdict.region:
        page.paragraph(f"Left under suspicion: {', '.join(verdict.region)}.", indent=4)
    if trace is not None:
        _rows(page, trace, verdict)
    _what_next(page, trace, verdict)
    return "\n".join(page.lines).rstrip("\n")


#: Statuses whose first evidence sentence stands in the headline.
_TOLD = ("fault", "contained", "inconclusive")


class _Page:
    """Collects lines; the one place where text meets width, colour and ASCII."""

    def __init__(self, width: int, colour: bool, ascii_only: bool) -> None:
        self.width, self.colour, self.ascii = width, colour, ascii_only
        self.lines: list[str] = []

    def line(self, content: str, style: str | None = None) -> None:
        self._put(shorten(harmless(content, self.ascii), self.width, self.ascii), style)

    def paragraph(self, content: str, indent: int = 0, first: str | None = None, style: str | None = None) -> None:
        for line in wrap(harmless(content, self.ascii), self.width, indent, first):
            self._put(line, style)

    def words(self, parts: Sequence[str], style: str | None = None) -> None:
        """Parts with wide gaps between them, of which none is broken at a blank that fits on a line."""
        lines = [harmless(parts[0], self.ascii)]
        for part in (harmless(part, self.ascii) for part in parts[1:]):
            longer = f"{lines[-1]}   {part}"
            if columns(longer) <= self.width - 4:
                lines[-1] = longer
            else:
                lines.append(part)
        for number, line in enumerate(lines):
            for broken in wrap(line, self.width, 4, "" if number == 0 else None):
                self._put(broken, style)

    def command(self, content: str) -> None:
        """A command to copy: never broken nor shortened, the one thing that may be wider than the page."""
        self._put(f"Next: {harmless(content, self.ascii)}", None)

    def gap(self) -> None:
        if self.lines and self.lines[-1]:
            self.lines.append("")

    def columns(
        self, rows: Sequence[Sequence[str]], right: Sequence[bool], shrink: Sequence[int], marked: int | None
    ) -> None:
        """A table whose first row is its head; row `marked` is the culprit."""
        clean = [[harmless(cell, self.ascii) for cell in row] for row in rows]
        for number, line in enumerate(table(clean, right, self.width, shrink, self.ascii)):
            self._put(line, "1;31" if number == marked else None)

    def _put(self, line: str, style: str | None) -> None:
        self.lines.append(f"\x1b[{style}m{line}\x1b[0m" if style and self.colour and line else line)


def _header(trace: Trace) -> str:
    meta = trace.meta
    steps = len(trace.steps) or (len(np.unique(trace.events["step"])) if len(trace) else 0)
    parts = [f"torch {meta['torch']}" if "torch" in meta else "", str(meta.get("device", ""))]
    parts += [f"{steps:,} step{'s' * (steps != 1)}", f"{len(trace):,} events"]
    parts.append("complete" if trace.complete else "incomplete: the writer did not close it")
    return f"{trace.path or 'trace in memory'}   {', '.join(part for part in parts if part)}"


def _first_nonfinite(page: _Page, verdict: Verdict, origin: Origin) -> None:
    page.words(["FIRST NONFINITE", *_place_words(origin)], style="1")
    for sentence in _facts(origin):
        page.paragraph(sentence, indent=4)
    page.gap()


def _place_words(origin: Origin) -> list[str]:
    words = [f"step {origin.step}"] if origin.step and not origin.op else []
    if origin.step and origin.op:  # counted as the sentences about a replayed step count
        words.append(f"iteration {origin.step + 1}")
    given = origin.phase is None and not origin.op  # the tensor was so before anybody computed with it
    words.append("before the step" if given else origin.phase or "unknown phase")
    if origin.module is not None and not (given and origin.tensor):
        words.append(origin.module or "(model)")
    if given and not origin.tensor and origin.module is None:
        words.append("a tensor without a name")
    if origin.op:
        words.append(origin.op)
    elif origin.tensor and origin.tensor != origin.module:
        words.append(_without(origin.tensor, origin.module))
    if origin.node:
        words.append(f"node {origin.node}")
    output = origin.output
    shape = f" {list(_field(output, 'shape'))}" if _field(output, "shape") is not None else ""
    if origin.dtype:
        words.append(f"{origin.dtype}{shape}")
    return words


def _without(tensor: str, module: str | None) -> str:
    """A site's tensor without the module that stands beside it: "block.1 output[0]" is "output[0]"."""
    for front in (f"{module} ", "(model) "):
        if module is not None:
            tensor = tensor.removeprefix(front).replace(f"gradient of {front}", "gradient of ")
    return tensor


def _facts(origin: Origin) -> list[str]:
    facts = []
    output = origin.output
    if output is not None and _field(output, "numel"):
        facts.append(_held(output, origin.first_bad))
    if origin.where:
        facts.append(f"its forward ran at {origin.where}" if origin.node else f"at {origin.where}")
    if origin.samples:
        shown = ", ".join(str(sample) for sample in origin.samples[:12])
        facts.append(f"samples of the batch: {shown}{', ...' if len(origin.samples) > 12 else ''}")
    for operand in origin.inputs[:_OPERANDS]:
        facts.append(_operand(operand))
    if len(origin.inputs) > _OPERANDS:
        facts.append(f"and {len(origin.inputs) - _OPERANDS} more inputs")
    return facts


def _held(stats: Any, first: tuple[int, ...] | None) -> str:
    kinds = [(_field(stats, "nan"), "nan"), (_field(stats, "posinf"), "+inf"), (_field(stats, "neginf"), "-inf")]
    held = ", ".join(f"{count:,} {name}" for count, name in kinds if count)
    if _field(stats, "numel") == 1:
        return f"its one element is {held.removeprefix('1 ')}" if held else "its one element is finite"
    where = f"; first at {list(first)}" if first else ""
    return f"{held or 'no nonfinite elements'} of {_field(stats, 'numel'):,} elements{where}"


def _operand(operand: Any) -> str:
    names = [name for name in (_field(operand, "name"), _field(operand, "tensor")) if name]
    name = " = ".join(dict.fromkeys(names)) or "input"
    span = _span(_field(operand, "min"), _field(operand, "max"), _field(operand, "shape"))
    kinds = [(_field(operand, "nan"), "nan"), (_field(operand, "posinf"), "+inf"), (_field(operand, "neginf"), "-inf")]
    bad = "".join(f", {count:,} {what}" for count, what in kinds if count)
    zero = _field(operand, "zero")
    zeros = f", {zero:,} zero{'s' * (zero != 1)}" if zero and span != "all 0" and span != "0" else ""
    return f"read {name}: {_field(operand, 'dtype')} {list(_field(operand, 'shape') or ())}, {span}{zeros}{bad}"


def _span(low: float | None, high: float | None, shape: Any) -> str:
    """The finite range; one value is said once."""
    if low is None or high is None:
        return "no finite element"
    if low != high:
        return f"{low:.3g} to {high:.3g}"
    return f"{low:.3g}" if shape is not None and not len(shape) else f"all {low:.3g}"


def _told_by_numbers(origin: Origin | None) -> set[str]:
    """Sentences of the evidence that the statistics of the first nonfinite tensor show already."""
    if origin is None:
        return set()
    told = {read(operand) for operand in origin.inputs[:_OPERANDS] if isinstance(operand, Operand)}
    output = origin.output
    if isinstance(output, TensorStats):
        bad = counts(output.nan, output.posinf, output.neginf)
        told.add(put_out(origin.op, bad, output.numel, origin.dtype))
    return told


def _way(verdict: Verdict) -> str:
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
    last = steps[-1]
    name = str(last["name"])
    sink = name if last["sink"] in ("loss", "returned", "state") else f"{last['sink']} {name}"
    return " -> ".join([*_ends(said), sink])


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


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def _place(origin: Origin) -> str:
    return ", ".join(_place_words(origin)) + (f", at {origin.where}" if origin.where else "")


def _headline(page: _Page, verdict: Verdict) -> None:
    style = _STYLES.get(verdict.status, "1;32")
    if verdict.status in ("fault", "contained", "inconclusive"):
        stage = f" in {verdict.stage}" if verdict.stage else ""
        cause = f": {verdict.cause.replace('_', ' ')}" if verdict.cause else ""
        word = "FAULT" if verdict.status == "fault" else _HEADLINE[verdict.status]
        first = f" {verdict.evidence[0]}" if verdict.evidence else ""
        page.paragraph(f"{word}{stage}{cause}.{first}", indent=4, first="", style=style)
    else:
        page.paragraph(_HEADLINE[verdict.status], style=style)


def _rows(page: _Page, trace: Trace, verdict: Verdict) -> None:
    """The rows around the culprit, and those of the path from it."""
    path = _rows_of_path(trace, verdict)
    if not path:
        return
    culprit = path[0]
    shown = sorted({*_neighbours(trace, culprit), *path[:_AROUND]})
    page.gap()
    head = ["", "#", "module", "phase", "role", "dtype", "absmax", "nan", "inf"]
    body = [_cells(trace, row, row == culprit) for row in shown]
    right = [False, True, False, False, False, False, True, True, True]
    page.columns([head, *body], right, (2, 4, 3), 1 + shown.index(culprit))


def _rows_of_path(trace: Trace, verdict: Verdict) -> list[int]:
    """The rows of the verdict's path that the trace holds; for an op the first row of that op in that module."""
    if not len(trace) or verdict.origin is None:
        return []
    seqs = np.array([step["seq"] for step in verdict.path if "seq" in step], dtype=np.int64)
    if seqs.size:
        rows = seqs - int(trace.events["seq"][0])
        return [int(row) for row in rows if 0 <= row < len(trace)]
    wanted = (verdict.origin.op, verdict.origin.module, verdict.origin.node)
    sites = [n for n, s in enumerate(trace.sites) if s.role is Role.OP and (s.op, s.module, s.node) == wanted]
    return [int(row) for row in np.flatnonzero(np.isin(trace.events["site"], sites))[:1]]


def _neighbours(trace: Trace, culprit: int) -> Iterable[int]:
    """Rows before and after of the same step that pair with the culprit's phase, gradients and outputs before state."""
    site = trace.site(trace.events[culprit])
    step = trace.events["step"][culprit]
    roles = {Role.OUTPUT, Role.LOSS, site.role} if site.phase is not Phase.BACKWARD else set(Role)
    wanted = [row for row in range(max(culprit - 400, 0), min(culprit + 400, len(trace)))]
    kept = [
        row
        for row in wanted
        if row == culprit or (trace.events["step"][row] == step and trace.site(trace.events[row]).role in roles)
    ]
    place = kept.index(culprit)
    return kept[max(place - _AROUND, 0) : place + _AROUND + 1]


def _cells(trace: Trace, row: int, culprit: bool) -> list[str]:
    event = trace.events[row]
    site = trace.site(event)
    infinite = int(event["posinf"]) + int(event["neginf"])
    low, high = float(event["min"]), float(event["max"])
    size = "." if np.isnan(low) or np.isnan(high) else f"{max(abs(low), abs(high)):.2e}"
    nan = f"{int(event['nan']):,}" if event["nan"] else "."
    return [
        ">" if culprit else "",
        f"{int(event['seq'])}",
        _module_of(site),
        site.phase.label,
        site.op if site.op is not None else f"{site.role.label}{_part(site)}",
        site.dtype,
        size,
        nan,
        f"{infinite:,}" if infinite else ".",
    ]


def _module_of(site: Site) -> str:
    if site.role in (Role.PARAM, Role.BUFFER, Role.GRAD, Role.STATE) or site.module is None:
        return site.tensor
    return site.module or "(model)"


def _part(site: Site) -> str:
    """What of a slot its role does not say: "output[0].logits" is "[0].logits"."""
    if site.role in (Role.PARAM, Role.BUFFER, Role.GRAD, Role.STATE, Role.LOSS) or site.module is None:
        return ""
    return site.slot.removeprefix("output").removeprefix("args")[:16]


def _what_next(page: _Page, trace: Trace | None, verdict: Verdict) -> None:
    if verdict.advice:
        page.gap()
    for number, sentence in enumerate(verdict.advice):
        page.paragraph(sentence, indent=len(_ADVICE), first=_ADVICE if number == 0 else None)
    command = next_command(trace, verdict)
    if command:
        page.command(command)


def next_command(trace: Trace | None, verdict: Verdict) -> str | None:
    """The command to type next; None where nothing is left to find."""
    if verdict.status in ("clean", "expected"):
        return None
    origin = verdict.origin
    named = verdict.stage in ("input", "state")  # a tensor that was bad from the start needs no search
    if origin is not None and origin.op is None and verdict.replays == 0 and not named:
        return "nantrace bisect FILE.py:step"
    if trace is not None and trace.path:
        return f"nantrace report {shlex.quote(trace.path)} -o report.html"
    return None
