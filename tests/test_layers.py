"""Who may import whom, read off the source; what importing loads, read off a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import nantrace
from nantrace.events import EVENT, Columns, ModuleEntry, Phase, Role, Site
from nantrace.store.writer import TraceWriter

ROOT = Path(nantrace.__file__).parent

#: Top-level modules that only some parts may import. Parts are paths inside the package; a folder ends with "/".
OWNERS = {
    "torch": ("capture/", "flow/", "stats/", "replay/", "checkpoint/", "api.py"),
    "h5py": ("store/",),
    "triton": ("stats/fused.py", "stats/launches.py"),
    "click": ("cli/",),
    "matplotlib": ("render/plot/",),
    "pandas": ("frame.py",),
    "pyarrow": ("export/",),
    "tensorboard": ("export/",),
}
#: Parts of nantrace that a part never imports.
FORBIDDEN = {
    "events.py": ("capture", "flow", "store", "diagnosis", "render", "replay", "stats", "api", "cli"),
    "errors.py": ("events", "capture", "flow", "store", "diagnosis", "render", "replay", "stats", "api", "cli"),
    "lineage.py": ("events", "capture", "flow", "store", "diagnosis", "render", "replay", "stats", "api", "cli"),
    "stats/": ("capture", "flow", "store", "diagnosis", "render", "replay", "api", "cli"),
    "capture/": ("flow", "diagnosis", "render", "replay", "api", "cli"),
    "flow/": ("store", "diagnosis", "render", "replay", "api", "cli"),
    "store/": ("capture", "flow", "diagnosis", "render", "replay", "stats", "api", "cli"),
    "diagnosis/": ("capture", "flow", "store", "render", "replay", "stats", "api", "cli"),
    "render/": ("capture", "flow", "store", "replay", "stats", "api", "cli"),
    "replay/": ("render", "api", "cli"),
    "export/": ("capture", "flow", "store", "diagnosis", "replay", "stats", "api", "cli"),
    "checkpoint/": ("capture", "flow", "store", "render", "replay", "api", "cli"),
    "api.py": ("cli",),
    "__init__.py": ("cli",),
}
TORCHLESS = ("replay/search.py", "replay/target.py", "checkpoint/result.py", "checkpoint/expected.py")


def files() -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


def imports(source: str) -> Iterator[str]:
    """Full names of what a module imports, wherever in it; not what is imported for type checkers alone."""
    tree = ast.parse(source)
    hidden = {id(node) for guard in ast.walk(tree) if _is_type_guard(guard) for node in ast.walk(guard)}
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_type_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def violations(part: str, source: str) -> list[str]:
    """What `part` imports and must not."""
    found = []
    for name in imports(source):
        top, _, rest = name.partition(".")
        if top in OWNERS and ((part in TORCHLESS and top == "torch") or not part.startswith(OWNERS[top])):
            found.append(f"{part} imports {top}")
        for owner, refused in FORBIDDEN.items():
            if top == "nantrace" and part.startswith(owner) and rest.split(".")[0] in refused:
                found.append(f"{part} imports {name}")
    return found + ([] if part.startswith("cli/") else [f"{part} prints by {what}" for what in prints(source)])


def prints(source: str) -> Iterator[str]:
    """How a module writes to the terminal: only the command line does."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield "print"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.stdout", "sys.stderr"):
            yield ast.unparse(node)


@pytest.mark.parametrize("part", files())
def test_every_module_keeps_to_its_layer(part: str) -> None:
    assert violations(part, (ROOT / part).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("diagnosis/blame.py", "import torch"),
        ("diagnosis/blame.py", "def f():\n    from torch import nn"),
        ("render/text.py", "import h5py"),
        ("store/reader.py", "import triton.language as tl"),
        ("events.py", "import click"),
        ("events.py", "def f():\n    import pandas"),
        ("export/csv_table.py", "from nantrace.store.reader import load"),
        ("render/svg/ranges.py", "def f():\n    import matplotlib"),
        ("replay/search.py", "import torch"),
        ("capture/tracer.py", "from nantrace.diagnosis.blame import blame"),
        ("flow/recorder.py", "from nantrace import render"),
        ("api.py", "import nantrace.cli"),
        ("render/text.py", "def f():\n    print('x')"),
        ("capture/tracer.py", "import sys\nsys.stderr.write('x')"),
    ],
)
def test_a_violation_is_found(part: str, source: str) -> None:
    assert len(violations(part, source)) == 1


