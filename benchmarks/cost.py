"""The table of the README that says what tracing costs, made from the rows in benchmarks/results/.

    python -m benchmarks.cost

writes it into README.md, between its two marks. A row of the table whose measure is missing is left out.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- cost: made by python -m benchmarks.cost -->\n", "<!-- end of cost -->"

Row = Mapping[str, str]

#: (file, column that names a measure, its name, what the README calls it, how its figure is written)
_STEP = "overhead-cpu.csv"
_MEASURES: tuple[tuple[str, str, str, str, Callable[[Row], str]], ...] = (
    (_STEP, "name", "nantrace imported, off", "imported, not tracing", lambda row: _times(row["p50"])),
    (_STEP, "name", "nantrace ledger only", 'the ledger alone (`stats="none"`)', lambda row: _times(row["p50"])),
    (
        _STEP,
        "name",
        "nantrace all modules",
        "every module, forward and backward, parameters, gradients, moments, file included",
        lambda row: _times(row["p50"]),
    ),
    (
        "oppass-cpu.csv",
        "name",
        "op pass, GPT-2-like step",
        "every op, with the flow of nonfinite values (`ops=True`)",
        lambda row: _times(row["p50"]),
    ),
    (_STEP, "name", "torch detect_anomaly", "`torch.autograd.detect_anomaly`", lambda row: _times(row["p50"])),
    (
        _STEP,
        "name",
        "transformers DebugUnderflowOverflow",
        "`DebugUnderflowOverflow` of `transformers` (forward only)",
        lambda row: _times(row["p50"]),
    ),
    (
        _STEP,
        "name",
        "msprobe statistics, modules",
        "`mindstudio-probe`, statistics of modules (L0)",
        lambda row: _times(row["p50"]),
    ),
    (
        _STEP,
        "name",
        "torchlens, the forward alone",
        "`torchlens`, one logged forward without the rest of the step",
        lambda row: _times(row["p50"]),
    ),
    (
        _STEP,
        "name",
        "naive dispatch mode",
        "a dispatch mode that asks each output `isfinite().all()`",
        lambda row: _times(row["p50"]),
    ),
    (
        "bisection-cpu.csv",
        "model",
        "GPT-2 like, 6 layers of 256",
        "`nantrace.bisect` in all, everything put back after each replay",
        lambda row: f"{float(row['multiple']):.1f} steps, {row['replays']} replays",
    ),
    (
        _STEP,
        "name",
        "cost of a recorded tensor, file included",
        "a recorded tensor, if tiny",
        lambda row: f"{float(row['p50']):.0f} microseconds",
    ),
    (
        "oppass-cpu.csv",
        "name",
        "op pass, tiny tensors",
        "an op of the op pass, if tiny",
        lambda row: f"{float(row['p50']):.0f} microseconds",
    ),
    (
        "storage-cpu.csv",
        "measure",
        "size of a closed file of 1000000 rows",
        "the file, a recorded tensor",
        lambda row: f"{float(row['p50']):.0f} bytes",
    ),
    (
        "storage-cpu.csv",
        "measure",
        "load 1000000 rows",
        "`nantrace.load` of a million recorded tensors",
        lambda row: f"{float(row['p50']):.2f} s",
    ),
)


def table() -> str:
    """The table in Markdown with the machine above it, ended by a line feed."""
    bare = _row(_STEP, "name", "bare step")
    lines = [f"Medians of {bare['date']} on {bare['device']}, torch {bare['torch']}:", ""] if bare is not None else []
    lines += ["| what | cost |", "|---|---|"]
    for file, column, name, told, figure in _MEASURES:
        row = _row(file, column, name)
        if row is not None:
            lines.append(f"| {told} | {figure(row)} |")
    return "\n".join(lines) + "\n"


def refreshed(readme: str) -> str:
    """The README's text with the table of now.

    Raises:
        ValueError: the text has no marks for it.
    """
    marked = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not marked.search(readme):
        raise ValueError(f"the text has no {BEGIN.strip()!r} with {END!r} behind it.")
    return marked.sub(lambda _: BEGIN + "\n" + table() + "\n" + END, readme)


def _row(file: str, column: str, name: str) -> Row | None:
    """The last row of that name: files of results grow at their end."""
    with open(RESULTS / file, newline="") as rows:
        return {row[column]: row for row in csv.DictReader(rows)}.get(name)


def _times(ratio: str) -> str:
    return f"{float(ratio):.2f} of a bare step"


if __name__ == "__main__":
    README.write_text(refreshed(README.read_text(encoding="utf-8")), encoding="utf-8")
    print(table(), end="")
