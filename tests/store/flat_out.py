"""Writes a trace flat out until it is killed; a process of its own. Prints how many rows each returned flush holds.

Imports no torch. Row `seq` holds `seq` in `numel`, `-seq` in `first_bad` and site `seq % known sites`, so that whoever
opens the file can tell a right row from a torn one.
"""

from __future__ import annotations

import sys

import numpy as np

from nantrace.events import EVENT, ModuleEntry, Phase, Role, Site
from nantrace.store import TraceWriter

BATCH = 64


def site(number: int) -> Site:
    return Site(
        f"block.{number}.\N{GREEK SMALL LETTER MU}", Phase.FORWARD, Role.OUTPUT, "output[0]", "float16", (number, 2)
    )


def rows(first: int, count: int, sites: int) -> np.ndarray:
    made = np.zeros(count, EVENT)
    made["seq"] = made["numel"] = np.arange(first, first + count)
    made["first_bad"] = -made["seq"].astype(np.int64)
    made["site"] = made["seq"] % sites
    made["min"] = np.nan
    made["max"] = made["seq"]
    return made


def write(path: str) -> None:
    writer = TraceWriter(path, modules=[ModuleEntry("", "Model")], meta={"numpy": np.__version__})
    sites = written = steps = 0
    print(0, 0, flush=True)
    while True:
        if steps % 5 == 0:
            writer.add_sites([site(sites)])
            sites += 1
        writer.append(rows(written + 1, BATCH * (steps % 40 + 1), sites))
        written += BATCH * (steps % 40 + 1)
        writer.add_step({"step": steps, "loss": float("nan"), "rows": written}, whole=steps % 3 == 0)
        steps += 1
        writer.flush()
        print(written, steps, flush=True)


if __name__ == "__main__":
    if "torch" in sys.modules:
        raise SystemExit("the writer needs no torch")
    write(sys.argv[1])
