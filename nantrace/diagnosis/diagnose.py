"""From a trace to a verdict: by its ops where it has them, else by its modules. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

import numpy as np

from nantrace.diagnosis.by_ledger import by_ledger, is_ledger_alone, with_unsampled
from nantrace.diagnosis.modules.by_module import by_module, left_out_fault
from nantrace.diagnosis.modules.seen import Seen
from nantrace.diagnosis.ranks import with_other_ranks
from nantrace.diagnosis.unseen import limited
from nantrace.diagnosis.verdict import Verdict
from nantrace.events import Role, Trace, nonfinite_rows
from nantrace.lineage import Lineage


def diagnose(trace: Trace) -> Verdict:
    """Say what happened in the traced steps, where it began, why, and what to check next.

    Args:
        trace: what `nantrace.trace` recorded or `nantrace.load` read. It is not changed.

    Returns:
        The verdict. One that a bisection stored in the trace stands. A trace with a lineage (ops) is judged op by op.
        Without one the verdict names a module, and says in `evidence` what rows of modules cannot show. A trace that
        was cut short says so, and is not clean.

    Raises:
        TypeError: `trace` is not a trace.
        ValueError: rows were taken out of a step by `Trace.module`, `.phase` or `.nonfinite`; whatever is not there
            would count as never recorded. A trace of one `.step` is judged.
    """
    if not isinstance(trace, Trace):
        raise TypeError(f"diagnose got a {type(trace).__name__}: pass a Trace (nantrace.load(path), tracer.trace).")
    taken_out = [by for by in (trace.narrowed.by if trace.narrowed else ()) if not by.startswith("step ")]
    if taken_out:
        raise ValueError(f"the trace was narrowed by {taken_out[0]}, which hides causes: diagnose the whole trace.")
    found = _stored(trace)
    return found if found is not None else limited(with_other_ranks(_by_what_it_holds(trace), trace), trace)


def _stored(trace: Trace) -> Verdict | None:
    """What a bisection found and put beside the trace; it had replays that the trace does not hold."""
    plain = trace.meta.get("verdict")
    if not isinstance(plain, Mapping):
        return None
    try:
        verdict = Verdict.from_dict(plain)
    except ValueError:
        return None
    said = f"nantrace bisect came to this verdict in {verdict.replays:,} replays; this trace holds the last of them."
    return dataclasses.replace(verdict, evidence=(*verdict.evidence, said))


def _by_what_it_holds(trace: Trace) -> Verdict:
    if trace.lineage is not None and (trace.lineage.ops or trace.lineage.events):
        from nantrace.diagnosis.blame import blame

        lineage = _counted(trace, trace.lineage)
        verdict = blame(lineage).verdict
        return _with_left_out(_in_steps(verdict) if lineage.round == "step" else verdict, trace)
    return by_ledger(trace) if is_ledger_alone(trace) else with_unsampled(by_module(trace), trace)


def _with_left_out(verdict: Verdict, trace: Trace) -> Verdict:
    """A verdict by ops, which see no harm in a step that the loop threw away, with what the modules show of such."""
    if verdict.status not in ("clean", "expected", "contained") or not nonfinite_rows(trace.events).any():
        return verdict
    found = left_out_fault(Seen.of(trace))
    if found is None or found.origin is None:
        return verdict
    origin = verdict.origin
    if verdict.status != "contained" or found.stage == "state" or not origin or origin.module != found.origin.module:
        return found
    return dataclasses.replace(verdict, status="fault", evidence=(*verdict.evidence, *found.evidence[1:2]))


def _in_steps(verdict: Verdict) -> Verdict:
    origin = None if verdict.origin is None else dataclasses.replace(verdict.origin, round="step")
    return dataclasses.replace(
        verdict, origin=origin, also=tuple(dataclasses.replace(other, round="step") for other in verdict.also)
    )


def _counted(trace: Trace, lineage: Lineage) -> Lineage:
    """The lineage, whose iterations are called steps if the rows of its ops lie in steps of the same numbers."""
    ops = [number for number, site in enumerate(trace.sites) if site.role == Role.OP]
    rows = Counter(trace.events["step"][np.isin(trace.events["site"], ops)].tolist())
    told = Counter(event.iteration - 1 for event in lineage.events if event.category is None)
    same = bool(rows) and all(told[step] == count for step, count in rows.items())
    return dataclasses.replace(lineage, round="step") if same else lineage
