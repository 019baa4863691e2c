"""What is said of programs that break a rule of mixed precision, and that nothing is said of those that do not."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib.util
import json
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad
from torch.optim.lr_scheduler import LRScheduler

import nantrace
from nantrace.diagnosis.recipe import RULES, over_steps, recipe
from nantrace.events import Trace
from tests.recipes import frameworks, programs
from tests.recipes.documented import DOCUMENTED
from tests.recipes.programs import RIGHT, WRONG, Parts, Program

#: Ways to trace in which each rule has to be heard: a tracer listens to less in some, and to more in others.
MODES: dict[str, dict[str, Any]] = {
    "all modules": {},
    "the ledger alone": {"stats": "none"},
    "ops": {"ops": True},
    "every second step": {"every": 2},
    "a flight recorder": {"every": 3, "keep_steps": 1},
}


def traced(
    program: Program, parts: Parts | None = None, path: Path | None = None, **options: Any
) -> tuple[Trace, list[str]]:
    """The trace of a program, and what it was warned of."""
    parts = parts or programs.parts()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tracer = nantrace.trace(parts.model, path, on_nonfinite="ignore", **options)
        with contextlib.suppress(ValueError), tracer:
            program(parts)
    return tracer.trace, [str(one.message) for one in caught if one.category is nantrace.RecipeWarning]


def name(value: Any) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", "")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("rule", "program", "said"), WRONG, ids=name)
def test_a_program_that_breaks_a_rule_is_told_of_that_rule_alone(
    rule: str, program: Program, said: str, mode: str
) -> None:
    trace, warned = traced(program, **MODES[mode])
    (found,) = recipe(trace)
    assert found.rule == rule
    assert said in found.sentence
    assert warned == [found.sentence]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", (*RIGHT, *DOCUMENTED), ids=name)
def test_a_program_by_the_recipe_is_told_nothing(program: Program, mode: str) -> None:
    trace, warned = traced(program, **MODES[mode])
    assert len(trace.steps) >= 1
    assert recipe(trace) == ()
    assert warned == []


def test_an_update_outside_the_sample_counts_for_the_scheduler() -> None:
    """The second of two updates between two moves was skipped, and recorded in detail; the first was committed."""

    def train(parts: Parts) -> None:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(parts.optimizer, 10)
        for iteration in range(6):
            parts.optimizer.zero_grad()
            loss = programs.loss_of(parts)
            parts.scaler.scale(loss * float("inf") if iteration in (2, 4) else loss).backward()
            parts.scaler.step(parts.optimizer)
            parts.scaler.update()
            if iteration % 2 == 0:
                scheduler.step()

    trace, warned = traced(train, every=2)
    assert [step["skipped"] for step in trace.steps] == [0, 0, 1, 0, 1, 0]
    assert recipe(trace) == () and warned == []


def test_a_rule_that_is_broken_outside_the_sample_stands_in_the_first_row_that_shows_it() -> None:
    trace, warned = traced(programs.clip_scaled, every=100)
    assert len(warned) == 1
    assert ["conduct" in step for step in trace.steps] == [True, False, False]  # step 0 is in the sample
    trace, warned = traced(programs.scheduler_moves_on, every=2, keep_steps=1)
    (found,) = recipe(trace)
    assert (found.step, found.steps) == (3, 1)
    assert trace.steps[3].get("detailed") is False
    assert warned == [found.sentence]


def test_a_rule_is_on_record_where_the_rows_of_its_step_were_let_go() -> None:
    def train(parts: Parts) -> None:
        programs.clip_scaled(parts)
        programs.clip_unscaled(parts)

    trace, _ = traced(train, keep_steps=1)
    assert ["not_kept" in step for step in trace.steps] == [True] * 5 + [False]
    (found,) = recipe(trace)
    assert (found.rule, found.step) == ("clip_before_unscale", 0)


@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_that_steps_inside_of_backward_is_heard(mode: str) -> None:
    """Every parameter's own optimizer takes its gradient as soon as it is there, scaled as it is."""

    def train(parts: Parts) -> None:
        own = {parameter: torch.optim.SGD([parameter], lr=1e-6) for parameter in parts.model.parameters()}

        def step(parameter: torch.Tensor) -> None:
            own[parameter].step()  # type: ignore[index]
            own[parameter].zero_grad()  # type: ignore[index]

        handles = [parameter.register_post_accumulate_grad_hook(step) for parameter in own]
        for _ in range(programs.STEPS):
            parts.scaler.scale(programs.loss_of(parts)).backward()
        for handle in handles:
            handle.remove()

    trace, warned = traced(train, **MODES[mode])
    (found,) = recipe(trace)
    assert found.rule == "step_around_scaler"
    assert "SGD.step() was called directly with 1 gradient that" in found.sentence
    assert warned == [found.sentence]


