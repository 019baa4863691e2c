"""How long `nantrace report` takes from a cold start, in seconds, beside an interpreter that does nothing.

Run `python benchmarks/cli.py [ROUNDS]`. What is compared is taken in turn within one run; medians are printed, and the
rows are appended to `benchmarks/results/cli.csv`. The floor is what no report can do without: Python with NumPy, h5py
and click. The package is compiled to bytecode first, as an installer does; without that, as in a checkout where
PYTHONDONTWRITEBYTECODE is set, each start compiles it again.
"""

from __future__ import annotations

import compileall
import csv
import datetime
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import nantrace
from nantrace.events import EVENT, Columns, ModuleEntry, Phase, Role, Site
from nantrace.store.writer import TraceWriter

RESULTS = Path(__file__).parent / "results" / "cli.csv"


def write_trace(path: Path, layers: int) -> int:
    """A step of a deep model whose middle layer makes NaN, which everything after it holds. Returns its events."""
    sites, rows = [], []

    def row(module: str | None, phase: Phase, role: Role, slot: str, call: int, nan: int) -> None:
        sites.append(Site(module, phase, role, slot, "float32", (8, 64)))
        numbers = (512, 512 - nan, nan, 0, 0, -1.0, 1.0, np.nan, 0 if nan else -1, 0, 0, 0, Columns.FIRST_BAD)
        rows.append((len(rows) + 1, 0, len(rows), call, *numbers))

    for layer in range(layers):
        row(f"layers.{layer}", Phase.FORWARD, Role.PARAM, "weight", 0, 0)
    row("", Phase.FORWARD, Role.INPUT, "args[0]", layers + 1, 0)
    for layer in range(layers):
        row(f"layers.{layer}", Phase.FORWARD, Role.INPUT, "args[0]", layer + 1, layer > layers // 2)
        row(f"layers.{layer}", Phase.FORWARD, Role.OUTPUT, "output", layer + 1, layer >= layers // 2)
    row("", Phase.FORWARD, Role.OUTPUT, "output", layers + 1, 1)
    row(None, Phase.LOSS, Role.LOSS, "loss", 0, 1)
    for layer in reversed(range(layers)):
        row(f"layers.{layer}", Phase.BACKWARD, Role.GRAD_OUTPUT, "output", layer + 1, 1)
        row(f"layers.{layer}", Phase.BACKWARD, Role.GRAD, f"layers.{layer}.weight", 0, 1)
    for layer in range(layers):
        row(f"layers.{layer}", Phase.UPDATE, Role.PARAM, "weight", 0, 1)
    modules = [ModuleEntry("", "Net"), *(ModuleEntry(f"layers.{layer}", "Linear") for layer in range(layers))]
    with TraceWriter(path, modules=modules, overwrite=True) as writer:
        writer.add_sites(sites)
        writer.append(np.array(rows, EVENT))
        writer.add_step({"step": 0, "first_seq": 1, "events": len(rows)})
    return len(rows)


def seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    found = []
    versions = [nantrace.__version__, platform.python_version(), platform.machine()]
    today = datetime.date.today().isoformat()
    compileall.compile_dir(str(Path(nantrace.__file__).parent), quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        for layers in (16, 700):
            path = Path(folder) / f"{layers}.h5"
            events = write_trace(path, layers)
            report = [sys.executable, "-m", "nantrace.cli", "report", str(path)]
            nothing = [sys.executable, "-c", "pass"]
            floor = [sys.executable, "-c", "import numpy, h5py, click"]
            taken = [(seconds(report), seconds(floor), seconds(nothing)) for _ in range(rounds)]
            low, middle, high = np.percentile([turn[0] for turn in taken], [20, 50, 80])
            imported, idle = (statistics.median(turn[at] for turn in taken) for at in (1, 2))
            print(
                f"{events:6,} events: report {middle:.2f} s ({low:.2f} to {high:.2f}), "
                f"NumPy, h5py and click alone {imported:.2f} s, idle interpreter {idle:.3f} s"
            )
            seconds_of = [f"{value:.3f}" for value in (middle, low, high, idle)]
            found.append([events, *seconds_of, *versions, f"{imported:.3f}", today])
    new = not RESULTS.exists()
    with open(RESULTS, "a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if new:
            head = [
                "events",
                "median_s",
                "p20_s",
                "p80_s",
                "idle_s",
                "nantrace",
                "python",
                "machine",
                "floor_s",
                "date",
            ]
            writer.writerow(head)
        writer.writerows(found)


if __name__ == "__main__":
    main()
