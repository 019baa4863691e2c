"""The matrix: the right rows for steps that fail in a known way, and nothing of the caller's changed by any of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import nantrace
from nantrace.diagnosis.contrast.reading import readings
from nantrace.diagnosis.contrast.rows import AXES, BASE, Contrast, Row
from nantrace.errors import ReplayError
from nantrace.replay.change.axes import TABLE
from nantrace.replay.change.fewest import _narrowed
from nantrace.replay.change.precision import InFloat32, autocast_as
from nantrace.replay.matrix import matrix
from nantrace.replay.snapshot import Snapshot
from nantrace.replay.step import Step
from tests.replay.matrix_programs import PROGRAMS, Scaled, amp_step, batch_of, body, fp16_overflow, half_model

NAMES = tuple(PROGRAMS)


def patched() -> tuple[Any, ...]:
    """What the axes set otherwise while a replay runs."""
    return (
        torch.autocast.__enter__,
        nn.Module.train,
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.amp.GradScaler.step,
    )


def unchanged(step: Step, do: Callable[[], Any]) -> Any:
    """What `do` gives; the step's objects, hooks and torch's switches stay as they are, also when it raises."""
    before, was = Snapshot(step), patched()
    hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in step.model.modules()]
    tensors = [(p, p.data_ptr(), p.dtype) for p in step.model.parameters()]
    try:
        return do()
    finally:
        assert before.differences() == ()
        assert patched() == was
        assert not any(one or other for one, other in hooks)
        assert all(p.data_ptr() == where and p.dtype is dtype for p, where, dtype in tensors)


def of(step: Step, **options: Any) -> Contrast:
    found = unchanged(step, lambda: matrix(step, **options))
    assert isinstance(found, Contrast)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_each_program_gets_the_rows_and_the_reading_it_was_written_for(name: str) -> None:
    program = PROGRAMS[name]
    step, other = program.make()
    found = of(
        step,
        axes=program.axes,
        other_batch=other,
        smallest=program.smallest is not None,
    )
    assert {axis: found.row(axis).outcome for axis in program.rows} == program.rows
    said = " ".join(str(found).split())
    assert [words for words in program.says if words not in said] == []
    assert [words for words in program.never_says if words in said] == []
    assert program.begins in (None, found.base.place)
    if program.smallest is not None:
        assert found.smallest is not None and found.smallest.modules == program.smallest
    if found.smallest is not None and found.smallest.modules:
        assert found.smallest.minimal and found.smallest.pairs == 5 and (found.smallest.ratio or 0) > 0


def test_losses_and_norms_are_those_of_the_step_without_its_scale() -> None:
    model = body(nn.Tanh())
    step = amp_step(model, batch_of(), torch.bfloat16, torch.amp.GradScaler("cpu", init_scale=4096.0))
    alone = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(alone(batch_of()["x"]), batch_of()["y"])
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in alone.parameters() if p.grad is not None]).norm()
    found = of(step, axes=["scaler-off", "no-update"], smallest=False)
    for row in found.rows:
        assert row.loss == pytest.approx(float(loss.detach()), rel=1e-3)
        assert row.gradient_norm == pytest.approx(float(norm), rel=1e-2)


def test_the_scale_of_a_scaler_that_has_scaled_before_is_lowered_for_the_row_alone() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**23)
    step = amp_step(body(nn.Tanh()), batch_of(), scaler=scaler)
    step()  # skips, and halves the scale
    found = of(step, axes=["scale-lowered"], smallest=False)
    assert (found.base.outcome, found.row("scale-lowered").outcome) == ("nonfinite", "finite")
    assert found.row("scale-lowered").changed == "scale 4,096 in place of 4,194,304"
    assert scaler.get_scale() == 2.0**22


class Stop(BaseException):
    """Neither an error nor caught as one."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, Stop])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 15])
def test_whatever_leaves_a_replay_early_everything_is_put_back(error: type[BaseException], at: int) -> None:
    step, other = fp16_overflow()
    runs = 0
    inner = step.run

    def run(m: nn.Module, b: Any) -> Any:
        nonlocal runs
        runs += 1
        inner(m, b)
        if runs == at:
            raise error

    wrapped = Step(run, step.model, step.batch, optimizer=step.optimizer)
    with pytest.raises(error):
        unchanged(step, lambda: matrix(wrapped, other_batch=other))


