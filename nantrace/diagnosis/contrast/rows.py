"""One step run under one change after the other, as a value: the rows, their reading, the fewest float32 modules.

Knows no torch and runs nothing. `replay.matrix` builds a `Contrast`; `reading` reads its rows.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nantrace.diagnosis.verdict import plain

#: What became of a row. `cannot_tell`: the step does not come out the same twice. `not_run`: no replay was left.
Outcome = Literal["finite", "nonfinite", "raised", "not_applicable", "cannot_tell", "not_run"]

BASE = "as-it-was"
#: Every axis in the order of the table: its name on the command line, and in words.
AXES: Mapping[str, str] = {
    BASE: "as it was",
    "autocast-off": "autocast off",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "float64": "float64",
    "module-float32": "module in float32",
    "scaler-off": "scaler off",
    "scale-lowered": "scale lowered",
    "no-update": "no update",
    "evaluation": "evaluation mode",
    "other-batch": "another batch",
    "deterministic": "deterministic",
    "eager": "eager",
    "aot-eager": "aot_eager",
    "inductor": "inductor",
}
COMPILED = (BASE, "eager", "aot-eager", "inductor")
#: What a picture of the table calls an outcome that no verdict names.
_DRAWN = {"finite": "clean", "nonfinite": "fault", "cannot_tell": "not_reproduced"}


@dataclass(frozen=True)
class Row:
    """The step with one thing changed.

    Attributes:
        axis: a key of `AXES`.
        outcome: see `Outcome`; "nonfinite" if something that training keeps went nonfinite.
        changed: what exactly was changed: "module block.1 in float32".
        reason: why it could not apply or cannot be told, or what was raised; "" otherwise.
        status, stage: of the verdict on a trace of this run; None where the run was finite or was not traced.
        module, tensor: of the first nonfinite tensor; module None outside any module, and where nothing was traced.
        phase: of it.
        loss: of the last backward pass, or the first that was nonfinite, without the loss scale; None: not seen.
        gradient_norm: over all gradients, unscaled, before clipping; None: no gradients.
        ends: which ends went nonfinite, in words.
        skipped: updates that a gradient scaler skipped.
        seconds: what the run took, probes included.
        compared_with: the row from which this one differs in the one thing.
        notes: what of the change did not reach the whole step.
    """

    axis: str
    outcome: Outcome
    changed: str = ""
    reason: str = ""
    status: str | None = None
    stage: str | None = None
    module: str | None = None
    tensor: str | None = None
    phase: str | None = None
    loss: float | None = None
    gradient_norm: float | None = None
    ends: str = ""
    skipped: int = 0
    seconds: float | None = None
    compared_with: str = BASE
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return AXES.get(self.axis, self.axis)

    @property
    def ran(self) -> bool:
        """It shows whether the step is finite under this change."""
        return self.outcome in ("finite", "nonfinite")

    @property
    def place(self) -> str:
        """Where it was first nonfinite: "forward block.1", "(model)"; "" if that was not seen."""
        if self.outcome != "nonfinite":
            return ""
        parts = [self.stage or self.phase or "", "(model)" if self.module == "" else self.module or self.tensor or ""]
        return " ".join(dict.fromkeys(part for part in parts if part))

    def detail(self) -> str:
        """What a picture says beside the row."""
        if self.outcome not in ("finite", "nonfinite"):
            return self.reason
        said = [self.place] if self.place else []
        said += [f"loss {number(self.loss)}"] if self.loss is not None else []
        return ", ".join(said)


@dataclass(frozen=True)
class Smallest:
    """The fewest modules that have to run in float32 for the step to be finite, as a search found them.

    Attributes:
        modules: their FQNs; everything inside a module counts with it. Empty: no set helps, or none was found.
        minimal: none of them can be left out, nor be replaced by modules within it; another set may serve as well.
        replays: runs of the step that the search took.
        ratio: step time with these modules in float32 over the time without, the median of pairs; None: not measured.
        pairs: how many pairs were measured.
        seconds: median step time without and with them.
        reason: why there is no set.
    """

    modules: tuple[str, ...] = ()
    minimal: bool = False
    replays: int = 0
    ratio: float | None = None
    pairs: int = 0
    seconds: tuple[float, float] | None = None
    reason: str = ""

    def __str__(self) -> str:
        if not self.modules:
            return f"Smallest set of modules in float32: none, {self.reason}."
        names = ", ".join(name or "(model)" for name in self.modules)
        kind = "none of them can be left out" if len(self.modules) > 1 else "no part of it suffices"
        how = kind if self.minimal else "the replays ran out before a smaller one was tried"
        said = f"Smallest set of modules in float32 with which the step is finite: {names} ({how})."
        if self.ratio is None:
            return f"{said} What it costs was not measured."
        return f"{said} Step time {self.ratio:.2f} times that without, the median of {self.pairs} pairs of runs."


@dataclass(frozen=True)
class Reading:
    """What one pair of rows shows, and what it leaves open.

    Attributes:
        rows: the axes compared: the changed one, then the one without the change.
        establishes: a sentence.
        leaves_open: a sentence; "" if there is nothing to add.
    """

    rows: tuple[str, str]
    establishes: str
    leaves_open: str = ""


@dataclass(frozen=True)
class Contrast:
    """What `nantrace.matrix` gives: one row an axis, and their reading. `str()` is the text.

    Attributes:
        rows: in the order of `AXES`, the step as it was first.
        readings: what each pair of rows does and does not establish.
        smallest: the fewest modules that have to run in float32; None where that was not asked.
        replays: how often the step was run.
        notes: what holds for the whole table.
    """

    rows: tuple[Row, ...]
    readings: tuple[Reading, ...] = ()
    smallest: Smallest | None = None
    replays: int = 0
    notes: tuple[str, ...] = ()

    @property
    def base(self) -> Row:
        return self.rows[0]

    def row(self, axis: str) -> Row:
        """The row of an axis.

        Raises:
            KeyError: the table has none.
        """
        return {row.axis: row for row in self.rows}[axis]

    def records(self) -> tuple[tuple[str, str, str], ...]:
        """(axis, outcome, detail) of each row, for the picture of the table."""
        return tuple((row.title, row.status or _DRAWN.get(row.outcome, row.outcome), row.detail()) for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON types only; a nonfinite float becomes {"finite": false, "value": "nan" | "inf" | "-inf"}."""
        found = plain(self)
        assert isinstance(found, dict)
        return found

    def __str__(self) -> str:
        text: str = importlib.import_module("nantrace.render.matrix").text(self)
        return text

    def __repr__(self) -> str:
        return str(self)


def number(value: float | None) -> str:
    """A loss or a norm for people: "0.693", "inf", "-" if there is none."""
    if value is None:
        return "-"
    return f"{value:.4g}" if math.isfinite(value) else repr(value)
