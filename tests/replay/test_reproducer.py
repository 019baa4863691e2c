"""The reproducer: one op with its real inputs, run in a fresh process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nantrace.diagnosis.verdict import Origin, Verdict
from nantrace.errors import ReplayError
from nantrace.replay.bisect import bisect
from nantrace.replay.keeper import _copied
from nantrace.replay.reproducer import write_reproducer
from nantrace.replay.snapshot import Snapshot
from nantrace.replay.step import Step


def run(model: nn.Module, batch: Any) -> None:
    model(batch).mean().backward()


def step_of(layer: Any) -> Step:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return layer(x)

    torch.manual_seed(0)
    return Step(run, nn.Sequential(nn.Linear(4, 4), Layer()), torch.randn(3, 4))


LAYERS = {
    "forward": (lambda x: (x - x.detach().amin()).log(), "aten.log"),
    "in_place": (lambda x: (x * 1.0).mul_(1e30).mul_(1e30), "aten.mul_"),
    "backward": (lambda x: (x * 0).sqrt(), "aten.div"),
    "autocast": (lambda x: torch.stack([(x * 1e3), x]).half() * 1e4, "aten.mul"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_op_gives_birth_again_in_a_fresh_process(name: str, tmp_path: Path) -> None:
    layer, op = LAYERS[name]
    step = step_of(layer)
    verdict = bisect(step)
    before = Snapshot(step)
    made = write_reproducer(tmp_path / "out", step, verdict)
    assert before.differences() == ()
    assert made.verified and made.said.startswith(op) and "the same bits as in the step" in made.said, made
    text = made.script.read_text()
    assert "nantrace" not in text and "weights_only=True" in text
    if name == "backward":
        assert "It belongs to SqrtBackward0 of the forward line test_reproducer.py:" in text


def test_a_reproducer_with_healthy_inputs_fails(tmp_path: Path) -> None:
    step = step_of(LAYERS["forward"][0])
    made = write_reproducer(tmp_path, step, bisect(step))
    kept = torch.load(tmp_path / "inputs.pt", weights_only=True)
    kept["args"] = [torch.ones(2)]
    torch.save(kept, tmp_path / "inputs.pt")
    assert subprocess.run([sys.executable, str(made.script)], capture_output=True).returncode == 1


def test_a_reproducer_that_gives_other_bits_fails(tmp_path: Path) -> None:
    step = step_of(LAYERS["forward"][0])
    made = write_reproducer(tmp_path, step, bisect(step))
    kept = torch.load(tmp_path / "inputs.pt", weights_only=True)
    kept["args"][0].mul_(1 + 2**-20)
    torch.save(kept, tmp_path / "inputs.pt")
    done = subprocess.run([sys.executable, str(made.script)], capture_output=True, text=True)
    assert done.returncode == 2 and "OTHER bits" in done.stdout


def test_the_settings_of_the_step_are_recorded_and_used(tmp_path: Path) -> None:
    def train(model: nn.Module, batch: Any) -> None:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            (model(batch) * 1e38 * 1e4).float().sum().backward()

    step = Step(train, nn.Linear(4, 4), torch.ones(3, 4))
    made = write_reproducer(tmp_path, step, bisect(step))
    assert made.verified, made
    kept = torch.load(tmp_path / "inputs.pt", weights_only=True)
    assert kept["autocast"]["cpu"] == {"enabled": True, "dtype": "torch.bfloat16"} and not kept["autocast"]["cache"]
    assert not kept["autocast"]["cuda"]["enabled"]
    assert (kept["default_dtype"], kept["grad_mode"]) == ({"torch": "float64"}, True)
    assert (kept["deterministic"], kept["warn_only"]) == (True, True)
    assert "Autocast in the step: cpu (bfloat16); its cache was off." in made.script.read_text()
    assert torch.set_autocast_enabled.__module__ != "nantrace.replay.keeper" and not torch.is_autocast_enabled("cpu")


def test_random_ops_draw_the_same_again_with_a_generator_of_their_own_or_without(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)

    def train(model: nn.Module, batch: Any) -> None:
        torch.rand(2)
        noise = torch.empty(4).exponential_(1e-39, generator=generator) if given else torch.empty(4).log_normal_(0, 99)
        (model(batch) * noise).sum().backward()

    for given in (True, False):
        step = Step(train, nn.Linear(4, 4), torch.ones(3, 4))
        made = write_reproducer(tmp_path / str(given), step, bisect(step))
        assert made.verified and "_" in made.said, made


def test_an_op_of_another_library_is_refused_with_the_reason(tmp_path: Path) -> None:
    verdict = Verdict("fault", origin=Origin(op="mylib.scale", phase="forward"))
    with pytest.raises(ReplayError, match=r"mylib\.scale is an op of mylib, which torch alone cannot run"):
        write_reproducer(tmp_path, step_of(torch.tanh), verdict)


def test_expanded_and_transposed_inputs_keep_their_strides() -> None:
    for tensor in (torch.rand(3, 1).expand(3, 4), torch.rand(3, 4).t(), torch.rand(2, 3, 4, 5)[:, 1]):
        copy = _copied(tensor)
        assert torch.equal(copy, tensor) and (copy.stride() == tensor.stride() or not tensor.is_contiguous())
    assert _copied(torch.rand(3, 1).expand(3, 4)).stride() == (1, 0)


def test_a_verdict_without_an_op_is_refused(tmp_path: Path) -> None:
    step = step_of(torch.tanh)
    with pytest.raises(ReplayError, match=r"No reproducer: the verdict is clean, there is no op"):
        write_reproducer(tmp_path, step, bisect(step))


@pytest.mark.parametrize(
    ("verdict", "why"),
    [
        (Verdict("fault", "input", "bad_input", Origin(tensor="batch.x")), "the batch itself was bad (batch.x), there"),
        (Verdict("fault", "input", "bad_constant", Origin()), "a constant was bad, there is no op"),
        (Verdict("fault", "state", origin=Origin(tensor="0.bias")), "the state was bad before the step began (0.bias)"),
        (Verdict("fault", "forward", origin=Origin(module="0")), "the verdict (fault) names no op to reproduce"),
    ],
)
def test_why_there_is_no_op_is_said_by_what_was_bad(tmp_path: Path, verdict: Verdict, why: str) -> None:
    with pytest.raises(ReplayError, match=re.escape(f"No reproducer: {why}")):
        write_reproducer(tmp_path, step_of(torch.tanh), verdict)
