"""Writes lineages by hand: events in order, then the sinks that they reach."""

from __future__ import annotations

from typing import Any

from nantrace.lineage import Lineage, OpEvent, Sink


class Flow:
    """A lineage under construction. Each event comes one op after the one before."""

    def __init__(self) -> None:
        self.lineage = Lineage(backwards=1)

    def op(
        self,
        op: str,
        kind: str,
        *,
        nan: int = 0,
        posinf: int = 0,
        neginf: int = 0,
        of_nan: tuple[int, ...] = (),
        of_inf: tuple[int, ...] = (),
        phase: str = "forward",
        **fields: Any,
    ) -> int:
        """An event; returns its id. `of_nan` and `of_inf` are its parents. By default forward ops read it later."""
        id = len(self.lineage.events) + 1
        module = fields.pop("module", "net" if phase in ("forward", "backward") else None)
        defaults: dict[str, Any] = {"node": None, "where": f"train.py:{id} in step", "iteration": 1, "dtype": "float32"}
        defaults |= {"read_by_forward": phase in ("forward", "loss"), "carries_grad": phase in ("forward", "backward")}
        if phase == "backward":
            node = fields.get("node", "NodeBackward0")
            defaults |= {"node": node, "node_key": (0, id, node), "readers": ("elsewhere",)}
        self.lineage.events.append(
            OpEvent(
                id=id,
                time=fields.pop("time", id),
                op=op,
                kind=kind,  # type: ignore[arg-type]
                phase=phase,
                module=module,
                shape=(4,),
                nan=nan,
                posinf=posinf,
                neginf=neginf,
                nan_parents=of_nan,
                inf_parents=of_inf,
                **(defaults | fields),
            )
        )
        self.lineage.ops = id
        return id

    def given(self, category: str, tensor: str | None = None, **fields: Any) -> int:
        """An external event."""
        defaults: dict[str, Any] = {"phase": None, "module": None, "where": None}
        id = self.op("", "external", category=category, tensor=tensor, **(defaults | fields))
        self.lineage.event(id).op = None
        return id

    def sink(
        self, kind: str, name: str = "", *, nan: tuple[int, ...] = (), inf: tuple[int, ...] = (), **fields: Any
    ) -> None:
        """A sink that holds the nonfinite elements of these events, reached after everything so far."""
        starts = tuple((id, "nan") for id in nan) + tuple((id, "inf") for id in inf)
        defaults: dict[str, Any] = {"iteration": 1, "time": len(self.lineage.events)}
        self.lineage.sinks.append(Sink(kind, name or kind, starts, **(defaults | fields)))
