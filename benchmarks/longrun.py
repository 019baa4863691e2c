"""What a long run costs: a file of a million steps to write, open and look at, and a step outside the sample.

Run from the root of the repository: `OMP_NUM_THREADS=1 python -m benchmarks.longrun`. Writes
benchmarks/results/longrun-cpu.csv. The million steps go through the writer, one in a thousand of them with events and
a line of JSON; nothing is trained. The steps that are trained are tiny, bare and traced in turns within one process:
what is added is the difference of neighbouring medians.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

import nantrace
from nantrace.events import ModuleEntry
from nantrace.store import TraceWriter, load
from tests.store.flat_out import rows, site

COLUMNS = (
    "measure",
    "unit",
    "p20",
    "p50",
    "p80",
    "repeats",
    "machine",
    "python",
    "numpy",
    "h5py",
    "hdf5",
    "torch",
    "date",
)
RESULTS = Path(__file__).parent / "results" / "longrun-cpu.csv"
STEPS, DETAILED, EVENTS = 1_000_000, 1000, 60
OPENINGS = 7
TRAINED, EVERY, KEPT, ROUNDS = 2000, 100, 3, 3
Measure = tuple[str, str, list[float]]


def a_step(number: int, seq: int, detailed: bool) -> dict[str, Any]:
    step = {
        "step": number,
        "first_seq": seq if detailed else 0,
        "events": EVENTS if detailed else 0,
        "attempted": 1,
        "committed": 1,
        "skipped": 0,
        "seconds": 0.1,
        "loss": 1.0 / (number + 1),
        "lr": 1e-3,
        "gradient_norm": 2.0,
        "scale_before": 65536.0,
        "scale_after": 65536.0,
    }
    more = {"losses": {"ce": 0.5, "kl": 0.5}, "notes": ["no gradient came: head output[0] (grad_output, 1)"]}
    return {**step, **more} if detailed else {**step, "detailed": False}


def write(path: Path) -> float:
    """Writes the million steps; seconds."""
    begin = time.perf_counter()
    with TraceWriter(path, modules=[ModuleEntry("", "Model")], meta={"torch": torch.__version__}) as writer:
        writer.add_sites([site(number) for number in range(EVENTS)])
        seq = 1
        for number in range(STEPS):
            detailed = number % DETAILED == 0
            if detailed:
                events = rows(seq, EVENTS, EVENTS)
                events["step"] = number
                writer.append(events)
            writer.add_step(a_step(number, seq, detailed), whole=detailed)
            if detailed:
                seq += EVENTS
                writer.flush()
    return time.perf_counter() - begin


def seconds_to_load(path: Path) -> float:
    begin = time.perf_counter()
    trace = load(path)
    assert len(trace.steps) == STEPS and trace.steps[STEPS // 2 + 1]["detailed"] is False
    return time.perf_counter() - begin


def cold(command: list[str]) -> tuple[float, float]:
    """A command in a process of its own: seconds, and MB at its largest."""
    code = (
        "import resource, subprocess, sys, time; begin = time.perf_counter();"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
        "print(time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], check=True, capture_output=True, text=True)
    seconds, size = map(float, done.stdout.split())
    return seconds, size


def trained(path: Path | None, keep_steps: int | None) -> tuple[list[float], list[float]]:
    """Seconds of each step, and MB of this process after each hundred."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(8)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(32, 64)
    traced = contextlib.nullcontext()
    if path is not None:
        traced = nantrace.trace(model, path, optimizer=optimizer, every=EVERY, keep_steps=keep_steps, overwrite=True)  # type: ignore[assignment]
    seconds, size = [], []
    with traced:
        for step in range(TRAINED):
            begin = time.perf_counter()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
            if step % 100 == 99:
                size.append(_resident())
    return seconds, size


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def outside_the_sample(seconds: list[float]) -> float:
    """Median microseconds of the steps that begin and end without a hook being placed or taken away."""
    return 1e6 * statistics.median(s for step, s in enumerate(seconds) if 2 <= step % EVERY <= EVERY - 2)


def million(folder: Path) -> list[Measure]:
    path = folder / "million.h5"
    written = write(path)
    loads = [seconds_to_load(path) for _ in range(OPENINGS)]
    infos = [cold([sys.executable, "-m", "nantrace", "info", str(path)]) for _ in range(OPENINGS)]
    idle = [cold([sys.executable, "-m", "nantrace", "--version"])[0] for _ in range(OPENINGS)]
    return [
        (f"write {STEPS} steps", "us/step", [1e6 * written / STEPS]),
        ("size of their file", "MB", [path.stat().st_size / 1e6]),
        ("open it", "s", loads),
        ("nantrace info, a process of its own", "s", [seconds for seconds, _ in infos]),
        ("nantrace info, memory at most", "MB", [size for _, size in infos]),
        ("nantrace --version, a process of its own", "s", idle),
    ]


def sampled(folder: Path) -> list[Measure]:
    path = folder / "tiny.h5"
    trained(None, None), trained(path, KEPT)  # warm
    bare, added, grown = [], [], []
    for _ in range(ROUNDS):
        before = outside_the_sample(trained(None, None)[0])
        seconds, size = trained(path, KEPT)
        after = outside_the_sample(trained(None, None)[0])
        bare.append((before + after) / 2)
        added.append(outside_the_sample(seconds) - bare[-1])
        grown.append(size[-1] - size[2])
    return [
        ("a tiny step, bare", "us", bare),
        (f"added to it outside the sample, every={EVERY}, keep_steps={KEPT}", "us", added),
        (f"growth of memory from step 300 to {TRAINED}", "MB", grown),
        ("size of the file", "MB", [path.stat().st_size / 1e6]),
    ]


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measures = [*sampled(Path(folder)), *million(Path(folder))]
    versions = [platform.python_version(), np.__version__, h5py.__version__, h5py.version.hdf5_version]
    with RESULTS.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for name, unit, values in measures:
            found = [f"{value:.5g}" for value in np.percentile(values, [20, 50, 80])]
            print(f"{name}: {found[1]} {unit} ({found[0]} to {found[2]})")
            machine = f"{platform.machine()} CPU"
            table.writerow(
                [
                    name,
                    unit,
                    *found,
                    len(values),
                    machine,
                    *versions,
                    torch.__version__,
                    datetime.date.today().isoformat(),
                ]
            )


if __name__ == "__main__":
    main()
