"""Narrowing a trace to what one wants to look at: modules, phases, one step, nonfinite rows. Pure.

Only rows leave. What a narrowed trace no longer holds it cannot testify to, so it remembers by what it was narrowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from nantrace.events import Narrowed, Phase, Trace, nonfinite_rows
from nantrace.steps import numbers_of

_SHOWN = 5  # names that an error suggests


def by_module(trace: Trace, patterns: Sequence[str]) -> Trace:
    """Rows of modules that one of the globs matches by name or alias; see `Trace.module`."""
    if not patterns:
        raise ValueError("module got no pattern: pass one or more globs, for example 'block.1.*'.")
    fqns = _fqns(trace)
    chosen: set[str] = set()
    for pattern in patterns:
        hits = {fqn for fqn, names in fqns.items() if any(fnmatch.fnmatchcase(name, pattern) for name in names)}
        if not hits:
            names = [name for known in fqns.values() for name in known]
            raise ValueError(
                f"module pattern {pattern!r} matches none of the trace's {len(fqns)} modules: {_near(pattern, names)}."
            )
        chosen |= hits
    wanted = [site.module in chosen for site in trace.sites]
    return _kept(trace, _of_sites(trace, wanted), f"module {_quoted(patterns)}")


def by_phase(trace: Trace, phases: Sequence[str | Phase]) -> Trace:
    """Rows of some phases; see `Trace.phase`."""
    if not phases:
        raise ValueError(f"phase got no name: pass one or more of {_quoted(member.label for member in Phase)}.")
    chosen = {_phase(phase) for phase in phases}
    wanted = [site.phase in chosen for site in trace.sites]
    return _kept(trace, _of_sites(trace, wanted), f"phase {_quoted(phase.label for phase in sorted(chosen))}")


def by_step(trace: Trace, number: int) -> Trace:
    """Rows of one step; see `Trace.step`."""
    known = steps_of(trace)
    if number not in known:
        held = f"it holds {_ranges(known)}" if known else "it holds no step"
        raise ValueError(f"the trace has no step {number!r}: {held}.")
    if known == (number,):
        return trace
    rows = trace.events["step"] == number
    narrowed = _kept(trace, rows, f"step {number}")
    # The flow of values is recorded over all steps together and cannot be split.
    ledger = tuple(step for step in trace.steps if step.get("step") == number)
    return dataclasses.replace(narrowed, steps=ledger, lineage=None, narrowed=_by(trace, f"step {number}", (number,)))


def nonfinite(trace: Trace) -> Trace:
    """Rows with a NaN or an infinity; see `Trace.nonfinite`."""
    return _kept(trace, nonfinite_rows(trace.events), "nonfinite")


def steps_of(trace: Trace) -> tuple[int, ...]:
    """Numbers of the steps that the trace covers, also those of which no row is left."""
    if trace.narrowed is not None:
        return trace.narrowed.steps
    numbers = trace.events["step"]
    # Steps follow each other, so their numbers stand where they change: sorting millions of rows is not needed.
    changes = numbers[np.flatnonzero(np.diff(numbers, prepend=~numbers[:1]))] if len(numbers) else numbers
    return tuple(sorted({*changes.tolist(), *numbers_of(trace.steps)}))


def _kept(trace: Trace, rows: npt.NDArray[np.bool_], by: str) -> Trace:
    return dataclasses.replace(trace, events=trace.events[rows], narrowed=_by(trace, by, steps_of(trace)))


def _by(trace: Trace, by: str, steps: tuple[int, ...]) -> Narrowed:
    before = trace.narrowed.by if trace.narrowed is not None else ()
    return Narrowed((*before, by), steps)


def _of_sites(trace: Trace, wanted: list[bool]) -> npt.NDArray[np.bool_]:
    return np.array(wanted, np.bool_)[trace.events["site"]] if wanted else np.zeros(len(trace), np.bool_)


def _fqns(trace: Trace) -> dict[str, tuple[str, ...]]:
    """Modules by FQN, each with all names under which it is known."""
    names = {entry.fqn: (entry.fqn, *entry.aliases) for entry in trace.modules}
    for site in trace.sites:
        if site.module is not None:
            names.setdefault(site.module, (site.module,))
    return names


def _phase(phase: str | Phase) -> Phase:
    labels = {member.label: member for member in Phase}
    if isinstance(phase, Phase):
        return phase
    if phase not in labels:
        raise ValueError(f"phase is {phase!r}: {_near(str(phase), list(labels))}.")
    return labels[phase]


def _near(name: str, known: Sequence[str]) -> str:
    """What was probably meant, or else what there is."""
    close = difflib.get_close_matches(name, [str(one) for one in known], _SHOWN)
    if close:
        return f"did you mean {_quoted(close, ' or ')}"
    if not known:
        return "it names no module"
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return f"there are {_quoted(known[:_SHOWN])}{more}"


def _quoted(names: Iterable[str], between: str = ", ") -> str:
    return between.join(repr(str(name)) for name in names)


def _ranges(numbers: tuple[int, ...]) -> str:
    """Step numbers in words: "step 3", "steps 0 to 7", "steps 0 to 90 (12 of them)"."""
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    gaps = "" if numbers[-1] - numbers[0] + 1 == len(numbers) else f" ({len(numbers)} of them)"
    return f"steps {numbers[0]} to {numbers[-1]}{gaps}"
