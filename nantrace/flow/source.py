"""A line of source as its author knows it: "train.py:41 in forward", in a notebook "cell In[5], line 3 in forward".

Knows how IPython and its kernel name what they compile. Imports neither: where a cell runs, IPython is loaded.
"""

from __future__ import annotations

import os
import re
import sys

_KERNEL = re.compile(r"[\\/]ipykernel_\d+[\\/]\d+\.py")  # a name in the folder for temporary files; no file lies there
_TERMINAL = re.compile(r"<ipython-input-(\d+)-\w+>")
_WHOLE_CELL = ("<module>", "<cell")  # what a cell's own lines are a function of


def line_of_source(filename: str, line: int, function: str) -> str:
    """Where a line stands.

    Args:
        filename: of its code object, as compiled.
        line: from 1.
        function: the name of its code object.
    """
    cell = _cell(filename)
    if cell is None:
        return f"{os.path.basename(filename)}:{line} in {function}"
    return f"{cell}, line {line}" if function.startswith(_WHOLE_CELL) else f"{cell}, line {line} in {function}"


def _cell(filename: str) -> str | None:
    """The cell of a notebook that was compiled under this name, by the number at its side if that is known."""
    numbered = _TERMINAL.fullmatch(filename)
    if numbered:
        return f"cell In[{numbered[1]}]"
    label = _label(filename)
    if label is not None:
        return f"cell {label}"
    return "cell" if _KERNEL.search(filename) else None


def _label(filename: str) -> str | None:
    """What the running IPython calls a cell in its own tracebacks: "In[5]"."""
    try:
        kind, name = sys.modules["IPython"].get_ipython().compile.format_code_name(filename)
    except Exception:  # no IPython, no shell, none that knows the file: all the same here
        return None
    return str(name) if kind == "Cell" else None
