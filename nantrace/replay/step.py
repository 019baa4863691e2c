"""A training step that can be run again, and how to load one from a file.

Knows what a step is made of and how a script wants to be imported. Restores nothing: see `replay.snapshot`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from nantrace.errors import ReplayError
from nantrace.replay.target import defines, parse_target

_PRIVATE = "_nantrace_target_"


@dataclass(frozen=True)
class Step:
    """One training step as a value: what to run, and whose state it changes.

    The step may run several iterations, and may make its optimizer or `GradScaler` inside.

    Attributes:
        run: called as `run(model, batch)`, or as `run()` when `batch` is None.
        model: the module whose state the step changes.
        batch: what the step reads: tensors, or containers of them.
        optimizer: one optimizer, or a sequence of them; those not named here are found when they first step.
        scaler: the `GradScaler`, likewise optional.

    Raises:
        ReplayError: `run` cannot be called or `model` is not a `torch.nn.Module`.

    Example:
        >>> step = Step(train_step, model, batch, optimizer=optimizer)
        >>> loss = step()
    """

    run: Callable[..., Any]
    model: torch.nn.Module
    batch: Any = None
    optimizer: Any = field(default=None, kw_only=True)
    scaler: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not callable(self.run):
            raise ReplayError(f"Step got {_short(self.run)} as run; give the function that runs the step.")
        if not isinstance(self.model, torch.nn.Module):
            raise ReplayError(f"Step got {_short(self.model)} as model; give the torch.nn.Module that the step trains.")

    def __call__(self) -> Any:
        return self.run() if self.batch is None else self.run(self.model, self.batch)


def load_target(target: str, argv: Sequence[str] = ()) -> Step:
    """Load `file.py:name`, where `name` is a `Step` or a function without arguments that returns one.

    The file is imported under a private name, so that its `if __name__ == "__main__"` part does not run, with
    `sys.path` and `sys.argv` as `python file.py *argv` would set them. Both are put back afterwards, and set again
    while the step runs, since a step may import a neighbour of its file. The working directory is the caller's.

    Raises:
        ReplayError: the target names no file, no step, or something that is neither a step nor makes one.
        Exception: whatever the file itself raises, unchanged.
    """
    path, name = parse_target(target)
    with _script(path, argv):
        module = _import(path)
        step = _resolve(module, path, name)
    return dataclasses.replace(step, run=_as_in_script(step.run, path, tuple(argv)))


def _resolve(module: ModuleType, path: str, name: str) -> Step:
    if not hasattr(module, name):
        raise ReplayError(f"{path} has no {name!r}; it {defines(path)}.")
    found = getattr(module, name)
    if isinstance(found, Step):
        return found
    if isinstance(found, torch.nn.Module):
        raise ReplayError(
            f"{path}:{name} is a Module ({type(found).__name__}), not a nantrace.Step or a function without arguments: "
            f"make a nantrace.Step(run, model, batch) of it; {path} {defines(path)}."
        )
    if not callable(found):
        raise ReplayError(
            f"{path}:{name} is {_short(found)}; it must be a nantrace.Step or a function that returns one."
        )
    needed = _required_arguments(found)
    if needed:
        raise ReplayError(
            f"{path}:{name} needs the arguments {', '.join(needed)}; it must be a function without arguments that "
            f"returns nantrace.Step(run, model, batch)."
        )
    made = found()
    if not isinstance(made, Step):
        raise ReplayError(f"{path}:{name}() returned {_short(made)}; it must return nantrace.Step(run, model, batch).")
    return made


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature: calling them will tell
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in variadic]


def _import(path: str) -> ModuleType:
    name = _PRIVATE + os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ReplayError(f"{path} is not a Python file; TARGET is FILE.py:NAME.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # stays: dataclasses and pickle look up the module of a class by its name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def _script(path: str, argv: Sequence[str]) -> Iterator[None]:
    """`sys.path` and `sys.argv` as `python path *argv` sees them."""
    before_path, before_argv = list(sys.path), list(sys.argv)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    sys.argv[:] = [path, *argv]
    try:
        yield
    finally:
        sys.path[:] = before_path
        sys.argv[:] = before_argv


def _as_in_script(run: Callable[..., Any], path: str, argv: tuple[str, ...]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_as_in_script(*args: Any) -> Any:
        with _script(path, argv):
            return run(*args)

    return run_as_in_script


def _short(value: Any) -> str:
    text = repr(value) if value is None or isinstance(value, (bool, int, float, str)) else ""
    kind = type(value).__name__
    return text if value is None else f"{text} ({kind})" if text and len(text) < 40 else f"an object of type {kind}"
