"""The form of TARGET, `FILE.py:NAME`: checked by reading the file, before anything is imported. Knows no torch."""

from __future__ import annotations

import ast
import os

from nantrace.errors import ReplayError

_SHOWN = 6  # candidates in a message


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
    """What of a file can be a TARGET, read without running it: "defines make_step(), READY and 2 more"."""
    with open(path, "rb") as file:
        try:
            tree = ast.parse(file.read(), path)
        except (SyntaxError, ValueError):
            return "is not valid Python"
    names = _candidates(tree)
    if not names:
        return "defines no Step and no function without arguments"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"defines {', '.join(names[:_SHOWN])}{more}"


def _candidates(tree: ast.Module) -> list[str]:
    """Functions that can be called without arguments, then names that hold what `Step` or one of them gave."""
    functions = [
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not _needs_arguments(node.args)
    ]
    steps = [
        target.id
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and _called(node.value) in ("Step", *functions)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    ]
    named = dict.fromkeys([*(f"{name}()" for name in functions), *steps])
    return [name for name in named if not name.startswith("_")]


def _needs_arguments(arguments: ast.arguments) -> bool:
    positional = len(arguments.posonlyargs) + len(arguments.args) > len(arguments.defaults)
    return positional or any(default is None for default in arguments.kw_defaults)


def _called(value: ast.expr | None) -> str | None:
    """The last part of the name that a call calls: "Step" of `nantrace.Step(run, model)`."""
    if not isinstance(value, ast.Call):
        return None
    return value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", None)
