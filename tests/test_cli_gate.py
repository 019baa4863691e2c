"""`nantrace gate` as a user types it: what it prints, its exit codes, and what it says of wrong use."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.diagnosis.test_gate import at
from tests.diagnosis.test_gate import run as training
from tests.test_cli import run, stored


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return stored(training(), tmp_path / "good.h5")


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return stored(training(change=at(7, loss=math.nan)), tmp_path / "bad.h5")


def test_it_says_which_rule_failed_at_which_step_and_ends_with_the_next_command(bad: Path, good: Path) -> None:
    done = run("gate", bad, "--updates", "20", "--reference", good)
    assert done.exit_code == 0 and done.stderr == ""
    lines = done.stdout.rstrip("\n").split("\n")
    assert lines[0].split()[0] == "FAILS"
    assert "FAILED       losses             Step 7: loss was nan." in lines
    assert "passed       updates            20 committed; 20 are asked." in lines
    assert lines[-1] == f"Next: nantrace report {bad}"


def test_the_exit_code_tells_a_failing_gate_only_when_asked(bad: Path, good: Path) -> None:
    updates = ("--updates", "20")
    assert run("gate", bad, *updates, "--exit-code").exit_code == 1
    assert run("gate", bad, *updates).exit_code == 0
    assert run("gate", good, *updates, "--exit-code").exit_code == 0
    assert run("gate", good, "--updates", "21", "--exit-code").exit_code == 1


def test_what_was_not_checked_fails_only_a_strict_gate(good: Path) -> None:
    done = run("gate", good, "--updates", "20", "--strict", "--exit-code")
    assert done.exit_code == 1
    assert done.stdout.startswith("FAILS") and "3 not checked, which fails a strict gate" in " ".join(
        done.stdout.split()
    )
    assert run("gate", good, "--updates", "20", "--strict", "--reference", good, "--exit-code").exit_code == 0


def test_json_is_strict_and_alone_on_stdout(bad: Path) -> None:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"not strict JSON: {constant}")

    done = run("gate", bad, "--updates", "20", "--json")
    found = json.loads(done.stdout, parse_constant=refuse)
    assert found["passed"] is False
    assert [(rule["name"], rule["steps"]) for rule in found["rules"] if rule["status"] == "failed"] == [("losses", [7])]
    assert done.stderr == f"Next: nantrace report {bad}\n"


def test_each_repeated_option_reaches_the_gate(bad: Path) -> None:
    assert run("gate", bad, "--updates", "20", "--without", "losses", "--exit-code").exit_code == 0
    assert run("gate", bad, "--updates", "20", "--allow", "loss", "--exit-code").exit_code == 0
    assert run("gate", bad, "--updates", "12", "--warm-up", "8", "--exit-code").exit_code == 0


def test_wrong_use_and_an_empty_window_are_sentences(good: Path, tmp_path: Path) -> None:
    done = run("gate", good, "--without", "loss")
    assert done.exit_code == 2 and "without='loss': the rules are updates" in done.stderr
    assert run("gate", good, "--time-tolerance", "-1").exit_code == 2
    done = run("gate", good, "--warm-up", "20")
    assert done.exit_code == 3
    assert done.stderr == (
        f"nantrace: The gate window is empty: {good} holds 20 attempted updates, all within the warm-up of 20; lower "
        "the warm-up or trace more steps.\n"
    )
    assert run("gate", tmp_path / "none.h5").exit_code == 3
