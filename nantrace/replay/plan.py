"""What a bisection would do, told without running the step."""

from __future__ import annotations

import os

from nantrace.capture.sites import is_compiled
from nantrace.replay.afford import MOST_SECONDS, MOST_TIMES
from nantrace.replay.captured import read, recovery
from nantrace.replay.snapshot import Snapshot
from nantrace.replay.step import Step


def plan(step: Step, capture: str | os.PathLike[str] | None = None) -> tuple[str, ...]:
    """Sentences: the state that is kept, how the step would be narrowed, what cannot be wound back.

    Raises:
        ReplayError: the state cannot be kept.
        CaptureError: the capture cannot be read.
    """
    snapshot = Snapshot(step)
    kept = ", ".join(f"{size:,} bytes on {device}" for device, size in snapshot.bytes.items()) or "no tensor"
    modules = sum(1 for _ in step.model.modules())
    bound = f"{MOST_SECONDS:.0f} s or {MOST_TIMES:.0f} times the step"
    how = f"every op is watched at once if that takes up to {bound} by replay 1, else modules are searched first"
    sentences = [
        f"Kept and restored around each replay: {kept}.",
        f"{modules:,} modules: {how}.",
    ]
    if is_compiled(step.model):
        sentences.append("The model is compiled: its ops are watched in an eager run.")
    sentences += [f"Cannot be wound back between replays: {name}, a {kind}." for name, kind in snapshot.opaque.items()]
    if capture is not None:
        sentences += recovery(read(capture))
    return tuple(sentences)
