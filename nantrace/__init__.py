"""nantrace finds where a PyTorch training step first went nonfinite, why, and what to check next.

Public names are loaded when first used, so that `import nantrace` is cheap and reading a trace needs no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "trace": "nantrace.api",
    "load": "nantrace.api",
    "diagnose": "nantrace.diagnosis.diagnose",
    "bisect": "nantrace.api",
    "report": "nantrace.api",
    "diff": "nantrace.api",
    "matrix": "nantrace.api",
    "gate": "nantrace.diagnosis.gate.rule",
    "check_checkpoint": "nantrace.checkpoint.check",
    "Step": "nantrace.replay.step",
    "tensor_stats": "nantrace.stats.host",
    "TensorStats": "nantrace.events",
    "Trace": "nantrace.events",
    "Verdict": "nantrace.diagnosis.verdict",
    "Origin": "nantrace.diagnosis.verdict",
    "Difference": "nantrace.diagnosis.difference.compare",
    "Contrast": "nantrace.diagnosis.contrast.rows",
    "Gate": "nantrace.diagnosis.gate.rule",
    "NantraceError": "nantrace.errors",
    "TraceFormatError": "nantrace.errors",
    "TraceExistsError": "nantrace.errors",
    "NonfiniteError": "nantrace.errors",
    "ReplayError": "nantrace.errors",
    "CaptureError": "nantrace.errors",
    "MissingExtraError": "nantrace.errors",
    "NantraceWarning": "nantrace.errors",
    "RecipeWarning": "nantrace.errors",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'nantrace' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
