"""`nantrace bisect`: what it prints, where, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import nantrace
from nantrace.cli import main

SCRIPT = """
import sys
import torch
import nantrace

torch.manual_seed(0)


class Log(torch.nn.Module):
    def forward(self, x):
        return x.log()


def train(model, batch):
    loss = model(batch["x"]).mean()
    loss.backward()
    return loss


def step_with(layer, fill):
    x = torch.full((4, 2), 1.0)
    x[1] = fill
    model = torch.nn.Sequential(layer, torch.nn.Linear(2, 1))
    return nantrace.Step(train, model, {"x": x})


class Root(torch.nn.Module):
    def forward(self, x):
        return (x * 0).sqrt()


def bad():
    return step_with(Log(), -1.0)


def root():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Root())
    return nantrace.Step(train, model, {"x": torch.ones(4, 2)})


def bad_batch():
    return step_with(torch.nn.Identity(), float("nan"))


def good():
    return step_with(Log(), float(sys.argv[1]) if sys.argv[1:] else 2.0)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bisect", *arguments])


def last(result: Result) -> str:
    return result.stdout.rstrip("\n").split("\n")[-1]


def test_a_fault_is_named_progress_goes_to_stderr_and_the_last_line_is_the_next_command(script: Path) -> None:
    done = run("train.py:bad")
    assert done.exit_code == 0, done.output
    assert "aten.log" in done.stdout and "FAULT in forward" in done.stdout
    assert done.stderr.startswith("replay 1: the ends only: loss nan") and "replay" not in done.stdout.split("\n")[0]
    assert last(done) == "Next: nantrace bisect train.py:bad --reproducer reproducer"


def test_the_next_command_can_be_typed_and_ends_in_a_verified_script(script: Path) -> None:
    command = last(run("train.py:bad")).removeprefix("Next: nantrace bisect ").split()
    done = run(*command)
    assert done.exit_code == 0, done.output
    assert "verified in a fresh process" in done.stdout
    assert last(done) == "Next: python reproducer/reproduce.py"


def test_with_exit_code_a_fault_exits_with_1_and_a_clean_step_with_0(script: Path) -> None:
    assert run("train.py:bad", "--exit-code").exit_code == 1
    done = run("train.py:good", "--exit-code")
    assert done.exit_code == 0 and "CLEAN" in done.stdout


def test_arguments_after_two_dashes_reach_the_file_and_the_next_command(script: Path) -> None:
    done = run("train.py:good", "--", "-3")
    assert "FAULT" in done.stdout
    assert last(done) == "Next: nantrace bisect train.py:good --reproducer reproducer -- -3"


def test_json_is_all_of_stdout(script: Path) -> None:
    done = run("train.py:bad", "--json", "--samples")
    found = json.loads(done.stdout)
    assert found["samples"]["indices"] == [1]
    assert "Next: " in done.stderr.rstrip("\n").split("\n")[-1]


def test_the_samples_are_told(script: Path) -> None:
    assert "Of 4 samples, 1 fails by itself (sample 1). Not" in run("train.py:bad", "--samples").stdout


def test_where_anomaly_mode_stops_the_step_is_told_as_evidence_of_the_same_fault(script: Path) -> None:
    done = run("train.py:root", "--anomaly", "--exit-code")
    assert "FAULT in backward" in done.stdout and done.exit_code == 1
    evidence = " ".join(done.stdout.split())
    assert "detect_anomaly stopped at MulBackward0, made in forward at train.py:" in evidence
    assert "core.py" not in done.stdout and "test_cli_bisect.py" not in done.stdout
    assert "Traceback" not in done.stderr


def test_a_reproducer_that_cannot_be_had_leaves_the_verdict_and_its_exit_code(script: Path) -> None:
    done = run("train.py:bad_batch", "--reproducer", "out", "--exit-code")
    assert done.stdout.startswith("FIRST NONFINITE") and "FAULT in input" in done.stdout and done.exit_code == 1
    said = "No reproducer: the batch itself was bad (batch.x), there is no op to reproduce."
    assert last(done) == said and not (script / "out").exists()
    plain = run("train.py:bad_batch", "--reproducer", "out", "--json")
    found = json.loads(plain.stdout)
    assert found["verdict"]["status"] == "fault" and found["reproducer"] == {"problem": said} and plain.exit_code == 0


def test_a_healthy_step_has_neither_reproducer_nor_failing_samples_and_is_still_clean(script: Path) -> None:
    done = run("train.py:good", "--reproducer", "out", "--samples", "--exit-code")
    assert "CLEAN" in done.stdout and done.exit_code == 0
    assert "No failing samples: the verdict is clean" in done.stdout
    assert last(done) == "No reproducer: the verdict is clean, there is no op to reproduce."


def test_a_folder_that_cannot_be_written_costs_neither_verdict_nor_samples(script: Path) -> None:
    done = run("train.py:bad", "--reproducer", "train.py", "--samples")
    assert "FAULT in forward" in done.stdout and "Not bit-exact" in done.stdout and done.exit_code == 0
    assert last(done) == "No reproducer: train.py cannot be written (File exists): choose another folder."


def test_anomaly_mode_samples_and_reproducer_each_have_their_say(script: Path) -> None:
    done = run("train.py:root", "--anomaly", "--samples", "--reproducer", "out")
    assert "FAULT in backward" in done.stdout and done.exit_code == 0
    places = [
        done.stdout.index(each) for each in ("detect_anomaly stopped at", "Each of the 4 samples fails", "Wrote out")
    ]
    assert places == sorted(places) and "verified in a fresh process" in done.stdout
    assert last(done) == "Next: python out/reproduce.py"


def test_a_dry_run_runs_nothing(script: Path) -> None:
    done = run("train.py:bad", "--dry-run")
    assert "Kept and restored around each replay: 44 bytes on cpu." in done.stdout
    assert done.stderr == "" and last(done) == "Next: nantrace bisect train.py:bad"


def test_the_trace_is_written_and_reported_next(script: Path) -> None:
    done = run("train.py:bad", "-o", "out.h5")
    assert last(done) == "Next: nantrace report out.h5"
    assert nantrace.diagnose(nantrace.load("out.h5")).status == "fault"
    assert run("train.py:bad", "-o", "out.h5").exit_code == 3


def test_a_search_that_was_cut_short_asks_for_more_replays(script: Path) -> None:
    done = run("train.py:bad", "--max-replays", "1")
    assert "INCONCLUSIVE" in done.stdout
    assert last(done) == "Next: nantrace bisect train.py:bad --max-replays 4"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("none.py:step",), 3, "There is no file 'none.py'"),
        (("train.py",), 3, "names no step"),
        (("train.py:nothing",), 3, "has no 'nothing'"),
        (("train.py:bad", "--capture", "none.capture"), 3, "There is no file 'none.capture'"),
        (("train.py:bad", "--depth", "deep"), 2, "Invalid value for '--depth'"),
        (("train.py:bad", "--max-replays", "0"), 2, "Invalid value for '--max-replays'"),
        ((), 2, "Missing argument 'TARGET'"),
    ],
)
def test_bad_input_gets_a_sentence_and_its_exit_code(
    script: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = run(*arguments)
    assert done.exit_code == code, done.output
    assert message in done.stderr and "Traceback" not in done.output
