"""The notebooks in examples/: each runs from its first cell to its last and comes to what its kept outputs say.

`--update-snapshots` runs them and keeps the new outputs. Of outputs, words are compared and numbers are not: what is
rounded differs from processor to processor.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

import nantrace

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

EXAMPLES = Path(__file__).parent.parent / "examples"
FIX, READ = "from_failing_float16_to_the_fix", "reading_a_trace_with_pandas"
#: What the kept outputs say, whatever they are updated to.
SAID = {
    FIX: (
        "scale 64",
        "fault | forward | overflow | blocks.1",
        "FIRST NONFINITE forward blocks.1 aten.mul float16",
        "at model.py:15 in forward",
        "finite: True | scale kept: True",
        "the last five losses are lower than the first five: True",
        "forward | blocks.1.wo | args[0]",
        "clean | 20 of 20 updates committed",
    ),
    READ: ("step 2, forward, module 2, output, float16", "complete True", "rows written"),
}
#: What tells of the machine or the moment that an output was made on: paths, addresses in memory, times.
_PRIVATE = re.compile(
    r"/(?:tmp|home|root|Users|work|var|usr|opt)/|ipykernel_\d|0x[0-9a-f]{6,}|\d\d:\d\d:\d\d|\d{4}-\d\d-\d\d"
)


def read(name: str) -> Any:
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def executed(name: str, folder: Path) -> Any:
    """The notebook with new outputs."""
    book = read(name)
    place = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(book, kernel_name="python3", timeout=300, record_timing=False, resources=place).execute()
    for cell in book.cells:
        if cell.get("outputs"):
            cell.outputs = joined(cell.outputs)
    return book


def joined(outputs: list[Any]) -> list[Any]:
    """The outputs with neighbours of one stream as one: a slow moment makes a kernel send them in pieces."""
    whole: list[Any] = []
    for output in outputs:
        if whole and output.output_type == "stream" and whole[-1].get("name") == output.name:
            whole[-1].text += output.text
        else:
            whole.append(output)
    return whole


def texts(cell: Any) -> list[str]:
    """What a cell put out, as text; of a picture that it is one."""
    return [output.get("text") or output.data["text/plain"] for output in joined(cell.get("outputs", []))]


def compared(text: str) -> str:
    """The words of an output; of a report its two headlines, since the rest has its own tests."""
    if "FIRST NONFINITE" in text:
        text = "\n".join(re.findall(r"^(?:FIRST NONFINITE|FAULT|CONTAINED)[^\[.]*", text, re.MULTILINE))
    return " ".join(re.sub(r"-?\d[\d.,]*(?:e[+-]?\d+)?", "#", text).split())


@pytest.mark.parametrize("name", SAID)
def test_a_notebook_comes_to_the_outputs_it_keeps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update_snapshots: bool
) -> None:
    # A kernel finds nantrace as the tests do, and leaves no trace in the user's home.
    monkeypatch.setenv("PYTHONPATH", str(Path(nantrace.__file__).parent.parent))
    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / "private"))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    (tmp_path / "run").mkdir()
    made = executed(name, tmp_path / "run")
    if update_snapshots:
        made.metadata = read(name).metadata  # not of the interpreter that ran it
        nbformat.write(made, EXAMPLES / f"{name}.ipynb")
    for now, kept in zip(made.cells, read(name).cells, strict=True):
        assert [compared(text) for text in texts(now)] == [compared(text) for text in texts(kept)], now.source


def test_every_notebook_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(SAID)


@pytest.mark.parametrize("name", SAID)
def test_the_kept_outputs_say_what_the_notebook_is_about_and_nothing_of_where_it_ran(name: str) -> None:
    cells = [cell for cell in read(name).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))  # in order, none left out
    shown = " ".join(" ".join(text.split()) for cell in cells for text in texts(cell))
    for words in SAID[name]:
        assert words in shown
    kept = [str(part) for cell in cells for output in cell.outputs for part in (output.get("text"), output.get("data"))]
    told = re.sub(r"'image/png': '[^']*'", "", " ".join(kept))
    assert _PRIVATE.search(told) is None and socket.gethostname() not in told
    assert all(set(cell.metadata) <= {"tags"} for cell in cells)


def test_the_fix_takes_ten_cells() -> None:
    assert sum(cell.cell_type == "code" for cell in read(FIX).cells) == 10


def test_after_its_first_cell_the_reader_needs_no_nantrace() -> None:
    later = [cell.source for cell in read(READ).cells if cell.cell_type == "code"][1:]
    assert "import h5py\nimport pandas" in later[0]
    assert not any("nantrace" in source or "torch" in source for source in later)
