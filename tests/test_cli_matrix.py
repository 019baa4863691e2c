"""`nantrace matrix` as a user types it: what it prints, its exit codes, and what it says of wrong use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.test_cli import run

STEP = """
import sys
import torch
from torch import nn
import nantrace


class Log(nn.Module):
    def forward(self, x):
        return (x - x.detach().amin()).log()


def make(bad=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Log() if bad else nn.Tanh())

    def run(m, batch):
        loss = m(batch).sum()
        loss.backward()
        return loss.detach()

    return nantrace.Step(run, model, torch.ones(2, 4) * torch.rand(1))


def fine():
    return make(False)


def without_batch():
    step = make()
    return nantrace.Step(lambda: step.model(torch.ones(1, 4)).sum().backward(), step.model)


def boom(model, batch):
    raise ValueError("no more data")


raises = nantrace.Step(boom, nn.Linear(4, 4), torch.ones(2, 4))


def leaves():
    step = make()
    return nantrace.Step(lambda *_: sys.exit(7), step.model)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(STEP)
    return path


def test_it_prints_the_table_the_reading_and_the_next_command(file: Path) -> None:
    done = run("matrix", f"{file}:make", "--axis", "float64", "--axis", "evaluation")
    assert done.exit_code == 0
    lines = done.stdout.rstrip("\n").split("\n")
    assert lines[0].split() == ["axis", "finite", "begins", "at", "loss", "grad", "norm"]
    assert [line.split("  ")[0] for line in lines[1:4]] == ["as it was", "float64", "evaluation mode"]
    assert "NO      forward 1  -inf" in lines[1]
    assert "float64 / as it was: No digits and no range mend it" in done.stdout
    assert lines[-1] == f"Next: nantrace bisect {file}:make"
    assert max(map(len, lines[:-1])) <= 80
    assert done.stderr.startswith("replay 1: as it was: loss -inf")


def test_json_is_strict_and_alone_on_stdout(file: Path) -> None:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"not strict JSON: {constant}")

    done = run("matrix", f"{file}:make", "--axis", "float64", "--json")
    found = json.loads(done.stdout, parse_constant=refuse)
    assert found["rows"][0]["loss"] == {"finite": False, "value": "-inf"}
    assert found["smallest"]["reason"] == "the step uses no half precision"


def test_the_exit_code_tells_a_fault_only_when_asked(file: Path) -> None:
    assert run("matrix", f"{file}:make", "--axis", "float64", "--exit-code").exit_code == 1
    assert run("matrix", f"{file}:make", "--axis", "float64").exit_code == 0
    assert run("matrix", f"{file}:fine", "--axis", "float64", "--exit-code").exit_code == 0


def test_the_batch_of_another_step_is_tried_and_draws_nothing_from_the_first_ones_stream(file: Path) -> None:
    alone = run("matrix", f"{file}:fine", "--axis", "float64", "--json")
    done = run("matrix", f"{file}:fine", "--axis", "other-batch", "--other", f"{file}:make", "--json")
    rows = {row["axis"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["other-batch"]["outcome"] == "finite"
    assert rows["as-it-was"]["loss"] == json.loads(alone.stdout)["rows"][0]["loss"]


def test_wrong_use_is_a_sentence(file: Path) -> None:
    done = run("matrix", f"{file}:make", "--axis", "fp16")
    assert done.exit_code == 2 and "'fp16' is none of as-it-was, autocast-off, " in done.stderr
    done = run("matrix", f"{file}:make", "--module", "nine")
    assert done.exit_code == 3
    assert done.stderr == "nantrace: The model has no module 'nine' that can be changed; it has '0', '1'.\n"
    done = run("matrix", f"{file}:make", "--other", f"{file}:without_batch")
    assert done.exit_code == 3 and "has no batch that could be tried" in done.stderr
    assert run("matrix", f"{file}:make", "--max-replays", "2").exit_code == 2


def test_a_step_that_leaves_the_interpreter_ends_the_command_in_a_sentence(file: Path) -> None:
    done = run("matrix", f"{file}:leaves")
    assert done.exit_code == 3 and "the step called sys.exit(7) at train.py" in done.stderr


def test_a_step_that_raises_over_nothing_nonfinite_is_the_users_error_first(file: Path) -> None:
    done = run("matrix", f"{file}:raises", "--axis", "float64")
    assert done.exit_code == 3
    assert "ValueError: no more data" in done.stderr and "in boom" in done.stderr
    last = done.stderr.strip().split("\n")[-1]
    assert "the step raised ValueError: no more data at train.py:" in last and last.endswith("then run matrix again.")
