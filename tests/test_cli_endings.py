"""How commands end when the user's code or the output does not play along: what is said, and the exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nantrace.cli import main
from nantrace.cli.console import Progress, width
from nantrace.cli.usercode import own_traceback
from tests.diagnosis.written import NAN, Written
from tests.test_cli import stored

SCRIPT = """
import sys
import torch
import nantrace

MODEL = torch.nn.Linear(2, 1)


def step(run, fill=1.0):
    return nantrace.Step(run, MODEL, torch.full((4, 2), fill))


def raises():
    def run(model, batch):
        model(batch).sum().backward()
        return {}["missing"]

    return step(run)


def guards():
    def run(model, batch):
        loss = model(batch).log().sum() * float("inf")
        if not torch.isfinite(loss):
            raise FloatingPointError("loss went bad")
        loss.backward()

    return step(run)


def leaves():
    def run(model, batch):
        model(batch).sum().backward()
        sys.exit(7)

    return step(run)


def interrupted():
    calls = []

    def run(model, batch):
        calls.append(model(batch).sum().backward())
        if len(calls) == 2:
            raise KeyboardInterrupt

    return step(run)


def breaks():
    raise ValueError("no checkpoint")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    written = Written()
    with written.call("", made=NAN):
        written.run("block.log", made=NAN)
    written.loss(nan=1)
    return stored(written.trace(), tmp_path / "step.h5")


def bisect(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bisect", *arguments])


@pytest.mark.parametrize("options", [(), ("--exit-code",)])
def test_a_step_that_raises_shows_its_own_traceback_first_and_exits_with_3(
    script: Path, options: tuple[str, ...]
) -> None:
    done = bisect("train.py:raises", *options)
    assert done.exit_code == 3
    told = done.stderr[done.stderr.index("Traceback") :]
    assert told.split("\n")[1].endswith('train.py", line 16, in run')
    assert "/nantrace/" not in told and "click" not in told and "importlib" not in told
    assert "nantrace: the step raised KeyError: 'missing' at train.py:16 in run" in told
    assert "INCONCLUSIVE. The step raised KeyError: 'missing'" in done.stdout
    assert "Next:" not in done.stdout


def test_a_step_that_raises_because_it_found_nan_is_a_fault_and_not_an_error(script: Path) -> None:
    done = bisect("train.py:guards", "--exit-code")
    assert done.exit_code == 1
    assert "FloatingPointError: loss went bad" in done.stderr and "FAULT in " in done.stdout
    assert bisect("train.py:guards").exit_code == 0


def test_a_step_that_leaves_is_told_with_its_code_and_place(script: Path) -> None:
    done = bisect("train.py:leaves")
    assert done.exit_code == 3
    assert done.stderr == (
        "nantrace: the step called sys.exit(7) at train.py:34 in run: a step that is to be replayed has to return or "
        "raise.\n"
    )


def test_an_interrupted_search_says_in_one_line_how_far_it_got(script: Path) -> None:
    done = bisect("train.py:interrupted")
    assert done.exit_code == 130
    last = done.stderr.rstrip("\n").split("\n")[-1]
    assert last == "nantrace: interrupted; it had got as far as 'replay 1: the ends only: all finite'."


def test_a_file_that_raises_while_it_is_loaded_shows_its_own_frames_only(script: Path) -> None:
    done = bisect("train.py:breaks")
    assert done.exit_code == 3
    lines = done.stderr.rstrip("\n").split("\n")
    assert lines[0] == "Traceback (most recent call last):" and lines[1].endswith("in breaks")
    assert not any("importlib" in line or "/nantrace/" in line for line in lines)
    assert lines[-1] == (
        "nantrace: train.py raised ValueError: no checkpoint at train.py:51 in breaks while it was loaded; no step "
        "was run."
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import sys\nsys.exit('usage: --data')", "broken.py called sys.exit('usage: --data') at broken.py:2"),
        ("import nothing_at_all", "ModuleNotFoundError: No module named 'nothing_at_all' at broken.py:1"),
        ("def f(:", "broken.py raised SyntaxError: "),
    ],
)
def test_a_file_that_cannot_be_loaded_is_an_error_and_not_a_fault(script: Path, source: str, said: str) -> None:
    (script / "broken.py").write_text(source)
    done = bisect("broken.py:step", "--exit-code")
    assert done.exit_code == 3
    assert said in done.stderr.rstrip("\n").split("\n")[-1]


def test_the_frames_of_causes_are_the_users_too() -> None:
    def inner() -> None:
        raise KeyError("a")

    try:
        try:
            inner()
        except KeyError as error:
            raise ValueError("b") from error
    except ValueError as error:
        told = own_traceback(error)
    assert told.index("KeyError: 'a'") < told.index("direct cause") < told.index("ValueError: b")


def python(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        **options,  # type: ignore[call-overload]
    )


def test_a_wrong_target_is_refused_before_torch_is_loaded() -> None:
    code = (
        "import sys, nantrace.cli\n"
        "try:\n    nantrace.cli.main(['bisect', 'nothing'])\n"
        "except SystemExit as end:\n    assert end.code == 3\n"
        "assert 'torch' not in sys.modules"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "There is no file 'nothing'" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_output_that_cannot_be_written_is_one_sentence_and_3(trace: Path, options: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = python("-m", "nantrace", "report", str(trace), *options, stdout=full)
    assert done.returncode == 3
    assert done.stderr == (
        "nantrace: standard output cannot be written (No space left on device): choose another place for it.\n"
    )


def test_a_reader_that_goes_away_is_no_error_and_the_exit_code_stays(trace: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = python("-m", "nantrace", "report", str(trace), "--exit-code", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_progress_that_nobody_can_read_does_not_stop_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs a device that is always full")
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        progress = Progress()
        progress("replay 1: all finite")
        assert progress.last == "replay 1: all finite"


def test_the_package_runs_as_a_module(trace: Path) -> None:
    done = python("-m", "nantrace", "report", str(trace), stdout=subprocess.PIPE)
    assert done.returncode == 0 and "FIRST NONFINITE" in done.stdout


@pytest.mark.parametrize(("given", "expected"), [("200", 200), ("40", 40), ("5", 40), ("9999", 240), ("wide", 80)])
def test_the_width_is_that_of_columns_even_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str, expected: int
) -> None:
    monkeypatch.setenv("COLUMNS", given)
    assert width() == expected
