"""The rows of a benchmark that are measures with percentiles: made, printed, and written as CSV."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def row(name: str, unit: str, values: Sequence[float]) -> dict[str, Any]:
    """The 20th, 50th and 80th percentile of two values or more."""
    p20, _, _, p80 = statistics.quantiles(values, n=5)
    return {"name": name, "unit": unit, "p20": p20, "p50": statistics.median(values), "p80": p80, "n": len(values)}


def report(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Print rows that have the same columns, and put them in place of the file."""
    for each in rows:
        print("{name:44} {p20:9.3f} {p50:9.3f} {p80:9.3f} {unit}".format(**each))
    with open(out, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
