"""Steps that inductor compiles: the matrix tells what the compiler did, bisect watches the ops of an eager run."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import nantrace
from nantrace.diagnosis.contrast.rows import Contrast
from nantrace.replay.step import Step

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="inductor builds with the compiler of Linux"),
]


class Squared(nn.Module):
    """300 * 300 is infinite in float16; inductor keeps the product in float32 within its kernel."""

    def forward(self, x: Tensor) -> Tensor:
        half = (x * 0 + 300).half()
        return (half * half / half).float() + x


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.detach().amin()).log()


@pytest.fixture(autouse=True)
def compiler_reset() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about what it compiles
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()


def step_of(layer: nn.Module, backend: str) -> Step:
    torch.manual_seed(0)
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), layer), backend=backend)
    return Step(lambda m, b: m(b).mean().backward(), model, torch.randn(3, 4))


def outcomes(found: Contrast) -> dict[str, str]:
    return {row.axis: row.outcome for row in found.rows}


def test_a_value_that_inductor_keeps_in_float32_is_finite_in_its_row_alone() -> None:
    found = nantrace.matrix(step_of(Squared(), "eager"), axes=["eager", "aot-eager", "inductor"], smallest=False)
    assert outcomes(found) == {
        "as-it-was": "nonfinite", "eager": "nonfinite", "aot-eager": "nonfinite", "inductor": "finite",
    }  # fmt: skip


def test_a_step_that_inductor_compiled_is_explained_by_an_eager_run_and_confirmed_compiled() -> None:
    verdict = nantrace.bisect(step_of(Log(), "inductor"))
    assert verdict.origin is not None
    assert (verdict.status, verdict.cause, verdict.origin.module) == ("fault", "log_of_zero", "1")
    said = " ".join(verdict.evidence)
    assert "The model is compiled: the ops were watched in an eager run" in said
    assert "A last replay without probes ended in the same way" in said


def test_a_step_that_fails_only_without_inductor_is_not_called_a_fault() -> None:
    verdict = nantrace.bisect(step_of(Squared(), "inductor"))
    assert verdict.status == "inconclusive"
    assert verdict.evidence[0].startswith("Without probes the step ends alike each time (all finite), under the op ")
    assert "compiled arithmetic is not that of eager ops" in verdict.evidence[0]


def test_without_a_compiler_the_row_says_so_and_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as config

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler-here",))
    found = nantrace.matrix(step_of(Log(), "eager"), axes=["aot-eager", "inductor"], smallest=False)
    assert outcomes(found) == {"as-it-was": "nonfinite", "eager": "nonfinite", "aot-eager": "nonfinite",
                               "inductor": "not_applicable"}  # fmt: skip
    assert found.row("inductor").reason.startswith("inductor finds no C++ compiler here (")
