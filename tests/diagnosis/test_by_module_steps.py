"""Module-level blame on traces of real steps, each with its answer known in advance."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nantrace
from nantrace.diagnosis.verdict import Verdict


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def judged(model: nn.Module, step: Callable[[], Any], **options: Any) -> Verdict:
    with nantrace.trace(model, on_nonfinite="ignore", **options) as tracer:
        step()
    return nantrace.diagnose(tracer.trace)


def said(verdict: Verdict) -> str:
    return " ".join(verdict.evidence)


class Around(nn.Module):
    """`code` between two layers, in the forward of the module around them."""

    def __init__(self, code: Callable[[Tensor], Tensor], after: nn.Module) -> None:
        super().__init__()
        self.code, self.before, self.after = code, nn.Linear(4, 4), after

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.code(self.before(x)))
        return out


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.amax(0)


def trained(model: nn.Module, batch: Tensor, loss_of: Callable[[Tensor], Tensor] = Tensor.mean) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        optimizer.step()

    return step


def log_of_relu(x: Tensor) -> Tensor:
    return torch.log(torch.relu(x))


@pytest.mark.parametrize("after", [nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Identity(), Unknown()])
def test_minus_infinity_that_code_between_submodules_made_is_that_codes_not_the_next_modules(after: nn.Module) -> None:
    model = Around(log_of_relu, after)
    verdict = judged(model, trained(model, torch.randn(8, 4)))
    assert (verdict.status, verdict.stage) == ("fault", "forward")
    assert verdict.origin is not None
    assert (verdict.origin.module, verdict.origin.tensor) == ("", "after args[0]")


def test_a_softmax_over_a_row_that_is_all_masked_is_named_itself() -> None:
    model = Around(lambda x: x.masked_fill(torch.eye(8, 4)[:, :1] > 0, -torch.inf), nn.Softmax(-1))
    verdict = judged(model, trained(model, torch.randn(8, 4)))
    assert verdict.status == "fault" and verdict.origin is not None
    assert verdict.origin.module == "after"


class Pair(nn.Module):
    """A generator and a discriminator with an optimizer each; a module that only holds others."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.G = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.D = nn.Sequential(nn.Linear(4, 8), activation, nn.Linear(8, 1))


def penalized(pair: Pair) -> Callable[[], None]:
    """WGAN-GP: the norm of a gradient that is zero."""
    optimizers = [torch.optim.Adam(part.parameters(), 0.1) for part in (pair.D, pair.G)]
    with torch.no_grad():
        pair.D[0].weight.zero_()
    real = torch.randn(8, 4)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        fake = pair.G(torch.randn(8, 4))
        between = (real + fake.detach()).div(2).requires_grad_()
        (slope,) = torch.autograd.grad(pair.D(between).sum(), between, create_graph=True)
        penalty = (slope.pow(2).sum(1).sqrt() - 1).pow(2).mean()
        (pair.D(fake.detach()).mean() - pair.D(real).mean() + penalty).backward()
        optimizers[0].step()
        (-pair.D(fake).mean()).backward()
        optimizers[1].step()

    return step


def test_a_gradient_penalty_is_not_blamed_on_the_linear_map_whose_weight_it_reaches_first() -> None:
    pair = Pair(nn.Identity())
    verdict = judged(pair, penalized(pair))
    assert (verdict.status, verdict.stage) == ("fault", "backward")
    assert verdict.origin is not None
    assert (verdict.origin.module, verdict.origin.tensor) == (None, "gradient of D.2.weight")
    assert "D.2 cannot have made it" in said(verdict)
    assert "Each of the" in verdict.evidence[1] and "tensors seen before it was finite" in verdict.evidence[1]


def test_a_gradient_penalty_through_a_nonlinearity_names_no_module() -> None:
    pair = Pair(nn.Tanh())
    verdict = judged(pair, penalized(pair))
    assert (verdict.stage, verdict.origin and verdict.origin.module) == ("backward", None)


def test_damage_is_counted_over_the_optimizers_that_take_turns() -> None:
    pair = Pair(nn.Identity())
    assert "6 of 8 gradients, 6 of 8 parameters after the update" in said(judged(pair, penalized(pair)))


def test_damage_of_two_iterations_of_one_optimizer_is_not_added_up() -> None:
    model = nn.Linear(4, 1)
    step = trained(model, torch.full((2, 4), torch.nan))
    assert "the loss, 1 of 2 gradients, 1 of 2 parameters after the update." in said(
        judged(model, lambda: (step(), step()))
    )


