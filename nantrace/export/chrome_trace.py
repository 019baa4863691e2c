"""The order of execution in the Trace Event Format, which chrome://tracing and Perfetto show.

A trace holds no times: one microsecond stands for one event. Each step is a process, each phase in it a thread; calls
of modules are slices that enclose the slices of their tensors, and a nonfinite tensor is red. Source of the format:
"Trace Event Format", The Chromium Authors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from nantrace.events import Phase, Trace
from nantrace.export.blocks import Progress, blocks, site_texts

_MODULE, _PHASE, _ROLE, _SLOT, _DTYPE, _SHAPE, _OP = range(7)  # of `SITE_COLUMNS`
_META = {"ts": "one microsecond is one event; the trace holds their order, not their times"}


def write_chrome_trace(trace: Trace, path: str, progress: Progress = None) -> int:
    """Writes the file, one object a line; returns the number of slices."""
    texts = site_texts(trace)
    phases = np.array([int(site.phase) for site in trace.sites], np.int64)
    written = 0
    with open(path, "w", encoding="ascii") as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(_META)}, "traceEvents": [\n')
        before = ""
        for made in _all(trace, texts, phases, progress):
            file.write(before + json.dumps(made, allow_nan=False, separators=(",", ":")))
            before = ",\n"
            written += made["ph"] == "X"
        file.write("\n]}\n")
    return written


def _all(
    trace: Trace, texts: list[tuple[str | None, ...]], phases: npt.NDArray[np.int64], progress: Progress
) -> Iterator[dict[str, Any]]:
    yield from _names(trace, phases)
    yield from _calls(trace, texts, phases)
    for events in blocks(trace, progress):
        sites = events["site"].tolist()
        for event, site in zip(events, sites, strict=True):
            yield _tensor(event, texts[site], int(phases[site]))


def _names(trace: Trace, phases: npt.NDArray[np.int64]) -> Iterator[dict[str, Any]]:
    """What viewers call the processes and threads. A process numbered 0 would be taken for the idle task."""
    if not len(trace):
        return
    both = np.unique(trace.events["step"].astype(np.int64) << 8 | phases[trace.events["site"]])
    for step in sorted({int(code) >> 8 for code in both}):
        yield _name("process_name", f"step {step}", step + 1, 0)
    for code in both.tolist():
        yield _name("thread_name", Phase(code & 255).label, (code >> 8) + 1, (code & 255) + 1)


def _name(kind: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _calls(
    trace: Trace, texts: list[tuple[str | None, ...]], phases: npt.NDArray[np.int64]
) -> Iterator[dict[str, Any]]:
    """A slice from the first to the last tensor of each call in each phase, cut where it would leave its parent's."""
    rows = np.flatnonzero(trace.events["call"])
    events = trace.events[rows]
    phase = phases[events["site"]] if len(rows) else np.zeros(0, np.int64)
    code = events["call"].astype(np.int64) << 8 | phase
    codes, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    last = np.zeros(len(codes), np.int64)
    np.maximum.at(last, inverse, np.arange(len(rows)))
    open_ends: dict[tuple[int, int], list[int]] = {}
    for call in np.lexsort((-last, first)):
        event, thread = events[first[call]], int(phase[first[call]]) + 1
        step, begin, end = int(event["step"]) + 1, int(event["seq"]), int(events["seq"][last[call]]) + 1
        ends = open_ends.setdefault((step, thread), [])
        while ends and ends[-1] <= begin:
            ends.pop()
        end = min(end, ends[-1]) if ends else end
        ends.append(end)
        name = texts[int(event["site"])][_MODULE] or "(model)"
        yield {"ph": "X", "name": name, "cat": "call", "pid": step, "tid": thread, "ts": begin, "dur": end - begin}


def _tensor(event: np.void, texts: tuple[str | None, ...], phase: int) -> dict[str, Any]:
    counts = {name: int(event[name]) for name in ("numel", "nan", "posinf", "neginf")}
    low, high = float(event["min"]), float(event["max"])
    place = "" if texts[_MODULE] is None else f"{texts[_MODULE] or '(model)'} "
    made: dict[str, Any] = {
        "ph": "X",
        "name": f"{place}{texts[_SLOT]}",
        "cat": texts[_ROLE],
        "pid": int(event["step"]) + 1,
        "tid": phase + 1,
        "ts": int(event["seq"]),
        "dur": 1,
        "args": {
            "dtype": texts[_DTYPE],
            "shape": texts[_SHAPE],
            **({"op": texts[_OP]} if texts[_OP] is not None else {}),
            **counts,
            "min": low if math.isfinite(low) else None,
            "max": high if math.isfinite(high) else None,
        },
    }
    if counts["nan"] or counts["posinf"] or counts["neginf"]:
        made["cname"] = "terrible"
    return made
