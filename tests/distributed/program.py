"""One of two ranks that run every scenario in turn and write what nantrace answered: `program.py RANK INIT OUT`.

Rank 1 alone goes wrong. Knows no expectations.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import nantrace


class Net(torch.nn.Module):
    """Two linear layers, a batch norm, a block that can be checkpointed, and a layer that nobody calls."""

    def __init__(self, checkpointed: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.first, self.bn = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)
        self.block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        self.last = torch.nn.Linear(8, 1)
        self.unused = torch.nn.Linear(2, 2) if unused else None
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.bn(self.first(x))
        h = checkpoint(self.block, h, use_reentrant=False) if self.checkpointed else self.block(h)
        return self.last(h)


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * rank + number))


def data_parallel(**options: Any) -> torch.nn.Module:
    own = {name: options.pop(name) for name in ("checkpointed", "unused") if name in options}
    return DistributedDataParallel(Net(**own), **options)


def sharded() -> torch.nn.Module:
    mesh, model = init_device_mesh("cpu", (2,)), Net()
    for part in (model.block, model.last):  # `last` has one row: rank 1 holds nothing of it
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def flat() -> torch.nn.Module:
    return FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)


def made(make: Callable[..., torch.nn.Module], **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = make(**options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def loss_of(y: torch.Tensor, bad: bool) -> torch.Tensor:
    return (y * 0).log().mean() if bad else y.mean()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int, bad: bool) -> None:
    loss_of(model(batch(rank, number)), bad).backward()
    optimizer.step()
    optimizer.zero_grad()


def told(verdict: nantrace.Verdict) -> dict[str, Any]:
    return verdict.to_dict()


def traced(rank: int, make: Callable[..., torch.nn.Module], ops: bool, steps: int = 2, **options: Any) -> Any:
    """The last step goes wrong on rank 1."""
    model, optimizer = made(make, **options)
    with nantrace.trace(model, optimizer=optimizer, ops=ops, on_nonfinite="ignore") as tracer:
        for number in range(steps):
            step(model, optimizer, rank, number, rank == 1 and number == steps - 1)
    return tracer.trace


def accumulated(rank: int, ops: bool) -> dict[str, Any]:
    model, optimizer = made(data_parallel)
    with nantrace.trace(model, optimizer=optimizer, ops=ops, on_nonfinite="ignore") as tracer:
        with model.no_sync():
            loss_of(model(batch(rank, 0)), rank == 1).backward()
        model(batch(rank, 1)).mean().backward()
        optimizer.step()
    return told(nantrace.diagnose(tracer.trace))


def by_hand(rank: int, ops: bool) -> dict[str, Any]:
    """All-reduces gradients itself; both ranks are finite and their sum is not."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nantrace.trace(model, optimizer=optimizer, ops=ops, on_nonfinite="ignore") as tracer:
        (model(batch(rank, 0)).sum() * 5e37).backward()  # the gradient of last.bias is 2.5e38
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    return told(nantrace.diagnose(tracer.trace))


def broadcast(rank: int, ops: bool) -> dict[str, Any]:
    """Rank 0 poisons its running statistics; the next forward hands them to rank 1."""
    model, optimizer = made(data_parallel)
    with nantrace.trace(model, optimizer=optimizer, ops=ops, on_nonfinite="ignore") as tracer:
        with torch.no_grad():
            model.module(batch(rank, 0) * (torch.inf if rank == 0 else 1.0))
        step(model, optimizer, rank, 1, False)
    return told(nantrace.diagnose(tracer.trace))


def bad_shard(rank: int, ops: bool) -> dict[str, Any]:
    model, optimizer = made(sharded)
    if rank == 1:
        with torch.no_grad():
            model.first.weight.to_local()[0, 0] = torch.nan
    with nantrace.trace(model, optimizer=optimizer, ops=ops, on_nonfinite="ignore") as tracer:
        step(model, optimizer, rank, 0, False)
    return told(nantrace.diagnose(tracer.trace))


