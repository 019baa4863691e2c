"""The trace file without nantrace: the documented lines do what they say, and viewers find nothing they cannot show."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import h5py
import pandas
import pytest

from nantrace.events import Phase, Role
from nantrace.store import schema
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
