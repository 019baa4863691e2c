"""How long `nantrace report -o report.html` takes from a cold start, its memory, and how large the page gets.

Run `python -m benchmarks.page [ROUNDS]` from the root of the repository. Medians are printed, and the rows are
appended to `benchmarks/results/page.csv`.
"""

from __future__ import annotations

import csv
import datetime
import platform
import statistics
import sys
import tempfile
from pathlib import Path

import nantrace
from benchmarks.longrun import cold
from nantrace.events import Trace
from nantrace.store.writer import TraceWriter
from tests.render.drawn import wide

RESULTS = Path(__file__).parent / "results" / "page.csv"
SIZES = ((40, 50), (400, 50))  # modules, steps: 10,050 and 100,050 events


def write_trace(path: Path, trace: Trace) -> None:
    with TraceWriter(path, modules=trace.modules, meta=trace.meta) as writer:
        writer.add_sites(trace.sites)
        for step in trace.steps:
            first = step["first_seq"] - 1
            writer.append(trace.events[first : first + step["events"]])
            writer.add_step(step)


def measure(trace: Path, page: Path) -> tuple[float, float]:
    """Seconds and peak resident memory in MB of one run."""
    return cold([sys.executable, "-m", "nantrace.cli", "report", str(trace), "-o", str(page)])


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for modules, steps in SIZES:
            trace, path, page = wide(modules, steps, born=0.3), Path(folder) / f"{modules}.h5", Path(folder) / "r.html"
            write_trace(path, trace)
            runs = [measure(path, page) for _ in range(rounds)]
            seconds, memory = statistics.median(run[0] for run in runs), max(run[1] for run in runs)
            size = page.stat().st_size / 1e6
            print(f"{len(trace):8,} events: {seconds:.2f} s, {memory:.0f} MB of memory, a page of {size:.2f} MB")
            found.append([len(trace), modules, f"{seconds:.3f}", f"{memory:.0f}", f"{size:.3f}"])
    new = not RESULTS.exists()
    versions = [nantrace.__version__, platform.python_version(), platform.machine(), datetime.date.today().isoformat()]
    with open(RESULTS, "a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if new:
            head = ["events", "modules", "median_s", "peak_mb", "page_mb", "nantrace", "python", "machine", "date"]
            writer.writerow(head)
        writer.writerows([*row, *versions] for row in found)


if __name__ == "__main__":
    main()