def local_backward(rank: int) -> dict[str, Any]:
    """On rank 1 the loss is finite and its gradient is not: it goes through the reduce-scatter."""
    model, optimizer = made(sharded)
    with nantrace.trace(model, optimizer=optimizer, ops=True, on_nonfinite="ignore") as tracer:
        y = model(batch(rank, 0))
        ((y * 0).abs().sqrt().sum() if rank == 1 else y.mean()).backward()
        optimizer.step()
    return told(nantrace.diagnose(tracer.trace))


def bisected(rank: int) -> dict[str, Any]:
    model, optimizer = made(data_parallel)

    def run(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x), rank == 1)
        loss.backward()
        optimizer.step()
        return loss

    return told(nantrace.bisect(nantrace.Step(run, model, batch(rank, 0), optimizer=optimizer)))


def identity(rank: int, make: Callable[..., torch.nn.Module]) -> list[bool]:
    """Whether a module trace and an op trace leave the bits of three steps and every hook as they are."""
    left = []
    for ops in (None, False, True):
        model, optimizer = made(make)
        hooks = hooks_on(model)
        if ops is None:
            for number in range(3):
                step(model, optimizer, rank, number, False)
        else:
            with nantrace.trace(model, optimizer=optimizer, ops=ops):
                for number in range(3):
                    step(model, optimizer, rank, number, False)
        tensors = [getattr(t, "_local_tensor", t).detach().clone() for t in (*model.parameters(), *model.buffers())]
        left.append((tensors, torch.get_rng_state(), hooks == hooks_on(model)))
    plain = left[0]
    same = [all(torch.equal(a, b) for a, b in zip(plain[0], other[0], strict=True)) for other in left[1:]]
    random = [torch.equal(plain[1], other[1]) for other in left[1:]]
    return [*same, *random, *(other[2] for other in left[1:])]


def hooks_on(model: torch.nn.Module) -> list[int]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    on_modules = [len(getattr(module, kind)) for module in model.modules() for kind in kinds]
    return on_modules + [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]


def file(rank: int, ops: bool) -> dict[str, Any]:
    model, optimizer = made(data_parallel)
    with nantrace.trace(model, f"ops{ops}.h5", optimizer=optimizer, ops=ops, on_nonfinite="ignore"):
        step(model, optimizer, rank, 0, rank == 1)
    trace = nantrace.load(f"ops{ops}.r{rank:05d}.h5")
    return {"text": str(nantrace.report(trace)), "modules": [m.fqn for m in trace.modules]}


def names(rank: int, make: Callable[..., torch.nn.Module]) -> dict[str, Any]:
    trace = traced(rank, make, True)
    gradients = {trace.site(e).tensor for e in trace.events if trace.site(e).role.label == "grad"}
    return {
        "classes": {m.fqn: m.cls for m in trace.modules},
        "gradients": sorted(gradients),
        "in the flow": sorted({module for _, module, _ in trace.lineage.magnitudes}),
        "unobserved": [row["unobserved"] for row in trace.steps],
    }


def main(rank: int, init: str, out: str) -> None:
    torch.set_num_threads(1)
    os.chdir(out)
    dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=2)
    answers: dict[str, Any] = {}
    for ops in (False, True):
        for name, (make, options) in {
            "ddp": (data_parallel, {}),
            "bucket view": (data_parallel, {"gradient_as_bucket_view": True}),
            "unused": (data_parallel, {"unused": True, "find_unused_parameters": True}),
            "static": (data_parallel, {"checkpointed": True, "static_graph": True, "steps": 3}),
            "fsdp2": (sharded, {}),
            "fsdp1": (flat, {}),
        }.items():
            answers[f"{name} {ops}"] = told(nantrace.diagnose(traced(rank, make, ops, **options)))
        for scenario in (accumulated, by_hand, broadcast, bad_shard, file):
            answers[f"{scenario.__name__} {ops}"] = scenario(rank, ops)
    answers["local backward"], answers["bisected"] = local_backward(rank), bisected(rank)
    for make in (data_parallel, sharded, flat):
        answers[f"identity {make.__name__}"] = identity(rank, make)
        answers[f"names {make.__name__}"] = names(rank, make)
    with open(f"answers{rank}.json", "w") as stream:
        json.dump(answers, stream)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
