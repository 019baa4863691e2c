"""The form of TARGET, `FILE.py:NAME`: checked by reading the file, before anything is imported. Knows no torch."""

from __future__ import annotations

import ast
import os

from nantrace.errors import ReplayError


def parse_target(target: str) -> tuple[str, str]:
    """The file and the name in `FILE.py:NAME`.

    Raises:
        ReplayError: there is no such file, or no name is given.
    """
    path, colon, name = target.rpartition(":")
    if not colon or name.endswith(".py") or os.sep in name:
        path, name = target, ""
    if not os.path.isfile(path):
        raise ReplayError(f"There is no file {path!r}; TARGET is FILE.py:NAME, and {target!r} was given.")
    if not name:
        raise ReplayError(f"TARGET {target!r} names no step; write {path}:NAME, where {path} {defines(path)}.")
    return path, name


def defines(path: str) -> str:
    """What a file defines at its top level, read without running it: "defines step(), MODEL"."""
    with open(path, "rb") as file:
        try:
            tree = ast.parse(file.read(), path)
        except (SyntaxError, ValueError):
            return "is not valid Python"
    names = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.append(f"{node.name}()")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [t.id for t in targets if isinstance(t, ast.Name)]
    public = [name for name in names if not name.startswith("_")]
    return f"defines {', '.join(public)}" if public else "defines no function and no variable"
