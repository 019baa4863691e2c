"""What stands out over the steps: told apart, in careful words, and silence for a run in which nothing does."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import nantrace
from nantrace.capture.tracer import Tracer
from nantrace.diagnosis.observation import Observation
from nantrace.diagnosis.scale import readings
from nantrace.diagnosis.stalled import stalled
from nantrace.diagnosis.symptom import _quantile, symptoms
from nantrace.events import EVENT, Raised, Trace


def _trace(*steps: Mapping[str, Any], raised: Raised | None = None) -> Trace:
    return Trace(np.zeros(0, EVENT), (), steps=steps, raised=raised)


def _losses(*losses: float) -> Trace:
    return _trace(*({"step": step, "loss": loss} for step, loss in enumerate(losses)))


def _scaled(pattern: str, scale: float = 65_536.0, committed: int = 0, **other: list[Any]) -> Trace:
    """A run of one letter a step: "." committed, "s" skipped, "g" committed and the scale grew."""
    rows = []
    for step, letter in enumerate(pattern):
        after = scale / 2 if letter == "s" else scale * 2 if letter == "g" else scale
        committed += letter != "s"
        row = {
            "step": step,
            "attempted": 1,
            "committed": int(letter != "s"),
            "skipped": int(letter == "s"),
            "committed_total": committed,
            "scale_before": scale,
            "scale_after": after,
            "loss": 1.0,
        }
        rows.append({**row, **{name: values[step] for name, values in other.items()}})
        scale = after
    return _trace(*rows)


def _kinds(found: tuple[Observation, ...]) -> list[str]:
    return [each.kind for each in found]


def test_nothing_stands_out_of_a_plain_run() -> None:
    assert symptoms(_losses(*(1 / (1 + step) for step in range(100)))) == ()
    assert symptoms(_scaled("." * 30)) == ()


def test_a_loss_far_above_the_steps_before_is_a_spike() -> None:
    (spike,) = symptoms(_losses(*([1.0, 1.1, 0.9, 1.05] * 5), 9.0, 1.0))
    assert (spike.kind, spike.steps) == ("loss_spike", (20,))
    assert "was 9" in spike.sentence
    assert "the median was 1.025" in spike.sentence
    assert "no overflow" in spike.leaves_open


def test_a_noisy_loss_is_no_spike() -> None:
    rng = np.random.default_rng(0)
    assert symptoms(_losses(*rng.lognormal(0.0, 0.25, 400).tolist())) == ()


def test_a_few_losses_are_no_distribution() -> None:
    assert symptoms(_losses(1.0, 1.0, 1.0, 50.0)) == ()


def test_an_exception_is_told_apart_from_a_nonfinite_value() -> None:
    raised = Raised("ValueError", "loss is too high", 1)
    (alone,) = symptoms(_trace({"step": 0, "loss": 1.0}, raised=raised))
    assert alone.kind == "raised"
    assert alone.evidence == ("No nonfinite value had been seen in it.",)
    with_nan = symptoms(_trace({"step": 1, "loss": math.nan}, raised=raised))
    assert _kinds(with_nan) == ["raised", "nonfinite"]
    assert with_nan[0].evidence == ("A nonfinite value had been seen in that step.",)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("fault", "The verdict says where it began and what it reached."),
        ("contained", "No harm by it was seen; the verdict says what is known of that."),
        ("expected", "No harm by it was seen."),
        ("inconclusive", "It does not prove damage: "),
        (None, "It does not prove damage: "),
    ],
)
def test_what_the_verdict_knows_of_damage_is_not_left_open_beside_it(status: Any, said: str) -> None:
    (found,) = symptoms(_losses(1.0, math.nan), status)
    assert found.kind == "nonfinite" and found.leaves_open.startswith(said)


def test_a_skip_is_no_verdict_on_the_model() -> None:
    skipped = symptoms(_scaled("....s....", committed=100))[0]
    assert skipped.kind == "skipped_update"
    assert skipped.sentence == "1 of 9 attempted updates were skipped."
    assert skipped.leaves_open.startswith("It does not prove that the model is broken")


@pytest.mark.parametrize(
    ("pattern", "committed", "kinds"),
    [
        ("sss......", 0, ["calibration"]),
        ("sss...s..", 0, ["calibration", "occasional"]),
        ("...g...s....", 500, ["occasional"]),
        ("ss...", 500, ["occasional"]),
        ("....sssssss", 0, ["persistent_overflow"]),
        ("s" * 18, 0, ["persistent_overflow"]),
        ("s" * 18 + "..", 0, ["persistent_overflow"]),
        (".......", 0, []),
    ],
)
def test_the_scale_is_read(pattern: str, committed: int, kinds: list[str]) -> None:
    assert _kinds(readings(_scaled(pattern, committed=committed))) == kinds


@pytest.mark.parametrize(("pattern", "said"), (("s...", "The first update was"), ("ss...", "The first 2 updates were")))
def test_one_update_is_told_in_the_singular(pattern: str, said: str) -> None:
    (found,) = readings(_scaled(pattern))
    assert found.sentence.startswith(f"{said} skipped while the scale fell from 65,536 to ")


def test_growth_before_a_skip_is_told() -> None:
    (found,) = readings(_scaled("...g...s....", committed=500))
    assert found.evidence == ("The scale had grown before 1 of these.",)
    assert found.steps == (7,)


def test_a_nan_loss_is_no_scale_problem() -> None:
    losses = [1.0, 1.0, 1.0, math.nan, math.nan, math.nan, math.nan, 1.0]
    found = readings(_scaled("...ssss.", committed=9, loss=losses))
    assert found[0].kind == "nan_at_stable_scale"
    assert found[0].evidence == ("Up to step 3 the scale stood at 65,536.",)


def test_a_skip_whose_loss_was_nonfinite_before_it_was_scaled_says_nothing_of_the_scale() -> None:
    losses = [1.0] * 3 + [math.inf] * 3
    assert _kinds(readings(_scaled("...sss", committed=9, loss=losses))) == ["nan_at_stable_scale"]


def test_skips_up_to_the_end_are_not_said_to_have_committed_updates_between_them() -> None:
    (found,) = readings(_scaled("...sss", committed=9))
    assert found.sentence == "The last 3 of 6 updates were skipped, one after the other."
    assert found.steps == (3, 4, 5)
    (single,) = readings(_scaled(".....s", committed=9))
    assert single.sentence == "1 of 6 updates was skipped."


def test_skips_that_go_with_batches_are_told() -> None:
    batches = [step % 5 for step in range(20)]
    pattern = "".join("s" if batch == 3 else "." for batch in batches)
    found = {each.kind: each for each in readings(_scaled(pattern, committed=9, batch_id=batches))}
    assert "which were skipped every time" in found["same_batches"].sentence
    assert "with batch 3," in found["same_batches"].sentence
    other = _scaled("...s......s....s....", committed=9, batch_id=batches)
    assert "same_batches" not in _kinds(readings(other))


def test_an_onset_after_a_rise_of_the_learning_rate_is_told() -> None:
    rates = [[0.1]] * 5 + [[0.4]] * 5
    found = readings(_scaled("......s...", committed=9, lr=rates))
    assert _kinds(found) == ["occasional", "onset_at_rise"]
    assert "rose from 0.1 to 0.4 at step 5" in found[1].sentence


def test_an_onset_at_the_end_of_warmup_is_told() -> None:
    rates = [[0.5 + 0.1 * min(step, 6)] for step in range(12)]
    found = readings(_scaled("........s...", committed=9, lr=rates))
    assert _kinds(found) == ["occasional", "onset_at_end_of_warmup"]
    assert "not shown" in found[1].leaves_open


def test_observations_are_strict_json() -> None:
    found = symptoms(_trace({"step": 0, "loss": math.nan}))
    assert json.loads(json.dumps(found[0].to_dict(), allow_nan=False))["steps"] == [0]


class _Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused, self.gate = nn.Linear(2, 2), nn.Linear(2, 2), nn.Parameter(torch.zeros(2))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(x) * (1 + self.gate)
        return out


def _run(model: nn.Module, held: list[nn.Parameter], steps: int = 4, factor: float = 1.0, lr: float = 0.1) -> Trace:
    optimizer = torch.optim.SGD(held, lr=lr)
    with Tracer(model, on_nonfinite="ignore") as tracer:
        for _ in range(steps):
            optimizer.zero_grad()
            (model(torch.ones(1, 2)).pow(2).sum() * factor).backward()
            optimizer.step()
    return tracer.trace


def test_parameters_outside_of_the_graph_and_the_optimizer_are_named() -> None:
    model = _Parts()
    held = [p for name, p in model.named_parameters() if name != "used.bias" and p.requires_grad]
    found = {each.kind: each for each in stalled(_run(model, held))}
    assert set(found) == {"no_gradient", "not_in_optimizer"}
    assert "2 of 5 parameters (40 %)" in found["no_gradient"].sentence
    assert "unused.weight, unused.bias" in found["no_gradient"].sentence
    assert found["not_in_optimizer"].sentence.endswith("in 4 sampled steps: used.bias.")


def test_a_zero_initialised_or_frozen_parameter_raises_no_alarm() -> None:
    model = _Parts()
    del model.unused
    model.used.weight.requires_grad_(True)
    assert stalled(_run(model, [p for p in model.parameters() if p.requires_grad])) == ()


def test_a_factor_whose_partner_begins_at_zero_raises_no_alarm() -> None:
    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.up(self.down(x)) + 1
            return out

    model = Adapter()
    assert stalled(_run(model, list(model.parameters()))) == ()


@pytest.mark.parametrize("factor", (math.nan, math.inf))
def test_a_nonfinite_gradient_is_no_missing_one(factor: float) -> None:
    model = nn.Linear(2, 1)
    assert stalled(_run(model, list(model.parameters()), factor=factor)) == ()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_a_bias_before_a_norm_raises_no_alarm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Tracer(model) as tracer:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 6, dtype=dtype)).pow(2).mean().backward()
            optimizer.step()
    assert stalled(tracer.trace) == ()


def test_a_whole_layer_without_slope_is_told() -> None:
    torch.manual_seed(0)
    first = nn.Linear(2, 2)
    model = nn.Sequential(first, nn.Linear(2, 2), nn.Linear(2, 2))
    first.register_forward_hook(lambda module, given, out: out * 1e-13 + out.detach())
    (found,) = stalled(_run(model, list(model.parameters()), lr=1e-3))
    assert found.kind == "small_gradient"
    assert "0.weight, 0.bias" in found.sentence


def test_a_gradient_of_exactly_zero_is_told() -> None:
    model = nn.Linear(2, 2)
    (found,) = stalled(_run(model, list(model.parameters()), factor=0.0))
    assert found.kind == "zero_gradient"
    assert "2 of 2" in found.sentence


def test_updates_that_are_rounded_away_are_told() -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 1e6)
    (found,) = stalled(_run(model, [model.weight, model.bias], lr=1e-12))
    assert found.kind == "unmoved"
    assert "weight" in found.sentence


def test_two_steps_are_no_window() -> None:
    model = _Parts()
    assert stalled(_run(model, list(model.used.parameters()), steps=2)) == ()


def test_rows_of_an_embedding_that_no_token_named_raise_no_alarm() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(1000, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.embedding(torch.tensor([1]))
            return out

    model = Model()
    assert stalled(_run(model, list(model.parameters()))) == ()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 1))
def test_a_quantile_of_sorted_losses_is_that_of_numpy(losses: list[float], share: float) -> None:
    assert _quantile(sorted(losses), share) == pytest.approx(float(np.quantile(losses, share)), rel=1e-9, abs=1e-6)


def test_a_step_in_which_only_ops_held_an_infinity_is_not_counted_among_those_that_went_wrong() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nantrace.trace(model, optimizer=optimizer, ops=True, on_nonfinite="ignore") as tracer:
        for step in range(3):
            optimizer.zero_grad()
            weights = torch.zeros(2).masked_fill(torch.tensor([False, True]), float("-inf")).softmax(0)
            (model(torch.ones(1, 2)).sum() * weights[0] / (0.0 if step == 2 else 1.0)).backward()
            optimizer.step()
    found = next(each for each in symptoms(tracer.trace) if each.kind == "nonfinite")
    assert (found.steps, found.sentence) == ((2,), "A nonfinite value was seen in step 2.")
    assert any("In steps 0, 1 only results of single ops held one" in each for each in found.evidence), found.evidence
