"""What the trace file costs: rows a second, bytes a row, time to load, and how many killed writers left it whole.

Run from the root of the repository: `python -m benchmarks.storage`. Writes benchmarks/results/storage-cpu.csv: one row
a measure with its 20th, 50th and 80th percentile. Rates are of one process, into the folder for temporary files.
"""

from __future__ import annotations

import csv
import datetime
import platform
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

from nantrace.events import Phase, Role, Site
from nantrace.store import TraceWriter, load
from tests.store.flat_out import rows
from tests.store.killing import check_survivor, kill_a_writer

COLUMNS = ("measure", "unit", "p20", "p50", "p80", "repeats", "machine", "python", "numpy", "h5py", "hdf5", "date")
REPEATS = 9
ROWS = 1_000_000
KILLS = 100
RESULTS = Path(__file__).parent / "results" / "storage-cpu.csv"
SITES = [Site(f"block.{number}", Phase.FORWARD, Role.OUTPUT, "output[0]", "float16", (8, 128)) for number in range(64)]


def write(path: Path, batches: list[np.ndarray], flush_every: int | None) -> float:
    """Writes a trace; seconds from the first row to the closed file."""
    with TraceWriter(path, overwrite=True) as writer:
        writer.add_sites(SITES)
        begin = time.perf_counter()
        for number, batch in enumerate(batches, 1):
            writer.append(batch)
            if flush_every and number % flush_every == 0:
                writer.flush()
        writer.close()
        return time.perf_counter() - begin


def rate(path: Path, count: int, batch: int, flush_every: int | None) -> Callable[[], float]:
    made = rows(1, count, len(SITES))
    batches = [made[at : at + batch] for at in range(0, count, batch)]
    return lambda: count / write(path, batches, flush_every)


def seconds_to_load(path: Path) -> float:
    begin = time.perf_counter()
    trace = load(path)
    assert len(trace) == ROWS
    return time.perf_counter() - begin


def killed_and_whole(folder: Path) -> int:
    """How many of `KILLS` writers, killed at random moments, left a file with every flushed row, each of them right."""
    moments = random.Random(1)
    whole = 0
    for number in range(KILLS):
        path = folder / f"{number}.h5"
        flushed, steps = kill_a_writer(path, min(1.0, moments.expovariate(6)))
        try:
            check_survivor(path, flushed, steps)
            whole += 1
        except Exception as error:
            print(f"kill {number}, {flushed} rows flushed: {error!r}")
        path.unlink()
    return whole


def main() -> None:
    measures: list[tuple[str, str, list[float]]] = []

    def measure(name: str, unit: str, values: list[float]) -> None:
        measures.append((name, unit, values))
        low, middle, high = np.percentile(values, [20, 50, 80])
        print(f"{name}: {middle:,.4g} {unit} ({low:,.4g} to {high:,.4g})", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.h5"
        for name, count, batch, flush_every in (
            ("write, batches of 64", ROWS, 64, None),
            ("write, batches of 64, flush every 1024 rows", ROWS, 64, 16),
            ("write, batches of 64, flush each", ROWS // 5, 64, 1),
            ("write, batches of 1024", ROWS, 1024, None),
        ):
            once = rate(path, count, batch, flush_every)
            measure(name, "rows/s", [once() for _ in range(REPEATS)])
        measure("size of a closed file of 1000000 rows", "bytes/row", [path.stat().st_size / ROWS])
        measure("load 1000000 rows", "s", [seconds_to_load(path) for _ in range(REPEATS)])
        measure(f"whole files after {KILLS} SIGKILLs", "files", [killed_and_whole(Path(folder))])
    save(measures)


def save(measures: list[tuple[str, str, list[float]]]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    versions = [platform.python_version(), np.__version__, h5py.__version__, h5py.version.hdf5_version]
    with RESULTS.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for name, unit, values in measures:
            percentiles = [f"{value:.6g}" for value in np.percentile(values, [20, 50, 80])]
            table.writerow(
                [
                    name,
                    unit,
                    *percentiles,
                    len(values),
                    f"{platform.machine()} CPU",
                    *versions,
                    datetime.date.today().isoformat(),
                ]
            )


if __name__ == "__main__":
    main()