def test_every_rule_has_a_wrong_program() -> None:
    assert {rule for rule, _, _ in WRONG} == set(RULES)


@pytest.mark.parametrize(
    ("package", "program"), [("accelerate", frameworks.accelerate), ("pytorch_lightning", frameworks.lightning)]
)
def test_a_framework_is_told_nothing(package: str, program: Program) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    trace, warned = traced(program)
    calls = [call for step in trace.steps for call in step["conduct"]["calls"]]
    assert {"scale", "backward", "unscale_", "clip_grad_norm_", "scaler.step", "update", "scheduler.step"} <= set(calls)
    assert recipe(trace) == ()
    assert warned == []


def test_the_calls_of_a_step_stand_in_its_row_in_their_order() -> None:
    trace, _ = traced(programs.clip_unscaled)
    assert [step["conduct"]["calls"] for step in trace.steps] == [
        ["scale", "backward", "unscale_", "clip_grad_norm_", "scaler.step", "update"]
    ] * programs.STEPS


def test_a_rule_is_found_with_its_first_step_and_how_many_broke_it() -> None:
    trace, _ = traced(programs.scheduler_moves_on)
    (found,) = recipe(trace)
    assert (found.step, found.steps) == (3, 1)
    trace, _ = traced(programs.clip_scaled)
    (found,) = recipe(trace)
    assert (found.step, found.steps) == (0, programs.STEPS)


def test_a_trace_that_was_written_says_the_same_as_one_in_memory(tmp_path: Path) -> None:
    for rule, program, _ in WRONG[2::6]:
        in_memory, _ = traced(program)
        written, _ = traced(program, path=tmp_path / f"{rule}-{program.__name__}.h5")
        assert recipe(nantrace.load(written.path)) == recipe(in_memory)


def test_a_row_without_facts_or_with_strange_ones_says_nothing() -> None:
    assert over_steps([{"step": 0}, {"step": 1, "conduct": None}, {"step": 2, "conduct": {}}]) == ()


def test_a_departure_is_strict_json() -> None:
    trace, _ = traced(programs.clip_scaled)
    (found,) = recipe(trace)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["rule"] == "clip_before_unscale"


