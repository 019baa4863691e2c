"""SIGKILL at any moment leaves a file that opens and holds every flushed row."""

import random
from pathlib import Path

import pytest

from tests.store.killing import check_survivor, kill_a_writer


@pytest.mark.parametrize("after", [random.Random(seed).expovariate(8) for seed in range(20)])
def test_a_killed_writer_leaves_every_flushed_row(tmp_path: Path, after: float) -> None:
    path = tmp_path / "killed.h5"
    check_survivor(path, *kill_a_writer(path, min(after, 0.5)))
