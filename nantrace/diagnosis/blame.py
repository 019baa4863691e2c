"""From a lineage to a verdict: what was damaged, where it was born, in which stage, and which replay would tell more.

Pure. A question that one run cannot settle is handed back as a wish: a driver replays the step accordingly and asks
again. Without a replay the answer stands, and its evidence says what was not tested.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nantrace.diagnosis import harmless
from nantrace.diagnosis.causes.checks import ANOTHER_BATCH
from nantrace.diagnosis.causes.explain import explain
from nantrace.diagnosis.causes.hyperparameters import of_silencing, silencing
from nantrace.diagnosis.causes.messengers import update_growth
from nantrace.diagnosis.causes.table import Explanation
from nantrace.diagnosis.causes.wording import has_rounds, in_round, round_of
from nantrace.diagnosis.contained import advice_of_contained
from nantrace.diagnosis.damage import Damage, Hit, damage, escaping_event, is_bad_unscaled
from nantrace.diagnosis.origins import as_read, named_by_sink, origin_of, step_on_path
from nantrace.diagnosis.prepared import is_prepared_data
from nantrace.diagnosis.roots import Roots
from nantrace.diagnosis.verdict import Origin, Stage, Status, Verdict
from nantrace.lineage import Hyperparameter, Lineage, OpEvent, Sink

_STAGES: dict[str | None, Stage] = {
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "recompute": "backward",
    "post_backward": "gradients",
    "optimizer": "optimizer",
    "update": "update",
}
#: Ops that select or compare: a nonfinite value that only they read was meant to be there (cut-offs, observers).
_SELECTS = re.compile(
    r"min|max|clamp|where|index|gather|select|slice|embedding|isfinite|isnan|isinf|copy|nan_to_num|topk|sort|logical"
    r"|bitwise|\.(eq|ne|lt|le|gt|ge)(_|$)|scatter|masked|fill|zero|clone|detach|lerp|grid|take|unbind|cat"
)
_NOUNS = {"grad": "gradient", "param": "parameter", "state": "optimizer moment", "buffer": "buffer"}
_WORDS = {"grad": "the gradient of", "param": "parameter"}
_RECIPROCALS = frozenset({"aten.rsqrt", "aten.reciprocal", "aten.div"})
#: More births than this at one sink are not told apart by replays.
_MOST_CANDIDATES = 6
#: Steps of a path that are kept: the first and last of a longer one.
_PATH = 40


@dataclass(frozen=True)
class Frozen:
    """Wish for a replay in which every optimizer update is undone right after it."""


@dataclass(frozen=True)
class Neutral:
    """Wish for a replay in which the nonfinite outputs of the ops at these times are made finite."""

    times: frozenset[int]


@dataclass(frozen=True)
class Finding:
    """The verdict as far as it is known, and the replay that would settle what is open."""

    verdict: Verdict
    wants: Frozen | Neutral | None = None


def blame(
    lineage: Lineage, *, frozen: Lineage | None = None, neutralised: Mapping[frozenset[int], Lineage] | None = None
) -> Finding:
    """Judge one recorded run of a step.

    Args:
        lineage: what the op pass saw.
        frozen: lineage of a replay with every update undone, if `Frozen` was wished for.
        neutralised: lineages of the replays wished for by `Neutral`, by the times that were made finite.
    """
    return _Case(lineage, frozen, neutralised or {}).judge()


class _Case:
    """One lineage under judgement, with the answers of further replays."""

    def __init__(self, lineage: Lineage, frozen: Lineage | None, neutralised: Mapping[frozenset[int], Lineage]) -> None:
        self.lineage, self.frozen, self.neutralised = lineage, frozen, neutralised
        self.roots = Roots(lineage)
        self.damage: Damage = damage(lineage, self.roots)
        self.wants: Frozen | Neutral | None = None
        self.evidence: list[str] = []

    def judge(self) -> Finding:
        if self.damage.faults:
            return self._fault()
        if self.damage.escaped:
            return self._escaped(self.damage.escaped[0])
        stuck = silencing(self.lineage)
        if stuck is not None:
            return self._silenced(stuck)
        if self.damage.contained or self.damage.births:
            return self._contained()
        absorbed = next((event for event in self.lineage.events if self._was_absorbed(event)), None)
        if absorbed is not None:
            self.evidence.append("Arithmetic turned it into finite values: what it scales is silenced or stuck.")
            return self._say("contained", "state", absorbed)
        status: Status = "expected" if self.lineage.events else "clean"
        return Finding(Verdict(status, evidence=self._harmless()))

    def _harmless(self, *more: str) -> tuple[str, ...]:
        return (*harmless.told(self.lineage), *more, *self.lineage.notes)

    # ------------------------------------------------------------------------------------------------ fault
    def _fault(self) -> Finding:
        hit = self.damage.faults[0]
        if hit.sink.excuse == "skip":
            self.evidence.append(_stands_still(self.lineage, self.damage.standstill))
        sufficient = self._sufficient(hit)
        event = self.roots.in_forward(self._earliest(sufficient))
        stage = self._stage_of_fault(event, hit)
        if self._diverged():
            return self._inconclusive(event)
        return self._say("fault", stage, event, hit.sink, others=hit.roots - {event.id})

    def _sufficient(self, hit: Hit) -> frozenset[int]:
        """Of several births that reach one sink, the earliest that reaches it alone.

        Data flows from tensor to tensor here, so an innocent infinity in the same sum is a root too. Making the others
        finite tells them apart.
        """
        candidates = sorted(id for id in hit.roots if self.roots.event(id).kind in ("inf", "nan"))
        if not 2 <= len(candidates) <= _MOST_CANDIDATES or len(candidates) != len(hit.roots):
            return hit.roots
        for id in candidates:
            times = {self.roots.event(other).time for other in candidates if other != id}
            others = frozenset(times - {self.roots.event(id).time})
            replayed = self.neutralised.get(others)
            if replayed is None:
                self.wants = self.wants or Neutral(others)
                self.evidence.append(
                    f"{len(candidates)} births reach {_named(hit.sink)}; which of them does so alone was not tested."
                )
                return hit.roots
            if any(_same_sink(sink, hit.sink) for sink in replayed.sinks):
                rest = "the other is" if len(candidates) == 2 else "the others are"
                self.evidence.append(
                    f"{len(candidates)} births reach {_named(hit.sink)}; this one does so even when {rest} made finite."
                )
                return frozenset((id,))
        self.evidence.append(
            f"{len(candidates)} births reach {_named(hit.sink)}, and none of them alone: this is the earliest."
        )
        return hit.roots

    def _earliest(self, ids: frozenset[int]) -> OpEvent:
        """Bad state and bad data come before any birth."""
        events = [self.roots.event(id) for id in ids]
        given = [e for e in events if e.kind == "external" and e.category not in ("constant", "unobserved", "received")]
        return min(given or events, key=lambda event: event.id)

    def _stage_of_fault(self, event: OpEvent, hit: Hit) -> Stage | None:
        if event.id in self.roots.settings:
            return "optimizer"
        if event.kind == "external":
            return _stage_of_external(event)
        if hit.sink.kind == "buffer" and (
            event.iteration in self.lineage.skipped_iterations or _was_abandoned(self.lineage, event)
        ):
            if event.iteration not in self.lineage.skipped_iterations:  # a scaler's skip is told by the explanation
                of = f" of {round_of(self.lineage, event.iteration)}" if has_rounds(self.lineage) else ""
                self.evidence.append(
                    f"The update{of} was left out; buffer {hit.sink.name} kept what forward had written into it."
                )
            return "update"
        if self._born_of_updates(event):
            return "update"
        if self._works_on_weights(event, hit.sink):
            return "update"
        return self._stage_of(event, hit.sink)

    def _stage_of(self, event: OpEvent, sink: Sink | None) -> Stage | None:
        """By where the event lies, and for what was made ahead of the model by what reads it."""
        if event.kind == "external":
            return _stage_of_external(event)
        return "input" if is_prepared_data(self.roots, event, sink) else _STAGES.get(event.phase)

    def _works_on_weights(self, event: OpEvent, sink: Sink) -> bool:
        """Whether code outside the model computed the value for the parameters alone: an average, a projection.

        Such an op need not touch a parameter itself; what it made was written into one before a module, or a loss that
        is differentiated, read it.
        """
        if event.phase != "loss" or event.carries_grad:
            return False
        way = self.roots.path(event.id, sink)
        first = next((e for e in way if e.phase != "loss"), None)
        return first is not None and first.phase == "update" and (first.inplace or way[-1].phase == "update")

    def _born_of_updates(self, event: OpEvent) -> bool:
        """Whether the value is born because of updates made in this run; a frozen replay tells.

        Without one an explosion of the weights counts, as it cannot have left what came after it alone.
        """
        earlier = any(time < event.time for *_, time in self.lineage.growth)
        if event.iteration <= 1 or event.kind == "external" or event.phase in ("optimizer", "update") or not earlier:
            return False
        if self.frozen is None:
            self.wants = self.wants or Frozen()
            of = "" if self.lineage.round == "step" else " of this step"
            self.evidence.append(f"Whether earlier updates{of} led to it was not tested by a replay.")
            return update_growth(self.lineage, event) is not None
        if any(_same_birth(event, other) for other in self.frozen.events):
            return False
        self.evidence.append("With every update undone the value is not born: the updates before it made it.")
        return True

    def _diverged(self) -> bool:
        """Whether the frozen replay ran differently before the first update already: then it proves nothing."""
        if self.frozen is None or not self.lineage.growth:
            return False
        return _births_before_updates(self.lineage) != _births_before_updates(self.frozen)

    def _inconclusive(self, event: OpEvent) -> Finding:
        region = event.module if event.module is not None else (event.phase or "the step")
        self.evidence.append(
            "Two replays from the same state were born to different nonfinite values before any update: the step "
            "depends on something that is not restored (a counter, an iterator, a generator)."
        )
        return self._say("inconclusive", _STAGES.get(event.phase), event, region=(region,))

    # ------------------------------------------------------------------------------------------------ no fault
    def _escaped(self, sink: Sink) -> Finding:
        event = escaping_event(self.roots, sink)
        stage = self._stage_of(event, sink)
        what = "A NaN that the code put in" if event.nan else "An infinity that was inserted on purpose"
        self.evidence.append(f"{what} reached {_named(sink)}{in_round(self.lineage, sink.iteration)}.")
        return self._say("fault", stage, event, sink, cause="sentinel_escaped")

    def _silenced(self, setting: Hyperparameter) -> Finding:
        """Damage without a nonfinite value anywhere that training keeps: no parameter moves."""
        why = of_silencing(setting)
        origin = Origin(step=setting.iteration - 1, phase="optimizer", tensor=setting.place, kind="inf")
        evidence = (*why.evidence, *self.lineage.notes)
        return Finding(Verdict("fault", "optimizer", why.cause, origin, evidence, why.advice))

    def _contained(self) -> Finding:
        reached = frozenset().union(*(hit.roots for hit in self.damage.contained))
        births = self.damage.births
        carrying = [event for event in births if event.carries_grad]
        ids = reached or frozenset(event.id for event in carrying or births)
        kept = self._earliest(ids)
        event = self.roots.in_forward(kept)
        hit = next((hit for hit in self.damage.contained if kept.id in hit.roots), None)
        if update_growth(self.lineage, event) is not None and self._born_of_updates(event):
            return self._say("fault", "update", event, hit.sink if hit else None, cause="exploding_update")
        if not self.damage.contained and harmless.are_beside_training(self.roots, births):
            facts = 1 if update_growth(self.lineage, event) is None else 2  # how the parameters grew comes first
            why = explain(self.lineage, event).evidence[:facts]
            return Finding(Verdict("expected", evidence=self._harmless(*why, harmless.BESIDE)))
        self.evidence += [_excuse(self.lineage, hit.sink)] if hit else self._where_it_ended(event)
        if hit and is_bad_unscaled(self.roots, hit):
            self.evidence.append(
                "The loss was nonfinite before it was scaled, so no lower scale helps: if later rounds fail in the "
                "same way, every update is skipped and training stands still."
            )
        stage = self._stage_of(event, hit.sink if hit else None)
        others = frozenset(e.id for e in births) - {event.id} - frozenset(self.roots.descendants(event.id))
        return self._say("contained", stage, event, hit.sink if hit else None, others=others)

    def _was_absorbed(self, event: OpEvent) -> bool:
        """Bad state that arithmetic, not a selection or a comparison, turned into finite values, at once or later."""
        if event.kind != "external" or event.category not in ("param", "buffer", "moment"):
            return False
        ends = (self.roots.event(id) for id in self.roots.descendants(event.id))
        return bool(event.nan or event.posinf) and any(not _SELECTS.search(op) for e in ends for op in e.absorbed_by)

    def _where_it_ended(self, event: OpEvent) -> list[str]:
        """The ops that made finite values of it, and what that leaves."""
        last = [
            e for e in map(self.roots.event, sorted({event.id, *self.roots.descendants(event.id)})) if e.absorbed_by
        ]
        named = dict.fromkeys(op for e in last for op in e.absorbed_by)
        ops = [op for op in named if op.removesuffix("_backward") == op or op.removesuffix("_backward") not in named]
        ended = "No loss, gradient, parameter or buffer holds it"
        if not ops:
            return [f"{ended}."]
        infinite = any(not e.nan and _RECIPROCALS & set(e.absorbed_by) for e in last)
        effect = " 1 / inf is 0, so what this scales is silently 0." if infinite else ""
        return [f"{ended}: {' and '.join(ops[:2])} made finite values of it.{effect}"]

    # ------------------------------------------------------------------------------------------------ the answer
    def _say(
        self,
        status: Status,
        stage: Stage | None,
        event: OpEvent,
        sink: Sink | None = None,
        *,
        others: frozenset[int] = frozenset(),
        cause: str | None = None,
        region: tuple[str, ...] = (),
    ) -> Finding:
        event = named_by_sink(as_read(self.lineage, event), sink)
        why: Explanation = explain(self.lineage, event)
        reached = self._reached(sink) if status == "fault" and sink is not None else []
        way = self.roots.path(event.id, sink) if sink is not None else []
        if len(way) > _PATH:
            way = way[: _PATH // 2] + way[-_PATH // 2 :]
        path: list[Mapping[str, Any]] = [step_on_path(each) for each in way]
        if sink is not None:
            path.append({"sink": sink.kind, "name": sink.name})
        verdict = Verdict(
            status,
            stage,
            cause or why.cause,
            origin_of(event),
            evidence=(*why.evidence, *self.evidence, *reached, *self.lineage.notes),
            advice=self._advice(status, _that_help(why.advice, stage), event, sink),
            also=self._also(event, others),
            path=tuple(path),
            region=region,
        )
        return Finding(verdict, self.wants)

    def _advice(self, status: Status, checks: tuple[str, ...], event: OpEvent, sink: Sink | None) -> tuple[str, ...]:
        """The checks; of what was contained those that the report has not answered."""
        stands = event.kind == "external" or any(is_bad_unscaled(self.roots, hit) for hit in self.damage.contained)
        if status != "contained" or stands:  # bad state and a loss that no scale mends fail again
            return checks
        made = (self.roots.event(id) for id in sorted(self.roots.descendants(event.id)))
        absorbed_by = next((op for each in made for op in each.absorbed_by), None)
        excuse = None if sink is None else sink.excuse or "skip"
        flows_back = event.carries_grad and event.phase != "backward"
        return advice_of_contained(checks, excuse, absorbed_by, flows_back)

    def _also(self, event: OpEvent, others: frozenset[int]) -> tuple[Origin, ...]:
        """Where an infinity became NaN, the forward half of a backward birth, and other roots of the same damage."""
        found: list[OpEvent] = []
        if not event.nan:
            after = (self.roots.event(id) for id in sorted(self.roots.descendants(event.id)) if id != event.id)
            found += [e for e in after if e.kind == "nan" and not self.roots.hidden(e)][:1]
        if event.phase == "backward":
            found += [
                e
                for e in self.lineage.events
                if e.kind in ("nan", "inf")
                and e.phase in ("forward", "loss")
                and (e.op, e.module, e.where) == (event.forward_op, event.module, event.where)
            ][:1]
        found += [self.roots.in_forward(self.roots.event(id)) for id in sorted(others)]
        unique = {_shown(e): e for e in reversed(found) if _shown(e) != _shown(event)}
        return tuple(origin_of(as_read(self.lineage, e)) for e in list(unique.values())[::-1][:3])

    def _reached(self, first: Sink) -> list[str]:
        """What the damage reached, counted."""
        held = {(hit.sink.kind, hit.sink.name) for hit in self.damage.faults}
        counts = [
            f"{n} {name}{'s' if n > 1 else ''}"
            for kind, name in _NOUNS.items()
            if (n := sum(1 for k, _ in held if k == kind))
        ]
        loss = ["the loss"] if any(k == "loss" for k, _ in held) else []
        said = f"It reached {_named(first)}{in_round(self.lineage, first.iteration)}"
        sound = (
            " No loss came out nonfinite." if counts and not any(s.kind == "loss" for s in self.lineage.sinks) else ""
        )
        if not held:  # a mark that escaped, which has been said
            return []
        steps = {hit.sink.iteration - 1 for hit in self.damage.faults}
        over = f" over {self.lineage.round}s {min(steps)} to {max(steps)}" if len(steps) > 1 else ""
        return [f"{said}; nonfinite in all{over}: {', '.join(loss + counts)}.{sound}" if loss or counts else f"{said}."]


def _stage_of_external(event: OpEvent) -> Stage | None:
    if event.category == "received" and event.phase == "backward":
        return "gradients"
    if event.category in ("unobserved", "received"):
        return _STAGES.get(event.phase)
    return "input" if event.category in ("batch", "constant") else "state"


def _was_abandoned(lineage: Lineage, event: OpEvent) -> bool:
    """Whether the round of an event was given up by the step's own guard: a test was read, and no update followed."""
    begin = max((time for time in lineage.round_times if time < event.time), default=0)
    end = min((time for time in lineage.round_times if time > event.time), default=None)

    def within(time: int) -> bool:
        return begin < time and (end is None or time <= end)

    updated = any(within(time) for time in lineage.step_times)
    tested = any(within(time) for time, _, _ in lineage.guard_reads)
    return bool(lineage.step_times) and tested and not updated


