"""How a nonfinite output came about, and what is written down about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from nantrace.lineage import OpEvent
from tests.flow.steps import Net, kinds, only, recorded

INF, NAN = math.inf, math.nan


def test_an_infinity_out_of_finite_values_is_born() -> None:
    assert kinds(recorded(lambda: torch.log(torch.zeros(2)))) == [("aten.log", "inf")]


def test_a_nan_out_of_infinities_is_born_and_names_them_as_parents() -> None:
    def run() -> None:
        big = torch.full((2,), 1e38) * 10
        (big - big).sum()

    lineage = recorded(run)
    assert kinds(lineage) == [("aten.mul", "inf"), ("aten.sub", "nan"), ("aten.sum", "propagated")]
    assert (lineage.event(2).inf_parents, lineage.event(2).nan_parents) == ((1,), ())
    assert lineage.event(3).nan_parents == (2,)


@pytest.mark.parametrize(
    "make", [lambda x: x.masked_fill(x > 0, -INF), lambda x: nn.functional.pad(x, (1, 1), value=-INF)]
)
def test_an_infinity_that_only_a_literal_explains_is_inserted(make: object) -> None:
    lineage = recorded(lambda: make(torch.ones(3)))  # type: ignore[operator]
    assert [kind for _, kind in kinds(lineage)] == ["inserted"]


def test_a_nan_out_of_an_infinite_literal_is_born_all_the_same() -> None:
    assert kinds(recorded(lambda: torch.zeros(2) * -INF)) == [("aten.mul", "nan")]


@pytest.fixture
def memory_of_nan() -> Iterator[None]:
    """Memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("memory_of_nan")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3),
        lambda: torch.empty_like(torch.ones(3)),
        lambda: torch.ones(2).new_empty(3),
        lambda: torch.empty_strided((3,), (1,)),
        lambda: torch.ones(1).resize_(3),
    ],
)
def test_memory_that_nobody_wrote_is_no_birth_and_no_value_until_it_is_read(make: Callable[[], torch.Tensor]) -> None:
    def all_written() -> None:
        memory = make()
        memory[1:] = 1
        memory[0].fill_(2).add(1)
        memory.sum()

    assert kinds(recorded(all_written)) == []
    assert kinds(recorded(lambda: make() is None)) == []
    assert [kind for _, kind in kinds(recorded(lambda: make() + 1))] == ["uninit", "propagated"]


@pytest.mark.usefixtures("memory_of_nan")
def test_only_reads_of_what_was_not_written_show_the_memory_as_it_was_handed_out() -> None:
    def run() -> None:
        memory = torch.empty(3)
        memory[:2] = 1
        memory[:2].sum()
        (torch.zeros(1) / 0).sum()
        (memory.sum() + memory[2]).sum()

    lineage = recorded(run)
    assert [kind for _, kind in kinds(lineage)][:3] == ["nan", "propagated", "uninit"]
    read = only(lineage, "aten.empty")
    assert (read.id, read.time < lineage.event(1).time) == (3, True)
    assert {parent for event in lineage.events[3:] for parent in event.nan_parents if parent < 4} == {3}


@pytest.mark.parametrize(("op", "value", "kind"), [(torch.log, 0.0, "inf"), (torch.sqrt, -1.0, "nan")])
def test_a_number_read_from_a_nonfinite_tensor_is_that_tensor_s_doing(op: Any, value: float, kind: str) -> None:
    def run() -> torch.Tensor:
        number = op(torch.tensor(value)).item()
        return torch.ones(2) * number

    lineage = recorded(run)
    assert [kind for _, kind in kinds(lineage)] == [kind, "propagated"]
    assert (lineage.event(2).nan_parents, lineage.event(2).inf_parents) == (((1,), ()) if kind == "nan" else ((), (1,)))


def test_an_inplace_op_is_described_by_its_inputs_before_the_call() -> None:
    event = only(recorded(lambda: torch.tensor([1.0, 3.0]).div_(torch.tensor([0.0, 2.0]))), "aten.div_")
    assert event.inplace and (event.kind, event.posinf) == ("inf", 1)
    assert [(o.name, o.min, o.max, o.zero) for o in event.operands] == [("self", 1.0, 3.0, 0), ("other", 0.0, 2.0, 1)]


def test_a_large_inplace_operand_keeps_its_extent() -> None:
    event = only(recorded(lambda: torch.full((70_000,), 2.0).mul_(1e38).sub(0).mul_(10)), "aten.mul_")
    assert [(o.name, o.max, o.zero) for o in event.operands] == [("self", pytest.approx(2e38), None)]


