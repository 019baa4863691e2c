"""Blocks that do not come to their end: what is in the file after a kill, and what an exception leaves in the trace."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nantrace
from nantrace.capture import step_rows
from nantrace.capture.raised import raised
from nantrace.events import Raised, Trace

_KILLED = """
import os, signal, sys, torch, nantrace
from nantrace.capture import step_rows
step_rows._MOST_ON_HOST = 100
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
with nantrace.trace(model, sys.argv[1]):
    for _ in range(int(sys.argv[2])):
        model(torch.ones(1, 2)).sum().backward()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _killed(path: Path, calls: int) -> Trace:
    done = subprocess.run([sys.executable, "-c", _KILLED, str(path), str(calls)], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return nantrace.load(path)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_kill_leaves_what_was_seen_of_a_loop_without_steps_and_it_is_not_clean(tmp_path: Path) -> None:
    trace = _killed(tmp_path / "long.h5", calls=60)
    assert 60 * 13 - 130 < len(trace) < 60 * 17 and trace.steps == ()
    verdict = nantrace.diagnose(trace)
    assert verdict.status == "inconclusive"
    assert verdict.evidence[0].endswith(f"it holds only the first {len(trace)} tensors of step 0.")
    trace = _killed(tmp_path / "short.h5", calls=1)
    assert len(trace) == 0
    assert nantrace.diagnose(trace).status == "inconclusive"


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 1))


def _many_calls(path: Path | None, bad: int | None = None, **options: Any) -> Trace:
    model = _model()
    with nantrace.trace(model, path, on_nonfinite="ignore", **options) as tracer:
        for call in range(30):
            model(torch.full((1, 2), float("inf") if call == bad else 1.0)).sum().backward()
        tracer.mark_step(batch_id="long")
        model(torch.ones(1, 2))
    return tracer.trace


@pytest.mark.parametrize("bad", [None, 2, 29])
def test_rows_that_were_written_ahead_change_nothing_of_the_trace(
    bad: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _many_calls(None, bad)
    monkeypatch.setattr(step_rows, "_MOST_ON_HOST", 40)
    ahead = _many_calls(tmp_path / "step.h5", bad)
    assert ahead.events.tobytes() == whole.events.tobytes()
    assert ahead.sites == whole.sites
    for name in ("step", "first_seq", "events", "loss", "batch_id"):
        assert [step.get(name) for step in ahead.steps] == pytest.approx(
            [step.get(name) for step in whole.steps], nan_ok=True
        )
    assert nantrace.diagnose(ahead) == nantrace.diagnose(whole)


def test_a_flight_recorder_writes_nothing_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_rows, "_MOST_ON_HOST", 40)
    trace = _many_calls(tmp_path / "step.h5", keep_steps=1)
    assert set(trace.events["step"]) == {1}
    assert (trace.events["seq"] == np.arange(1, len(trace) + 1)).all()


def test_a_slow_step_is_written_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_rows, "_LONGEST", 0.0)
    model, path = _model(), tmp_path / "step.h5"
    with nantrace.trace(model, path):
        model(torch.ones(1, 2))
        model(torch.ones(1, 2))
        assert 0 < len(nantrace.load(path)) < 20


@pytest.mark.parametrize("filed", [True, False])
def test_the_exception_that_ended_the_block_is_in_the_trace(filed: bool, tmp_path: Path) -> None:
    path = tmp_path / "step.h5" if filed else None
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="no room"), nantrace.trace(model, path) as tracer:
        for step in range(3):
            loss = model(torch.ones(1, 2)).sum()
            if step == 2:
                raise RuntimeError("no room in /home/me/data/x.bin\nand more")
            loss.backward()
            optimizer.step()
    assert tracer.trace.raised == Raised("RuntimeError", "no room in x.bin", 2)
    assert tracer.trace.complete
    report = nantrace.report(tracer.trace)
    assert report.verdict.status == "inconclusive"
    assert "ended by RuntimeError" in str(report).split("\n\n")[0]
    assert "The block ended with RuntimeError: no room in x.bin, in step 2" in " ".join(str(report).split())


def test_an_exception_after_the_last_update_broke_no_step_off() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(KeyboardInterrupt), nantrace.trace(model) as tracer:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        raise KeyboardInterrupt
    assert tracer.trace.raised == Raised("KeyboardInterrupt")
    assert nantrace.diagnose(tracer.trace).status == "clean"


def test_a_block_that_ends_by_itself_has_no_exception_in_its_trace(tmp_path: Path) -> None:
    with nantrace.trace(_model(), tmp_path / "step.h5") as tracer:
        pass
    assert tracer.trace.raised is None


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("nothing to say")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError(""), ""),
        (Mute(), ""),
        (ValueError("a\n/b"), "a"),
        (ValueError("x" * 500), "x" * 157 + "..."),
        (FileNotFoundError(2, "No such file", "/root/data/a.bin"), "[Errno 2] No such file: 'a.bin'"),
        (ValueError(r"C:\Users\me\a.bin is gone"), "a.bin is gone"),
        (ValueError("~/me/x and (/tmp/y)"), "x and (y)"),
        (ValueError("1/0 of block.0/weight, a / b, 3 m/s"), "1/0 of block.0/weight, a / b, 3 m/s"),
    ],
)
def test_one_line_without_folders_is_kept_of_an_exception(error: BaseException, message: str) -> None:
    assert raised(error, 3) == Raised(type(error).__name__, message, 3)


@pytest.mark.parametrize("message", ["\x1b[31m\u2028red", "\ud800", "\U0001f600" * 160, "json:{"])
def test_any_message_survives_the_file_or_is_left_out(message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError), nantrace.trace(_model(), tmp_path / "step.h5") as tracer:
        raise ValueError(message)
    found = tracer.trace.raised
    assert found is not None and found.error == "ValueError"
    assert found.message in (raised(ValueError(message), None).message, "")
    assert "\x1b" not in str(nantrace.report(tracer.trace))
