"""What Python takes to have a tensor measured on a CUDA device, beside the ordinary launch of a Triton kernel.

Without a GPU it measures Python's share alone: the kernels are compiled for a Hopper, and in place of the driver's
launcher stands one that does nothing. What is missing then is the launcher itself, in C, and all that PyTorch does for
a real device (asking for the current stream and device, a copy of the addresses of small tensors from pinned memory).
With --device cuda the same calls launch; the device's own work is waited for outside the clock.

Tensors have 64 elements. Each repetition times all cases in turn, so that a ratio compares neighbours in time.

    python benchmarks/launch.py [--device cuda] [--repetitions 25] [--out benchmarks/results/launch-cpu.csv]
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from rows import report, row
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import nantrace
from nantrace.stats import fused_launch
from nantrace.stats.fused import UNTOUCHED, WIDTH, row_kernel
from nantrace.stats.fused_table import FusedTable

_TIMES = 256  # launches a repetition
_TENSORS = 256  # of a launch that small tensors share
_ELEMENTS = 64


class NoLauncher:
    """In place of the driver's launcher."""

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        pass


class NoDriver:
    """Triton's driver of a Hopper that is not there; also what loads a kernel into it."""

    launcher_cls = NoLauncher

    def __init__(self) -> None:
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return -1  # as of a tensor on the CPU

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 17}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 32, 0, 1024


def cases(device: str) -> dict[str, tuple[Callable[[], object], int]]:
    """Name -> (what a repetition does once or several times, how many tensors that measures)."""
    tensor = torch.randn(_ELEMENTS, device=device)
    transposed = torch.randn(8, _ELEMENTS // 8, device=device).t()
    many = [torch.randn(_ELEMENTS, device=device) for _ in range(_TENSORS)]
    table = FusedTable(device)
    rows = torch.tensor([UNTOUCHED] * _TENSORS, dtype=torch.int64, device=device)
    assert rows.shape[1] == WIDTH
    variant = fused_launch._variant(tensor.dtype, 0)
    by_triton = (tensor.view(variant.bits), rows, 0, _ELEMENTS, *fused_launch.FLAT, *variant.constants)

    def add_all() -> None:
        table.add_all(many, True)

    return {
        "FusedTable.add": (_repeated(lambda: table.add(tensor, True), table), _TIMES),
        "FusedTable.add of a transposed tensor": (_repeated(lambda: table.add(transposed, True), table), _TIMES),
        "FusedTable.add_all": (_repeated(add_all, table, 1), _TENSORS),
        "launch": (_repeated(lambda: fused_launch.launch(tensor, _ELEMENTS, rows, 0)), _TIMES),
        "launch_batch": (_repeated(lambda: fused_launch.launch_batch(many, rows, 0), times=1), _TENSORS),
        "JITFunction.run": (
            _repeated(lambda: row_kernel[(1, 1)](*by_triton, num_warps=fused_launch.WARPS)),
            _TIMES,
        ),
    }


def _repeated(do: Callable[[], object], table: FusedTable | None = None, times: int = _TIMES) -> Callable[[], float]:
    """Does it some times; the seconds of this thread that took, without what empties the table."""

    def timed() -> float:
        start = time.thread_time()
        for _ in range(times):
            do()
        taken = time.thread_time() - start
        if table is not None:
            table.drain()
        return taken

    return timed


def measured(device: str, repetitions: int) -> list[dict[str, Any]]:
    """Microseconds a tensor of each case, and their ratios to the ordinary launch beside it."""
    chosen = cases(device)
    micros: dict[str, list[float]] = {name: [] for name in chosen}
    for repetition in range(repetitions + 2):
        for name, (timed, tensors) in chosen.items():
            seconds = timed()
            if device == "cuda":
                torch.cuda.synchronize()
            if repetition >= 2:  # the first ones compile, and are watched
                micros[name].append(seconds / tensors * 1e6)
    ordinary = micros["JITFunction.run"]
    found = [row(name, "us a tensor", values) for name, values in micros.items()]
    for name in ("FusedTable.add", "launch"):
        ratios = [ours / theirs for ours, theirs in zip(micros[name], ordinary, strict=True)]
        found.append(row(f"{name} to JITFunction.run", "ratio", ratios))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--out", type=Path, help="CSV file; default benchmarks/results/launch-DEVICE.csv")
    options = parser.parse_args()
    if options.device == "cpu":
        driver.set_active(NoDriver())
    where = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()}, no GPU",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "nantrace": nantrace.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    rows = [{**each, **where} for each in measured(options.device, options.repetitions)]
    report(rows, options.out or Path(__file__).parent / "results" / f"launch-{options.device}.csv")


if __name__ == "__main__":
    main()