@pytest.mark.parametrize("program", [programs.loss_inside, programs.clip_scaled, programs.step_around, *DOCUMENTED])
def test_listening_changes_no_bit_of_the_training(program: Program) -> None:
    plain = programs.parts()
    program(plain)
    heard = programs.parts()
    traced(program, heard)
    for a, b in zip(plain.model.parameters(), heard.model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert (a.grad is None) == (b.grad is None) and (a.grad is None or torch.equal(a.grad, b.grad))
    assert plain.scaler.state_dict() == heard.scaler.state_dict()


def patched() -> dict[str, Any]:
    scaler = torch.amp.GradScaler
    found = {name: vars(scaler)[name] for name in ("scale", "unscale_", "step", "update", "get_scale")}
    found["backward"] = torch.autograd._engine_run_backward
    for name in ("clip_grad_norm_", "_clip_grads_with_norm_", "clip_grad_value_", "_group_tensors_by_device_and_dtype"):
        found[name] = getattr(clip_grad, name)
    left = [LRScheduler]
    while left:
        cls = left.pop()
        left += cls.__subclasses__()
        found[f"{cls.__qualname__}.step"] = vars(cls).get("step")
    return found


@pytest.mark.parametrize("program", [programs.clip_scaled_values, programs.scheduler_moves_on])
def test_nothing_stays_patched_when_the_last_tracer_has_left(program: Program) -> None:
    before = patched()
    parts = programs.parts()
    with nantrace.trace(parts.model, on_nonfinite="ignore"):
        within = patched()
        with nantrace.trace(torch.nn.Linear(1, 1)):
            pass
        assert patched() == within
    changed = [name for name in before if within[name] is not before[name]]
    assert {"scale", "unscale_", "get_scale", "step", "update", "LRScheduler.step"} <= set(changed)
    traced(program)
    assert patched() == before


def test_no_tensor_of_the_step_is_kept_alive() -> None:
    parts = programs.parts()
    kept: list[weakref.ref[torch.Tensor]] = []

    def loop() -> None:
        loss = programs.loss_of(parts)
        scaled = parts.scaler.scale(loss)
        kept.extend((weakref.ref(loss), weakref.ref(scaled)))
        scaled.backward()
        kept.extend(weakref.ref(one.grad) for one in parts.model.parameters() if one.grad is not None)
        parts.scaler.step(parts.optimizer)
        parts.scaler.update()
        parts.optimizer.zero_grad()

    with nantrace.trace(parts.model, on_nonfinite="ignore"):
        loop()
        gc.collect()
        assert len(kept) == 6 and [one() for one in kept] == [None] * 6


def test_a_rule_is_warned_of_once_a_trace_and_after_its_step() -> None:
    parts = programs.parts()
    warned: list[tuple[str, str]] = []
    where = "before"

    def note(message: Warning | str, category: type[Warning], *_: Any) -> None:
        warned.append((where, category.__name__))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        with nantrace.trace(parts.model, on_nonfinite="ignore") as tracer:
            for step in range(3):
                where = f"forward {step}"
                parts.optimizer.zero_grad()
                loss = programs.loss_of(parts)
                where = f"backward {step}"
                parts.scaler.scale(loss).backward()
                where = f"clip {step}"
                clip_grad.clip_grad_norm_(parts.model.parameters(), 1.0)
                where = f"update {step}"
                parts.scaler.step(parts.optimizer)
                parts.scaler.update()
    assert warned == [("backward 1", "RecipeWarning")]
    assert [step["conduct"]["clips"][0]["bound"] for step in tracer.trace.steps] == [1.0] * 3


def test_a_warning_that_is_an_error_waits_for_the_end_of_the_block() -> None:
    parts = programs.parts()
    done = False
    with pytest.raises(nantrace.RecipeWarning, match="still multiplied by the scale 1,024"):  # noqa: SIM117
        with nantrace.trace(parts.model, on_nonfinite="ignore"):
            programs.step_around(parts)
            done = True
    assert done


def test_a_warning_of_a_single_step_comes_with_mark_step() -> None:
    parts = programs.parts()
    with nantrace.trace(parts.model, on_nonfinite="ignore") as tracer:
        parts.scaler.scale(programs.loss_of(parts)).backward()
        parts.optimizer.step()
        with pytest.warns(nantrace.RecipeWarning, match=r"SGD\.step\(\) was called directly"):
            tracer.mark_step()


def test_a_scaler_of_another_class_that_does_things_its_own_way_is_left_alone() -> None:
    class Sharded(torch.amp.GradScaler):
        def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
            return super().unscale_(optimizer)

    parts = programs.parts()
    parts.scaler = Sharded("cpu", init_scale=1024.0)
    trace, warned = traced(programs.clip_scaled, parts)
    assert recipe(trace) == () and warned == []


def test_the_scaler_of_another_model_is_not_held_against_this_one() -> None:
    """A discriminator in bfloat16 beside a generator in float16 with a scaler."""
    parts, other = programs.parts(), programs.parts()
    optimizer = torch.optim.SGD(other.model.parameters(), lr=0.01)

    def train(_: Parts) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            with programs.autocast(torch.bfloat16):
                loss = torch.nn.functional.mse_loss(other.model(other.x), other.y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(other.model.parameters(), 1.0)
            parts.optimizer.zero_grad()
            parts.scaler.scale(programs.loss_of(parts)).backward()
            optimizer.step()
            parts.scaler.step(parts.optimizer)
            parts.scaler.update()

    trace, warned = traced(train, other)
    assert recipe(trace) == () and warned == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_computes_every_loss_that_a_rule_relies_on_in_float32(dtype: torch.dtype) -> None:
    from nantrace.capture.conduct.tail import _FLOAT32_LOSSES

    functional = torch.nn.functional
    y, classes = torch.randn(4, 3), torch.randint(3, (4,))
    with programs.autocast(dtype):
        output = torch.nn.Linear(5, 3)(torch.randn(4, 5))
        losses = [
            functional.binary_cross_entropy_with_logits(output, y.sigmoid()),
            functional.mse_loss(output, y),
            functional.multi_margin_loss(output, classes),
            functional.nll_loss(output, classes),
            functional.nll_loss(output.view(1, 3, 4, 1), classes.view(1, 4, 1)),
            functional.smooth_l1_loss(output, y),
            functional.soft_margin_loss(output, y.sign()),
        ]
    assert {loss.grad_fn.name() for loss in losses if loss.grad_fn} == _FLOAT32_LOSSES
    assert {loss.dtype for loss in losses} == {torch.float32}


def test_saved_tensor_hooks_are_not_run_by_looking_at_a_loss() -> None:
    unpacked = 0

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal unpacked
        unpacked += 1
        return tensor

    def train(parts: Parts) -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            loss = programs.loss_of(parts) * 2 / 3
            parts.scaler.get_scale()
            scaled = parts.scaler.scale(loss) * 1.0
        scaled.backward()

    train(programs.parts())
    plain, unpacked = unpacked, 0
    traced(train)
    assert unpacked == plain > 0


def test_copies_of_a_model_that_is_traced_are_not_mixed_up_with_it() -> None:
    def train(parts: Parts) -> None:
        average = copy.deepcopy(parts.model)
        programs.loss_inside(parts)
        programs.loss_inside(Parts(average, parts.x, parts.y, parts.scaler))

    trace, warned = traced(train)
    assert recipe(trace) == () and warned == []


def test_a_report_has_a_section_for_broken_rules_and_none_without() -> None:
    broken, _ = traced(programs.clip_scaled)
    text = str(nantrace.report(broken))
    assert "RECIPE   1 rule of mixed precision broken" in text
    assert "clip_before_unscale: step 0 (3 steps): clip_grad_norm_ clipped 4 gradients to 1" in " ".join(text.split())
    assert "Call scaler.unscale_(optimizer) before clipping." in text
    (found,) = nantrace.report(broken).to_dict()["recipe"]
    assert (found["rule"], found["step"], found["steps"]) == ("clip_before_unscale", 0, 3)
    kept, _ = traced(programs.clip_unscaled)
    assert "RECIPE" not in str(nantrace.report(kept))
    assert nantrace.report(kept).to_dict()["recipe"] == []


def test_a_loss_times_a_number_does_not_end_the_recording_of_ops() -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with nantrace.trace(model, optimizer=optimizer, ops=True) as tracer:
        scaler.scale(model(torch.ones(3, 4)).mean() * 0.5).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [step["conduct"]["scales"] for step in tracer.trace.steps] == [[8.0]]
