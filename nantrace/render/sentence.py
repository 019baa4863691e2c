"""A verdict in one sentence: what a warning says."""

from __future__ import annotations

import shlex

from nantrace.diagnosis.standstill import STANDS_STILL
from nantrace.diagnosis.verdict import Origin, Verdict
from nantrace.render.cells import harmless, shorten
from nantrace.render.wording import phase_word


def sentence(verdict: Verdict, path: str | None = None, since: int | None = None) -> str:
    """The first nonfinite tensor, the stage and the cause, and where to read on.

    Args:
        verdict: of a fault.
        path: of the trace file, if there is one.
        since: the step since which training stands still, which a report places the fault in.
    """
    where = "print(nantrace.report(tracer.trace))" if path is None else f"nantrace report {shlex.quote(path)}"
    still = "" if since is None else f"{STANDS_STILL} since step {since} (GradScaler skips every update): "
    if verdict.origin is not None and verdict.origin.dtype is None and verdict.stage is None and verdict.evidence:
        return harmless(f"{still}{verdict.evidence[0]} See: {where}")  # told by the ledger, which knows no first tensor
    found = "the step is at fault" if verdict.origin is None else f"first nonfinite tensor: {_tensor(verdict)}"
    stage = verdict.stage if verdict.origin is None or verdict.stage != verdict.origin.phase else None  # said already
    why = ", ".join(word for word in (stage, (verdict.cause or "").replace("_", " ")) if word)
    step = f"step {verdict.origin.step}: " if verdict.origin is not None and verdict.origin.step else ""
    return harmless(f"{step}{still}{found}{f' ({why})' if why else ''}. See: {where}")


def _tensor(verdict: Verdict) -> str:
    origin = verdict.origin or Origin()
    stats = origin.output
    name = origin.tensor or origin.op or "value"
    if origin.module and origin.module not in name:
        name = f"{origin.module} {name}"
    shape = f" {list(stats.shape)}" if stats is not None else ""
    counts = [(stats.nan, "nan"), (stats.posinf, "inf"), (stats.neginf, "-inf")] if stats is not None else []
    held = "".join(f", {count:,} {what}" for count, what in counts if count)
    line = f", at {shorten(origin.where, 80)}" if origin.op and origin.where else ""
    return f"{phase_word(origin, verdict.stage)}, {shorten(name, 80)}, {origin.dtype}{shape}{held}{line}"
