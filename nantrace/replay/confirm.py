"""Whether the run that was explained is the run that fails: compares what several runs of one step came to. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nantrace.diagnosis.verdict import Status, Verdict
from nantrace.replay.compare import alike, difference, finer
from nantrace.replay.ends import Ends

_SHOWN = 4
_UNSEEDED = "Seed or pass in whatever the step draws from outside (iterators, counters, generators), then bisect again."


@dataclass(frozen=True)
class Runs:
    """What the runs of one step came to.

    Attributes:
        first: without probes, before anything else.
        watched: under the probes that the verdict rests on.
        last: without probes again; None if it was not run.
        compiled: the step's own path runs compiled code, the watched one ran it eagerly.
        suspects: what could make a run differ: state that was not wound back, objects that cannot be.
        others: the ends of the runs between, under probes that leave the step as it is.
    """

    first: Ends
    watched: Ends
    last: Ends | None
    compiled: bool = False
    suspects: tuple[str, ...] = ()
    others: tuple[Ends, ...] = ()


def needs_confirmation(verdict: Verdict, runs: Runs) -> bool:
    """A fault is confirmed; anything else only if the runs before disagree."""
    return verdict.status in ("fault", "inconclusive") or bool(_under_probes(runs))


def confirmed(verdict: Verdict, runs: Runs) -> Verdict:
    """The verdict if the runs agree, else `not_reproduced` or `inconclusive` with what differs."""
    between = _under_probes(runs)
    if runs.last is None:
        if between:
            return _apart(verdict, runs, between)
        if needs_confirmation(verdict, runs):
            return _with(verdict, "No replay was left to confirm it without probes.")
        return verdict
    what = difference(runs.first, runs.last)
    if what:
        return _unsteady(verdict, runs, runs.last, what)
    if between:
        return _apart(verdict, runs, between)
    return _steady(verdict, runs, runs.last)


def _under_probes(runs: Runs) -> str:
    """How the watched run, or one between, differs from the first; "" if none does in a way that matters."""
    for ends in (runs.watched, *runs.others):
        if runs.compiled:
            if not alike(runs.first, ends):
                return "other ends were nonfinite"
        elif what := difference(runs.first, ends):
            return what
    return ""


def _steady(verdict: Verdict, runs: Runs, last: Ends) -> Verdict:
    """Every run came to the same, with probes or without. To the bit?"""
    same = "A last replay without probes ended in the same way"
    again = finer(runs.first, last)
    what = again or finer(runs.first, runs.watched)
    if what:
        where = "" if again else " under probes"
        return _with(verdict, f"{same}, but not every run had the same bits ({what}{where}){_because(runs)}.")
    if any("0x" in loss for loss in last.losses):
        return _with(verdict, f"{same}, with the same bits of the loss.")
    return _with(verdict, f"{same}, with as many nonfinite elements at each end.")  # all nan losses look alike


def _apart(verdict: Verdict, runs: Runs, what: str) -> Verdict:
    """The step does the same each time without probes, as far as that is known, and something else under them."""
    watched = runs.watched.error or runs.watched.in_words()
    if not _failed(runs):
        return _with(verdict, f"No replay failed, but they did not compute the same: {what}{_because(runs)}.")
    if runs.last is None:
        said = f"The run that was watched is not the first one again ({runs.first.in_words()}, then {watched}): {what}"
        return _instead(verdict, _either(runs.first, runs.watched), f"{said}{_because(runs)}.")
    said = f"Without probes the step ends alike each time ({runs.last.in_words()}), under the op recorder otherwise "
    return _instead(verdict, "inconclusive", f"{said}({watched}): {what}{_why_probes_matter(runs)}.")


def _why_probes_matter(runs: Runs) -> str:
    if runs.compiled:
        return "; it runs compiled, and compiled arithmetic is not that of eager ops"
    return _because(runs) or "; watching it takes other kernels or another path"


def _unsteady(verdict: Verdict, runs: Runs, last: Ends, what: str) -> Verdict:
    """Two runs from the same state, without probes, that come to different ends."""
    if not _failed(runs):
        return _with(verdict, f"No replay failed, but they did not compute the same: {what}{_because(runs)}.")
    said = (
        f"Two replays from the same state without probes ended differently: {runs.first.in_words()}, then "
        f"{last.in_words()}; {what}{_because(runs)}."
    )
    return _instead(verdict, _either(runs.first, last), said)


def _failed(runs: Runs) -> bool:
    return any(ends is not None and ends.failed for ends in (runs.first, runs.watched, runs.last))


def _either(one: Ends, other: Ends) -> Status:
    return "inconclusive" if one.failed and other.failed else "not_reproduced"


def _because(runs: Runs) -> str:
    if not runs.suspects:
        return ""
    more = f" and {len(runs.suspects) - _SHOWN} more" if len(runs.suspects) > _SHOWN else ""
    return f". It depends on state that is not restored between replays: {'; '.join(runs.suspects[:_SHOWN])}{more}"


def _with(verdict: Verdict, sentence: str) -> Verdict:
    return dataclasses.replace(verdict, evidence=(*verdict.evidence, sentence))


def _instead(verdict: Verdict, status: Status, sentence: str) -> Verdict:
    """The same findings under another status: they hold for the one run that was watched."""
    found = (f"What follows holds for the one replay that was watched: {verdict.status}.",) if verdict.origin else ()
    return dataclasses.replace(
        verdict,
        status=status,
        evidence=(sentence, *found, *verdict.evidence),
        advice=(_UNSEEDED, *verdict.advice)[:3],
        region=verdict.region or region_of(verdict),
    )


def region_of(verdict: Verdict) -> tuple[str, ...]:
    """Where to look on, for a verdict that cannot name one op for sure."""
    origin = verdict.origin
    if origin is None:
        return ("the step",)
    place = origin.module if origin.module else "the model" if origin.module == "" else origin.phase or "the step"
    return (f"{origin.op} in {place}" if origin.op else origin.tensor or place,)
