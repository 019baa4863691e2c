"""Records small steps and finds events in what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nantrace.flow.record import Recording, record
from nantrace.lineage import Lineage, OpEvent, Sink


def recorded(run: Callable[[], Any], model: nn.Module | None = None, batch: Any = None, **options: Any) -> Lineage:
    """The lineage of one run; fails if the recorder failed, raises what the step raised."""
    recording = recording_of(run, model, batch, **options)
    if recording.error is not None:
        raise recording.error
    return recording.lineage


def recording_of(
    run: Callable[[], Any], model: nn.Module | None = None, batch: Any = None, **options: Any
) -> Recording:
    recording = record(run, model if model is not None else nn.Identity(), batch, **options)
    assert recording.failure is None, recording.failure
    return recording


def only(lineage: Lineage, op: str | None) -> OpEvent:
    """The one event of an op (None: the one external event)."""
    found = [event for event in lineage.events if event.op == op]
    assert len(found) == 1, [(event.op, event.kind) for event in lineage.events]
    return found[0]


def kinds(lineage: Lineage) -> list[tuple[str | None, str]]:
    """(op, kind) of every event, in order."""
    return [(event.op, event.kind) for event in lineage.events]


def sinks(lineage: Lineage) -> list[tuple[str, str]]:
    """(kind, name) of every sink, in order."""
    return [(sink.kind, sink.name) for sink in lineage.sinks]


def sink(lineage: Lineage, kind: str, name: str) -> Sink:
    found = [each for each in lineage.sinks if (each.kind, each.name) == (kind, name)]
    assert found, sinks(lineage)
    return found[0]


class Log(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x)


class Net(nn.Module):
    """Linear of weight 1 without bias, then `log`: a row of zeros becomes -inf."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.lin, self.log = nn.Linear(width, width, bias=False), Log()
        with torch.no_grad():
            self.lin.weight.copy_(torch.eye(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.log(self.lin(x))
