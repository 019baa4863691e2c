"""What a trace of five million events costs to look at: seconds and peak memory of each way, each in its own process.

Run from the root of the repository: `python -m benchmarks.large`, or some by name: `... info diff`. All together write
benchmarks/results/large-cpu.csv, one row a measure, and take a quarter of an hour. Peak memory is the
process's largest resident set; "imported" is what it has without a trace.
"""

from __future__ import annotations

import csv
import datetime
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np

from nantrace.events import EVENT, Columns, ModuleEntry, Phase, Role, Site
from nantrace.store import TraceWriter

EVENTS, SITES, STEP = 5_000_000, 10_000, 50_000
RESULTS = Path(__file__).parent / "results" / "large-cpu.csv"
COLUMNS = ("measure", "seconds", "peak_mb", "events", "machine", "python", "numpy", "h5py", "date")

LOAD = "import nantrace; trace = nantrace.load(sys.argv[1]); "
COMMAND = "from nantrace.cli import main; main([{}], standalone_mode=False)"
MEASURES = {
    "imported": "import nantrace, nantrace.store, nantrace.api",
    "load": LOAD,
    "nonfinite()": LOAD + "print(len(trace.nonfinite()), file=sys.stderr)",
    "module().step()": LOAD + "print(len(trace.module('block.1*').step(3)), file=sys.stderr)",
    "to_frame()": LOAD + "print(len(trace.to_frame()), file=sys.stderr)",
    "info": COMMAND.format("'info', sys.argv[1]"),
    "diff": COMMAND.format("'diff', sys.argv[1], sys.argv[1]"),
    "export csv": COMMAND.format("'export', sys.argv[1], '--to', 'csv'"),
    "export parquet": COMMAND.format("'export', sys.argv[1], '--to', 'parquet'"),
    "export tensorboard": COMMAND.format("'export', sys.argv[1], '--to', 'tensorboard'"),
    "export chrome-trace": COMMAND.format("'export', sys.argv[1], '--to', 'chrome-trace'"),
}
MEASURE = """
import os, sys, time
sys.stdout = open(os.devnull, "w")
began = time.perf_counter()
exec(sys.argv[2])
seconds = time.perf_counter() - began
# Not ru_maxrss, which a child inherits from the process that forked it.
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(seconds, int(peak) / 1024, file=sys.__stdout__)
"""


def write(path: Path) -> None:
    """A hundred steps of ten thousand sites, one row in a thousand nonfinite."""
    sites = [Site(f"block.{n}", Phase.FORWARD, Role.OUTPUT, "output[0]", "float16", (8, 128)) for n in range(SITES)]
    made = np.zeros(STEP, EVENT)
    made["site"], made["call"] = np.arange(STEP) % SITES, np.arange(1, STEP + 1)
    made["numel"] = made["finite"] = 1024
    made["nan"][::1000], made["finite"][::1000] = 1, 1023
    made["first_bad"] = np.where(made["nan"] > 0, 5, -1)
    made["min"], made["max"], made["absmin"] = -np.pi, np.e, np.nan
    made["columns"] = int(Columns.FIRST_BAD)
    with TraceWriter(path, modules=[ModuleEntry(site.module or "", "Block") for site in sites]) as writer:
        writer.add_sites(sites)
        for step in range(EVENTS // STEP):
            made["step"], made["seq"] = step, np.arange(step * STEP + 1, (step + 1) * STEP + 1)
            made["call"] = made["seq"]
            writer.append(made)
            writer.add_step({"step": step, "first_seq": step * STEP + 1, "events": STEP, "loss": 1.0})
            writer.flush()


def main() -> None:
    chosen = sys.argv[1:] or list(MEASURES)
    machine = f"{platform.machine()} {platform.system()}"
    facts = (
        EVENTS,
        machine,
        platform.python_version(),
        np.__version__,
        h5py.__version__,
        datetime.date.today().isoformat(),
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.h5"
        write(path)
        for name in chosen:
            done = subprocess.run(
                [sys.executable, "-c", MEASURE, str(path), MEASURES[name]], capture_output=True, text=True, check=True
            )
            seconds, peak = map(float, done.stdout.split())
            rows.append((name, f"{seconds:.2f}", f"{peak:.0f}", *facts))
            print(f"{name:20} {seconds:8.2f} s {peak:8.0f} MB", flush=True)
            for made in Path(folder).glob("large.*"):
                if made != path and made.is_file():
                    print(f"{'':20} {made.stat().st_size / 2**20:8.0f} MB written", flush=True)
                    made.unlink()
            if len(chosen) == len(MEASURES):
                with open(RESULTS, "w", newline="") as file:  # after each: the whole takes many minutes
                    csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main()
