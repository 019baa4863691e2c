"""A trace whose events stay in their file says what the loaded one says, with few of its rows in memory at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from nantrace.diagnosis.difference.compare import compare
from nantrace.errors import NantraceError, TraceFormatError
from nantrace.events import EVENT, ModuleEntry, Phase, Role, Site
from nantrace.store import TraceWriter, lazy, load
from nantrace.store.lazy import StoredEvents, opened_lazily

SITES, STEP, STEPS = 50, 3_000, 30


def write(path: Path, missing: int = 0, bad: int = 0) -> Path:
    """Thirty steps; of each, rows at the end are missing; of one, `bad` rows are nonfinite."""
    sites = [Site(f"block.{n}", Phase.FORWARD, Role.OUTPUT, "output[0]", "float32", (8,)) for n in range(SITES)]
    made = np.zeros(STEP - missing, EVENT)
    made["site"], made["numel"], made["finite"] = np.arange(len(made)) % SITES, 8, 8
    made["min"], made["max"], made["first_bad"] = -1, np.arange(len(made)) % 7, -1
    with TraceWriter(path, modules=[ModuleEntry(site.module or "", "Block") for site in sites]) as writer:
        writer.add_sites(sites)
        for step in range(STEPS):
            rows = made.copy()
            rows["step"], rows["seq"] = step, np.arange(len(rows)) + step * len(rows) + 1
            rows["call"] = rows["seq"]
            if step == 21:
                rows["nan"][:bad], rows["finite"][:bad] = 1, 7
            writer.append(rows)
            writer.add_step({"step": step, "first_seq": int(rows["seq"][0]), "events": len(rows)})
    return path


def test_slices_and_columns_are_those_of_the_loaded_trace(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5")
    whole = load(path)
    with opened_lazily(path) as trace:
        assert len(trace) == len(whole) == STEP * STEPS
        for rows in (slice(0, 10), slice(65_530, 80_000), slice(89_000, None), slice(5, 5)):
            assert trace.events[rows].tobytes() == whole.events[rows].tobytes()
        for name in ("step", "site"):
            assert np.array_equal(trace.events[name], whole.events[name])
        assert (trace.sites, trace.modules, trace.meta) == (whole.sites, whole.modules, whole.meta)


@pytest.mark.parametrize(("missing", "bad"), [(0, 0), (0, 120), (7, 0), (1, 3)])
def test_two_traces_in_their_files_differ_as_two_loaded_ones_with_few_rows_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int, bad: int
) -> None:
    paths = write(tmp_path / "a.h5"), write(tmp_path / "b.h5", missing, bad)
    expected = compare(*map(load, paths))
    most: list[int] = []

    def read(events: StoredEvents, chosen: Any) -> Any:
        found = original(events, chosen)
        if isinstance(chosen, slice):
            most.append(len(found))
        return found

    original = StoredEvents.__getitem__
    monkeypatch.setattr(lazy.StoredEvents, "__getitem__", read)
    with opened_lazily(paths[0]) as a, opened_lazily(paths[1]) as b:
        assert compare(a, b) == expected
    assert expected.counts["nonfinite"] == bad and expected.a.only == missing * STEPS
    assert sum(most) > 2 * STEP * STEPS and max(most) < 65_536 + STEP


def test_of_a_damaged_table_the_valid_rows_count(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        row = file["events"][70_000]
        row["site"] = SITES
        file["events"][70_000] = row
    with opened_lazily(path) as trace:
        assert len(trace) == 70_000 == len(load(path)) and len(trace.events[69_990:80_000]) == 10


def test_what_is_no_trace_is_refused_as_by_load_and_other_exceptions_pass(tmp_path: Path) -> None:
    (tmp_path / "text.h5").write_text("no trace")
    with pytest.raises(TraceFormatError, match="it is not an HDF5 file"), opened_lazily(tmp_path / "text.h5"):
        pass
    with pytest.raises(NantraceError, match="does not exist"), opened_lazily(tmp_path / "none.h5"):
        pass
    with pytest.raises(OSError, match="of the caller"), opened_lazily(write(tmp_path / "a.h5")):
        raise OSError("of the caller")
