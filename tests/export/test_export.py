"""Exports, read back with the tools they are made for."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nantrace.cli.reading import export as command
from nantrace.errors import MissingExtraError, TraceExistsError
from nantrace.events import EVENT, Columns, Phase, Role, Site, Trace
from nantrace.export import blocks
from nantrace.export.csv_table import guarded
from nantrace.export.export import FORMATS, Format, default_path, export
from nantrace.frame import BEFORE, BEHIND, SITE_COLUMNS
from tests.diagnosis.written import NAN, Written
from tests.test_cli import run, stored

HOSTILE = [
    "=1+1", "+1", "-1", "@SUM(A1)", "'=1", "\t=1", "\r=1", "=cmd|' /C calc'!A0", "\uff1d1", "a,b", 'say "x"', "a\nb",
    "\ud800", "\x00", "\u202e", "</script>", "",
]  # fmt: skip


def steps(names: list[str] | None = None) -> Trace:
    """Two steps of a model with a nonfinite module, of which the second call is the bad one."""
    written = Written("float16")
    for number in range(2):
        if number:
            written.end(loss=0.5, lr=(1e-3, 1e-4), seconds=0.25)
        with written.call("", made=NAN):
            written.run("block.norm", made={"size": 3.0})
            written.run("block.norm", made={"posinf": 2, "size": 7.0})
        for name in names or ():
            written.run(name)
        written.loss(nan=1)
    return written.trace()


def measured(trace: Trace) -> Trace:
    """The same with every extended column measured in the first row alone."""
    trace.events["columns"][0] = int(Columns.full())
    trace.events["absmin"][0] = 0.125
    return trace


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_names_for_ids_and_empty_cells_for_what_is_not_there(tmp_path: Path) -> None:
    trace = measured(steps())
    done = export(trace, "csv", tmp_path / "step.csv")
    rows = rows_of(tmp_path / "step.csv")
    assert done.written == f"{len(trace)} rows" and len(rows) == len(trace)
    assert list(rows[0]) == [*BEFORE, *SITE_COLUMNS, *BEHIND]
    assert {name: rows[0][name] for name in ("module", "phase", "role", "dtype", "shape", "zero", "absmin")} == {
        "module": "(model)", "phase": "forward", "role": "input", "dtype": "float16", "shape": "[2, 4]", "zero": "0",
        "absmin": "0.125",
    }  # fmt: skip
    bad = rows[4]
    assert (bad["module"], bad["posinf"], bad["first_bad"], bad["max"], bad["min"]) == (
        "block.norm", "2", "6", "7.0", "-7.0"
    )  # fmt: skip
    assert (bad["zero"], bad["absmin"], bad["op"], rows[1]["first_bad"]) == ("", "", "", "")
    assert rows[-1]["module"] == "" and rows[-1]["role"] == "loss"


def test_csv_and_frame_tell_the_same_numbers(tmp_path: Path) -> None:
    trace = measured(steps())
    export(trace, "csv", tmp_path / "step.csv")
    read = pandas.read_csv(tmp_path / "step.csv", keep_default_na=False, na_values=[""])
    frame = trace.to_frame()
    for name in (*BEFORE, *BEHIND):
        assert read[name].astype("float64").tolist() == pytest.approx(
            frame[name].astype("float64").tolist(), nan_ok=True, abs=0, rel=0
        )


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_cell_of_a_csv_begins_as_a_formula_and_names_come_back(name: str, tmp_path: Path) -> None:
    export(steps([name]), "csv", tmp_path / "step.csv")
    rows = rows_of(tmp_path / "step.csv")
    for row in rows:
        assert not any(
            row[column].startswith(("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d")) for column in SITE_COLUMNS
        )
    if name.isprintable() and name:
        assert {row["module"].removeprefix("'") for row in rows} >= {name}
    assert rows[1]["min"].startswith("-") or rows[0]["min"].startswith("-")  # numbers stay numbers


@given(st.text())
@settings(deadline=None, max_examples=100)
def test_the_guard_can_be_taken_away(text: str) -> None:
    assert guarded(text).removeprefix("'") == text
    assert guarded(text) == text or guarded(text)[0] == "'"


def test_parquet_keeps_types_nulls_and_texts(tmp_path: Path) -> None:
    trace = measured(steps(["\ud800"]))
    export(trace, "parquet", tmp_path / "step.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "step.parquet")
    assert table.num_rows == len(trace)
    read = table.to_pydict()
    assert str(table.schema.field("numel").type) == "uint64" and str(table.schema.field("min").type) == "double"
    assert read["module"][0] == "" and read["module"][-1] is None and "\\ud800" in read["module"]
    assert read["phase"][0] == "forward" and read["posinf"][4] == 2
    assert read["zero"][:2] == [0, None] and read["first_bad"][3:5] == [None, 6]


@pytest.mark.parametrize("rows", [1, 2, 7, 100])
def test_blocks_of_any_size_give_the_same_tables(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = measured(steps(["\u5c42", "=1"]))
    forms: tuple[Format, ...] = ("csv", "chrome-trace")
    for form in forms:
        export(trace, form, tmp_path / f"whole.{form}")
    export(trace, "parquet", tmp_path / "whole.parquet")
    monkeypatch.setattr(blocks, "_ROWS", rows)
    for form in forms:
        export(trace, form, tmp_path / f"parts.{form}")
        assert (tmp_path / f"parts.{form}").read_bytes() == (tmp_path / f"whole.{form}").read_bytes()
    export(trace, "parquet", tmp_path / "parts.parquet")
    whole, parts = (pyarrow.parquet.read_table(tmp_path / f"{name}.parquet") for name in ("whole", "parts"))
    assert parts.to_pydict() == whole.to_pydict()
    export(trace, "tensorboard", tmp_path / "parts")
    assert scalars(tmp_path / "parts")["absmax forward/block.norm output"] == [(0, 7.0), (1, 7.0)]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard's own reader finds."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.iterdir()):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_tensorboard_gets_one_point_a_site_and_step(tmp_path: Path) -> None:
    trace = steps()
    done = export(trace, "tensorboard", tmp_path / "curves")
    found = scalars(tmp_path / "curves")
    assert found["absmax forward/block.norm output"] == [(0, 7.0), (1, 7.0)]
    assert found["nonfinite forward/block.norm output"] == [(0, 2.0), (1, 2.0)]
    assert found["nonfinite loss/loss"] == [(0, 1.0), (1, 1.0)]
    assert "nonfinite forward/block.norm input args[0]" not in found
    assert found["ledger/loss"] == [(0, 0.5)] and found["ledger/lr/1"] == [(0, pytest.approx(1e-4))]
    assert done.written.startswith(f"{sum(map(len, found.values()))} points")
    assert done.command == ("tensorboard", "--logdir", str(tmp_path / "curves"))


def test_tensorboard_files_name_no_host(tmp_path: Path) -> None:
    export(steps(), "tensorboard", tmp_path / "curves")
    assert [path.name for path in (tmp_path / "curves").iterdir()] == ["events.out.tfevents.0000000000.nantrace"]


def test_a_magnitude_beyond_float32_is_drawn_at_its_end(tmp_path: Path) -> None:
    written = Written("float64")
    written.run("block", made={"size": 1e300})
    export(written.trace(), "tensorboard", tmp_path / "curves")
    [(_, value)] = scalars(tmp_path / "curves")["absmax forward/block output"]
    assert 3.4e38 < value < float("inf")


def test_a_chrome_trace_nests_calls_and_keeps_the_order(tmp_path: Path) -> None:
    trace = steps(["</script>"])
    export(trace, "chrome-trace", tmp_path / "step.json")
    found = strict(tmp_path / "step.json")
    slices = [entry for entry in found["traceEvents"] if entry["ph"] == "X"]
    tensors = [entry for entry in slices if entry["cat"] != "call"]
    assert [entry["ts"] for entry in tensors] == trace.events["seq"].tolist()
    red = [entry["ts"] for entry in tensors if entry.get("cname") == "terrible"]
    assert red == trace.nonfinite().events["seq"].tolist()
    calls = [(entry["name"], entry["ts"], entry["dur"]) for entry in slices if entry["cat"] == "call"]
    assert calls[:3] == [("(model)", 1, 6), ("block.norm", 2, 2), ("block.norm", 4, 2)]
    assert tensors[4]["args"] | {"posinf": 2, "dtype": "float16", "max": 7.0} == tensors[4]["args"]
    assert found["otherData"]["ts"].startswith("one microsecond is one event")


def strict(path: Path) -> Any:
    return json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@st.composite
def tangled(draw: st.DrawFn) -> Trace:
    """Rows of calls that need not nest."""
    sites = tuple(Site(f"m{n}", Phase.FORWARD, Role.OUTPUT, "output", "float32", ()) for n in range(3))
    events = np.zeros(draw(st.integers(0, 20)), EVENT)
    events["seq"] = np.arange(1, len(events) + 1)
    for row in events:
        row["call"], row["site"] = draw(st.integers(0, 4)), draw(st.integers(0, 2))
        row["min"], row["max"] = draw(st.floats()), np.nan
    return Trace(events, sites)


@given(tangled())
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_slices_of_a_thread_always_nest(tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
    path = tmp_path_factory.mktemp("chrome") / "step.json"
    export(trace, "chrome-trace", path)
    slices = [(e["ts"], e["ts"] + e["dur"]) for e in strict(path)["traceEvents"] if e["ph"] == "X"]
    for begin, end in slices:
        assert end > begin
        assert not any(begin < other < end < last for other, last in slices)


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_is_replaced(form: Format, tmp_path: Path) -> None:
    export(steps(), form, tmp_path / "out")
    kept = (tmp_path / "out").stat().st_mtime_ns
    with pytest.raises(TraceExistsError, match="out exists already: choose another path with -o, or remove it"):
        export(steps(), form, tmp_path / "out")
    assert (tmp_path / "out").stat().st_mtime_ns == kept


@pytest.mark.parametrize("form", FORMATS)
def test_a_trace_without_events_gives_an_empty_export(form: Format, tmp_path: Path) -> None:
    export(Trace(np.zeros(0, EVENT), ()), form, tmp_path / "out")
    assert (tmp_path / "out").exists()


@pytest.mark.parametrize("form", FORMATS)
def test_what_fails_half_way_leaves_nothing(form: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(trace: Trace, progress: Any = None) -> Any:
        raise OSError(28, "No space left on device")

    for room in ("csv_table", "parquet_table", "scalars", "chrome_trace"):
        monkeypatch.setattr(f"nantrace.export.{room}.blocks", fail)
    with pytest.raises(OSError, match="No space left"):
        export(steps(), form, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("form", "package"), [("parquet", "pyarrow"), ("tensorboard", "tensorboard")])
def test_a_missing_library_is_one_sentence_with_the_command(
    form: Format, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"needs {package}, which cannot be imported: pip install {package}\."):
        export(steps(), form, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_format_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be exported to 'xlsx': pass one of 'csv', 'parquet'"):
        export(steps(), "xlsx", tmp_path / "out")  # type: ignore[arg-type]


# The command.


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return stored(steps(), tmp_path / "a step.h5")


@pytest.mark.parametrize("form", FORMATS)
def test_the_command_writes_beside_the_trace_and_says_what_next(file: Path, form: Format) -> None:
    done = run("export", file, "--to", form)
    target = default_path(str(file), form)
    assert (done.exit_code, done.stdout) == (0, "") and Path(target).exists()
    wrote, command = done.stderr.rstrip("\n").split("\n")
    assert wrote.startswith(f"Wrote {target}: ")
    assert command.startswith("Next: tensorboard --logdir '" if form == "tensorboard" else "Next: nantrace report '")
    again = run("export", file, "--to", form)
    assert (again.exit_code, again.stderr.count("\n")) == (3, 1) and "exists already" in again.stderr


@pytest.mark.parametrize("form", FORMATS)
def test_the_command_writes_one_step_under_a_name_of_its_own(file: Path, form: Format) -> None:
    done = run("export", file, "--to", form, "--step", "1")
    target = default_path(str(file), form, 1)
    assert (done.exit_code, done.stdout) == (0, "") and Path(target).exists()
    assert Path(target).name == f"a step.step1.{'trace.json' if form == 'chrome-trace' else form}"
    assert run("export", file, "--to", form).exit_code == 0  # the whole beside it


def test_of_one_step_the_command_writes_its_rows_and_no_other(file: Path, tmp_path: Path) -> None:
    run("export", file, "--to", "csv", "-o", tmp_path / "whole.csv")
    run("export", file, "--to", "csv", "--step", "1", "-o", tmp_path / "one.csv")
    whole, one = rows_of(tmp_path / "whole.csv"), rows_of(tmp_path / "one.csv")
    assert one == [row for row in whole if row["step"] == "1"] and 0 < len(one) < len(whole)


@pytest.mark.parametrize("number", ["2", "-1"])
def test_a_step_that_is_not_there_is_one_sentence_with_those_that_are(file: Path, number: str) -> None:
    done = run("export", file, "--to", "csv", "--step", number)
    assert done.exit_code == 2 and not Path(default_path(str(file), "csv", int(number))).exists()
    assert f"Invalid value for --step: the trace has no step {number}: it holds steps 0 to 1." in done.stderr


def test_the_command_knows_every_format() -> None:
    [option] = [option for option in command.params if option.name == "form"]
    assert tuple(option.type.choices) == FORMATS  # type: ignore[attr-defined]


def test_a_place_that_cannot_be_written_is_one_sentence_and_three(file: Path, tmp_path: Path) -> None:
    done = run("export", file, "--to", "csv", "-o", tmp_path / "missing" / "out.csv")
    assert done.exit_code == 3 and "No such file or directory" in done.stderr
    assert run("export", file, "--to", "xlsx").exit_code == 2


def test_exporting_in_a_fresh_interpreter_loads_no_torch(file: Path) -> None:
    code = (
        "import sys, nantrace.cli\n"
        "for form in ('csv', 'parquet', 'tensorboard', 'chrome-trace'):\n"
        "    nantrace.cli.main(['export', sys.argv[1], '--to', form], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'tensorflow' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