def test_plain_arguments_are_kept_by_their_schema_name() -> None:
    event = only(recorded(lambda: torch.full((4,), 1e20).pow(2)), "aten.pow")
    assert event.scalars == {"exponent": 2}


def test_the_output_is_counted_and_the_bad_samples_of_the_batch_are_listed() -> None:
    x = torch.tensor([[1.0, 2.0], [0.0, 3.0], [-1.0, 0.0]])
    event = only(recorded(lambda: torch.log(x), batch={"x": x}), "aten.log")
    assert (event.nan, event.posinf, event.neginf, event.first_bad) == (1, 0, 2, 2)
    assert (event.samples, event.min, event.max) == ((1, 2), 0.0, pytest.approx(math.log(3)))
    assert [o.tensor for o in event.operands] == ["batch.x"]


def test_samples_are_not_listed_where_dim_0_is_not_the_batch() -> None:
    x = torch.tensor([[1.0, 2.0], [0.0, 3.0], [-1.0, 0.0]])
    assert only(recorded(lambda: torch.log(x.t().contiguous()), batch={"x": x}), "aten.log").samples == ()


def test_each_element_knows_who_wrote_it() -> None:
    def run() -> torch.Tensor:
        buffer = torch.zeros(3)
        buffer[0] = torch.log(torch.tensor(0.0))
        buffer[2] = torch.sqrt(torch.tensor(-1.0))
        return buffer[:1] + 1, buffer[2:] + 1  # type: ignore[return-value]

    lineage = recorded(run)

    def ancestry(event: OpEvent) -> set[str | None]:
        parents = {*event.nan_parents, *event.inf_parents}
        return {event.op}.union(*(ancestry(lineage.event(p)) for p in parents))

    first, second = (event for event in lineage.events if event.op == "aten.add")
    assert "aten.log" in ancestry(first) and "aten.sqrt" not in ancestry(first)
    assert "aten.sqrt" in ancestry(second) and "aten.log" not in ancestry(second)


def test_elements_overwritten_with_finite_values_have_no_writer_left() -> None:
    def run() -> torch.Tensor:
        x = torch.log(torch.zeros(3))
        x.fill_(1.0)
        return x + 1

    assert kinds(recorded(run)) == [("aten.log", "inf")]


def test_list_ops_keep_their_elements_apart() -> None:
    def run() -> None:
        good, bad = torch.ones(2), torch.log(torch.zeros(2))
        torch._foreach_mul_([good, bad], 2.0)
        good + 1

    lineage = recorded(run)
    assert kinds(lineage) == [("aten.log", "inf"), ("aten._foreach_mul_", "propagated")]


def test_views_write_nothing_and_read_nothing() -> None:
    def run() -> None:
        x = torch.log(torch.zeros(1, 4))
        x.t().view(4)[1:].unsqueeze(0).expand(2, 3)

    lineage = recorded(run)
    assert kinds(lineage) == [("aten.log", "inf")]
    assert lineage.event(1).readers == ()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_ops_outside_autograd_are_seen(mode: type) -> None:
    def run() -> torch.Tensor:
        with mode():
            return torch.log(torch.zeros(4)).reshape(2, 2) * 1

    assert kinds(recorded(run))[0] == ("aten.log", "inf")
    assert len(kinds(recorded(run))) == 2


def test_results_written_through_out_are_outputs_not_inputs() -> None:
    target = torch.full((2,), NAN)
    assert kinds(recorded(lambda: torch.add(torch.ones(2), torch.ones(2), out=target))) == []
    assert kinds(recorded(lambda: torch.log(torch.zeros(2), out=target))) == [("aten.log", "inf")]


def test_an_op_that_absorbed_a_value_is_noted_with_it() -> None:
    lineage = recorded(lambda: torch.ones(2) / torch.full((2,), 1e38).mul(10))
    assert only(lineage, "aten.mul").absorbed_by == ("aten.div",)


def test_a_comparison_absorbs_nothing() -> None:
    assert only(recorded(lambda: torch.log(torch.zeros(2)) < 0), "aten.log").absorbed_by == ()


def test_what_no_op_wrote_is_external_and_named() -> None:
    model = nn.BatchNorm1d(2)
    with torch.no_grad():
        model.weight[1] = NAN
        model.running_var[0] = INF
    model.eval()
    x = torch.tensor([[1.0, 2.0], [INF, 3.0]])
    found = {(e.category, e.tensor) for e in recorded(lambda: model(x), model, {"x": x}).events if e.kind == "external"}
    assert found == {("param", "weight"), ("buffer", "running_var"), ("batch", "batch.x")}