def _that_help(advice: tuple[str, ...], stage: Stage | None) -> tuple[str, ...]:
    """The checks without that of another batch, where the value was computed without one."""
    return tuple(text for text in advice if text != ANOTHER_BATCH) if stage in ("optimizer", "update") else advice


def _shown(event: OpEvent) -> tuple[Any, ...]:
    """What a reader sees of an event: a second one at the same place tells nothing new."""
    return event.phase, event.module, event.op, event.node, event.where, event.tensor


def _same_birth(event: OpEvent, other: OpEvent) -> bool:
    return _identity(event) == _identity(other)


def _identity(event: OpEvent) -> tuple[Any, ...]:
    return event.kind, event.op, event.module, event.node, event.phase, event.iteration


def _births_before_updates(lineage: Lineage) -> list[tuple[Any, ...]]:
    first = min(time for *_, time in lineage.growth) if lineage.growth else 0
    return [
        (*_identity(event), event.nan, event.posinf, event.neginf)
        for event in lineage.events
        if event.time < first and event.kind in ("nan", "inf", "inserted")
    ]


def _same_sink(one: Sink, other: Sink) -> bool:
    return (one.kind, one.name, one.iteration) == (other.kind, other.name, other.iteration)


def _named(sink: Sink) -> str:
    if sink.kind == "exception":
        return f"an op that raised {sink.name}"
    if sink.kind == "returned" and sink.name.startswith("output"):
        return "what the model put out" + (f" ({sink.name})" if sink.name != "output" else "")
    if sink.kind == "returned":
        return "what the step returned" + (f" ({sink.name})" if sink.name != "returned" else "")
    if sink.kind == "loss":
        return "the loss" if sink.name == "loss" else sink.name
    return sink.name if sink.kind == "state" else f"{_WORDS.get(sink.kind, sink.kind)} {sink.name}"


def _stands_still(lineage: Lineage, iterations: list[int]) -> str:
    first, last = iterations[0] - 1, iterations[-1] - 1  # told from 0
    return (
        f"In {lineage.round}s {first} to {last} the loss was nonfinite before it was scaled, and the "
        f"gradient scaler skipped all {len(iterations)} updates: training stands still, and lowering the scale cannot "
        "change that."
    )


def _excuse(lineage: Lineage, sink: Sink) -> str:
    why = {
        "skip": "the gradient scaler skipped the update",
        "guard": "the step tested the value itself and did not update",
        "returned": "it was only returned, after training was done",
        "soft": "it was only differentiated, not trained on",
    }
    return f"It reached {_named(sink)}{in_round(lineage, sink.iteration)}, but {why[sink.excuse or 'skip']}."
