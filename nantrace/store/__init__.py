"""The trace file. The only package that imports h5py."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nantrace.store.reader import load
    from nantrace.store.writer import TraceWriter, rank_path

__all__ = ["TraceWriter", "load", "rank_path"]

# Loaded when first used: whoever reads a trace needs none of what writes one.
_HOME = {"TraceWriter": "nantrace.store.writer", "load": "nantrace.store.reader", "rank_path": "nantrace.store.writer"}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'nantrace.store' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