def test_a_step_that_raises_under_a_change_is_neither_passed_nor_failed() -> None:
    step, _ = fp16_overflow()
    inner = step.run

    def run(m: nn.Module, b: Any) -> Any:
        if not m.training:
            raise LookupError("only for training")
        return inner(m, b)

    found = of(Step(run, step.model, step.batch, optimizer=step.optimizer), axes=["evaluation"], smallest=False)
    row = found.row("evaluation")
    assert row.outcome == "raised" and "LookupError: only for training" in row.reason
    assert found.readings == ()


def test_moments_and_gradients_of_an_optimizer_nobody_named_are_cast_along_and_put_back() -> None:
    model = body(nn.Tanh())
    held = [torch.optim.AdamW(model.parameters(), lr=1e-3)]  # in a list of the closure

    def run(m: nn.Module, b: Any) -> Any:
        loss = nn.functional.mse_loss(m(b["x"]), b["y"])
        loss.backward()  # on top of what lies there
        held[0].step()
        return loss.detach()

    step = Step(run, model, batch_of())
    run(model, step.batch)
    kept = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found = of(step, axes=["float64", "float32"], smallest=False)
    assert found.row("float64").outcome == "finite" and found.row("float32").outcome == "not_applicable"
    assert found.row("float64").loss == pytest.approx(found.base.loss or 0, rel=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, kept[name])
        assert parameter.grad.dtype is torch.float32 and held[0].state[parameter]["exp_avg"].dtype is torch.float32


def test_a_step_trains_on_after_a_matrix_as_if_there_had_been_none() -> None:
    def trained(with_matrix: bool) -> list[Tensor]:
        step, other = PROGRAMS["a loss scale too high"].make()
        step()
        if with_matrix:
            matrix(step, other_batch=other)
        for _ in range(3):
            step()
        return [p.detach() for p in step.model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))


def test_a_named_module_that_does_not_suffice_is_read_so() -> None:
    step, _ = fp16_overflow()
    found = of(step, axes=["module-float32"], module="0", smallest=False)
    assert found.row("module-float32").outcome == "nonfinite"
    assert "It does not suffice" in found.readings[0].establishes


def test_a_module_that_nobody_calls_is_not_applicable_and_not_passed() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x * 1e5, self.inner.weight)

    found = of(amp_step(body(Direct()), batch_of()), axes=["module-float32"], module="1.inner", smallest=False)
    assert found.row("module-float32").outcome == "not_applicable"
    assert "was not called as a module" in found.row("module-float32").reason


def test_two_modules_that_are_both_needed_are_both_in_the_smallest_set() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Scaled() if n in (1, 4) else nn.Linear(8, 8) for n in range(6)), nn.Linear(8, 4))
    with torch.no_grad():
        for n in (0, 3):
            model[n].weight.copy_(torch.eye(8) * 10)  # the second overflows on its own
    step = amp_step(model, batch_of())
    found = of(step, axes=["float32"])
    assert found.smallest is not None and found.smallest.modules == ("1.proj", "4.proj")
    assert found.smallest.minimal


def test_the_search_goes_into_lists_and_layers_that_a_module_trace_leaves_alone() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    with torch.no_grad():
        model.layers[1].linear1.weight.mul_(1e6)
    batch = {"x": torch.randn(3, 4, 8), "y": torch.randn(3, 4, 8)}
    found = of(amp_step(model, batch), axes=["float32"])
    assert found.smallest is not None
    assert found.smallest.modules == ("layers.1.linear1", "layers.1.linear2")


