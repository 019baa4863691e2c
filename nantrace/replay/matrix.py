"""Runs a step under one change after the other, each time from the same state, and puts the results side by side.

Every row is one replay under the module trace, so that it says where the step first went nonfinite; rows that ask what
a compiler did run compiled and are watched at their ends only. The step as it was runs first, again, and last: if it
does not come to the same each time, no row says anything.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nantrace.diagnosis.contrast.reading import readings
from nantrace.diagnosis.contrast.rows import AXES, BASE, COMPILED, Contrast, Row, Smallest
from nantrace.errors import ReplayError
from nantrace.replay.captured import applied
from nantrace.replay.change.axes import TABLE, Scene, Unreached, modules_by_name
from nantrace.replay.change.fewest import fewest
from nantrace.replay.change.observed_run import Ran, as_it_is, run
from nantrace.replay.change.rows import outcome_of, row_of
from nantrace.replay.compare import difference
from nantrace.replay.replays import Replays
from nantrace.replay.step import Step


def matrix(
    step: Step,
    *,
    capture: str | os.PathLike[str] | None = None,
    axes: Iterable[str] | None = None,
    module: str | None = None,
    other_batch: Any = None,
    smallest: bool = True,
    max_replays: int = 60,
    progress: Callable[[str], None] | None = None,
) -> Contrast:
    """Run `step` under one change at a time. The caller's state stays as it is, bit for bit.

    Args:
        step: what to run; an exception that it raises is a result, and is not raised here.
        capture: a captured step to replay from, in place of the present state.
        axes: names of `diagnosis.contrast.AXES`; None all. The step as it was is always there.
        module: FQN of the module that is to run in float32; None: the one in which the first nonfinite value was seen.
        other_batch: what the row "another batch" hands to the step; None: that row does not apply.
        smallest: also search for the fewest modules that have to run in float32 for the step to be finite.
        max_replays: how often the step may run, at least 3; rows for which none is left say so.
        progress: told one line about each replay.

    Raises:
        ReplayError: the step's state or the other batch cannot be kept, or the model has no such module.
        CaptureError: the capture cannot be read, or is that of another model.
        ValueError: an option is out of range.
    """
    chosen = _chosen(axes)
    if not isinstance(max_replays, int) or max_replays < 3:
        raise ValueError(f"max_replays is {max_replays!r}: pass an integer of 3 or more.")
    _refuse_unknown(step, module)
    asked = _Asked(chosen, module, other_batch, smallest)
    if capture is None:
        with Replays(step, max_replays, progress, alike=True) as replays:
            return _contrast(replays, asked)
    with applied(step, capture, most=max_replays - 2, progress=progress) as captured:
        assert captured.step is not None
        with Replays(captured.step, max_replays - len(captured.tried), progress, alike=True) as replays:
            found = _contrast(replays, asked)
    notes = [*captured.differs(), *captured.started()]
    if found.base.outcome == "finite":
        fault = captured.kept["manifest"].get("fault") or "it was at fault"
        notes.append(f"The captured step failed ({fault}); replayed from {captured.path} it stayed finite")
    return dataclasses.replace(found, notes=(*found.notes, *notes))


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What the caller wants to see."""

    axes: tuple[str, ...]
    module: str | None
    other_batch: Any
    smallest: bool


def _chosen(axes: Iterable[str] | None) -> tuple[str, ...]:
    if axes is None:
        return tuple(TABLE)
    given = [axes] if isinstance(axes, str) else list(axes)
    wrong = [name for name in given if name not in AXES]
    if wrong:
        raise ValueError(f"axes holds {wrong[0]!r}: choose from {', '.join(AXES)}.")
    return tuple(name for name in TABLE if name in given)


def _refuse_unknown(step: Step, module: str | None) -> None:
    if module is None:
        return
    names = list(modules_by_name(step.model))
    if module not in names:
        shown = ", ".join(repr(name) for name in names[1:7])
        more = f" and {len(names) - 7} more" if len(names) > 7 else ""
        raise ReplayError(f"The model has no module {module!r} that can be changed; it has {shown or 'none'}{more}.")


