"""A DTensor is read through its local shard; in a process of its own, since a process group concerns all of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")

SHARD = """
import sys, torch, nantrace
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
mesh = init_device_mesh("cpu", (1,))
for placement in (Replicate(), Shard(0)):
    tensor = distribute_tensor(torch.tensor([1.0, float("nan"), -3.0]), mesh, [placement])
    stats = nantrace.tensor_stats(tensor)
    print(stats.observed, stats.finite, stats.nan, stats.min, stats.max, stats.first_bad, stats.shape)
torch.distributed.destroy_process_group()
"""


def test_the_local_shard_of_a_dtensor_is_measured(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SHARD, str(tmp_path / "store")], capture_output=True, text=True, timeout=120
    )
    assert run.stdout.splitlines() == ["True 2 1 -3.0 1.0 1 (3,)"] * 2, run.stderr
