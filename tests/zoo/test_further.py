"""Bisect gives the right answer to steps that no rule was made for."""

from __future__ import annotations

import pytest

import nantrace
from tests.zoo.answers import matches
from tests.zoo.case import Case
from tests.zoo.further import CASES


def test_there_are_enough_of_them_and_none_has_another_s_name() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 350


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bisect_gives_the_right_answer(case: Case) -> None:
    model, batch, step = case.build()
    assert matches(case, nantrace.bisect(step, model, batch)) == []
