"""Launches by the real Triton, compiled for a real device, with a launcher that only writes down what it was given.

Run by test_fused_launches.py as a program of its own, where Triton doesn't interpret; prints what happened as JSON.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from nantrace.stats import fused, fused_launch
from nantrace.stats.fused_table import FusedTable

CALLS: list[dict[str, Any]] = []
FAILING: list[str] = []  # "direct", "ordinary": calls that raise
STREAM = 0x5EED


class Recorder:
    """In place of the driver's launcher. Triton passes its chains of hooks, a direct launch passes none."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.types = list(source.signature.values())
        self.batched = source.fn is fused.batch_kernel

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, *rest: Any) -> None:
        known, enter, leave, *arguments = rest
        direct = enter is None and leave is None
        if ("direct" if direct else "ordinary") in FAILING:
            raise RuntimeError("out of luck")
        if not direct:
            enter(known)
            leave(known)
        plain = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
        if self.batched:  # the sample is not read, and the list is another one each time
            listed = (ctypes.c_int64 * (2 * x)).from_address(plain[1])
            plain[:2] = [plain[0] % 16, list(listed)]
        where = {"grid": [x, y, z], "stream": stream, "function": function, "metadata": list(metadata)}
        CALLS.append({"direct": direct, **where, "arguments": plain, "types": self.types})


class Loaded:
    """In place of the driver's functions: each binary that is loaded gets another handle."""

    def __init__(self) -> None:
        self.loaded = 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 17}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[str, int, int, int, int]:
        self.loaded += 1
        return "module", self.loaded, 32, 0, 1024


class Driver:
    """A Hopper without any."""

    launcher_cls = Recorder

    def __init__(self) -> None:
        self.utils = Loaded()
        self.device = -1  # as of a tensor on the CPU

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return STREAM + device


def calls_of(launch: Any, *arguments: Any) -> list[dict[str, Any]]:
    before = len(CALLS)
    launch(*arguments)
    return CALLS[before:]


@contextmanager
def only_triton() -> Iterator[None]:
    """Every launch through `JITFunction.run`."""
    ways = fused_launch._ROW, fused_launch._BATCH
    for way in ways:
        way.again = lambda *_: False
    yield
    for way in ways:
        del way.again


def beside_triton() -> dict[str, Any]:
    """What the third of three equal launches passes, and what Triton passes for it."""
    found = {}
    flat = torch.zeros(1 << 14)
    rows = torch.zeros(16, fused.WIDTH, dtype=torch.int64)
    cases: dict[str, tuple[Any, ...]] = {
        "float32": (flat, 1 << 14),
        "float32 unaligned": (flat[1:], (1 << 14) - 1),
        "float32 in another order": (flat, 1 << 14, 1, (1, 128, 128, 0, 0, 1, 128)),
        "float32 with gaps": (flat.view(128, 128)[:, :5], 640, 2, (1, 1, 5, 0, 0, 128, 1)),
        "float16": (flat.half(), 1 << 14),
        "complex64": (torch.view_as_complex(flat.view(-1, 2)), 1 << 13),
        "float8_e4m3fn": (flat.to(torch.float8_e4m3fn), 1 << 14),
        "float8 of 2**33 elements": (flat[:1].to(torch.float8_e4m3fn), 2**33),
    }
    for name, (tensor, count, *walk) in cases.items():
        arguments = (tensor, count, rows, 7, *walk)
        for _ in range(2):
            calls_of(fused_launch.launch, *arguments)
        direct = calls_of(fused_launch.launch, *arguments)
        with only_triton():
            found[name] = direct, calls_of(fused_launch.launch, *arguments)
    for name, tensors in {"small float32": [flat[:5], flat[1:9]], "small float16": [flat[:9].half()] * 3}.items():
        calls = [calls_of(fused_launch.launch_batch, tensors, rows, 7) for _ in range(3)]
        with only_triton():
            found[name] = calls[-1], calls_of(fused_launch.launch_batch, tensors, rows, 7)
    return found


def watched() -> dict[str, Any]:
    """Whether launches are direct while something watches, and afterwards."""
    tensor = torch.zeros(64)
    table = FusedTable("cpu")
    for _ in range(2):
        table.add(tensor, True)
    seen: list[str] = []
    found = {"nothing": _directly(table, tensor)}
    for name in ("launch_enter_hook", "launch_exit_hook"):
        hook = getattr(knobs.runtime, name)
        watch = _watcher(seen, name)
        hook.add(watch)
        found[f"{name} added"] = _directly(table, tensor)
        hook.remove(watch)
        setattr(knobs.runtime, name, watch)
        found[f"{name} replaced"] = _directly(table, tensor)
        setattr(knobs.runtime, name, hook)
    fused.row_kernel.pre_run_hooks.append(lambda *_, **__: seen.append("pre_run"))
    found["pre_run_hooks"] = _directly(table, tensor)
    fused.row_kernel.pre_run_hooks.clear()
    for owner, name, value in (
        (knobs.runtime, "debug", True),
        (knobs.runtime, "add_stages_inspection_hook", lambda *_: ("key", "hash")),
        (knobs.compilation, "instrumentation_mode", "there is none of this name"),
    ):
        before = getattr(owner, name)
        setattr(owner, name, value)
        try:
            found[name] = _directly(table, tensor)
        finally:
            setattr(owner, name, before)
    afterwards = _directly(table, tensor)
    driver.set_active(Driver())
    found["another driver"] = _directly(table, tensor)
    return {"direct": found, "seen": seen, "afterwards": afterwards}


def _watcher(seen: list[str], name: str) -> Any:
    return lambda *_: seen.append(name)


def _directly(table: FusedTable, tensor: torch.Tensor) -> list[bool]:
    return [call["direct"] for call in calls_of(table.add, tensor, True)]


def elsewhere() -> bool:
    """Whether what was learned of one device is launched on another."""
    flat, rows = torch.zeros(64), torch.zeros(16, fused.WIDTH, dtype=torch.int64)
    for _ in range(2):
        fused_launch.launch(flat, 64, rows, 0)
    place = (flat.dtype, flat.data_ptr(), 64)
    assert fused_launch.relaunch(*place, -1, rows.data_ptr(), 0)
    fused_launch._programs = lambda device: 3
    return fused_launch.relaunch(*place, 1, rows.data_ptr(), 0)


def failing() -> dict[str, Any]:
    """A launcher that refuses a direct launch, then any."""
    tensor = torch.arange(64.0).to(torch.float64)
    table = FusedTable("cpu")
    for _ in range(3):
        table.add(tensor, True)
    FAILING.append("direct")
    gave_way = _directly(table, tensor)
    FAILING.clear()
    never_again = _directly(table, tensor)
    before = table.failure
    FAILING.append("ordinary")
    after = _directly(table, tensor)
    FAILING.clear()
    # Nothing has run: rows of the kernel are untouched, the last is measured in several passes.
    last = [float(number) for number in table.drain()[-1][5:7]]
    failures = [before, table.failure]
    return {"gave way": gave_way, "never again": never_again, "after": after, "failures": failures, "last": last}


def main() -> None:
    driver.set_active(Driver())
    found = {"beside triton": beside_triton(), "watched": watched(), "failing": failing(), "elsewhere": elsewhere()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