def test_what_is_allowed_is_not_a_violation() -> None:
    assert violations("capture/tracer.py", "import torch\nfrom nantrace.store.writer import TraceWriter") == []
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
    assert violations("render/text.py", guarded) == []


def loaded_by(code: str) -> set[str]:
    """Names of the modules that a fresh interpreter holds after `code`."""
    listing = f"{code}\nimport sys\nprint('\\n'.join(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_nantrace_loads_nothing_heavy() -> None:
    loaded = loaded_by("import nantrace")
    assert loaded & {"torch", "h5py", "numpy", "click", "triton", "nantrace.api"} == set()


def test_the_loading_test_sees_what_is_loaded() -> None:
    assert "numpy" in loaded_by("import nantrace; nantrace.Trace")


def test_judging_and_rendering_load_no_torch_and_no_h5py() -> None:
    loaded = loaded_by("import nantrace; nantrace.report; nantrace.diagnose; nantrace.load; nantrace.NantraceError")
    assert loaded & {"torch", "h5py", "triton", "click"} == set()


@pytest.mark.parametrize(
    ("arguments", "not_needed"),
    [
        ([], {"numpy", "h5py", "torch", "nantrace.api"}),
        (["--help"], {"numpy", "h5py", "torch", "nantrace.api"}),
        (["--version"], {"numpy", "h5py", "torch", "nantrace.cli.reading", "nantrace.cli.bisecting"}),
        (
            ["info", "step.h5"],
            {"torch", "numpy.ma", "nantrace.store.writer", "nantrace.diagnosis.diagnose", "nantrace.cli.bisecting"},
        ),
        (
            ["report", "step.h5"],
            {"torch", "numpy.ma", "nantrace.store.writer", "nantrace.diagnosis.blame", "nantrace.cli.bisecting"},
        ),
    ],
    ids=" ".join,
)
def test_a_command_loads_no_more_than_it_needs(
    arguments: list[str], not_needed: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _write_two_steps(tmp_path / "step.h5")
    code = f"from nantrace.cli import main\ntry:\n    main({arguments!r})\nexcept SystemExit:\n    pass"
    loaded = loaded_by(code)
    assert "click" in loaded
    assert loaded & not_needed == set()


def _write_two_steps(path: Path) -> None:
    """Two steps of a layer, of which the second puts out NaN."""
    site = Site("layer", Phase.FORWARD, Role.OUTPUT, "output", "float32", (4,))
    rows = np.zeros(2, EVENT)
    rows["seq"], rows["step"], rows["call"], rows["numel"] = [1, 2], [0, 1], [1, 2], 4
    rows["nan"], rows["finite"], rows["columns"] = [0, 1], [4, 3], int(Columns.FIRST_BAD)
    with TraceWriter(path, modules=[ModuleEntry("", "Net"), ModuleEntry("layer", "Linear")]) as writer:
        writer.add_sites([site])
        writer.append(rows)
        for step in range(2):
            writer.add_step({"step": step, "first_seq": step + 1, "events": 1, "loss": 1.0})


def test_the_words_of_a_report_load_no_cause_of_an_op() -> None:
    loaded = loaded_by("import nantrace.diagnosis.diagnose, nantrace.render.report")
    causes = {name.rpartition(".")[2] for name in loaded if name.startswith("nantrace.diagnosis.causes.")}
    assert causes == {"dtypes", "reading", "roles", "wording"}


def test_importing_has_no_side_effect_on_the_interpreter() -> None:
    code = """
import sys, warnings, signal, threading
before = (sys.excepthook, sys.displayhook, list(warnings.filters), signal.getsignal(signal.SIGTERM), list(sys.path))
import nantrace
after = (sys.excepthook, sys.displayhook, list(warnings.filters), signal.getsignal(signal.SIGTERM), list(sys.path))
assert before == after and threading.active_count() == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_listed_and_an_unknown_one_is_refused() -> None:
    assert set(nantrace.__all__) <= set(dir(nantrace))
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        nantrace.nonsense  # noqa: B018
