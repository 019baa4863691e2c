"""The order of execution in the Trace Event Format, which chrome://tracing and Perfetto show.

A trace holds no times: one microsecond stands for one event. Each step is a process, each phase in it a thread; calls
of modules are slices that enclose the slices of their tensors, and a nonfinite tensor is red. Source of the format:
"Trace Event Format", The Chromium Authors.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from nantrace.events import Phase, Trace, nonfinite_rows
from nantrace.export.blocks import Progress, blocks, site_texts

_MODULE, _PHASE, _ROLE, _SLOT, _DTYPE, _SHAPE, _OP = range(7)  # of `SITE_COLUMNS`
_COUNTS = ("numel", "nan", "posinf", "neginf")
_LINES = 65_536  # written at once
_META = {"ts": "one microsecond is one event; the trace holds their order, not their times"}

Texts = list[tuple[str | None, ...]]
Phases = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int64]


def write_chrome_trace(trace: Trace, path: str, progress: Progress = None) -> int:
    """Writes the file, one object a line; returns the number of slices."""
    texts = site_texts(trace)
    phases = np.array([int(site.phase) for site in trace.sites], np.int64)
    written, before = 0, ""
    with open(path, "w", encoding="ascii") as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(_META)}, "traceEvents": [\n')
        for lines in itertools.chain([_names(trace, phases)], _slices(trace, texts, phases, progress)):
            if lines:
                file.write(before + ",\n".join(lines))
                before = ",\n"
            written += sum(line.startswith('{"ph":"X"') for line in lines)
        file.write("\n]}\n")
    return written


def _names(trace: Trace, phases: Phases) -> list[str]:
    """What viewers call the processes and threads. A process numbered 0 would be taken for the idle task."""
    if not len(trace):
        return []
    both = np.unique(trace.events["step"].astype(np.int64) << 8 | phases[trace.events["site"]])
    steps = sorted({int(code) >> 8 for code in both})
    processes = [_name("process_name", f"step {step}", step + 1, 0) for step in steps]
    threads = [
        _name("thread_name", Phase(code & 255).label, (code >> 8) + 1, (code & 255) + 1) for code in both.tolist()
    ]
    return processes + threads


def _name(kind: str, name: str, process: int, thread: int) -> str:
    return _json({"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}})


def _slices(trace: Trace, texts: Texts, phases: Phases, progress: Progress) -> Iterator[list[str]]:
    """The slices of calls, a step at a time, then those of tensors, a block at a time."""
    begun = [_json({"ph": "X", "name": text[_MODULE] or "(model)", "cat": "call"})[:-1] for text in texts]
    for rows in _steps(trace):
        yield from _calls(trace.events[rows], begun, phases)
        if progress is not None:
            progress(f"wrote the calls of modules in {rows.stop:,} of {len(trace):,} events")
    begun = [_tensor(text, int(phase)) for text, phase in zip(texts, phases, strict=True)]
    for events in blocks(trace, progress):
        yield _tensors(events, begun)


def _steps(trace: Trace) -> Iterator[slice]:
    """The rows of each step: they follow each other."""
    ends = [*(np.flatnonzero(np.diff(trace.events["step"])) + 1).tolist(), len(trace)]
    for begin, end in zip([0, *ends], ends, strict=False):
        yield slice(begin, end)


def _calls(events: npt.NDArray[np.void], begun: list[str], phases: Phases) -> Iterator[list[str]]:
    """A slice from the first to the last tensor of each call in each phase, cut where it would leave its parent's."""
    first, last = _spans(events, phases)
    open_ends: dict[int, list[int]] = {}
    for at in range(0, len(first), _LINES):
        begins = events[first[at : at + _LINES]]
        ends = events["seq"][last[at : at + _LINES]]
        threads = phases[begins["site"]] + 1
        columns = begins["site"], begins["step"], threads, begins["seq"], ends
        lines = []
        for site, step, thread, begin, end in zip(*(column.tolist() for column in columns), strict=True):
            outer = open_ends.setdefault(thread, [])
            while outer and outer[-1] <= begin:
                outer.pop()
            end = min(end + 1, outer[-1]) if outer else end + 1
            outer.append(end)
            lines.append(f'{begun[site]},"pid":{step + 1},"tid":{thread},"ts":{begin},"dur":{end - begin}}}')
        yield lines


def _spans(events: npt.NDArray[np.void], phases: Phases) -> tuple[Rows, Rows]:
    """The first and the last row of each call in each phase, in the order in which they begin."""
    rows = np.flatnonzero(events["call"])
    if not rows.size:
        return rows, rows
    code = events["call"][rows].astype(np.int64) << 8 | phases[events["site"][rows]]
    order = np.argsort(code, kind="stable")  # stable: the rows of one call stay in order
    begins = np.flatnonzero(np.diff(code[order], prepend=-1))
    first, last = rows[order[begins]], rows[order[np.append(begins[1:], len(order)) - 1]]
    by_begin = np.argsort(first)
    return first[by_begin], last[by_begin]


def _tensor(texts: tuple[str | None, ...], phase: int) -> str:
    """What all slices of one site begin with, up to the numbers among their arguments."""
    place = "" if texts[_MODULE] is None else f"{texts[_MODULE] or '(model)'} "
    named = {"dtype": texts[_DTYPE], "shape": texts[_SHAPE]}
    if texts[_OP] is not None:
        named["op"] = texts[_OP]
    head = {"ph": "X", "name": f"{place}{texts[_SLOT]}", "cat": texts[_ROLE], "tid": phase + 1, "dur": 1}
    return _json({**head, "args": named})[:-2]


def _tensors(events: npt.NDArray[np.void], begun: list[str]) -> list[str]:
    columns = [events[name].tolist() for name in ("site", "step", "seq", *_COUNTS, "min", "max")]
    lines = []
    for bad, site, step, seq, numel, nan, posinf, neginf, low, high in zip(
        nonfinite_rows(events).tolist(), *columns, strict=True
    ):
        counts = f'"numel":{numel},"nan":{nan},"posinf":{posinf},"neginf":{neginf}'
        ends = f'"min":{_number(low)},"max":{_number(high)}'
        red = ',"cname":"terrible"' if bad else ""
        lines.append(f'{begun[site]},{counts},{ends}}},"pid":{step + 1},"ts":{seq}{red}}}')
    return lines


def _number(value: float) -> str:
    """JSON has no word for a number that is not there but null."""
    return repr(value) if math.isfinite(value) else "null"


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
