"""Whether the run that was explained is the run that fails: compares what several runs of one step came to. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nantrace.diagnosis.verdict import Verdict
from nantrace.replay.ends import Ends

_SHOWN = 4


@dataclass(frozen=True)
class Runs:
    """What the runs of one step came to.

    Attributes:
        first: without probes, before anything else.
        watched: under the probes that the verdict rests on.
        last: without probes again; None if it was not run.
        compiled: the step's own path runs compiled code, the watched one ran it eagerly.
        suspects: what could make a run differ: state that was not wound back, objects that cannot be.
    """

    first: Ends
    watched: Ends
    last: Ends | None
    compiled: bool = False
    suspects: tuple[str, ...] = ()


def needs_confirmation(verdict: Verdict, first: Ends, watched: Ends) -> bool:
    """A fault is confirmed; anything else only if the runs before disagree."""
    return verdict.status in ("fault", "inconclusive") or not alike(first, watched)


def confirmed(verdict: Verdict, runs: Runs) -> Verdict:
    """The verdict if the runs agree, else `not_reproduced` or `inconclusive` with what differs."""
    if runs.last is None:
        if needs_confirmation(verdict, runs.first, runs.watched):
            return _with(verdict, "No replay was left to confirm it without probes.")
        return verdict
    if alike(runs.first, runs.last):
        return _steady(verdict, runs, runs.last)
    return _unsteady(verdict, runs, runs.last)


def alike(one: Ends, other: Ends) -> bool:
    """The same ends went nonfinite, and the same type of exception was raised, if any."""
    return one.places() == other.places() and one.raised == other.raised


def _steady(verdict: Verdict, runs: Runs, last: Ends) -> Verdict:
    """Without probes the step does the same each time. And with them?"""
    if not alike(runs.watched, last):
        said = f"Without probes the step ends alike each time ({last.in_words()}), under the op recorder otherwise "
        watched = runs.watched.error or runs.watched.in_words()
        return _instead(verdict, "inconclusive", f"{said}({watched}){_why_probes_matter(runs)}.")
    every = (runs.first, runs.watched, last)
    same = "A last replay without probes ended in the same way"
    if len({ends.losses for ends in every}) > 1 or len({ends.nonfinite for ends in every}) > 1:
        return _with(verdict, f"{same}, but not every run had the same bits{_because(runs)}.")
    if any("0x" in loss for loss in last.losses):
        return _with(verdict, f"{same}, with the same bits of the loss.")
    return _with(verdict, f"{same}, with as many nonfinite elements at each end.")  # all nan losses look alike


def _why_probes_matter(runs: Runs) -> str:
    if runs.compiled:
        return ": it runs compiled, and compiled arithmetic is not that of eager ops"
    return _because(runs) or ": watching it takes other kernels or another path"


def _unsteady(verdict: Verdict, runs: Runs, last: Ends) -> Verdict:
    """Two runs from the same state, without probes, that end differently."""
    both = runs.first.failed and last.failed
    said = (
        f"Two replays from the same state without probes ended differently: {runs.first.in_words()}, then "
        f"{last.in_words()}{_loss_bits(runs.first, last)}{_because(runs)}."
    )
    return _instead(verdict, "inconclusive" if both else "not_reproduced", said)


def _loss_bits(one: Ends, other: Ends) -> str:
    if one.losses == other.losses:
        return "; the loss has the same bits"
    pairs = list(zip(one.losses, other.losses, strict=False))
    where = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if where is None:
        return f"; {len(one.losses)} backward passes, then {len(other.losses)}"
    one_loss, other_loss = (_number(text) for text in pairs[where])
    return f"; the loss was {one_loss}, then {other_loss}"


def _number(bits: str) -> str:
    return repr(float.fromhex(bits)) if "0x" in bits else bits


def _because(runs: Runs) -> str:
    if not runs.suspects:
        return ""
    more = f" and {len(runs.suspects) - _SHOWN} more" if len(runs.suspects) > _SHOWN else ""
    return f". It depends on state that is not restored: {'; '.join(runs.suspects[:_SHOWN])}{more}"


def _with(verdict: Verdict, sentence: str) -> Verdict:
    return dataclasses.replace(verdict, evidence=(*verdict.evidence, sentence))


def _instead(verdict: Verdict, status: str, sentence: str) -> Verdict:
    """The same findings under another status: they hold for the one run that was watched."""
    advice = (
        "Seed or pass in whatever the step draws from outside (iterators, counters, generators), then bisect again.",
    )
    return dataclasses.replace(
        verdict,
        status=status,  # type: ignore[arg-type]
        evidence=(sentence, *verdict.evidence),
        advice=advice if status == "not_reproduced" or not verdict.advice else verdict.advice,
        region=verdict.region or region_of(verdict),
    )


def region_of(verdict: Verdict) -> tuple[str, ...]:
    """Where to look on, for a verdict that cannot name one op for sure."""
    origin = verdict.origin
    if origin is None:
        return ("the step",)
    place = origin.module if origin.module else "the model" if origin.module == "" else origin.phase or "the step"
    return (f"{origin.op} in {place}" if origin.op else origin.tensor or place,)
