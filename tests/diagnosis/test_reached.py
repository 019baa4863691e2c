"""Which steps are one iteration of the loop, and that finding it does not look at every number between two steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from nantrace.diagnosis.modules.seen import Seen
from nantrace.diagnosis.reached import iteration_of
from nantrace.events import Phase, Role
from tests.diagnosis.written import Written


def turns(*steps: tuple[int, str]) -> Seen:
    """One optimizer gradient a step: (number of the step, parameter)."""
    written = Written()
    for _, parameter in steps:
        written.grad(parameter, phase=Phase.OPTIMIZER)
    events = written.trace().events.copy()
    events["step"] = [number for number, _ in steps]
    return Seen.of(dataclasses.replace(written.trace(), events=events))


def by_every_number(seen: Seen, step: int) -> list[int]:
    """The same by going through all numbers from the first step on."""
    groups: list[list[int]] = []
    taken: set[str] = set()
    for number in range(int(seen.step[0]), int(seen.step[-1]) + 1):
        mine = {seen.name(int(row)) for row in np.flatnonzero(seen.step == number)}
        if not mine or not taken or taken & mine:
            groups.append([])
            taken = set()
        groups[-1].append(number)
        taken |= mine
    return next(group for group in groups if step in group)


@pytest.mark.parametrize(
    "steps",
    [
        [(0, "a"), (1, "a"), (2, "a")],
        [(0, "a"), (1, "b"), (2, "a"), (3, "b")],
        [(0, "a"), (1, "b"), (2, "b"), (3, "a"), (4, "b")],
        [(3, "a"), (4, "b"), (7, "b"), (8, "a"), (9, "c"), (10, "a")],
    ],
)
def test_an_iteration_is_the_steps_up_to_an_optimizer_that_steps_again(steps: list[tuple[int, str]]) -> None:
    seen = turns(*steps)
    for number, _ in steps:
        assert iteration_of(seen, number) == by_every_number(seen, number)


def test_the_iteration_of_a_sampled_step_is_found_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = turns((0, "a"), (5_000_000, "a"), (5_000_001, "b"), (10_000_000, "a"))
    asked: list[int] = []
    rows = Seen.rows

    def counted(self: Seen, step: int, *roles: Role, phases: Iterable[Phase] | None = None) -> Any:
        asked.append(step)
        return rows(self, step, *roles, phases=phases)

    monkeypatch.setattr(Seen, "rows", counted)
    assert iteration_of(seen, 5_000_001) == [5_000_000, 5_000_001]
    assert len(asked) < 12
