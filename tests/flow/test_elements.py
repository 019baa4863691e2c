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
from nantrace.lineage import Lineage
from tests.flow.steps import kinds, only, recorded

INF, NAN = math.inf, math.nan


def _of(lineage: Lineage, op: str) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Kind, NaN parents and infinite parents of each event of an op."""
    return [(event.kind, event.nan_parents, event.inf_parents) for event in lineage.events if event.op == op]


def test_an_infinity_beside_it_does_not_explain_zero_over_zero() -> None:
    def run() -> None:
        ratio = torch.tensor([1.0, 0.0]) * torch.reciprocal(torch.tensor([0.0, 1.0]))
        ratio.clamp(max=5.0) / ratio

    assert _of(recorded(run), "aten.div") == [("nan", (), ())]


def test_an_overflow_beside_a_mask_is_born_and_the_mask_is_passed_on() -> None:
    def run() -> None:
        scores = torch.tensor([1.0, 2.0, 3.0]).masked_fill(torch.tensor([True, False, False]), -INF)
        scores * torch.tensor([1.0, 3e38, 1.0])

    lineage = recorded(run)
    assert _of(lineage, "aten.mul") == [("inf", (), ()), ("propagated", (), (1,))]
    born, passed_on = lineage.events[1:]
    assert (born.posinf, born.neginf, born.beside, born.first_bad) == (1, 0, (0, 0, 1), 1)
    assert (passed_on.posinf, passed_on.neginf, passed_on.beside, passed_on.first_bad) == (0, 1, (0, 1, 0), 0)


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

    assert _of(recorded(run), "aten.add") == [("propagated", (), (1,))]


def test_a_number_that_is_infinite_explains_what_stands_over_finite_elements() -> None:
    found = _of(recorded(lambda: torch.tensor([0.0, 1.0]).log() + INF), "aten.add")
    assert found == [("inserted", (), ()), ("nan", (), (1,))]


def test_a_cast_that_overflows_beside_a_mask_is_born() -> None:
    lineage = recorded(lambda: torch.tensor([1e5, -INF]).add(0.0).half())
    assert [(e.kind, e.posinf) for e in lineage.events if e.op == "aten._to_copy"] == [("inf", 1), ("propagated", 0)]


def test_padding_that_is_nan_and_a_birth_stay_apart() -> None:
    """A birth in one row of a tensor, padding in another: what is made of the one row knows nothing of the other."""
    padded = torch.tensor([[1.0, -1.0], [NAN, NAN]])

    def run() -> None:
        share = padded / padded.sum(-1, keepdim=True)  # row 0: 1 / 0
        mixed = torch.nn.functional.layer_norm(torch.relu(share) @ torch.ones(2, 2) + 1.0, (2,))
        torch.cat([mixed, torch.ones(1, 2)])[torch.tensor([0, 2])].sum()

    lineage = recorded(run)
    birth = next(event.id for event in lineage.events if event.op == "aten.div" and event.kind == "inf")
    last = only(lineage, "aten.sum") if len(_of(lineage, "aten.sum")) == 1 else lineage.events[-1]
    origins, queue = set(), [last.id]
    while queue:
        event = lineage.event(queue.pop())
        queue += [*event.nan_parents, *event.inf_parents]
        origins |= {event.id} if event.kind in ("inf", "external") else set()
    assert origins == {birth}


@pytest.mark.parametrize(
    ("run", "rows"),
    (
        (lambda x: x.softmax(-1), 1),
        (lambda x: x.sum(-1), 1),
        (lambda x: x.mean(0), 0),
        (lambda x: x.logsumexp(-1, keepdim=True), 1),
        (lambda x: torch.std(x, -1), 1),
        (lambda x: x.cumsum(-1), 1),
        (lambda x: x @ torch.ones(2, 2), 1),
        (lambda x: torch.addmm(torch.zeros(2), x, torch.ones(2, 2)), 1),
        (lambda x: x[None].bmm(torch.ones(1, 2, 2)), 1),
        (lambda x: x[torch.tensor([1, 0])], 1),
        (lambda x: x.index_select(0, torch.tensor([1, 0])), 1),
        (lambda x: x.gather(0, torch.tensor([[1, 1], [0, 0]])), 1),
        (lambda x: torch.cat([torch.zeros(1, 2), x]), 1),
        (lambda x: torch.stack([x, torch.zeros(2, 2)]), 1),
        (lambda x: torch.zeros(2, 2).index_add(0, torch.tensor([0, 1]), x), 1),
        (lambda x: torch.zeros(2, 2).scatter_add(0, torch.tensor([[0, 0], [1, 1]]), x), 1),
        (lambda x: torch.nn.functional.layer_norm(x, (2,)), 1),
        (lambda x: x.flip(0), 1),
        (lambda x: x.repeat(1, 2), 1),
        (lambda x: x.half(), 1),
    ),
)
def test_two_rows_of_different_origin_stay_apart(run: Callable[[Tensor], Tensor], rows: int) -> None:
    def step() -> None:
        top, bottom = torch.log(torch.zeros(2)), torch.sqrt(torch.full((2,), -1.0))
        run(torch.stack([top, bottom]))

    lineage = recorded(step)
    op, time = lineage.events[-1].op, lineage.events[-1].time
    found = {(*event.nan_parents, *event.inf_parents) for event in lineage.events if event.time == time}
    assert len(found) == (2 if rows else 1), op


def test_what_an_op_was_told_to_write_into_is_left_as_it_is() -> None:
    out = torch.zeros(2, 2)
    recorded(lambda: torch.stack([torch.zeros(2).log(), torch.ones(2)], out=out))
    assert out.tolist() == [[-INF, -INF], [1.0, 1.0]]


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
    lineage = recorded(lambda: op(x, y))
    events = [event for event in lineage.events if event.op == f"aten.{op.__name__}"]
    held = [event.nan + event.posinf + event.neginf for event in events]
    assert sum(held) == int((~torch.isfinite(out)).sum())
    assert all(sum(event.beside) == sum(held) - mine for event, mine in zip(events, held, strict=True))
    bare = [event for event in events if not event.nan_parents and not event.inf_parents]
    assert [(event.kind, event.nan > 0, event.posinf + event.neginf > 0) for event in bare] == (
        [(born[0], "nan" in born, "inf" in born)] if born else []
    )
