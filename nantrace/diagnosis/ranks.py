"""The other ranks of a distributed run: each has a trace of its own, and one rank's collectives bring another's values.

Knows where those files lie, by their names alone; opens none of them.
"""

from __future__ import annotations

import dataclasses
import re
import shlex

from nantrace.diagnosis.verdict import Verdict
from nantrace.events import Trace

#: The advice of an op that a collective stands behind; `with_other_ranks` puts one with the file's name in its place.
OTHER_RANKS = "Trace every rank and report each: the one whose own value was nonfinite first is where it began."

#: Ends the name of one rank's file: "step.r00001.h5".
_RANK = re.compile(r"\.r(\d{5})(?=(\.[^./\\]*)?$)")


def ranks(trace: Trace) -> tuple[int, int] | None:
    """The rank that recorded a trace and how many there were; None if there was only one."""
    rank, world = trace.meta.get("rank"), trace.meta.get("world")
    return (rank, world) if isinstance(rank, int) and isinstance(world, int) and world > 1 else None


def other_rank_command(trace: Trace, verdict: Verdict) -> str | None:
    """The command that shows what the next rank saw, where a collective may have brought the value from there."""
    found = ranks(trace)
    if found is None or trace.path is None or not _may_be_received(verdict) or not _RANK.search(trace.path):
        return None
    number = f".r{0 if found[0] else 1:05d}"
    return f"nantrace report {shlex.quote(_RANK.sub(lambda _: number, trace.path))}"


def with_other_ranks(verdict: Verdict, trace: Trace) -> Verdict:
    """The verdict with the advice to look at the other ranks first, where the value may have come from one of them."""
    found = ranks(trace)
    if found is None or not _may_be_received(verdict):
        return verdict
    rank, world = found
    others = f"rank {1 - rank}" if world == 2 else f"the {world - 1} other ranks"
    command = other_rank_command(trace, verdict)
    how = f"`{command}`" + ("" if world == 2 else ", and so on") if command else "report each trace (one file a rank)"
    first = f"Look at what {others} saw: {how}. Where a rank's own value was nonfinite, it began."
    advice = (first, *(sentence for sentence in verdict.advice if sentence != OTHER_RANKS))[:3]
    said = () if verdict.cause == "other_rank" else (_NOT_SHOWN.format(rank=rank, world=world),)
    return dataclasses.replace(verdict, advice=advice, evidence=(*verdict.evidence, *said))


_NOT_SHOWN = (
    "This is rank {rank} of {world}: collectives (the all-reduce of gradients, the all-gather of sharded weights, the "
    "broadcast of buffers) bring in what other ranks had; whether one did, this trace does not show."
)


def _may_be_received(verdict: Verdict) -> bool:
    """Whether a collective brought it: the op pass saw it, or modules show a tensor that changed between two looks.

    That is a gradient after backward, a weight before its layer used it (no stage), a buffer that no module was given.
    """
    origin = verdict.origin
    if verdict.status != "fault" or origin is None:
        return False
    buffer = verdict.stage == "forward" and origin.phase == "update"
    changed = origin.op is None and (verdict.stage in ("gradients", None) or buffer)
    return verdict.cause == "other_rank" or changed
