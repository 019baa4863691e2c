"""Kills a writer with SIGKILL and looks at what it left."""

import os
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np

from nantrace.events import EVENT
from nantrace.store import load
from tests.store.flat_out import rows, site

ROOT = Path(__file__).parents[2]
# One thread each: the kill should land in the writer, not in a pool being started.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def kill_a_writer(path: Path, after: float) -> tuple[int, int]:
    """Starts a writer, kills it `after` seconds into its writing, and returns the rows and steps of its last flush."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.store.flat_out", str(path)], stdout=subprocess.PIPE, cwd=ROOT, env=ENVIRONMENT
    )
    assert child.stdout is not None
    said = child.stdout.readline()  # from here on it writes
    end = time.monotonic() + after
    os.set_blocking(child.stdout.fileno(), False)
    while time.monotonic() < end:  # a full pipe would hold the writer up between two flushes
        said += child.stdout.read() or b""
    child.kill()
    child.wait()
    said += child.stdout.read() or b""
    child.stdout.close()
    whole = said[: said.rindex(b"\n")].split(b"\n")
    flushed, steps = whole[-1].split()
    return int(flushed), int(steps)


def check_survivor(path: Path, flushed: int, steps: int) -> None:
    with h5py.File(path, "r") as file:
        count = int(file["committed"][()]["events"])
        plain = file["events"][:count]
    trace = load(path)
    assert len(trace) >= flushed, f"{flushed} rows were flushed, {len(trace)} are there"
    assert len(trace.steps) >= steps
    assert trace.events.tobytes() == plain.tobytes()
    assert not trace.complete
    expected = rows(1, len(trace), 1)
    for name in EVENT.names or ():
        if name != "site":
            assert np.array_equal(trace.events[name], expected[name], equal_nan=name == "min"), name
    assert trace.sites == tuple(site(number) for number in range(len(trace.sites)))
    assert [step["step"] for step in trace.steps] == list(range(len(trace.steps)))
    assert ["rows" in step for step in trace.steps] == [number % 3 == 0 for number in range(len(trace.steps))]
