"""One of two ranks that replay steps together: `replays.py RANK INIT OUT`. Knows no expectations.

The ranks need different numbers of replays in all of it: rank 1 alone goes wrong.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import nantrace
from nantrace.cli import main


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.detach().amin()).log()


def model(rank: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Log() if rank else nn.Tanh(), nn.Linear(4, 1))


BATCH = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))


def counting(net: nn.Module, batch: Tensor) -> Tensor:
    """Each rank trains for itself; the ranks add up how many samples they saw."""
    net.zero_grad()
    loss = net(batch).mean()
    loss.backward()
    dist.all_reduce(torch.tensor(float(len(batch))))
    return loss.detach()


def alone(net: nn.Module, batch: Tensor) -> Tensor:
    net.zero_grad()
    loss = net(batch).mean()
    loss.backward()
    return loss.detach()


def uneven(rank: int) -> dict[str, Any]:
    return nantrace.bisect(counting, model(rank), BATCH).to_dict()


def averaged(rank: int) -> dict[str, Any]:
    """Rank 1's batch makes its loss NaN; the gradients of both are NaN after they were averaged."""
    net = DistributedDataParallel(model(0))
    batch = BATCH.clone()
    if rank:
        batch[2, 1] = float("nan")
    return nantrace.bisect(alone, net, batch).to_dict()


def one_only(rank: int) -> dict[str, Any] | None:
    return nantrace.bisect(alone, model(1), BATCH).to_dict() if rank else None


def rows(rank: int) -> dict[str, Any]:
    return nantrace.matrix(counting, model(rank), BATCH, axes=["float64"], smallest=False).to_dict()


def different_rows(rank: int) -> str:
    axes = ["float64", "evaluation"] if rank else ["float64"]
    try:
        nantrace.matrix(counting, model(rank), BATCH, axes=axes, smallest=False)
    except nantrace.ReplayError as error:
        return str(error)
    return ""


def given() -> nantrace.Step:
    """What the command line loads."""
    return nantrace.Step(counting, model(dist.get_rank()), BATCH)


def command(*options: str) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["bisect", f"{__file__}:given", *options])
    return {"code": done.exit_code, "said": done.output.splitlines()}


def extras(rank: int) -> dict[str, Any]:
    return command("--samples", "--reproducer", "repro", "-o", "both.h5")


def extras_of_one(rank: int) -> dict[str, Any]:
    return command(*(["--reproducer", "repro"] if rank else []))


def filed(rank: int) -> dict[str, Any]:
    nantrace.bisect(counting, model(rank), BATCH, path="step.h5")
    return nantrace.diagnose(nantrace.load(f"step.r{rank:05d}.h5")).to_dict()


def taken(rank: int) -> str:
    if rank:
        Path("taken.r00001.h5").touch()
    try:
        return nantrace.bisect(counting, model(rank), BATCH, path="taken.h5").status
    except nantrace.TraceExistsError as error:
        return str(error)


SCENARIOS: tuple[Callable[[int], Any], ...] = (
    *(uneven, averaged, one_only, rows, different_rows),
    *(extras, extras_of_one, filed, taken),
)


def run() -> None:
    rank, init, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.chdir(out)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(init_method=f"file://{init}", rank=rank, world_size=2)
    answers = {scenario.__name__: scenario(rank) for scenario in SCENARIOS}
    dist.barrier()
    with open(os.path.join(out, f"answers{rank}.json"), "w") as file:
        json.dump(answers, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