class Nested:
    """A tree of names, as the search asks for it."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def order(self, name: str) -> int:
        return self._names.index(name)

    def children(self, name: str) -> list[str]:
        depth = len(name.split(".")) if name else 0
        return [n for n in self._names if n and n.startswith(f"{name}." if name else "") and n.count(".") == depth]


@settings(deadline=None, max_examples=150)
@given(st.sets(st.sampled_from(["", "0", "1", "0.a", "0.b", "0.b.x", "0.b.y", "1.a", "1.b", "2"]), min_size=1))
def test_the_search_finds_exactly_what_is_needed(needed: set[str]) -> None:
    """A module that is needed for its own code is needed as a whole."""
    names = ["", "0", "0.a", "0.b", "0.b.x", "0.b.y", "1", "1.a", "1.b", "2"]
    runs = 0

    def passes(chosen: Any) -> bool:
        nonlocal runs
        runs += 1
        return all(any(n == c or c == "" or n.startswith(f"{c}.") for c in chosen) for n in needed)

    found, minimal = _narrowed(Nested(names), passes, lambda: True)  # type: ignore[arg-type]
    outermost = {n for n in needed if not any(n != o and (o == "" or n.startswith(f"{o}.")) for o in needed)}
    assert set(found) == outermost and minimal and found == sorted(found, key=names.index)
    assert runs < 40


@settings(deadline=None, max_examples=60)
@given(st.sets(st.sampled_from(["0.a", "0.b.x", "1.a", "2"]), min_size=1), st.integers(0, 20))
def test_a_search_that_is_cut_short_still_hands_out_a_set_that_suffices(needed: set[str], most: int) -> None:
    names = ["", "0", "0.a", "0.b", "0.b.x", "0.b.y", "1", "1.a", "1.b", "2"]
    runs = 0

    def passes(chosen: Any) -> bool:
        nonlocal runs
        runs += 1
        return all(any(n == c or c == "" or n.startswith(f"{c}.") for c in chosen) for n in needed)

    found, minimal = _narrowed(Nested(names), passes, lambda: runs < most)  # type: ignore[arg-type]
    assert passes(found)
    assert not minimal or set(found) == needed


def test_when_the_replays_run_out_rows_and_search_say_so() -> None:
    step, _ = fp16_overflow()
    found = of(step, max_replays=5)
    assert found.replays == 5
    assert [row.axis for row in found.rows if row.outcome == "not_run"][:1] == ["float32"]
    assert found.smallest is not None and found.smallest.modules == ()
    assert "no replay was left" in str(found)


def test_another_batch_is_tried_and_not_written_to() -> None:
    step, _ = PROGRAMS["a NaN in the batch"].make()
    inner = step.run

    def run(m: nn.Module, b: Any) -> Any:
        loss = inner(m, b)
        b["x"].zero_()
        return loss

    other = batch_of(2)
    kept = copy.deepcopy(other)
    found = of(
        Step(run, step.model, step.batch, optimizer=step.optimizer),
        axes=["other-batch"], other_batch=other, smallest=False,
    )  # fmt: skip
    assert found.row("other-batch").outcome == "finite"
    assert all(torch.equal(other[key], kept[key]) for key in other)


def test_wrong_options_are_one_sentence_each() -> None:
    step, _ = fp16_overflow()
    with pytest.raises(ReplayError, match=r"^The model has no module '7' that can be changed; it has '0', '1', "):
        matrix(step, module="7")
    with pytest.raises(ValueError, match=r"^axes holds 'fp16': choose from as-it-was, autocast-off, "):
        matrix(step, axes=["fp16"])
    with pytest.raises(ValueError, match=r"^max_replays is 2: pass an integer of 3 or more\.$"):
        matrix(step, max_replays=2)


def test_parameters_that_share_memory_are_not_cast() -> None:
    model = body(nn.Tanh())
    flat = torch.randn(16)
    model.first, model.second = nn.Parameter(flat[:8]), nn.Parameter(flat[8:])
    found = of(amp_step(model, batch_of()), axes=["float64"], smallest=False)
    assert found.row("float64").outcome == "not_applicable"
    assert "views of one memory" in found.row("float64").reason


def test_a_captured_step_is_the_one_that_is_run(tmp_path: Path) -> None:
    step, _ = fp16_overflow()
    path = tmp_path / "step.capture"
    with nantrace.trace(
        step.model, optimizer=step.optimizer, batch=step.batch, capture=path, on_nonfinite="ignore"
    ):  # fmt: skip
        step()
    for parameter in step.model.parameters():  # what it left is nonfinite, and not what it began with
        parameter.data.zero_()
    found = of(step, capture=path, axes=["float32"], smallest=False)
    assert [row.outcome for row in found.rows] == ["nonfinite", "finite"]
    assert found.base.place == "forward 1.proj"


def test_data_parallel_models_are_not_cast() -> None:
    class DistributedDataParallel(nn.Sequential):
        """Holds on to gradient nodes, as its namesake does."""

    found = of(amp_step(DistributedDataParallel(*body(nn.Tanh())), batch_of()), axes=["float64"], smallest=False)
    assert found.row("float64").outcome == "not_applicable"


def test_it_is_strict_json_and_draws() -> None:
    from nantrace.render.figures.matrix import matrix as drawn

    step, _ = fp16_overflow()
    found = nantrace.matrix(step, axes=["autocast-off", "evaluation"])
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["rows"][0]["loss"] == {"finite": False, "value": "nan"} and plain["rows"][1]["outcome"] == "finite"
    picture = drawn(found.records())
    assert picture.axes == ("as it was", "autocast off", "evaluation mode")
    assert picture.outcomes == ("fault", "clean")


# ---------------------------------------------------------------------------------------------------- the changes
def test_autocast_becomes_what_is_picked_however_it_is_entered() -> None:
    seen: list[tuple[bool, torch.dtype]] = []

    def look() -> None:
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))

    @torch.autocast("cpu", dtype=torch.float16)
    def decorated() -> None:
        look()

    with torch.autocast("cpu", dtype=torch.float16):
        with autocast_as(lambda region: torch.bfloat16):
            look()
            decorated()
            with torch.autocast("cpu", enabled=False):
                look()
            with torch.autocast("cpu", dtype=torch.float16):
                look()
        look()
        with autocast_as(lambda region: None):
            look()
            decorated()
    on, off = (True, torch.bfloat16), (True, torch.float16)
    assert seen[:2] == [on, on] and not seen[2][0] and seen[3:5] == [on, off]
    assert not seen[5][0] and not seen[6][0]
    decorated()
    assert seen[7] == off


def test_a_module_in_float32_stays_so_where_its_own_forward_enters_autocast() -> None:
    class Own(nn.Linear):
        @torch.autocast("cpu", dtype=torch.float16)
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model = nn.Sequential(Own(4, 4), nn.Linear(4, 4))
    dtypes: list[torch.dtype] = []
    model[1].register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
    with InFloat32(model, [model[0]]) as inside, torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(torch.ones(1, 4))
        with torch.autocast("cpu", dtype=torch.float16):  # entered behind it
            assert torch.is_autocast_enabled("cpu")
    assert inside.entered == 1 and dtypes == [torch.float32] and out.dtype is torch.bfloat16


def test_a_module_that_raises_leaves_autocast_as_it_was_around_it() -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise LookupError

    model = Bad()
    with InFloat32(model, [model]), torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(LookupError):
            model(torch.ones(1))
        assert torch.is_autocast_enabled("cpu")


def test_half_parameters_of_the_chosen_modules_alone_are_cast() -> None:
    step, _ = half_model()
    snapshot = Snapshot(step)
    with InFloat32(step.model, [step.model[1]]):
        assert {p.dtype for p in step.model[1].parameters()} == {torch.float32}
        assert {p.dtype for p in step.model[0].parameters()} == {torch.float16}
    snapshot.restore()
    assert {p.dtype for p in step.model.parameters()} == {torch.float16} and snapshot.differences() == ()


# ---------------------------------------------------------------------------------------------------- the reading
OUTCOMES = ("finite", "nonfinite", "raised", "not_applicable", "cannot_tell", "not_run")


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(OUTCOMES), min_size=len(AXES), max_size=len(AXES)))
def test_only_pairs_of_rows_that_both_ran_are_read(outcomes: list[Any]) -> None:
    rows = [Row(axis, outcome) for axis, outcome in zip(AXES, outcomes, strict=True)]
    table = {row.axis: row for row in rows}
    for reading in readings(rows):
        assert all(table[axis].ran for axis in reading.rows)
        assert table[BASE].ran
        claims = reading.establishes.startswith(("The failure needs", "The failure goes away"))
        if claims and BASE in reading.rows:
            assert table[BASE].outcome == "nonfinite"


@pytest.mark.parametrize("axis", list(TABLE))
def test_every_axis_has_a_reading_for_a_failure_that_goes_away_and_one_that_stays(axis: str) -> None:
    base = Row(BASE, "nonfinite", stage="forward", module="1")
    gone = readings([base, Row(axis, "finite")])[0]
    stays = readings([base, Row(axis, "nonfinite", stage="forward", module="1")])[0]
    assert gone.leaves_open and gone.establishes != stays.establishes
    assert "It begins at the same place, forward 1." in stays.establishes


def test_a_failure_that_begins_elsewhere_may_be_another_one() -> None:
    base = Row(BASE, "nonfinite", stage="forward", module="1")
    found = readings([base, Row("float32", "nonfinite", stage="loss", module=None)])[0]
    assert "another place, loss in place of forward 1" in found.establishes


def test_a_change_that_makes_a_finite_step_fail_explains_nothing() -> None:
    found = readings([Row(BASE, "finite"), Row("other-batch", "nonfinite", stage="input", tensor="batch.x")])
    assert len(found) == 1 and found[0].establishes.startswith("The change itself makes the step fail, at input")


def test_the_table_has_every_axis_in_the_order_of_the_names() -> None:
    assert [BASE, *TABLE] == list(AXES)
