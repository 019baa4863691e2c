"""From one replay to one row: did training keep something nonfinite, where did it begin, what of it was not changed."""

from __future__ import annotations

import dataclasses

from nantrace.diagnosis.contrast.rows import Outcome, Row
from nantrace.diagnosis.diagnose import diagnose
from nantrace.diagnosis.verdict import Verdict
from nantrace.events import Phase, Role, Trace
from nantrace.replay.change.axes import Scene
from nantrace.replay.change.observed_run import Ran

_HALF = ("float16", "bfloat16")
#: Dtypes that should be gone from the outputs of modules in a row.
_GONE = {"bfloat16": ("float16",), "float32": _HALF, "float64": (*_HALF, "float32"), "autocast-off": _HALF}
_SHOWN = 3
_WORST = ("fault", "contained", "inconclusive")


def row_of(axis: str, ran: Ran, scene: Scene, words: str) -> Row:
    """The row of a replay that took place."""
    outcome, verdict = outcome_of(ran)
    row = Row(
        axis,
        outcome,
        words,
        reason=ran.ends.error or "",
        loss=ran.seen.loss,
        gradient_norm=ran.seen.norm,
        ends=ran.ends.in_words(),
        skipped=ran.ends.skipped,
        seconds=ran.seconds,
        notes=_unreached(axis, ran.trace, scene),
    )
    return row if outcome != "nonfinite" or verdict is None else _placed(row, verdict)


def outcome_of(ran: Ran) -> tuple[Outcome, Verdict | None]:
    """Whether the run was finite in all that training keeps, and the verdict on its trace where it was not.

    What a step returns counts where it runs no backward pass, or where the verdict blames it. A step that raised
    before its ends could be looked at is nonfinite if the trace saw where it began.
    """
    ends = ran.ends
    if not ends.failed:
        return "finite", None
    kept = [end for end in ends.nonfinite if end.place != "returned" or not ends.losses]
    verdict = diagnose(ran.trace) if ran.trace is not None else None
    blamed = verdict is not None and verdict.origin is not None and verdict.status in _WORST
    if kept or (blamed and (ends.raised or (verdict is not None and verdict.status == "fault"))):
        return "nonfinite", verdict
    return ("raised" if ends.raised else "finite"), verdict


def _placed(row: Row, verdict: Verdict) -> Row:
    origin = verdict.origin
    return dataclasses.replace(
        row,
        status=verdict.status if verdict.status in _WORST else None,
        stage=verdict.stage,
        module=None if origin is None else origin.module,
        tensor=None if origin is None else origin.tensor,
        phase=None if origin is None else origin.phase,
    )


def _unreached(axis: str, trace: Trace | None, scene: Scene) -> tuple[str, ...]:
    """Outputs of modules in a dtype that this row does away with: the step's own code asks for it."""
    gone = _GONE.get(axis, ())
    if trace is None or not gone:
        return ()
    if axis == "autocast-off" and {str(d).removeprefix("torch.") for d in scene.dtypes} & set(_HALF):
        return ()  # half precision of the model's own
    found: dict[str, str] = {}
    for site in trace.sites:
        if site.phase is Phase.FORWARD and site.role is Role.OUTPUT and site.dtype in gone:
            found.setdefault(site.module or "(model)", site.dtype)
    shown = [f"{module} still put out {dtype}" for module, dtype in list(found.items())[:_SHOWN]]
    more = f" and {len(found) - _SHOWN} more modules" if len(found) > _SHOWN else ""
    return (f"{', '.join(shown)}{more}, as a cast in the step's own code asks for it",) if shown else ()