def test_a_penalty_on_a_weight_is_not_blamed_on_the_linear_map_that_owns_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].bias.zero_()
    batch = torch.randn(8, 4)
    step = trained(model, batch, lambda y: y.mean() + model[0].bias.pow(2).sum().sqrt())
    verdict = judged(model, step)
    assert (verdict.status, verdict.stage) == ("fault", "backward")
    assert verdict.origin is not None
    assert (verdict.origin.module, verdict.origin.tensor) == (None, "gradient of 0.bias")


class ReadsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out: Tensor = self.b(h) + torch.sqrt(h - h.detach())
        return out


def test_a_tensor_that_a_linear_map_and_the_code_around_it_read_is_the_code_around_its_affair() -> None:
    model = ReadsTwice()
    verdict = judged(model, trained(model, torch.randn(8, 4)))
    assert verdict.stage == "backward" and verdict.origin is not None
    assert verdict.origin.module == ""


class Scored(nn.Module):
    """Computes its loss itself, after its last submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.unused, self.head = nn.Dropout(0.1), nn.Linear(4, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.blocks[0](x)), labels)


def scored(model: Scored, labels: Tensor, **options: Any) -> Verdict:
    x = torch.randn(len(labels), 4)
    return judged(model, lambda: model(x, labels).backward(), **options)


def test_a_loss_over_labels_that_are_all_ignored_is_the_models_own_code_after_its_last_submodule() -> None:
    verdict = scored(Scored(), torch.full((8,), -100))
    assert (verdict.status, verdict.stage, verdict.cause) == ("fault", "forward", "nothing_to_average")
    assert verdict.origin is not None and verdict.origin.module == ""
    assert verdict.region == ()
    assert "code after head made it" in said(verdict)
    assert "Each of the 8 values of (model) args[1] is -100" in said(verdict)
    assert "(labels != -100).sum()" in verdict.advice[0]


def test_only_modules_that_were_left_out_within_the_culprits_own_code_are_under_suspicion() -> None:
    labels = torch.full((8,), -100)
    assert scored(Scored(), labels, modules=["", "head"]).region == ("blocks.0", "unused")
    assert scored(Scored(), labels, depth=1).region == ("blocks.0",)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), Around(log_of_relu, nn.Identity()))
    verdict = judged(model, trained(model, torch.randn(8, 4)), depth=1)
    assert verdict.origin is not None and verdict.origin.module == "1"
    assert verdict.region == ("1.before", "1.after")


def test_a_model_whose_forward_was_called_past_its_hooks_makes_no_claim_of_the_loss() -> None:
    model = Around(lambda x: x, nn.Linear(4, 1))
    batch = torch.randn(8, 4)
    verdict = judged(model, lambda: torch.log(model.forward(batch) * 0).mean().backward())
    assert (verdict.status, verdict.stage) == ("fault", None)
    assert verdict.origin is not None and verdict.origin.module is None
    assert "No call of the model itself was seen" in said(verdict)
    assert "outside the modules" not in said(verdict)


def test_what_reaches_a_submodule_of_a_model_that_was_called_past_its_hooks_has_no_stage() -> None:
    model = Around(log_of_relu, nn.BatchNorm1d(4))
    batch = torch.randn(8, 4)
    verdict = judged(model, lambda: model.forward(batch).mean().backward())
    assert (verdict.status, verdict.stage) == ("fault", None)
    assert verdict.origin is not None
    assert (verdict.origin.module, verdict.origin.tensor) == (None, "after args[0]")


def test_a_holder_of_modules_is_never_called_and_its_loss_is_a_loss() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 1)})
    verdict = judged(model, lambda: torch.log(model["a"](torch.randn(8, 4)) * 0).mean().backward())
    assert (verdict.status, verdict.stage) == ("fault", "loss")


def test_a_clean_trace_without_a_call_of_the_model_says_so() -> None:
    model = Around(lambda x: x, nn.Linear(4, 1))
    verdict = judged(model, lambda: torch.log(model.forward(torch.randn(8, 4)) * 0))
    assert verdict.status == "clean"
    assert "No call of the model itself was seen" in said(verdict)


def test_where_an_infinity_became_nan_stands_beside_where_it_was_born() -> None:
    model = Around(log_of_relu, nn.BatchNorm1d(4))
    verdict = judged(model, trained(model, torch.randn(8, 4)))
    assert [origin.module for origin in verdict.also] == ["after"]


def test_of_two_optimizers_each_with_weights_of_another_size_none_explodes() -> None:
    model = nn.ModuleDict({"large": nn.Linear(4, 4), "small": nn.Linear(4, 4)})
    with torch.no_grad():
        model["large"].weight.fill_(50.0)
        model["small"].weight.fill_(0.01)
    optimizers = {name: torch.optim.SGD(part.parameters(), 1e-6) for name, part in model.items()}

    def step() -> None:
        for number in range(3):
            for name in ("small", "large"):
                loss = model[name](torch.randn(3, 4)).mean()
                (loss / 0 if (number, name) == (2, "large") else loss).backward()
                optimizers[name].step()

    verdict = judged(model, step)
    assert (verdict.status, verdict.stage, verdict.cause) == ("fault", "loss", None)


def scaled(model: nn.ModuleDict, factors: dict[str, float], scale: float) -> Callable[[], None]:
    optimizers = [torch.optim.SGD(model[name].parameters(), 0.1) for name in factors]
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def step() -> None:
        for name, factor in factors.items():
            scaler.scale(model[name](torch.randn(3, 4)).mean() * factor).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    return step


def test_a_scaled_loss_that_overflowed_is_not_said_to_be_beyond_the_scale() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 1)})
    verdict = judged(model, scaled(model, {"a": 1e10}, 2.0**120))
    assert verdict.status == "contained"
    assert "the loss itself may have been finite" in said(verdict)
    assert "no loss scale" not in said(verdict)


def test_a_nan_loss_under_a_scaler_is_beyond_the_scale() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 1)})
    verdict = judged(model, scaled(model, {"a": float("nan")}, 4.0))
    assert verdict.status == "contained"
    assert "no loss scale can remove it" in said(verdict)


def test_of_two_updates_only_the_skipped_one_is_said_to_be_skipped() -> None:
    model = nn.ModuleDict({"good": nn.Linear(4, 1), "bad": nn.Linear(4, 1)})
    verdict = judged(model, scaled(model, {"good": 1.0, "bad": 1e38}, 1024.0))
    assert (verdict.status, verdict.stage) == ("contained", "loss")
    assert verdict.origin is not None and verdict.origin.tensor == "loss"
    assert "GradScaler skipped 1 of the 2 updates of step 0: parameters and buffers stayed finite." in said(verdict)


def test_a_loss_of_minus_infinity_is_no_mask() -> None:
    model = nn.Sequential(nn.Linear(4, 1))
    verdict = judged(model, trained(model, torch.randn(3, 4), lambda y: torch.log(y * 0).mean()))
    assert (verdict.status, verdict.stage) == ("fault", "loss")


def test_a_nonfinite_step_that_the_loop_threw_away_says_what_it_had_reached() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        for factor in (torch.inf, 1.0):
            loss = model(torch.randn(3, 4)).mean() * factor
            loss.backward()
            if loss.isfinite():
                optimizer.step()
            optimizer.zero_grad()

    verdict = judged(model, step)
    assert verdict.status == "contained"
    assert "It reached the loss" in said(verdict)
    assert "the optimizer was given finite gradients" in said(verdict)
    assert "reached no loss" not in said(verdict)


def test_an_evaluation_that_went_nonfinite_beside_healthy_training_says_what_it_reached() -> None:
    model = Around(lambda x: x / (x - x) if not model.training else x, nn.Linear(4, 1))
    step = trained(model, torch.randn(3, 4))

    def train_and_evaluate() -> None:
        step()
        with torch.no_grad():
            model.eval()(torch.randn(3, 4))

    verdict = judged(model, train_and_evaluate)
    assert verdict.origin is not None and (verdict.status, verdict.origin.module) == ("contained", "")
    assert "It reached the output of the model; no loss, gradient, parameter or buffer" in said(verdict)


def test_nonfinite_state_in_a_trace_where_nothing_ran_is_no_fault_and_not_on_purpose() -> None:
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(torch.nan)
    verdict = judged(model, lambda: None)
    assert (verdict.status, verdict.stage, verdict.cause) == ("inconclusive", "state", "bad_param")
    assert verdict.origin is not None and verdict.origin.tensor == "weight"


def test_a_nonfinite_argument_of_the_model_is_not_called_a_bad_batch_if_the_batch_is_finite() -> None:
    model = nn.Linear(4, 1)
    batch = torch.ones(3, 4)

    def step() -> None:
        model((batch - batch.mean(0)) / batch.std(0)).mean().backward()

    verdict = judged(model, step, batch={"x": batch})
    assert (verdict.status, verdict.cause) == ("fault", None)
    assert "the batch of the trace is finite" in said(verdict)
    unknown = judged(model, step)
    assert (unknown.stage, unknown.cause) == ("input", "bad_input")
    assert "whether the batch held it already" in said(unknown)
    assert "batch=batch" in unknown.advice[0]


def test_a_gradient_that_a_hook_made_nonfinite_is_not_blamed_on_the_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].weight.register_hook(lambda gradient: gradient / 0 * 0)
    verdict = judged(model, trained(model, torch.randn(3, 4)))
    assert verdict.origin is not None
    assert (verdict.origin.module, verdict.origin.tensor) == (None, "gradient of 0.weight")


def test_a_linear_map_whose_weight_gradient_can_overflow_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 1))
    batch = torch.full((3, 4), 1e20)
    verdict = judged(model, trained(model, batch, lambda y: (y - y.detach()).mean() * 1e19))
    assert (verdict.status, verdict.stage) == ("fault", "backward")
    assert verdict.origin is not None
    assert (verdict.origin.module, verdict.origin.tensor) == ("0", "gradient of 0.weight")


def test_a_module_called_several_times_is_not_blamed_for_code_between_its_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(self.layer(x))
            out: Tensor = self.layer(h / (h - h))
            return out

    model = Twice()
    verdict = judged(model, trained(model, torch.randn(3, 4)))
    assert verdict.origin is not None
    assert (verdict.origin.module, verdict.origin.tensor) == ("", "layer args[0]")


class LogOfZero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x.sum() * 0.0)


@pytest.mark.parametrize("scaled", (False, True))
@pytest.mark.parametrize(("inside", "stage", "module"), ((True, "forward", "1"), (False, "loss", "<LogOfZero>")))
def test_a_loss_of_minus_infinity_is_no_mask_whoever_computes_it(
    scaled: bool, inside: bool, stage: str, module: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 1), *([LogOfZero()] if inside else []))
    loss_of = nn.Identity() if inside else LogOfZero()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)

    def step() -> None:
        scaler.scale(loss_of(model(torch.ones(2, 4)))).backward()
        scaler.step(optimizer)
        scaler.update()

    verdict = judged(model, step, optimizer=optimizer)
    assert verdict.origin is not None
    found = (verdict.status, verdict.stage, verdict.origin.module)
    assert found == ("contained" if scaled else "fault", stage, module)
    assert "the loss is finite" not in said(verdict)


def test_a_score_of_minus_infinity_without_backward_is_no_mask() -> None:
    model = nn.Sequential(nn.Linear(4, 1), LogOfZero())
    verdict = judged(model, lambda: model(torch.ones(2, 4)))
    assert (verdict.status, verdict.stage) == ("fault", "forward")


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def test_a_bad_batch_after_another_call_of_the_step_is_no_matter_of_the_loss() -> None:
    model = with_batch_norm()
    training = trained(model, torch.full((4, 4), math.inf))

    def step() -> None:
        with torch.no_grad():
            model(torch.randn(4, 4))
        training()

    verdict = judged(model, step)
    assert (verdict.status, verdict.stage) == ("fault", None)
    assert verdict.origin is not None and verdict.origin.tensor == "(model) args[0]"
    assert "whether the batch held it already" in said(verdict)
    assert any("batch=batch" in each for each in verdict.advice)


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_bad_batch_that_the_loops_check_kept_from_the_update_is_still_the_input(evaluated: bool) -> None:
    model = with_batch_norm()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = [torch.randn(4, 4) for _ in range(3)]
    batches[1][0, 0] = math.inf

    def step() -> None:
        for batch in batches:
            optimizer.zero_grad()
            if evaluated:
                with torch.no_grad():
                    model(batches[0])
            loss = model(batch).mean()
            if torch.isfinite(loss):
                loss.backward()
                optimizer.step()

    verdict = judged(model, step)
    assert (verdict.status, verdict.stage) == ("fault", None if evaluated else "input")
    assert verdict.origin is not None and (verdict.origin.step, verdict.origin.tensor) == (1, "(model) args[0]")
    assert "1.running_var kept what it had written" in said(verdict)
    assert any("running statistics" in each for each in verdict.advice)


def test_a_parameter_that_the_trace_saw_finite_before_is_not_looked_for_in_a_checkpoint() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    training = trained(model, torch.randn(4, 4))
    model[0].requires_grad_(False)  # an average of other weights, as a teacher is

    def step() -> None:
        training()
        training()
        with torch.no_grad():
            model[0].weight.div_(0)
        training()

    verdict = judged(model, step)
    assert (verdict.status, verdict.stage, verdict.cause) == ("fault", "update", "bad_param")
    assert "It was finite when step 1 ended: something wrote it since." in said(verdict)
    assert "before step 2 used it" in verdict.advice[0] and not any("checkpoint" in each for each in verdict.advice)


def test_the_warning_of_a_later_step_does_not_say_that_a_parameter_was_bad_before_the_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    training = trained(model, torch.randn(4, 4))
    with pytest.warns(nantrace.NantraceWarning, match=r"0\.weight.*\(bad param\)"), nantrace.trace(model):
        training()
        with torch.no_grad():
            model[0].weight.div_(0)
        training()
