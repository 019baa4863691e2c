"""The trace file without nantrace: the documented lines do what they say, and viewers find nothing they cannot show."""

from __future__ import annotations

import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import h5py
import pandas
import pytest

from nantrace.events import ModuleEntry, Phase, Raised, Role
from nantrace.lineage import Lineage
from nantrace.store import load, schema
from nantrace.store.writer import TraceWriter
from tests.diagnosis.written import NAN, Written
from tests.test_cli import stored

README = (Path(__file__).parent.parent.parent / "README.md").read_text(encoding="utf-8")
LINES = {
    "README": README.split("in five lines:\n\n```python\n")[1].split("```")[0],
    "specification": textwrap.dedent(
        "    import h5py" + str(schema.__doc__).split("    import h5py")[1].split("\n\n")[0]
    ),
}


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    written = Written("float16")
    with written.call("", made=NAN):
        written.run("block.1.norm", made={"posinf": 2})
    written.loss(nan=1)
    monkeypatch.chdir(tmp_path)
    return stored(written.trace(), tmp_path / "step.h5")


@pytest.mark.parametrize("place", LINES)
def test_the_documented_lines_read_a_trace(place: str, step: Path) -> None:
    assert len([line for line in LINES[place].splitlines() if line.strip()]) <= 6  # five, and the import
    found: dict[str, Any] = {}
    exec(LINES[place], found)
    rows = found["rows"]
    bad = rows[rows[["nan", "posinf", "neginf"]].any(axis=1)]
    assert bad["module"].tolist()[:2] == ["block.1.norm", ""] and pandas.isna(bad["module"].iloc[2])
    assert bad["posinf"].tolist() == [2, 0, 0]
    found["file"].close()
    with h5py.File(step) as file:
        labels = h5py.check_enum_dtype(file["sites"].dtype["phase"])
    assert bad["phase"].tolist() == [labels["forward"], labels["forward"], labels["loss"]]


def test_viewers_find_labels_and_fields_of_fixed_size_alone(step: Path) -> None:
    """What h5dump and HDFView print: integers, floats, enums with labels, texts of fixed length; no references."""
    with h5py.File(step) as file:
        for name, dataset in ((name, file[name]) for name in schema.TABLES):
            fields = [dataset.dtype[field] for field in dataset.dtype.names or ()] or [dataset.dtype]
            assert all(field.kind in "iufS" and h5py.check_ref_dtype(field) is None for field in fields), name
            assert all(h5py.check_vlen_dtype(field) is None for field in fields), name
        stored_type = file["sites"].id.get_type()
        for column, kind in (("phase", Phase), ("role", Role)):
            member = stored_type.get_member_type(stored_type.get_member_index(column.encode()))
            assert isinstance(member, h5py.h5t.TypeEnumID)
            labels = {member.get_member_name(n).decode(): member.get_member_value(n) for n in range(len(kind))}
            assert labels == {one.label: one.value for one in kind} and member.get_nmembers() == len(kind)


def test_texts_end_at_their_first_nul(step: Path) -> None:
    """In a null-padded string h5dump prints each NUL as \\000: ninety of them behind a short name."""
    with h5py.File(step) as file:
        types = [file["names"].id.get_type(), *(file["meta"].attrs.get_id(n).get_type() for n in file["meta"].attrs)]
        texts = [found for found in types if isinstance(found, h5py.h5t.TypeStringID)]
        assert len(texts) > 2 and not any(found.is_variable_str() for found in texts)
        assert texts[0].get_strpad() == h5py.h5t.STR_NULLTERM
        for name, value in file["meta"].attrs.items():
            found = file["meta"].attrs.get_id(name).get_type()
            if isinstance(value, bytes) and len(value) < found.get_size():
                assert found.get_strpad() == h5py.h5t.STR_NULLTERM, name


@pytest.mark.parametrize("length", [95, 96, 97, 192])
def test_a_name_that_fills_its_row_is_whole(length: int, tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "step.h5", modules=[ModuleEntry("m" * length, "M")]):
        pass
    assert load(tmp_path / "step.h5").modules[0].fqn == "m" * length


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="HDF5's own tools are not installed")
def test_h5dump_prints_every_table(step: Path) -> None:
    """Fields with names, enums with labels, texts without padding, the ledger and the lineage as JSON."""
    with TraceWriter(step, meta={"device": "cpu"}, overwrite=True) as writer:
        written = Written("float16")
        written.run("block.1.norm", made={"posinf": 2})
        trace = written.trace()
        writer.add_sites(trace.sites)
        writer.append(trace.events)
        writer.add_step({"step": 0, "loss": 0.5, "first_seq": 1, "events": len(trace)})
        writer.set_lineage(Lineage(notes=["a note"]))
        writer.set_raised(Raised("ValueError", "why", 0))

    def printed(*options: str) -> str:
        return subprocess.run(["h5dump", *options, str(step)], capture_output=True, text=True, check=True).stdout

    whole = printed()
    assert "\\000" not in whole and all(f'DATASET "{name}"' in whole for name in (*schema.TABLES, "committed"))
    for table in ("sites", "events", "modules", "steps"):
        assert all(f'"{field}";' in whole for field in schema.TABLES[table][0].names or ())
    rows = printed("-d", "/sites")
    assert " forward,\n" in rows and " output,\n" in rows
    assert '"block.1.norm"' in printed("-d", "/names")
    assert '{"step":0,' in printed("-r", "-d", "/ledger") and '"a note"' in printed("-r", "-d", "/lineage")
    assert "ValueError" in printed("-a", "/meta/raised") and '"1.1"' in whole
