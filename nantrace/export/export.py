"""Which formats there are, where an export goes, and that it replaces nothing. Knows no format from within."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from nantrace.errors import TraceExistsError
from nantrace.events import Trace
from nantrace.export.blocks import Progress

Format = Literal["csv", "parquet", "tensorboard", "chrome-trace"]
FORMATS: tuple[Format, ...] = get_args(Format)

_SUFFIXES = {"csv": ".csv", "parquet": ".parquet", "tensorboard": ".tensorboard", "chrome-trace": ".trace.json"}


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: the file, or for "tensorboard" the folder.
        written: how much, in words: "884 rows".
        command: the command that shows it, if it is one for a terminal.
    """

    path: str
    written: str
    command: tuple[str, ...] | None = None


def default_path(trace_path: str, to: Format, step: int | None = None) -> str:
    """Beside the trace: "run.h5" becomes "run.csv", and "run.step3.csv" of step 3 alone."""
    of = "" if step is None else f".step{step}"
    return os.path.splitext(trace_path)[0] + of + _SUFFIXES[to]


def export(trace: Trace, to: Format, path: str | os.PathLike[str], progress: Progress = None) -> Exported:
    """Write a trace in another format, block by block: a trace of millions of events needs little more memory.

    Args:
        trace: whole, or narrowed to what is wanted.
        to: "csv" or "parquet", a table with one row an event; "tensorboard", the largest magnitude and the number of
            nonfinite elements of each site over the steps, and the ledger; "chrome-trace", the order of execution for
            chrome://tracing and Perfetto.
        path: a file, for "tensorboard" a folder, that does not exist yet. It is removed if writing fails.
        progress: told a line after each block of events.

    Raises:
        TraceExistsError: the path is taken.
        MissingExtraError: the library for the format is not installed.
        ValueError: there is no such format.
        OSError: the file cannot be written.
    """
    if to not in FORMATS:
        raise ValueError(f"a trace cannot be exported to {to!r}: pass one of {', '.join(map(repr, FORMATS))}.")
    name = os.fspath(path)
    if to == "csv":
        from nantrace.export.csv_table import write_csv

        with _new_file(name):
            return Exported(name, f"{write_csv(trace, name, progress):,} rows")
    if to == "parquet":
        from nantrace.export.parquet_table import library, write_parquet

        library()  # before a file is made in vain
        with _new_file(name):
            return Exported(name, f"{write_parquet(trace, name, progress):,} rows")
    if to == "tensorboard":
        from nantrace.export.scalars import protocol, write_scalars

        protocol()
        with _new_folder(name):
            points = write_scalars(trace, name, progress)
        return Exported(name, f"{points:,} points, one a site and step", ("tensorboard", "--logdir", name))
    from nantrace.export.chrome_trace import write_chrome_trace

    with _new_file(name):
        return Exported(
            name, f"{write_chrome_trace(trace, name, progress):,} slices, in order and not to scale in time"
        )


@contextlib.contextmanager
def _new_file(path: str) -> Iterator[None]:
    """Claims a path, so that nobody else's file is replaced, and gives it back if writing fails."""
    try:
        with open(path, "x"):
            pass
    except FileExistsError:
        raise _taken(path) from None
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


@contextlib.contextmanager
def _new_folder(path: str) -> Iterator[None]:
    try:
        os.mkdir(path)
    except FileExistsError:
        raise _taken(path) from None
    try:
        yield
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def _taken(path: str) -> TraceExistsError:
    return TraceExistsError(f"{path} exists already: choose another path with -o, or remove it.")
