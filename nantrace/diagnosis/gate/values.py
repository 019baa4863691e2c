"""The rules of a gate on nonfinite values: what the ledger and the rows of tensors show of the steps of a window. Pure.

A nonfinite value is found where it was recorded, and nowhere else: how many steps were looked at goes with each answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nantrace.diagnosis.gate.window import Row, Thresholds, Window, is_number, number, told_loss
from nantrace.events import Phase, Role, Site, Trace, nonfinite_rows
from nantrace.steps import is_nonfinite

Rows = npt.NDArray[np.int64]


class Bad(NamedTuple):
    """One nonfinite value: in which step, of what, and which."""

    step: int
    name: str
    kind: str


class Found(NamedTuple):
    """What a rule found.

    Attributes:
        bad: in order of the steps.
        looked: how many of the steps it asks about were looked at.
        asked: how many it asks about.
        unseen: why none was looked at.
    """

    bad: tuple[Bad, ...]
    looked: int
    asked: int
    unseen: str


@dataclass(frozen=True)
class Values:
    """The nonfinite values of a window."""

    trace: Trace
    window: Window
    thresholds: Thresholds

    def inputs(self) -> Found:
        """The batch and what the model was given; an additive mask of 0 and -inf is one by its values."""
        steps = [number(row) for row, _ in self.window.taken_up]
        rows = self._bad(_is_input, steps)
        held = self.trace.events[rows]
        mask = (held["nan"] == 0) & (held["posinf"] == 0) & (held["min"] == 0) & (held["max"] == 0)
        bad = [*self._named(rows[~mask]), *self._checked_batches()]
        return self._by_rows(bad, steps, _is_input, "no batch was handed over and no input of the model recorded")

    def losses(self) -> Found:
        """Of every step that worked or has a loss on record, so also of one that its user skipped for that loss."""
        taken_up = [row for row, _ in self.window.taken_up]
        rows = [row for row in taken_up if row.get("attempted", 1) or row.get("backwards") or told_loss(row)]
        looked = {number(row) for row in rows if is_number(row.get("loss"))}
        bad = [each for row in rows for each in self._bad_losses(row)]
        steps = [number(row) for row in rows]
        told = {(each.step, each.name) for each in bad}
        seen = self._named(self._bad(_is_loss, steps))
        bad += [each for each in seen if (each.step, each.name) not in told]
        if not self.window.has_ledger:
            looked = self._seen_steps & set(steps) if any(map(_is_loss, self.trace.sites)) else set()
        return self._found(bad, len(looked), len(rows), "no loss was recorded")

    def gradients(self) -> Found:
        """Norms without the scale, and the gradients that an optimizer was given."""
        rows = [row for row, _ in self.window.committed]
        looked = {number(row) for row in rows if is_number(row.get("gradient_norm"))}
        bad = [
            Bad(number(row), "gradient norm", repr(row["gradient_norm"]))
            for row in rows
            if is_nonfinite(row.get("gradient_norm")) and not self.thresholds.allows("gradient norm")
        ]
        given = self._bad(lambda site: site.role == Role.GRAD and site.phase == Phase.OPTIMIZER, self.window.steps)
        bad = [*self._named(given), *bad]  # a name says more than a norm
        return self._found(bad, len(looked), len(rows), "no gradient norm was recorded")

    def parameters(self) -> Found:
        return self._state(Role.PARAM, "no parameter was recorded")

    def optimizer_state(self) -> Found:
        return self._state(Role.STATE, "no tensor of an optimizer's state was recorded")

    @property
    def may_have_buffers(self) -> bool:
        """False where parameters were recorded and no buffer was: then the model has none."""
        roles = {site.role for site in self.trace.sites}
        return Role.BUFFER in roles or Role.PARAM not in roles

    def buffers(self) -> Found:
        """NaN, and infinities where the trace first saw finite values: an observer that never ran holds infinities."""
        rows = self._bad(_is_buffer, self.window.steps)
        held = self.trace.events[rows]
        turned = [site for site in np.unique(held["site"]).tolist() if self._was_finite(site)]
        bad = self._named(rows[(held["nan"] != 0) | np.isin(held["site"], turned)])
        return self._by_rows(bad, self.window.steps, _is_buffer, "no buffer was recorded")

    def _state(self, role: Role, unseen: str) -> Found:
        def wanted(site: Site) -> bool:
            return site.role == role

        bad = self._named(self._bad(wanted, self.window.steps))
        return self._by_rows(bad, self.window.steps, wanted, unseen)

    def _by_rows(
        self, bad: list[Bad], steps: list[int] | tuple[int, ...], wanted: Callable[[Site], bool], unseen: str
    ) -> Found:
        if not any(map(wanted, self.trace.sites)):
            why = unseen if len(self.trace) else "the trace holds no rows of tensors"
            return self._found(bad, 0, len(steps), why)
        return self._found(bad, len(self._seen_steps & set(steps)), len(steps), "none was recorded in detail")

    def _found(self, bad: list[Bad], looked: int, asked: int, unseen: str) -> Found:
        if not asked:
            unseen = "no update was committed without a skip" if self.window.has_ledger else "the trace has no ledger"
        ordered = sorted({(each.step, each.name): each for each in reversed(bad)}.values(), key=lambda each: each.step)
        return Found(tuple(ordered), looked, asked, unseen)

    @cached_property
    def _seen_steps(self) -> set[int]:
        """Steps whose tensors were looked at: the rows are kept, or were dropped after none had been nonfinite."""
        kept = {int(step) for step in np.unique(self.trace.events["step"])}
        return kept | {number(row) for row in self.window.rows if row.get("not_kept") and not row.get("nonfinite")}

    @cached_property
    def _nonfinite(self) -> npt.NDArray[np.bool_]:
        return nonfinite_rows(self.trace.events)

    def _bad(self, wanted: Callable[[Site], bool], steps: list[int] | tuple[int, ...]) -> Rows:
        """Nonfinite rows of these sites in these steps, the first of each site in each step."""
        allows = self.thresholds.allows
        sites = np.array([wanted(site) and not allows(site.tensor) for site in self.trace.sites] or [False], np.bool_)
        (rows,) = np.nonzero(self._nonfinite)
        rows = rows[sites[self.trace.events["site"][rows]]]
        rows = rows[np.isin(self.trace.events["step"][rows], list(steps))]
        held = self.trace.events[rows]
        _, first = np.unique(held["step"].astype(np.int64) * len(sites) + held["site"], return_index=True)
        return np.asarray(rows[np.sort(first)])

    def _named(self, rows: Rows) -> list[Bad]:
        events = self.trace.events[rows]
        return [Bad(int(event["step"]), self.trace.site(event).tensor, _kind(event)) for event in events]

    def _was_finite(self, site: int) -> bool:
        """Whether the first row of a tensor, in whatever phase, was finite."""
        name = self.trace.sites[site].tensor
        same = [at for at, other in enumerate(self.trace.sites) if _is_buffer(other) and other.tensor == name]
        (rows,) = np.nonzero(np.isin(self.trace.events["site"], same))
        return not self._nonfinite[rows[0]]

    def _checked_batches(self) -> Iterator[Bad]:
        """What a check of the batch of a failing step found."""
        for row, _ in self.window.taken_up:
            for found in row.get("batch_check") or ():
                name = str(found.get("tensor"))
                if "nonfinite" in str(found.get("finding")) and not self.thresholds.allows(name):
                    yield Bad(number(row), name, "nonfinite values")

    def _bad_losses(self, row: Row) -> Iterator[Bad]:
        named: dict[str, Any] = {"loss": row.get("loss")}
        named.update((f"losses.{name}", value) for name, value in (row.get("losses") or {}).items())
        for name, value in named.items():
            if is_nonfinite(value) and not self.thresholds.allows(name):
                yield Bad(number(row), name, repr(value))


def _is_input(site: Site) -> bool:
    return site.role == Role.INPUT and site.phase == Phase.FORWARD and site.module in (None, "")


def _is_loss(site: Site) -> bool:
    return site.role == Role.LOSS and site.slot.startswith("loss")


def _is_buffer(site: Site) -> bool:
    return site.role == Role.BUFFER


def _kind(event: np.void) -> str:
    counts = ((int(event["nan"]), "nan"), (int(event["posinf"]), "inf"), (int(event["neginf"]), "-inf"))
    held = ", ".join(f"{count:,} {word}" for count, word in counts if count)
    return f"{held} of {int(event['numel']):,}"
