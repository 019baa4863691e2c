"""What may be passed to a tracer. Each refusal is one sentence: the option, the value, what to pass."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_ON_NONFINITE = ("warn", "raise", "ignore")
#: Not everything that can be called: batches of a graph library can.
_NO_BATCH: tuple[type, ...] = (
    *(bool, int, float, type, Iterator, functools.partial, torch.nn.Module, torch.utils.data.DataLoader),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
)
_STATS = ("auto", "range", "full", "none")


def refuse_wrong_options(
    model: object,
    *,
    path: object = None,
    capture: object = None,
    scaler: object = None,
    batch: object = None,
    depth: object = None,
    on_nonfinite: object = "warn",
    keep_steps: object = None,
    every: object = 1,
    overwrite: object = False,
    stats: object = "auto",
) -> None:
    """Let only pass what a tracer can work with.

    Raises:
        TypeError: a value of a kind that the option cannot take.
        ValueError: a value out of range.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"trace got {_a(model)} as model: pass a torch.nn.Module")
    _refuse_no_path("path", path, "a file name, or None to keep the trace in memory")
    _refuse_no_path("capture", capture, "a file name, or None to capture no step")
    if scaler is not None and not _has(scaler, "is_enabled", "step", "update"):
        raise TypeError(f"scaler is {_shown(scaler)}: pass a torch.amp.GradScaler, or None")
    refuse_no_batch(batch)
    if depth is not None and not (_is_integer(depth) and depth >= 0):  # type: ignore[operator]
        raise ValueError(
            f"depth is {_shown(depth)}: pass 0 for the model alone, a larger integer, or None for all modules"
        )
    if keep_steps is not None and not (_is_integer(keep_steps) and keep_steps >= 1):  # type: ignore[operator]
        raise ValueError(f"keep_steps is {_shown(keep_steps)}: pass a positive integer, or None to keep every step")
    if not (_is_integer(every) and every >= 1):  # type: ignore[operator]
        raise ValueError(f"every is {_shown(every)}: pass 1 to record each step in detail, or N for every Nth")
    if not isinstance(overwrite, bool):
        raise TypeError(f"overwrite is {_shown(overwrite)}: pass True to replace an existing file, or False")
    _refuse_other_than(_ON_NONFINITE, "on_nonfinite", on_nonfinite)
    _refuse_other_than(_STATS, "stats", stats)


def optimizers_in(optimizer: Any) -> list[torch.optim.Optimizer]:
    """One optimizer or several as a list; none for None. Some wrappers are no subclass of `Optimizer`.

    Raises:
        TypeError: something in it does not step like an optimizer.
    """
    if optimizer is None:
        return []
    several = [optimizer] if _is_optimizer(optimizer) or not _is_many(optimizer) else list(optimizer)
    for one in several:
        if not _is_optimizer(one):
            found = _shown(optimizer) if one is optimizer else f"a {type(optimizer).__name__} with {_shown(one)} in it"
            raise TypeError(f"optimizer is {found}: pass a torch.optim.Optimizer, several in a list, or None")
    return several


def patterns_in(name: str, patterns: Any) -> list[str] | None:
    """One glob or several as a list; None stays None.

    Raises:
        TypeError: something else than texts.
        ValueError: no glob at all.
    """
    if patterns is None:
        return None
    several = [patterns] if isinstance(patterns, str) or not _is_many(patterns) else list(patterns)
    for pattern in several:
        if not isinstance(pattern, str):
            raise TypeError(
                f"{name} is {_shown(patterns)}: pass a glob on names of modules ('encoder.*') or a list of them"
            )
    if not several:
        raise ValueError(
            f"{name} is {_shown(patterns)}, which selects nothing: pass at least one glob, or leave it out"
        )
    return several


def refuse_no_batch(batch: object) -> None:
    """A size, a function, what batches come from. Texts and objects pass: a capture keeps them, a replay opens them.

    Raises:
        TypeError: it is none.
    """
    if isinstance(batch, _NO_BATCH):
        raise TypeError(
            f"batch is {_shown(batch)}, which is no batch: pass what the step reads, a tensor or a list, tuple or "
            "dict of them, or None"
        )


def refuse_ops_without_tensors(ops: object, stats: object) -> None:
    """Single ops are recorded only where tensors are read.

    Raises:
        ValueError: they are not.
    """
    if ops is not None and stats == "none":
        raise ValueError("stats is 'none', which reads no tensor, with ops, which do: leave one of the two out")


def refuse_no_note(kind: object, reason: object) -> None:
    """Let pass a decision that can be put on record.

    Raises:
        TypeError: it is no text.
        ValueError: it is empty.
    """
    if not isinstance(kind, str) or not (reason is None or isinstance(reason, str)):
        which, value = ("kind", kind) if not isinstance(kind, str) else ("reason", reason)
        raise TypeError(f"note got {which}={value!r}: pass a text")
    if not kind:
        raise ValueError("note got kind='': pass a word for what was decided, such as 'quarantine'")


def _refuse_no_path(name: str, path: object, wanted: str) -> None:
    if path is None:
        return
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise TypeError(f"{name} is {_shown(path)}: pass {wanted}")
    if not os.fspath(path):
        raise ValueError(f"{name} is '': pass {wanted}")


def _refuse_other_than(allowed: tuple[str, ...], name: str, value: object) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} is {_shown(value)}: pass one of {', '.join(map(repr, allowed))}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_optimizer(value: object) -> bool:
    return _has(value, "param_groups", "step")


def _has(value: object, *names: str) -> bool:
    return not isinstance(value, type) and all(hasattr(value, name) for name in names)


def _is_many(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, type, torch.Tensor))


def _shown(value: object) -> str:
    """The value where it is short and plain, else what it is."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    plain = value is None or isinstance(value, (bool, int, float, str, bytes, list, tuple))
    return repr(value) if plain and len(repr(value)) <= 60 else _a(value)


def _a(value: object) -> str:
    return f"a {type(value).__name__}"
