"""Curves over steps for TensorBoard: each site's largest magnitude and nonfinite elements, and the ledger.

One point a site and step. Where a site was seen several times in a step, the magnitude is the largest of them and the
nonfinite elements are summed. A site without a nonfinite element anywhere has no curve of them. TensorBoard keeps
float32: a magnitude beyond is drawn at its end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nantrace.errors import MissingExtraError
from nantrace.events import Trace
from nantrace.export.blocks import Progress, blocks, site_texts

# TensorBoard knows event files by this part of their name. Its own writer puts the host's name behind it.
_FILE = "events.out.tfevents.0000000000.nantrace"
_LARGEST = float(np.finfo(np.float32).max)
_LEDGER = ("loss", "lr", "scale_before", "scale_after", "attempted", "committed", "skipped", "seconds", "unobserved")

Points = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]


class Protocol(NamedTuple):
    """What TensorBoard's package writes its files with."""

    Event: Any
    Summary: Any
    RecordWriter: Any


def protocol() -> Protocol:
    """TensorBoard's messages and its record writer, neither of which needs torch or TensorFlow.

    Raises:
        MissingExtraError: TensorBoard is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise MissingExtraError(
            "exporting to TensorBoard needs tensorboard, which cannot be imported: pip install tensorboard."
        ) from error
    return Protocol(Event, Summary, RecordWriter)


def write_scalars(trace: Trace, folder: str, progress: Progress = None) -> int:
    """Writes one event file into a folder that exists; returns the number of points."""
    made = protocol()
    times = _times(trace)
    written = 0
    with open(os.path.join(folder, _FILE), "xb") as file:
        writer = made.RecordWriter(file)
        writer.write(made.Event(wall_time=0.0, file_version="brain.Event:2").SerializeToString())
        for tag, step, value in _points(trace, progress):
            summary = made.Summary(value=[made.Summary.Value(tag=tag, simple_value=value)])
            event = made.Event(wall_time=times.get(step, 0.0), step=step, summary=summary)
            writer.write(event.SerializeToString())
            written += 1
        writer.flush()
    return written


def _times(trace: Trace) -> dict[int, float]:
    """Seconds from the first step to the end of each: a trace keeps no time of day."""
    times, passed = {}, 0.0
    for step in trace.steps:
        seconds = step.get("seconds")
        passed += seconds if isinstance(seconds, float) and 0 <= seconds < 1e9 else 0.0
        times[_step_number(step)] = passed
    return times


def _points(trace: Trace, progress: Progress) -> Iterator[tuple[str, int, float]]:
    for entry in trace.steps:
        for name in _LEDGER:
            for tag, value in _ledger_values(name, entry.get(name)):
                yield tag, _step_number(entry), value
    names = [_tag(texts) for texts in site_texts(trace)]
    tags = {name: number for number, name in enumerate(dict.fromkeys(names))}
    tag_of_site = np.array([tags[name] for name in names], np.int64)
    spelled = list(tags)
    sizes, bad = _aggregated(trace, tag_of_site, progress)
    for group, (of_tag, of_step, values) in (("absmax", sizes), ("nonfinite", bad)):
        for at, number, point in zip(of_tag.tolist(), of_step.tolist(), values.tolist(), strict=True):
            yield f"{group} {spelled[at]}", number, min(point, _LARGEST)


def _aggregated(trace: Trace, tag_of_site: npt.NDArray[np.int64], progress: Progress) -> tuple[Points, Points]:
    """By tag and step: the largest magnitude where there is a finite element, and the number of nonfinite elements."""
    keys, sizes, bad = [np.zeros(0, np.uint64)], [np.zeros(0)], [np.zeros(0)]
    for events in blocks(trace, progress):
        code = tag_of_site[events["site"]].astype(np.uint64) << np.uint64(32) | events["step"].astype(np.uint64)
        size = np.maximum(np.abs(events["min"]), np.abs(events["max"]))
        count = sum(events[name].astype(np.float64) for name in ("nan", "posinf", "neginf"))
        found = _grouped(code, size, np.asarray(count))
        keys.append(found[0])
        sizes.append(found[1])
        bad.append(found[2])
    key, size, count = _grouped(np.concatenate(keys), np.concatenate(sizes), np.concatenate(bad))
    tag, step = (key >> np.uint64(32)).astype(np.int64), (key & np.uint64(2**32 - 1)).astype(np.int64)
    there = ~np.isnan(size)
    ever = np.isin(tag, tag[count > 0])
    return (tag[there], step[there], size[there]), (tag[ever], step[ever], count[ever])


def _grouped(
    code: npt.NDArray[np.uint64], size: npt.NDArray[np.float64], count: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    if not len(code):
        return code, size, count
    keys, inverse = np.unique(code, return_inverse=True)
    largest = np.full(len(keys), np.nan)
    np.fmax.at(largest, inverse, size)  # of NaN and a number the number
    return keys, largest, np.bincount(inverse, count, len(keys)).astype(np.float64)


def _tag(texts: tuple[str | None, ...]) -> str:
    """TensorBoard groups curves by what stands before the first slash."""
    module, phase, role, slot = texts[:4]
    place = "" if module is None else f"{module or '(model)'} "
    return f"{phase}/{place}{slot if str(role) in str(slot) else f'{role} {slot}'}"


def _ledger_values(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from _ledger_values(f"{name}/{number}", part)
    elif isinstance(value, (bool, int, float)):
        yield f"ledger/{name}", float(value)


def _step_number(step: Mapping[str, Any]) -> int:
    number = step.get("step")
    return number if isinstance(number, int) and 0 <= number < 2**63 else 0
