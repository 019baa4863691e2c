"""A line of a file is named by the file, a line of a notebook by its cell, whatever IPython compiled it under."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from nantrace.flow.links import Line
from nantrace.flow.source import line_of_source

KERNELS = "/tmp/ipykernel_4711/1234567.py"


@pytest.fixture(autouse=True)
def without_ipython(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)


@pytest.mark.parametrize(
    ("filename", "function", "said"),
    [
        ("/home/me/train.py", "forward", "train.py:3 in forward"),
        ("/home/me/ipykernel_4711/model.py", "forward", "model.py:3 in forward"),
        (KERNELS, "forward", "cell, line 3 in forward"),
        (r"C:\Users\me\Temp\ipykernel_4711\1234567.py", "forward", "cell, line 3 in forward"),
        (KERNELS, "<module>", "cell, line 3"),
        (KERNELS, "<cell line: 1>", "cell, line 3"),
        ("<ipython-input-12-0a1b2c3d>", "forward", "cell In[12], line 3 in forward"),
        ("<stdin>", "<module>", "<stdin>:3 in <module>"),
    ],
)
def test_a_cell_is_never_shown_as_a_temporary_file(filename: str, function: str, said: str) -> None:
    assert line_of_source(filename, 3, function) == said


def test_the_running_ipython_knows_the_number_of_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    compilerop = pytest.importorskip("IPython.core.compilerop")
    compiler = compilerop.CachingCompiler()
    name = compiler.cache("def forward():\n    return 1\n", number=5)
    code = compile("def forward():\n    return 1\n", name, "exec").co_consts[0]
    shell = SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert str(Line(code, 2)) == "cell In[5], line 2 in forward"
    assert line_of_source("/home/me/train.py", 2, "forward") == "train.py:2 in forward"


def test_an_ipython_that_has_no_shell_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert line_of_source(KERNELS, 3, "forward") == "cell, line 3 in forward"
    assert line_of_source("train.py", 3, "forward") == "train.py:3 in forward"
