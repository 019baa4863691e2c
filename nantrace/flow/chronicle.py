"""Writes what happened into the lineage: an event for each nonfinite output, and who read and absorbed it.

Knows how events come about and out of what; which tensors are looked at, and when, is the recorder's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, Protocol

from torch import Tensor

from nantrace.flow.between import Between
from nantrace.flow.births import is_datalike, kind_of, operands, output_fields, scalars
from nantrace.flow.calls import Call
from nantrace.flow.context import Context, Whereabouts
from nantrace.flow.elements import Share, shares
from nantrace.flow.externals import External, Externals
from nantrace.flow.host import HostReads
from nantrace.flow.memory import Memory, Unseen
from nantrace.flow.rounds import Rounds
from nantrace.flow.unwritten import Unwritten
from nantrace.flow.values import Masks, masks
from nantrace.lineage import Category, Lineage, OpEvent


class Recorder(Protocol):
    """The recorder, as the chronicle needs it."""

    time: int

    def lineage(self) -> Lineage: ...


class Chronicle:
    """Fills `Lineage.events`.

    Attributes:
        memory: what is known of each piece of memory.
        host: which nonfinite values the step itself looked at.
        between: events of which it is not known yet to which iteration they belong.
        filling: who had written what the op being recorded copies into. Some collectives work on memory of their own,
            and copy what came into the memory that they were given.
    """

    def __init__(
        self,
        recorder: Recorder,
        places: Whereabouts,
        rounds: Rounds,
        externals: Externals,
        on_event: Callable[[OpEvent], None] | None,
    ) -> None:
        self.memory, self.host = Memory(self._external, self._read_unwritten), HostReads()
        self._unwritten = Unwritten()
        self._recorder, self._lineage = recorder, recorder.lineage()
        self._places, self._rounds, self._externals = places, rounds, externals
        self.between = Between(rounds, self.memory.writers, on_event)
        self.filling: Unseen | None = None

    def record(self, call: Call, bad: list[tuple[int, Tensor]], outputs: int, finite: bool) -> None:
        """An op read something nonfinite, or put it out.

        Args:
            call: the op, with what it read.
            bad: planes that are not finite after it, each with its index in a list, -1 if it is in none.
            outputs: how many tensors it put out.
            finite: whether one of them is finite.
        """
        place = self._places.find(call.task, call.needs_grad, call.arguments, call.facts)
        self._note_readers(call, place, absorbed=finite and not bad and not call.facts.host_read)
        if call.facts.host_read:
            self.host.remember(call)
            return
        for index, plane in bad:
            if call.facts.unwritten:
                self._hand_out(call, place, plane, outputs)
            else:
                self._event(call, place, index, plane, outputs)

    def hand_over(self, call: Call, filled: Iterable[Tensor]) -> None:
        """A collective gives memory to other processes.

        Whatever turns up nonfinite in it where this process had finite values came from one of them; of what is filled
        anew nothing tells which element came from where, so that this process's own nonfinite values explain it.
        """
        place = self._places.find(call.task, call.needs_grad, call.arguments, call.facts)
        self._note_readers(call, place, absorbed=False)
        inside = place.phase != "backward"  # there the gradient that came last set it off, which tells nothing
        given = {id(argument.tensor) for argument, _ in call.bad}
        for tensor in filled:
            read = frozenset() if id(tensor) in given else call.read_ids()
            module, where = (place.module, place.where) if inside else (None, None)
            self.memory.hand_over(tensor, Unseen(call.facts.op, place.phase, module, where, True, read))

    def _note_readers(self, call: Call, place: Context, absorbed: bool) -> None:
        reader = place.node_key or place.phase
        self.between.read(call.read_ids(), place.phase)
        for id in call.read_ids():
            event = self._lineage.event(id)
            event.read_by_forward |= place.phase in ("forward", "loss", "recompute")
            if reader not in event.readers:
                event.readers += (reader,)
            if absorbed and call.facts.op not in event.absorbed_by:
                event.absorbed_by += (call.facts.op,)

    def _event(self, call: Call, place: Context, index: int, plane: Tensor, outputs: int) -> None:
        """An event of an output; of one whose elements have several explanations, an event for each of these."""
        mine = [look for a, look in call.bad if not call.list_length or -1 in (a.index, index) or a.index == index]
        found, literal = masks(plane), self.host.behind_literal(call)
        looks = [*mine, literal] if literal is not None else mine
        told_apart = None if literal is not None else shares(call, plane, found, self.memory.written_by)
        if told_apart is None:
            nan_parents = frozenset().union(*(look.nan_ids for look in looks))
            inf_parents = frozenset().union(*(look.inf_ids for look in looks))
            told_apart = [Share(found.bad, nan_parents, inf_parents)]
        events = []
        for share in told_apart:
            part = found if len(told_apart) == 1 else found.within(share.mask, plane)
            events.append((part, self._event_of(call, place, index, plane, part, share)))
        for part, event in events:
            event.outputs = outputs
            event.beside = (found.nan - part.nan, found.posinf - part.posinf, found.neginf - part.neginf)
            event.id = len(self._lineage.events) + 1
            self.memory.blame(plane, part, event.id)
            self._keep(event)

    def _event_of(self, call: Call, place: Context, index: int, plane: Tensor, found: Masks, share: Share) -> OpEvent:
        """The event of those elements of an output that `found` selects; without its id."""
        kind = kind_of(call, found, share.nan_ids, share.inf_ids)
        born = kind in ("nan", "inf", "inserted")
        event = OpEvent(
            id=0,
            time=self._recorder.time,
            op=call.facts.op,
            kind=kind,
            iteration=self._rounds.iteration,
            **place.fields(),
            **output_fields(plane, found, self._externals.rows, described=born),
            nan_parents=tuple(sorted(share.nan_ids)),
            inf_parents=tuple(sorted(share.inf_ids)),
            inplace=call.facts.mutates,
            carries_grad=call.task >= 0 or call.needs_grad(),
        )
        if born:
            event.operands = operands(call, index, self._externals)
            event.scalars = scalars(call)
        return event

    def _hand_out(self, call: Call, place: Context, plane: Tensor, outputs: int) -> None:
        """Memory that nobody has written: no event, unless somebody reads its elements as they are."""
        found = masks(plane)
        event = OpEvent(
            id=0,
            time=self._recorder.time,
            op=call.facts.op,
            kind="uninit",
            iteration=self._rounds.iteration,
            **place.fields(),
            **output_fields(plane, found, self._externals.rows, described=False),
            outputs=outputs,
            inplace=call.facts.mutates,
            carries_grad=call.task >= 0 or call.needs_grad(),
        )
        number = self._unwritten.hand_out(event, plane.untyped_storage())
        if call.facts.mutates:  # what a resized storage held before keeps its writers
            self.memory.writers.adopt(plane, found.bad, number)
        else:
            self.memory.blame(plane, found, number)

    def _read_unwritten(self, number: int) -> int:
        """Elements that nobody has written are read: from the first time on this is an event; returns its id."""
        event = self._unwritten.event(number)
        if not event.id:
            event.id = len(self._lineage.events) + 1
            self._keep(event)
        return event.id

    def _keep(self, event: OpEvent) -> None:
        self._lineage.events.append(event)
        self.between.keep(event)

    def _external(self, plane: Tensor, found: Masks) -> int:
        """Nonfinite elements that nobody was seen writing become an event; returns its id."""
        external = self._externals.find(plane.untyped_storage()._cdata, _offset_of_first(plane, found))
        unseen = self.memory.who_wrote(plane)
        if unseen is None and external is None and self.filling is not None and self.filling.collective:
            unseen = self.filling
        whole, all_found = self._whole(plane, found, external)
        event = OpEvent(
            id=len(self._lineage.events) + 1,
            time=self._recorder.time,
            op=unseen.op if unseen else None,
            kind="propagated" if unseen and unseen.read else "external",
            phase=unseen.phase if unseen else None,
            module=unseen.module if unseen else None,
            node=None,
            where=unseen.where if unseen else None,
            iteration=self._rounds.iteration,
            nan_parents=self._those(unseen, "nan"),
            inf_parents=self._those(unseen, "inf"),
            category=_category(unseen, external),
            tensor=external.name if external and not unseen else None,
            datalike=is_datalike(plane, found),
            **output_fields(whole, all_found, self._externals.rows, described=True),
        )
        self._lineage.events.append(event)
        self.between.arrived(event)
        if whole is not plane:
            self.memory.writers.adopt(whole, all_found.bad, event.id)
        return event.id

    def _whole(self, plane: Tensor, found: Masks, external: External | None) -> tuple[Tensor, Masks]:
        """The named tensor, whose index is asked for, in place of a part of it that was read.

        Unless some of its bad elements were written in the step: then the part alone was there before.
        """
        if external is None:
            return plane, found
        whole = masks(external.tensor)
        before = whole.count == found.count or self.memory.writers.of(external.tensor, whole.bad) == {0}
        return (external.tensor, whole) if before and whole.count >= found.count else (plane, found)

    def _those(self, unseen: Unseen | None, kind: Literal["nan", "inf"]) -> tuple[int, ...]:
        """Of the events that were given to an unseen writer, those with NaN, or with infinities."""
        events = [self._lineage.event(id) for id in sorted(unseen.read)] if unseen else []
        return tuple(e.id for e in events if (e.nan if kind == "nan" else e.posinf or e.neginf))


def _category(unseen: Unseen | None, external: External | None) -> Category:
    if unseen is not None:
        return "received" if unseen.collective else "unobserved"
    return external.category if external is not None else "constant"


def _offset_of_first(plane: Tensor, found: Masks) -> int:
    """Where in its storage, counted in elements, the first nonfinite element of a view lies."""
    index: list[int] = found.bad.nonzero()[0].tolist()
    return int(plane.storage_offset()) + sum(i * stride for i, stride in zip(index, plane.stride(), strict=True))
