"""An elementwise op is judged element by element: what stands elsewhere in its inputs explains nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nantrace.diagnosis.blame import blame
from tests.flow.steps import kinds, only, recorded

INF, NAN = math.inf, math.nan


def test_an_infinity_beside_it_does_not_explain_zero_over_zero() -> None:
    def run() -> None:
        ratio = torch.tensor([1.0, 0.0]) * torch.reciprocal(torch.tensor([0.0, 1.0]))
        ratio.clamp(max=5.0) / ratio

    event = only(recorded(run), "aten.div")
    assert (event.kind, event.nan_parents, event.inf_parents, event.beside) == ("nan", (), (), ())


def test_an_overflow_beside_a_mask_is_born_and_the_mask_is_passed_on() -> None:
    def run() -> None:
        scores = torch.tensor([1.0, 2.0, 3.0]).masked_fill(torch.tensor([True, False, False]), -INF)
        scores * torch.tensor([1.0, 3e38, 1.0])

    event = only(recorded(run), "aten.mul")
    assert (event.kind, event.inf_parents, event.beside) == ("inf", (1,), ("inf",))


def test_what_where_leaves_out_is_no_parent() -> None:
    def run() -> None:
        first, second = torch.log(torch.tensor([0.0, 1.0])), torch.sqrt(torch.tensor([0.0, -1.0]))
        torch.where(torch.tensor([False, False]), first, second)

    lineage = recorded(run)
    assert kinds(lineage)[:2] == [("aten.log", "inf"), ("aten.sqrt", "nan")]
    assert (only(lineage, "aten.where").nan_parents, only(lineage, "aten.where").inf_parents) == ((2,), ())


def test_an_op_in_place_is_judged_by_its_elements_before_the_call() -> None:
    def run() -> None:
        x = torch.tensor([-INF, 0.0]).add(0.0)
        x.reciprocal_()

    event = only(recorded(run), "aten.reciprocal_")
    assert (event.kind, event.posinf, event.inf_parents) == ("inf", 1, ())


def test_a_row_explains_every_row_that_it_is_added_to() -> None:
    def run() -> None:
        torch.ones(3, 2) + torch.tensor([0.0, 1.0]).log()

    event = only(recorded(run), "aten.add")
    assert (event.kind, event.inf_parents, event.beside) == ("propagated", (1,), ())


def test_a_number_that_is_infinite_stands_beside_every_element() -> None:
    def run() -> None:
        torch.tensor([0.0, 1.0]).log() + INF

    assert only(recorded(run), "aten.add").kind == "nan"


def test_a_sum_is_taken_as_a_whole() -> None:
    def run() -> None:
        torch.tensor([[0.0, 1.0], [1.0, 1.0]]).log().sum(1)

    assert only(recorded(run), "aten.sum").kind == "propagated"


def test_a_cast_that_overflows_beside_a_mask_is_born() -> None:
    event = only(recorded(lambda: torch.tensor([1e5, -INF]).add(0.0).half()), "aten._to_copy")
    assert (event.kind, event.beside, event.posinf) == ("inf", ("inf",), 1)


def test_a_birth_beside_a_mask_is_a_root() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (x.masked_fill(mask, -INF) * 1e30).logsumexp(-1)

    x, mask = torch.full((2, 3), 1e10, requires_grad=True), torch.tensor([[True, False, False]] * 2)
    model = Net()
    verdict = blame(recorded(lambda: model(x, mask).sum().backward(), model)).verdict
    assert verdict.origin is not None
    assert (verdict.status, verdict.cause, verdict.origin.op) == ("fault", "overflow", "aten.mul")


_VALUES = st.lists(st.sampled_from([0.0, 1.0, -1.0, 3e38, INF, -INF, NAN]), min_size=1, max_size=6)


@pytest.mark.parametrize("op", [torch.add, torch.mul, torch.div, torch.maximum], ids=lambda op: op.__name__)
@settings(deadline=None, max_examples=30)
@given(values=_VALUES, data=st.data())
def test_births_are_the_elements_over_finite_inputs(
    op: Callable[[Tensor, Tensor], Tensor], values: list[float], data: st.DataObject
) -> None:
    drawn = st.sampled_from([*values, 0.0, 2.0, INF])
    others = data.draw(st.lists(drawn, min_size=len(values), max_size=len(values)))
    x, y = torch.tensor(values), torch.tensor(others)
    out, finite = op(x, y), torch.isfinite(x) & torch.isfinite(y)
    born = tuple(kind for kind, test in (("nan", torch.isnan), ("inf", torch.isinf)) if (finite & test(out)).any())
    events = [event for event in recorded(lambda: op(x, y)).events if event.op == f"aten.{op.__name__}"]
    assert bool(events) == (not torch.isfinite(out).all())
    for event in events:
        if event.nan_parents or event.inf_parents:
            # A tensor without a finite element explains all that is made of it.
            assert event.beside == (born if x.isfinite().any() and y.isfinite().any() else ())
        else:
            assert (event.kind, event.beside) == (born[0], ())