def _contrast(replays: Replays, asked: _Asked) -> Contrast:
    first = run(replays, "as it was", as_it_is(replays.step), traced=False)
    scene = Scene(replays.step, replays.snapshot, first.seen, asked.module, asked.other_batch)
    again = run(replays, "as it was, again", as_it_is(replays.step), traced=not scene.compiles)
    base = row_of(BASE, first if scene.compiles else again, scene, "nothing changed")
    differs = difference(first.ends, again.ends)
    if differs:
        return _unlike(replays, asked, base, f"two runs of the step as it was differ: {differs}")
    eager, module = _suspect(replays, scene, again)
    if asked.module is None:
        scene = dataclasses.replace(scene, module=module)
    rows = [base, *_rows(replays, scene, asked.axes, eager)]
    fewer = _smallest(replays, scene, again if eager is None else eager, rows) if asked.smallest else None
    last = run(replays, "as it was, at last", as_it_is(replays.step), traced=False)
    differs = difference(first.ends, last.ends)
    if differs:
        return _unlike(replays, asked, base, f"the first and the last run of the step as it was differ: {differs}")
    return Contrast(tuple(rows), readings(rows), fewer, replays.count, _notes(replays, first, scene))


def _suspect(replays: Replays, scene: Scene, again: Ran) -> tuple[Ran | None, str | None]:
    """The traced run in which a compiled step runs eagerly, None for one that is not compiled; the suspect module."""
    traced, eager = again, None
    if scene.compiles and replays.left > 1:
        traced = eager = run(replays, "compiled code run eagerly", as_it_is(scene.step), traced=True)
    module = row_of(BASE, traced, scene, "").module
    return eager, module if module in modules_by_name(scene.step.model) else None


def _unlike(replays: Replays, asked: _Asked, base: Row, why: str) -> Contrast:
    """Whatever a row shows may be chance."""
    rows = [dataclasses.replace(base, outcome="cannot_tell", reason=why)]
    rows += [Row(axis, "cannot_tell", reason="the step does not come out the same twice") for axis in asked.axes]
    suspects = [*replays.untouched, *(f"{name} ({kind})" for name, kind in replays.snapshot.opaque.items())]
    notes = [f"Not wound back between replays: {'; '.join(suspects[:4])}"] if suspects else []
    smallest = Smallest(reason="the step does not come out the same twice") if asked.smallest else None
    return Contrast(tuple(rows), (), smallest, replays.count, tuple(notes))


def _rows(replays: Replays, scene: Scene, axes: Sequence[str], eager: Ran | None) -> list[Row]:
    rows: list[Row] = []
    if eager is not None:  # the row that all others of a compiled step are compared with
        axes = [axis for axis in TABLE if axis in axes or axis == "eager"]
    for name in axes:
        axis = TABLE[name]
        why = axis.refuse(scene)
        if why:
            rows.append(Row(name, "not_applicable", reason=why))
        elif name == "eager" and eager is not None:
            rows.append(row_of(name, eager, scene, axis.words(scene)))
        elif replays.left < 2:  # the last is kept for the step as it was
            rows.append(Row(name, "not_run", axis.words(scene), reason=f"{replays.most} replays were allowed"))
        else:
            compared = "eager" if scene.compiles and name not in COMPILED else BASE
            rows.append(dataclasses.replace(_changed(replays, scene, name), compared_with=compared))
    return rows


def _changed(replays: Replays, scene: Scene, name: str) -> Row:
    axis = TABLE[name]
    words = axis.words(scene)
    try:
        ran = run(replays, AXES[name], axis.change(scene), traced=axis.eager)
    except Unreached as error:
        return Row(name, "not_applicable", words, str(error))
    except ReplayError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        # Out of the change itself: what the step raises is a result.
        return Row(name, "raised", words, f"it cannot be changed so ({type(error).__name__}: {_line(error)})")
    return row_of(name, ran, scene, words)


def _line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _smallest(replays: Replays, scene: Scene, traced: Ran, rows: Sequence[Row]) -> Smallest:
    reference = row_of(BASE, traced, scene, "")
    why = TABLE["module-float32"].refuse(dataclasses.replace(scene, module=""))
    if reference.outcome == "finite":
        return Smallest(reason="the step is finite without")
    if why:
        return Smallest(reason=why)
    in_float32 = [row for row in rows if row.axis in ("float32", "autocast-off") and row.ran]
    if in_float32 and all(row.outcome == "nonfinite" and not row.notes for row in in_float32):
        return Smallest(reason="the step is nonfinite in float32 too")
    return fewest(replays, scene, lambda ran: outcome_of(ran)[0] == "finite")


def _notes(replays: Replays, first: Ran, scene: Scene) -> tuple[str, ...]:
    found = []
    if scene.compiles:
        found.append("The step is compiled: rows that change dtypes, modes or data run eagerly, against the row eager")
    if first.drew:
        found.append(
            "The step draws random numbers: under another dtype, mode or batch the same stream may give other ones"
        )
    if replays.untouched:
        found.append(f"The step changes values outside of model and batch, put back at the end: {replays.untouched[0]}")
    return tuple(found)
