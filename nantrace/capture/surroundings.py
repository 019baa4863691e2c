"""What surrounds a traced step: versions, devices, the rank of the process, and whether code is compiled."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from nantrace import __version__
from nantrace.capture.sites import is_compiled
from nantrace.errors import NantraceWarning


def facts(model: torch.nn.Module) -> dict[str, Any]:
    """What holds for a whole trace. No host names, no paths."""
    devices = sorted({tensor.device.type for tensor in (*model.parameters(), *model.buffers())})
    found: dict[str, Any] = {
        "nantrace": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": ", ".join(devices) or "cpu",
        "threads": torch.get_num_threads(),
        "executed": "eager",
        "user_mode": "compiled" if is_compiled(model) else "eager",
    }
    if (number := rank()) is not None:
        found["rank"] = number
        found["world"] = torch.distributed.get_world_size()
        # Their gradients are first seen when they have been summed over the ranks.
        found["sharded"] = any(hasattr(parameter, "_local_tensor") for parameter in model.parameters())
    return found


def rank() -> int | None:
    """Number of this process in a distributed run; None elsewhere."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if distributed else None


def own_path(path: str | os.PathLike[str], rank: int | None) -> str:
    """Where this process writes: each rank of a distributed run has a file of its own."""
    if rank is None:
        return os.fspath(path)
    from nantrace.store.writer import rank_path  # needs h5py

    return rank_path(path, rank)


@contextlib.contextmanager
def eager_instead_of_compiled() -> Iterator[None]:
    """Run compiled code eagerly, as hooks are not called in it.

    Nothing can be compiled before `torch._dynamo` was imported, which takes seconds: then there is nothing to do.
    Nothing is recompiled afterwards.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    # Compiled modules warn of global hooks. Where warnings are errors that would break the step.
    warnings.filters.insert(0, _ABOUT_GLOBAL_HOOKS)  # type: ignore[attr-defined]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        with contextlib.suppress(ValueError):  # the user put other filters in its place
            warnings.filters.remove(_ABOUT_GLOBAL_HOOKS)  # type: ignore[attr-defined]


_ABOUT_GLOBAL_HOOKS = (
    "ignore",
    re.compile(r"Using `torch\.compile\(module\)` when there are global"),
    UserWarning,
    None,
    0,
)


def warn_user(sentence: str, category: type[NantraceWarning] = NantraceWarning) -> None:
    """Warn at the user's line, every time: a cell of a notebook that runs again must be told again."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USER:
        frame = frame.f_back
    # A registry of its own keeps Python from showing a sentence only once a line.
    warnings.warn_explicit(sentence, category, frame.f_code.co_filename, frame.f_lineno, registry={})


_NOT_THE_USER = ("nantrace", "torch", "contextlib")
