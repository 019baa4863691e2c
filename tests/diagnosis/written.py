"""Traces written by hand, row by row, as the tracer would record them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from nantrace.events import EVENT, Columns, ModuleEntry, Phase, Role, Site, Trace

FINITE: dict[str, int] = {}
NAN, POSINF, NEGINF = {"nan": 1}, {"posinf": 1}, {"neginf": 1}


class Written:
    """Collects rows; `trace()` is the value. Tensors have 8 elements of shape (2, 4) unless a row says otherwise."""

    def __init__(self, dtype: str = "float32", **classes: str) -> None:
        self.dtype = dtype
        self.rows: list[tuple[Any, ...]] = []
        self.sites: dict[Site, int] = {}
        self.step = 0
        self.steps: list[dict[str, Any]] = []
        self.phase = Phase.FORWARD
        self.calls = itertools.count(1)
        self.modules: dict[str, str] = {name.replace("__", "."): cls for name, cls in classes.items()}

    def row(
        self, module: str | None, phase: Phase, role: Role, slot: str, call: int = 0, size: float = 1.0, **bad: int
    ) -> int:
        site = Site(module, phase, role, slot, self.dtype, (2, 4))
        number = self.sites.setdefault(site, len(self.sites))
        held = {"nan": 0, "posinf": 0, "neginf": 0, "low": -size, "high": size, **bad}
        lost = held["nan"] + held["posinf"] + held["neginf"]
        low, high = (held["low"], held["high"]) if lost < 8 else (np.nan, np.nan)
        first = 8 - lost if lost else -1
        counts = (8, 8 - lost, held["nan"], held["posinf"], held["neginf"])
        self.rows.append(
            (len(self.rows) + 1, self.step, number, call, *counts, low, high, np.nan, first, 0, 0, 0, Columns.FIRST_BAD)
        )
        if module is not None and not module.startswith("<"):
            self.modules.setdefault(module, "Module")
        return len(self.rows) - 1

    def batch(self, name: str, **bad: Any) -> int:
        return self.row(None, Phase.FORWARD, Role.INPUT, f"batch.{name}", **bad)

    def param(self, name: str, phase: Phase = Phase.FORWARD, **bad: Any) -> int:
        owner, _, leaf = name.rpartition(".")
        return self.row(owner, phase, Role.PARAM, leaf, **bad)

    def buffer(self, name: str, phase: Phase = Phase.FORWARD, **bad: Any) -> int:
        owner, _, leaf = name.rpartition(".")
        return self.row(owner, phase, Role.BUFFER, leaf, **bad)

    def moment(self, parameter: str, key: str = "exp_avg_sq", phase: Phase = Phase.FORWARD, **bad: Any) -> int:
        owner = parameter.rpartition(".")[0]
        return self.row(owner, phase, Role.STATE, f"optimizer.state.{parameter}.{key}", **bad)

    def grad(self, parameter: str, phase: Phase = Phase.BACKWARD, **bad: Any) -> int:
        return self.row(parameter.rpartition(".")[0], phase, Role.GRAD, parameter, **bad)

    def loss(self, **bad: Any) -> int:
        return self.row(None, Phase.LOSS, Role.LOSS, "loss", **bad)

    @contextlib.contextmanager
    def call(
        self,
        module: str,
        given: dict[str, Any] | None = FINITE,
        made: dict[str, Any] | None = FINITE,
        phase: Phase | None = None,
    ) -> Iterator[int]:
        """One call; `given` and `made` describe its input and output, None leaves the row out."""
        number = next(self.calls)
        phase = self.phase if phase is None else phase
        if given is not None:
            self.row(module, phase, Role.INPUT, "args[0]", number, **given)
        yield number
        if made is not None:
            self.row(module, phase, Role.OUTPUT, "output", number, **made)

    def run(self, module: str, given: dict[str, Any] | None = FINITE, made: dict[str, Any] | None = FINITE) -> int:
        """A call of a module without submodules."""
        with self.call(module, given, made) as number:
            pass
        return number

    def grad_output(self, module: str, call: int, **bad: Any) -> int:
        return self.row(module, Phase.BACKWARD, Role.GRAD_OUTPUT, "output", call, **bad)

    def grad_input(self, module: str, call: int, **bad: Any) -> int:
        return self.row(module, Phase.BACKWARD, Role.GRAD_INPUT, "args[0]", call, **bad)

    def end(self, **ledger: Any) -> None:
        """Finish the step."""
        self.steps.append({"step": self.step, "attempted": 1, "committed": 1, "skipped": 0, **ledger})
        self.step += 1

    def trace(self) -> Trace:
        if len(self.steps) == self.step:
            self.end()
        modules = tuple(ModuleEntry(name, cls) for name, cls in sorted(self.modules.items()))
        meta = {"torch": "2.13.0", "device": "cpu"}
        return Trace(np.array(self.rows, dtype=EVENT), tuple(self.sites), modules, tuple(self.steps), meta)
