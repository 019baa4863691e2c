"""Error texts as a feature: one sentence with what was found, where, and what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nantrace
from nantrace import NantraceError, NantraceWarning


class Half(nn.Module):
    """A linear layer whose output does not fit float16."""

    def __init__(self) -> None:
        super().__init__()
        self.wo = nn.Linear(4, 4, bias=False)
        nn.init.constant_(self.wo.weight, 2e4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.wo(x)
        return output


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4).half()).float().mean().backward()


def model() -> nn.Module:
    return Half().half()


def test_the_warning_says_which_tensor_and_which_command(tmp_path: Path) -> None:
    traced, path = model(), tmp_path / "step.h5"
    with pytest.warns(NantraceWarning) as caught, nantrace.trace(traced, path):
        step(traced)
    assert [str(warning.message) for warning in caught] == [
        f"first nonfinite tensor: forward, wo output, float16 [2, 4], 8 inf (overflow). See: nantrace report {path}"
    ]


def test_without_a_file_the_warning_names_the_call() -> None:
    traced = model()
    with (
        pytest.warns(NantraceWarning, match=r"See: print\(nantrace\.report\(tracer\.trace\)\)$"),
        nantrace.trace(traced),
    ):
        step(traced)


def test_a_fault_is_raised_at_the_end_of_the_step_when_asked() -> None:
    traced = model()
    with (
        pytest.raises(nantrace.NonfiniteError, match="first nonfinite tensor: forward, wo output"),
        nantrace.trace(traced, on_nonfinite="raise"),
    ):
        step(traced)
    assert traced.wo.weight.grad is not None  # type: ignore[union-attr]


def test_a_fault_can_be_ignored() -> None:
    traced = model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with nantrace.trace(traced, on_nonfinite="ignore") as tracer:
            step(traced)
    assert nantrace.diagnose(tracer.trace).status == "fault"


def wrong_calls(path: Path) -> dict[str, tuple[Callable[[], object], type[Exception], str]]:
    taken = path / "taken.h5"
    taken.write_bytes(b"something else")
    return {
        "model": (lambda: nantrace.trace("model.pt"), TypeError, "got a str as model: pass a torch.nn.Module"),  # type: ignore[arg-type]
        "policy": (
            lambda: nantrace.trace(model(), on_nonfinite="crash"),  # type: ignore[arg-type]
            ValueError,
            "on_nonfinite is 'crash': pass one of 'warn', 'raise', 'ignore'",
        ),
        "glob": (lambda: nantrace.trace(model(), modules="encoder.*"), ValueError, "'encoder.*', which matches none"),
        "depth": (lambda: nantrace.trace(model(), depth=-1), ValueError, "depth is -1"),
        "taken": (lambda: nantrace.trace(model(), taken).__enter__(), nantrace.TraceExistsError, "taken.h5"),
        "missing": (lambda: nantrace.load(path / "no.h5"), NantraceError, "no.h5 does not exist"),
        "foreign": (lambda: nantrace.load(taken), nantrace.TraceFormatError, "taken.h5"),
        "report": (lambda: nantrace.report(3), TypeError, "report got a int: pass a Trace"),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("call", ["model", "policy", "glob", "depth", "taken", "missing", "foreign", "report"])
def test_wrong_use_gets_one_sentence_with_the_value_and_what_to_do(call: str, tmp_path: Path) -> None:
    action, kind, said = wrong_calls(tmp_path)[call]
    with pytest.raises(kind) as error:
        action()
    message = str(error.value)
    assert said in message
    assert "\n" not in message
    assert message.count(":") >= 1 or "pass" in message


def test_errors_are_caught_by_the_builtin_that_fits() -> None:
    assert issubclass(nantrace.TraceFormatError, ValueError)
    assert issubclass(nantrace.TraceExistsError, FileExistsError)
    assert issubclass(nantrace.NonfiniteError, RuntimeError)
    assert issubclass(nantrace.ReplayError, RuntimeError)
    assert issubclass(nantrace.CaptureError, ValueError)
    assert issubclass(NantraceWarning, UserWarning)


def test_the_users_exception_is_the_one_that_arrives() -> None:
    traced = model()
    with pytest.raises(KeyError, match="mine"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with nantrace.trace(traced, on_nonfinite="raise"):
            step(traced)
            raise KeyError("mine")
