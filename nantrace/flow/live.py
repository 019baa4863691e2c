"""The op pass beside a module trace: on the step itself, for a failure that cannot be replayed."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from nantrace.events import Columns, Phase, Role, Site
from nantrace.flow.links import fqn
from nantrace.flow.recorder import OpRecorder
from nantrace.lineage import Lineage, OpEvent

Observe = Callable[[Site, tuple[Any, ...]], None]


class LiveOps:
    """Records ops between `begin` and `end`, and hands each nonfinite output on as a row of the trace.

    Args:
        model, batch, optimizer: as for `OpRecorder`; several optimizers may be given.
        modules: globs on FQNs. In other modules, and outside of all, ops whose inputs are finite are not looked at.

    Raises:
        ValueError: a glob matches no module. Modules outside the model ("<ClassName>") are not known before they run.
    """

    def __init__(
        self, model: torch.nn.Module, batch: Any = None, optimizer: Any = None, modules: Sequence[str] | None = None
    ) -> None:
        several = optimizer is not None and not hasattr(optimizer, "param_groups")
        self._arguments = (model, batch, list(optimizer) if several else optimizer)
        self._modules = None if modules is None else _known(model, modules)
        self._recorder: OpRecorder | None = None

    def begin(self, observe: Observe) -> None:
        """Start recording; `observe` takes the site and the numbers of a row."""
        model, batch, optimizer = self._arguments
        self._recorder = OpRecorder(
            model,
            batch,
            optimizer=optimizer,
            within=None if self._modules is None else self._selects,
            on_event=lambda event: observe(*op_row(event)),
        )
        self._recorder.__enter__()

    def end(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop recording."""
        if self._recorder is not None:
            self._recorder.__exit__(kind, error, traceback)

    def take_batch(self, batch: Any) -> None:
        """Name the tensors of what is read from here on."""
        if self._recorder is not None:
            self._recorder.take_batch(batch)

    def lineage(self) -> Lineage:
        """What was seen; complete after `end`."""
        return Lineage() if self._recorder is None else self._recorder.lineage()

    def _selects(self, module: str | None, phase: str) -> bool:
        return module is not None and any(fnmatch.fnmatchcase(module, glob) for glob in self._modules or ())


def _known(model: torch.nn.Module, globs: Sequence[str]) -> Sequence[str]:
    fqns = list(dict.fromkeys(fqn(name, model) for name, _ in model.named_modules(remove_duplicate=False)))
    for glob in globs:
        if not glob.startswith("<") and not any(fnmatch.fnmatchcase(name, glob) for name in fqns):
            some = ", ".join(map(repr, fqns[:8]))
            raise ValueError(f"ops has {glob!r}, which matches none of the model's {len(fqns)} modules: {some}")
    return globs


def op_row(event: OpEvent) -> tuple[Site, tuple[Any, ...]]:
    """A nonfinite op output as the site and the numbers of a trace's row."""
    phase = Phase[event.phase.upper()] if event.phase is not None else Phase.FORWARD
    site = Site(event.module, phase, Role.OP, "output", event.dtype, event.shape, event.op, event.node, event.where)
    numel = math.prod(event.shape)
    bad = [a + b for a, b in zip((event.nan, event.posinf, event.neginf), event.beside, strict=True)]
    low = math.nan if event.min is None else event.min
    high = math.nan if event.max is None else event.max
    counts = (numel, numel - sum(bad), *bad)
    return site, (*counts, low, high, math.nan, event.first_bad, 0, 0, 0, int(Columns.FIRST_BAD))
