"""What surrounds a traced step: versions, devices, the rank of the process, and whether code is compiled."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from nantrace import __version__
from nantrace.capture.sites import is_compiled


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
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        found["rank"] = torch.distributed.get_rank()
        found["world"] = torch.distributed.get_world_size()
    return found


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
    with torch.compiler.set_stance("force_eager"):
        yield
