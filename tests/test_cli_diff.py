"""`nantrace diff` as a user types it: what it prints, its exit codes, and what it says of wrong use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.diagnosis.written import NAN, Written
from tests.test_cli import run, stored


@pytest.fixture
def good(tmp_path: Path) -> Path:
    step = Written()
    step.run("block.log")
    return stored(step.trace(), tmp_path / "good.h5")


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    step = Written("float16")
    step.run("block.log", made=NAN)
    return stored(step.trace(), tmp_path / "bad step.h5")


def test_it_names_the_first_difference_and_ends_with_the_next_command(good: Path, bad: Path) -> None:
    done = run("diff", good, bad)
    assert done.exit_code == 0 and done.stderr == ""
    assert "FIRST DIFFERENCE IN NONFINITE VALUES   forward   block.log   output" in done.stdout
    assert done.stdout.rstrip("\n").split("\n")[-1] == f"Next: nantrace report '{bad}'"
    assert max(map(len, done.stdout.split("\n")[2:-2])) <= 80


def test_equal_traces_have_no_difference(good: Path) -> None:
    done = run("diff", good, good, "--exit-code")
    assert done.exit_code == 0
    assert "No difference in 2 common sites." in done.stdout and "Next:" not in done.stdout


def test_the_exit_code_tells_a_difference_only_when_asked(good: Path, bad: Path) -> None:
    assert run("diff", good, bad, "--exit-code").exit_code == 1
    assert run("diff", good, bad).exit_code == 0


def test_json_is_strict_and_alone_on_stdout(good: Path, bad: Path) -> None:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"not strict JSON: {constant}")

    done = run("diff", good, bad, "--json")
    found = json.loads(done.stdout, parse_constant=refuse)
    assert found["same"] is False and found["nonfinite"][0]["b"]["nan"] == 1
    assert done.stderr.startswith("Next: nantrace report ")


@pytest.mark.parametrize(
    "options", [["--rtol", "-1"], ["--rtol", "nan"], ["--atol", "nan"], ["--atol", "much"], ["third.h5"]]
)
def test_wrong_usage_exits_with_two(good: Path, options: list[str]) -> None:
    done = run("diff", good, good, *options)
    assert done.exit_code == 2 and "Traceback" not in done.stderr


def test_tolerances_are_taken(good: Path, tmp_path: Path) -> None:
    step = Written()
    step.run("block.log", made={"size": 1.5})
    other = stored(step.trace(), tmp_path / "other.h5")
    assert run("diff", good, other, "--exit-code").exit_code == 1
    assert run("diff", good, other, "--exit-code", "--rtol", "0.6").exit_code == 0


def test_a_file_that_is_no_trace_is_one_sentence_and_three(good: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "model.pt"
    wrong.write_bytes(b"PK\x03\x04")
    done = run("diff", good, wrong)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert str(wrong) in done.stderr
