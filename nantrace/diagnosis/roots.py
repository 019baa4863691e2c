"""From a sink back to the births: which events are to blame for nonfinite values that were kept.

Pure graph work on a `Lineage`. Which sinks count is decided in `damage`, what is said about them in `blame`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator

from nantrace.diagnosis.causes.hyperparameters import settings_made_of
from nantrace.lineage import Lineage, OpEvent, Sink

#: Ops for which -inf is an ordinary input: a NaN that one of them makes out of -inf is its own doing.
_DIGESTS_MINUS_INF = ("softmax", "logsumexp", "exp")
#: Ops that put a number in its place without computing with it: what an optimizer masks or begins a state with.
_PUTS = re.compile(r"full|fill|scalar_tensor|where|copy|pad|scatter|index_put|clamp")
_UPDATES = ("optimizer", "post_backward", "update")
_SAME_IN_A_COPY = ("kind", "op", "module", "where", "iteration", "shape", "nan", "posinf", "neginf", "first_bad")


class Roots:
    """Answers questions about one lineage. Every answer is computed once."""

    def __init__(self, lineage: Lineage) -> None:
        self.lineage = lineage
        self._memo: dict[tuple[int, str], frozenset[int]] = {}
        self._children: dict[int, list[int]] | None = None
        self.settings = settings_made_of(lineage)
        self._kept = {id for sink in lineage.sinks for id, _ in sink.starts}

    def event(self, id: int) -> OpEvent:
        return self.lineage.event(id)

    def of_sink(self, sink: Sink) -> frozenset[int]:
        """Ids of the events in which the nonfinite elements of a sink began."""
        return frozenset().union(*(self.of(id, kind) for id, kind in sink.starts))

    def of(self, id: int, kind: str) -> frozenset[int]:
        """Ids of the events in which the "nan" or "inf" elements that event `id` wrote began.

        A NaN that came in explains a NaN that goes out, and nothing else does: the infinities beside it are not
        followed. A NaN made of infinities alone goes back to these infinities if one of them carries blame, else the
        op that made NaN of them is the root itself: an infinity put there on purpose is no excuse for it.
        """
        stack = [(id, kind)]
        while stack:
            node = stack[-1]
            if node in self._memo:
                stack.pop()
                continue
            follow = self._sources(*node)
            missing = [source for source in follow if source not in self._memo]
            if missing:
                stack += missing
                continue
            self._memo[node] = self._combine(node, follow)
            stack.pop()
        return self._memo[id, kind]

    def _sources(self, id: int, kind: str) -> list[tuple[int, str]]:
        """Where to look next. What an op kept for itself (`hidden`) explains nothing."""
        event = self.event(id)
        if event.kind in ("external", "uninit", "inserted"):
            return []
        nans = [(p, "nan") for p in event.nan_parents if p < id and not self.hidden(self.event(p))]
        infs = [(p, "inf") for p in event.inf_parents if p < id and not self.hidden(self.event(p))]
        if kind == "nan":
            return nans or infs
        return infs or nans

    def _combine(self, node: tuple[int, str], follow: list[tuple[int, str]]) -> frozenset[int]:
        id, kind = node
        event = self.event(id)
        found = frozenset().union(*(self._memo[source] for source in follow))
        born_here = kind == "nan" and not any(k == "nan" for _, k in follow)
        if born_here and event.kind not in ("external", "uninit", "inserted"):
            found = frozenset(root for root in found if self._feeds_nan(self.event(root), event))
        return found or frozenset((id,))

    def _feeds_nan(self, root: OpEvent, maker: OpEvent) -> bool:
        """Whether an infinity is to blame for the NaN that `maker` made of it."""
        digests = any(name in (maker.op or "") for name in _DIGESTS_MINUS_INF)
        return self.carries_blame(root) or (self.is_bad_data(root) and not digests)

    def carries_blame(self, event: OpEvent) -> bool:
        """A birth does; an infinity inserted on purpose does not; of what was there before, -inf alone is a mark.

        An update that computes with a nonfinite number does not mean to: nothing later takes a mark out again.
        """
        if event.id in self.settings:
            return True
        if event.kind == "inserted":
            return event.phase in _UPDATES and not _PUTS.search(event.op or "")
        if event.kind == "external":
            constant = event.category == "constant"
            return (
                event.nan > 0
                or event.category in ("unobserved", "received")
                or (event.posinf > 0 and (not constant or event.datalike))
            )
        return True

    @staticmethod
    def is_bad_data(event: OpEvent) -> bool:
        """An infinity among varied finite values is data, not a mask."""
        return event.kind == "external" and event.datalike and event.category in ("batch", "constant")

    @staticmethod
    def hidden(event: OpEvent) -> bool:
        """An output that autograd keeps for itself (rstd, logsumexp): no forward op ever read it."""
        return (
            event.kind in ("inf", "nan", "propagated")
            and event.phase in ("forward", "loss", "recompute")
            and event.outputs > 1
            and not event.read_by_forward
            and not event.inplace
        )

    def internal(self, event: OpEvent) -> bool:
        """Born and buried inside one run of one autograd node, as 0/0 in the formula of norm's gradient at 0."""
        return event.phase == "backward" and event.node_key is not None and not self._leaves_node(event)

    def _leaves_node(self, event: OpEvent) -> bool:
        return any(
            id in self._kept or any(reader != event.node_key for reader in self.event(id).readers)
            for id in self.descendants(event.id)
        )

    def births(self) -> list[OpEvent]:
        """Every birth that somebody else could see."""
        return [
            event
            for event in self.lineage.events
            if event.kind in ("inf", "nan") and not self.hidden(event) and not self.internal(event)
        ]

    def descendants(self, id: int) -> Iterator[int]:
        """The event and all that came of it, breadth first."""
        children = self._by_parent()
        queue, seen = deque((id,)), {id}
        while queue:
            current = queue.popleft()
            yield current
            for child in children.get(current, ()):
                if child not in seen:
                    seen.add(child)
                    queue.append(child)

    def in_forward(self, event: OpEvent) -> OpEvent:
        """The same birth in the forward, of what backward only computed again (activation checkpointing).

        The forward may have dropped the value, so that its second copy alone reaches a sink; it was born before that.
        An event that was not recomputed, or went otherwise the first time, comes back as it is.
        """
        if event.phase != "recompute" or event.kind not in ("inf", "nan"):
            return event
        return next((e for e in self.lineage.events[: event.id - 1] if self._recomputes(event, e)), event)

    @staticmethod
    def _recomputes(copy: OpEvent, event: OpEvent) -> bool:
        """Whether one birth is another one's copy: the same op at the same line made the same elements of it."""
        return event.phase in ("forward", "loss") and all(
            getattr(copy, field) == getattr(event, field) for field in _SAME_IN_A_COPY
        )

    def path(self, id: int, sink: Sink) -> list[OpEvent]:
        """The shortest way from an event, or its recomputed copy, to what a sink holds; empty if there is none."""
        copies = (e.id for e in self.lineage.events[id:] if e.phase == "recompute" and self.in_forward(e).id == id)
        return next((way for start in (id, *copies) if (way := self._way(start, sink))), [])

    def _way(self, id: int, sink: Sink) -> list[OpEvent]:
        ends = {start for start, _ in sink.starts}
        children = self._by_parent()
        came: dict[int, int | None] = {id: None}
        queue = deque((id,))
        while queue:
            current: int | None = queue.popleft()
            if current in ends:
                way = []
                while current is not None:
                    way.append(self.event(current))
                    current = came[current]
                return way[::-1]
            assert current is not None
            for child in children.get(current, ()):
                if child not in came:
                    came[child] = current
                    queue.append(child)
        return []

    def ancestors(self, ids: Iterable[int]) -> set[int]:
        """These events and all that they came from."""
        seen: set[int] = set()
        queue = list(ids)
        while queue:
            id = queue.pop()
            if id not in seen:
                seen.add(id)
                queue += [*self.event(id).nan_parents, *self.event(id).inf_parents]
        return seen

    def _by_parent(self) -> dict[int, list[int]]:
        if self._children is None:
            self._children = {}
            for event in self.lineage.events:
                for parent in {*event.nan_parents, *event.inf_parents}:
                    self._children.setdefault(parent, []).append(event.id)
        return self._children