def test_a_tensor_of_unknown_origin_is_a_constant_and_an_argument_of_the_model_is_input() -> None:
    table = torch.tensor([1.0, INF])
    assert only(recorded(lambda: table + 1), None).category == "constant"
    model = nn.Linear(2, 2)
    event = only(recorded(lambda: model(table), model), None)
    assert (event.category, event.tensor) == ("batch", "args[0]")


@pytest.mark.parametrize(("values", "data"), [([INF, 1.0, 2.0], True), ([INF, 0.0, 1.0], False), ([-INF, 0.0], False)])
def test_varied_finite_values_beside_an_infinity_make_it_data(values: list[float], data: bool) -> None:
    table = torch.tensor(values)
    assert only(recorded(lambda: table + 1), None).datalike is data


def test_buffers_of_a_loss_outside_the_model_are_state() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, INF]))
    lineage = recorded(lambda: loss(torch.zeros(2, 2), torch.tensor([0, 1])), nn.Linear(2, 2))
    event = next(event for event in lineage.events if event.kind == "external")
    assert (event.category, event.tensor) == ("buffer", "CrossEntropyLoss.weight")


def test_batch_norm_s_unannounced_write_is_its_output() -> None:
    model = nn.BatchNorm1d(1)

    def run() -> None:
        model(torch.tensor([[1.0], [2.0]]))
        model(torch.tensor([[3e38], [-3e38]]))

    lineage = recorded(run, model)
    assert not [event for event in lineage.events if event.kind == "external"]
    assert any(s.kind == "buffer" and s.name == "running_var" for s in lineage.sinks)


@pytest.mark.filterwarnings("ignore:Sparse invariant")
def test_sparse_complex_and_narrow_floats_are_read() -> None:
    def run() -> None:
        torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.tensor([1e30]), (2, 2)).mul(1e30)
        torch.complex(torch.zeros(2), torch.zeros(2)).reciprocal()
        torch.tensor([1e6]).to(torch.float8_e5m2)

    found = {(event.op, event.dtype, event.kind) for event in recorded(run).events}
    assert found == {
        ("aten.mul", "float32", "inf"),
        ("aten.reciprocal", "complex64", "nan"),
        ("aten._to_copy", "float8_e5m2", "inf"),
    }


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_cannot_be_read_is_counted_in_the_notes() -> None:
    def run() -> None:
        torch.empty(2, device="meta") + 1
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)

    notes = recorded(run).notes
    assert any("meta" in note for note in notes) and any("quantized" in note for note in notes)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode_differentiation_is_watched_without_touching_its_zero_tensors() -> None:
    def run() -> torch.Tensor:
        f = lambda x: torch.sqrt(x).sum()  # noqa: E731
        return torch.func.jvp(f, (torch.zeros(2),), (torch.ones(2),))[1]

    assert recorded(run).events[0].kind == "inf"


def test_every_nonfinite_output_is_told_in_order() -> None:
    seen: list[tuple[str | None, str]] = []
    from nantrace.flow.recorder import OpRecorder

    with OpRecorder(nn.Identity(), on_event=lambda event: seen.append((event.op, event.kind))):
        x = torch.zeros(2)
        (x.log() + 1).exp()
    assert seen == [("aten.log", "inf"), ("aten.add", "propagated")]


def test_a_parameter_read_through_a_view_is_described_as_itself() -> None:
    model = Net(3)
    with torch.no_grad():
        model.lin.weight[0, 2] = math.nan
    event = only(recorded(lambda: model.lin.weight.t()[2] * 1.0, model), None)
    assert (event.tensor, event.shape, event.first_bad, event.nan) == ("lin.weight", (3, 3), 2, 1)


@pytest.mark.parametrize("bad, name", [((1, 0), "batch.x"), ((0, 2), "batch.y"), ((2, 1), "batch.x")])
def test_columns_of_one_table_keep_their_own_names(bad: tuple[int, int], name: str) -> None:
    table = torch.ones(3, 3)
    table[bad] = math.nan
    batch = {"x": table[:, :2], "y": table[:, 2:]}
    events = recorded(lambda: (batch["x"] * 1.0, batch["y"] * 1.0), None, batch).events
    assert [event.tensor for event in events if event.kind == "external"] == [name]


def test_a_buffer_is_counted_whole_although_a_part_of_it_was_read() -> None:
    model = nn.Identity()
    table = torch.arange(24.0).reshape(6, 4)
    table[:, 1] = torch.nan
    model.register_buffer("pe", table)
    event = only(recorded(lambda: model.pe[:5] + 1, model), None)  # type: ignore[operator]
    assert (event.tensor, event.shape, event.nan, event.first_bad) == ("pe", (6, 4), 6, 1)
