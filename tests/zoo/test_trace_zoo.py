"""Tracing changes nothing, leaves nothing and raises no alarm, on healthy models and on harmless steps.

A `NantraceWarning` fails these tests, since the suite makes every warning an error.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nantrace
from tests.zoo.case import Batch, Case, Program, Step
from tests.zoo.cases import CASES
from tests.zoo.identity import untraced_equals_traced
from tests.zoo.models import TRANSFORMERS_MODELS
from tests.zoo.plain_models import PLAIN_MODELS
from tests.zoo.training import ZooModel

_HARMLESS = [case for case in CASES if case.expect.harmless]
_DAMAGED = [case for case in CASES if not case.expect.harmless]


class _Traced:
    """Puts `nantrace.trace` around a step and remembers where the trace lies."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.path, self.options = folder / "step.h5", options

    def __call__(self, model: nn.Module, step: Step) -> AbstractContextManager[Any]:
        return nantrace.trace(model, self.path, optimizer=getattr(step, "optimizer", None), **self.options)

    @property
    def status(self) -> str:
        """The verdict on what was recorded; an empty trace gets none."""
        trace = nantrace.load(self.path)
        return nantrace.diagnose(trace).status if len(trace) else "nothing recorded"


@pytest.mark.parametrize("zoo_model", (*PLAIN_MODELS, *TRANSFORMERS_MODELS), ids=lambda m: m.name)
def test_tracing_a_healthy_model_changes_nothing_and_finds_nothing(zoo_model: ZooModel, tmp_path: Path) -> None:
    traced = _Traced(tmp_path)
    assert untraced_equals_traced(zoo_model.build, traced) == []
    assert traced.status in ("clean", "expected")


@pytest.mark.parametrize("zoo_model", TRANSFORMERS_MODELS, ids=lambda m: m.name)
def test_tracing_inference_changes_nothing_and_finds_nothing(zoo_model: ZooModel, tmp_path: Path) -> None:
    def infer(model: nn.Module, batch: Batch) -> list[Tensor | None]:
        with torch.no_grad():
            output = model(**batch)
        return [output.loss, output.get("logits")]

    def build() -> Program:
        model, batch, _ = zoo_model.build()
        return model.eval(), batch, infer

    traced = _Traced(tmp_path)
    assert untraced_equals_traced(build, traced) == []
    assert traced.status in ("clean", "expected")


@pytest.mark.parametrize("case", _HARMLESS, ids=lambda case: case.name)
def test_tracing_a_harmless_step_changes_nothing_and_raises_no_alarm(case: Case, tmp_path: Path) -> None:
    traced = _Traced(tmp_path)
    assert untraced_equals_traced(case.build, traced) == []
    assert traced.status in ("clean", "expected", "contained")


@pytest.mark.filterwarnings("ignore::nantrace.RecipeWarning")  # some of the steps break a rule of mixed precision
@pytest.mark.parametrize("case", _DAMAGED, ids=lambda case: case.name)
def test_tracing_a_damaged_step_changes_nothing(case: Case, tmp_path: Path) -> None:
    assert untraced_equals_traced(case.build, _Traced(tmp_path, on_nonfinite="ignore")) == []


def test_the_trace_of_a_damaged_step_says_so(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "vae_logvar_exp_overflow")
    model, batch, step = case.build()
    traced = _Traced(tmp_path)
    with pytest.warns(nantrace.NantraceWarning), traced(model, step):
        step(model, batch)
    assert traced.status == "fault"
