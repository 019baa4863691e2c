"""The reproducer: one op with its real inputs, run in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nantrace.errors import ReplayError
from nantrace.replay.bisect import bisect
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
    assert made.verified and made.said.startswith(op), made
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


def test_a_verdict_without_an_op_is_refused(tmp_path: Path) -> None:
    step = step_of(torch.tanh)
    with pytest.raises(ReplayError, match=r"The verdict \(clean\) names no op"):
        write_reproducer(tmp_path, step, bisect(step))
