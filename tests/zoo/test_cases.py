"""The cases are what they claim: repeatable, silent, and ending in the state that they state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.zoo.case import Case
from tests.zoo.cases import CASES
from tests.zoo.identity import bits


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def _bad(tensors: list[Tensor]) -> bool:
    return any(not torch.isfinite(t.coalesce().values() if t.is_sparse else t).all() for t in tensors)


def _grads(model: torch.nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_there_are_76_cases_of_different_names() -> None:
    assert len({case.name for case in CASES}) == len(CASES) == 76


def test_a_case_is_the_same_each_time(case: Case) -> None:
    def run() -> Any:
        model, batch, step = case.build()
        returned = step(model, batch)
        return bits([returned, list(model.state_dict().values()), _grads(model)])

    assert run() == run()


def test_the_tensors_said_to_be_bad_are_bad(case: Case) -> None:
    model, batch, step = case.build()
    expect = case.expect
    for name in expect.batch_bad:
        assert not name or _bad([batch[name]]), name
    if expect.stage == "update":
        step(model, batch)
    state = model.state_dict()
    outside = case.name == "class_weight_inf_label_smoothing"  # a buffer of the criterion
    for name in expect.param_bad + (() if outside else expect.buffers_bad):
        assert _bad([state[name]]), name


def test_a_case_ends_in_the_state_it_states(case: Case) -> None:
    model, batch, step = case.build()
    loss = step(model, batch)
    end = case.expect.end
    assert end.loss is None or torch.isfinite(loss).item() == (end.loss == "finite")
    assert end.params is None or _bad(list(model.parameters())) == end.params
    assert end.grads is None or _bad(_grads(model)) == end.grads
    assert end.buffers is None or _bad(list(model.buffers())) == end.buffers
