"""Two processes that train together: each names its own fault, and the other rank where a collective brought one."""

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
WRAPPED = ("ddp", "bucket view", "unused", "static", "fsdp2", "fsdp1")

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch has no gloo"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-m", "tests.distributed.program"]
    running = []
    for rank in (0, 1):
        call = [*program, str(rank), str(out / "init"), str(out)]
        with (out / f"log{rank}").open("w") as log:
            running.append(subprocess.Popen(call, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    assert codes == [0, 0], "\n".join((out / f"log{rank}").read_text()[-3000:] for rank in (0, 1))
    return [json.loads((out / f"answers{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", WRAPPED)
def test_an_op_trace_says_that_a_collective_brought_the_gradient(ranks: list[dict[str, Any]], name: str) -> None:
    verdict = ranks[0][f"{name} True"]
    assert (verdict["status"], verdict["stage"], verdict["cause"]) == ("fault", "gradients", "other_rank")
    assert verdict["origin"]["op"].startswith("c10d.") and verdict["origin"]["module"] is None
    assert verdict["origin"]["tensor"] == "gradient of first.weight"
    assert any("no op of this process wrote" in sentence.lower() for sentence in verdict["evidence"])
    assert verdict["advice"][0].startswith("Look at what rank 1 saw")


@pytest.mark.parametrize("name", WRAPPED)
def test_a_module_trace_says_that_the_gradient_changed_after_backward(ranks: list[dict[str, Any]], name: str) -> None:
    verdict = ranks[0][f"{name} False"]
    # FSDP1 hands parts of one flat gradient to the optimizer: none was seen after backward, so the stage stays open.
    assert (verdict["status"], verdict["stage"]) == ("fault", None if name == "fsdp1" else "gradients")
    assert verdict["origin"]["tensor"].startswith("gradient of ")
    assert "param_groups" not in verdict["origin"]["tensor"]
    assert any("rank 0 of 2" in sentence for sentence in verdict["evidence"])
    assert verdict["advice"][0].startswith("Look at what rank 1 saw")


@pytest.mark.parametrize("ops", [False, True])
@pytest.mark.parametrize("name", [*WRAPPED, "accumulated"])
def test_the_rank_at_fault_names_its_own_loss(ranks: list[dict[str, Any]], name: str, ops: bool) -> None:
    verdict = ranks[1][f"{name} {ops}"]
    assert (verdict["status"], verdict["stage"]) == ("fault", "loss")
    assert verdict["origin"]["op"] == ("aten.log" if ops else None)
    assert not any("rank" in sentence for sentence in (*verdict["evidence"], *verdict["advice"]))


@pytest.mark.parametrize("ops", [False, True])
def test_accumulation_without_sync_brings_the_fault_with_the_last_backward(
    ranks: list[dict[str, Any]], ops: bool
) -> None:
    verdict = ranks[0][f"accumulated {ops}"]
    assert (verdict["stage"], verdict["origin"]["tensor"]) == ("gradients", "gradient of first.weight")


def test_a_sum_that_overflows_is_not_blamed_on_another_rank_alone(ranks: list[dict[str, Any]]) -> None:
    for answers in ranks:
        verdict = answers["by_hand True"]
        assert (verdict["stage"], verdict["cause"]) == ("gradients", "other_rank")
        assert verdict["origin"]["tensor"] == "gradient of last.bias" and verdict["origin"]["kind"] == "inf"
        assert any("or the sum over the ranks left the range" in sentence for sentence in verdict["evidence"])


def test_a_broadcast_buffer_is_the_other_ranks(ranks: list[dict[str, Any]]) -> None:
    verdict = ranks[1]["broadcast True"]
    assert (verdict["status"], verdict["cause"]) == ("fault", "other_rank")
    assert verdict["origin"]["op"] == "c10d.broadcast_"


def test_a_bad_shard_is_state_on_its_rank_and_gathered_on_the_other(ranks: list[dict[str, Any]]) -> None:
    for ops in (False, True):
        own = ranks[1][f"bad_shard {ops}"]
        assert (own["stage"], own["origin"]["tensor"]) == ("state", "first.weight")
    assert ranks[0]["bad_shard True"]["origin"]["op"] == "c10d._allgather_base_"
    assert ranks[0]["bad_shard False"]["advice"][0].startswith("Look at what rank 1 saw")


def test_what_a_rank_gave_to_a_collective_explains_what_came_out(ranks: list[dict[str, Any]]) -> None:
    verdict = ranks[1]["local backward"]
    assert (verdict["stage"], verdict["cause"]) == ("backward", "sqrt_at_zero")
    assert ranks[0]["local backward"]["cause"] == "other_rank"


def test_ranks_that_bisect_together_each_find_their_part(ranks: list[dict[str, Any]]) -> None:
    there, here = ranks[0]["bisected"], ranks[1]["bisected"]
    assert (here["stage"], here["origin"]["op"]) == ("loss", "aten.log")
    assert (there["stage"], there["cause"]) == ("gradients", "other_rank")
    assert there["replays"] == here["replays"]


@pytest.mark.parametrize("wrapper", ["data_parallel", "sharded", "flat"])
def test_tracing_leaves_every_bit_and_no_hook(ranks: list[dict[str, Any]], wrapper: str) -> None:
    for answers in ranks:
        assert answers[f"identity {wrapper}"] == [True] * 6


@pytest.mark.parametrize("wrapper", ["data_parallel", "sharded", "flat"])
def test_names_are_those_of_the_model_inside(ranks: list[dict[str, Any]], wrapper: str) -> None:
    modules = {"": "Net", "first": "Linear", "bn": "BatchNorm1d", "last": "Linear", "block": "Sequential"}
    for answers in ranks:
        found = answers[f"names {wrapper}"]
        assert found["classes"] == {**modules, "block.0": "Linear", "block.1": "ReLU"}
        assert set(found["in the flow"]) == set(found["classes"])
        assert {name.rpartition(".")[0] for name in found["gradients"]} <= set(modules) | {"block.0"}
        assert found["unobserved"] == [0, 0]


@pytest.mark.parametrize("ops", [False, True])
def test_a_report_says_its_rank_and_gives_the_command_for_the_other(ranks: list[dict[str, Any]], ops: bool) -> None:
    here, there = ranks[0][f"file {ops}"], ranks[1][f"file {ops}"]
    assert "rank 0 of 2" in here["text"] and "rank 1 of 2" in there["text"]
    assert here["text"].endswith(f"Next: nantrace report ops{ops}.r00001.h5")
    assert "nantrace report" not in there["text"]


WARNED = """
import sys, warnings, torch, nantrace
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/init", rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    with nantrace.trace(model, f"{sys.argv[1]}/step.h5"):
        model(torch.full((1, 2), float("nan"))).sum().backward()
print(told[0].message)
torch.distributed.destroy_process_group()
"""


def test_a_warning_names_the_file_that_its_rank_wrote(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", WARNED, str(tmp_path)], capture_output=True, text=True, timeout=120)
    named = run.stdout.strip().rpartition(" ")[2]
    assert named == f"{tmp_path}/step.r00000.h5", run.stderr
    assert Path(named).exists()
