"""Bisect gives the right answer to every case."""

from __future__ import annotations

import pytest

import nantrace
from tests.zoo.answers import matches
from tests.zoo.case import Case
from tests.zoo.cases import CASES

pytest.importorskip("nantrace.replay.bisect")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bisect_gives_the_right_answer(case: Case) -> None:
    model, batch, step = case.build()
    assert matches(case, nantrace.bisect(step, model, batch)) == []
