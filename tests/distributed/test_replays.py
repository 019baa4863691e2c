"""Two ranks whose step communicates replay it equally often, whatever each of them needs; a hang is a failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
_SECONDS = 120  # takes a few; without agreement one rank waits for the other until gloo gives up

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch has no gloo"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("replays")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    running = []
    for rank in (0, 1):
        call = [sys.executable, "-m", "tests.distributed.replays", str(rank), str(out / "init"), str(out)]
        with (out / f"log{rank}").open("w") as log:
            running.append(subprocess.Popen(call, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=_SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
    assert codes == [0, 0], "\n".join((out / f"log{rank}").read_text()[-3000:] for rank in (0, 1))
    return [json.loads((out / f"answers{rank}.json").read_text()) for rank in (0, 1)]


def test_a_rank_that_is_clean_runs_along_until_the_other_has_found_its_fault(ranks: list[dict[str, Any]]) -> None:
    clean, fault = (answers["uneven"] for answers in ranks)
    assert (clean["status"], clean["replays"]) == ("clean", 2)
    assert (fault["status"], fault["cause"], fault["origin"]["op"]) == ("fault", "log_of_zero", "aten.log")
    assert fault["replays"] == 3


def test_of_averaged_gradients_each_rank_says_where_they_came_from(ranks: list[dict[str, Any]]) -> None:
    other, own = (answers["averaged"] for answers in ranks)
    assert (own["status"], own["stage"]) == ("fault", "input")
    assert (other["status"], other["cause"]) == ("fault", "other_rank")


def test_a_step_that_communicates_with_nobody_is_replayed_by_one_rank_alone(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["one_only"] is None and ranks[1]["one_only"]["status"] == "fault"


def test_a_matrix_of_the_same_rows_runs_on_both_ranks(ranks: list[dict[str, Any]]) -> None:
    outcomes = [[row["outcome"] for row in answers["rows"]["rows"]] for answers in ranks]
    assert outcomes == [["finite", "finite"], ["nonfinite", "nonfinite"]]


def test_different_rows_on_two_ranks_are_refused_on_both_in_a_sentence(ranks: list[dict[str, Any]]) -> None:
    said = [answers["different_rows"] for answers in ranks]
    assert all(each.startswith("The ranks of this step want different replays next (this one: ") for each in said)
    assert "evaluation mode" in said[1] and all("name what applies on every rank" in each for each in said)


def test_extras_that_one_rank_alone_can_have_are_made_while_the_other_runs_along(ranks: list[dict[str, Any]]) -> None:
    clean, fault = (answers["extras"] for answers in ranks)
    assert (clean["code"], fault["code"]) == (0, 0)
    assert "No failing samples: the verdict is clean, there is nothing to leave out." in clean["said"]
    assert "No reproducer: the verdict is clean, there is no op to reproduce." in clean["said"]
    assert clean["said"][-1] == "Next: nantrace report both.r00000.h5"
    assert any(line.startswith("Wrote repro.r00001/reproduce.py (verified in a") for line in fault["said"])


def test_ranks_started_with_different_options_both_end_with_a_sentence(ranks: list[dict[str, Any]]) -> None:
    for answers, options in zip(ranks, ("without options", "--reproducer"), strict=True):
        ended = answers["extras_of_one"]
        assert ended["code"] == 3
        assert ended["said"][-1] == (
            f"nantrace: The ranks of this step were started differently (this one: {options}), and would wait for each "
            "other: start every rank with the same options."
        )


def test_each_rank_keeps_its_verdict_in_its_own_file(ranks: list[dict[str, Any]]) -> None:
    clean, fault = (answers["filed"] for answers in ranks)
    assert (clean["status"], clean["replays"]) == ("clean", 3)
    assert (fault["status"], fault["origin"]["op"], fault["replays"]) == ("fault", "aten.log", 4)


def test_a_rank_whose_file_exists_refuses_and_leaves_the_other_to_its_verdict(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["taken"] == "clean"
    assert ranks[1]["taken"].startswith("taken.r00001.h5 exists already: choose another path")
