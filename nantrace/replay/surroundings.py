"""What a step can change outside of its objects: random streams, and torch's switches for this process or thread.

Read and put back one by one. A switch that this build of torch does not have, or refuses to tell, is left alone.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

_ABSENT = object()


def random_state() -> dict[str, Any]:
    """The state of every global random stream: Python, NumPy, torch, and each CUDA device in use."""
    state: dict[str, Any] = {"Python's random": random.getstate(), "torch's CPU generator": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy as np

        state["NumPy's random"] = np.random.get_state()
    # Asking a device that nobody uses yet would initialise it.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for device in range(torch.cuda.device_count()):
            state[f"torch's generator of cuda:{device}"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    for name, value in state.items():
        if name == "Python's random":
            random.setstate(value)
        elif name == "torch's CPU generator":
            torch.set_rng_state(value)
        elif name == "NumPy's random":
            import numpy as np

            np.random.set_state(value)
        else:
            torch.cuda.set_rng_state(value, name.rpartition(" ")[2])


def changed_random_state(state: dict[str, Any]) -> list[str]:
    """Names of the streams that moved since."""
    now = random_state()
    return [name for name, value in state.items() if not equal_state(value, now.get(name))]


def equal_state(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return isinstance(b, type(a)) and len(a) == len(b) and all(equal_state(x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "tobytes"):  # a NumPy array, without importing NumPy
        return hasattr(b, "tobytes") and bool(a.tobytes() == b.tobytes())
    return bool(a == b)


#: Each switch: how to read it, how to set it.
_Switch = tuple[Callable[[], Any], Callable[[Any], Any]]


def _attribute(owner: Any, name: str) -> _Switch:
    return (lambda: getattr(owner, name)), (lambda value: setattr(owner, name, value))


def _autocast(device: str) -> dict[str, _Switch]:
    return {
        f"autocast on {device}": (
            lambda: torch.is_autocast_enabled(device),
            lambda value: torch.set_autocast_enabled(device, value),
        ),
        f"autocast dtype on {device}": (
            lambda: torch.get_autocast_dtype(device),
            lambda value: torch.set_autocast_dtype(device, value),
        ),
    }


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_anomaly(value: tuple[bool, bool]) -> None:
    torch.autograd.set_detect_anomaly(value[0], check_nan=value[1])


def _set_filters(value: list[Any]) -> None:
    warnings.filters[:] = value  # type: ignore[index]
    mutated = getattr(warnings, "_filters_mutated", None)  # tells the caches of `warnings`; what catch_warnings calls
    if mutated is not None:
        mutated()


def _switches() -> dict[str, _Switch]:
    backends = torch.backends
    return {
        "grad mode": (torch.is_grad_enabled, torch._C._set_grad_enabled),
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        **_autocast("cpu"),
        **_autocast("cuda"),
        "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        "deterministic algorithms": (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            _set_deterministic,
        ),
        "filling of uninitialised memory": _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
        "anomaly detection": (
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            _set_anomaly,
        ),
        "number of threads": (torch.get_num_threads, torch.set_num_threads),
        "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "cudnn": _attribute(backends.cudnn, "enabled"),
        "cudnn benchmark": _attribute(backends.cudnn, "benchmark"),
        "cudnn deterministic": _attribute(backends.cudnn, "deterministic"),
        "cudnn TF32": _attribute(backends.cudnn, "allow_tf32"),
        "CUDA matmul reduced precision in fp16": _attribute(
            backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"
        ),
        "CUDA matmul reduced precision in bf16": _attribute(
            backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"
        ),
        "flash attention": (backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp),
        "memory-efficient attention": (backends.cuda.mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp),
        "math attention": (backends.cuda.math_sdp_enabled, backends.cuda.enable_math_sdp),
        "oneDNN": _attribute(backends.mkldnn, "enabled"),
        "fast path of attention": (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
        "warning filters": (lambda: list(warnings.filters), _set_filters),
    }


def settings() -> dict[str, Any]:
    """The value of every switch that can be read."""
    return {name: value for name, (get, _) in _switches().items() if (value := _read(get)) is not _ABSENT}


def restore_settings(before: dict[str, Any]) -> None:
    for name, (get, put) in _switches().items():
        if name in before and _read(get) != before[name]:
            put(before[name])


def changed_settings(before: dict[str, Any]) -> list[str]:
    """One sentence part for each switch that differs: "default dtype: torch.float64, was torch.float32"."""
    now = settings()
    changed = [name for name, value in before.items() if now.get(name, _ABSENT) != value]
    return [name if name == "warning filters" else f"{name}: {now.get(name)}, was {before[name]}" for name in changed]


def _read(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except (RuntimeError, AttributeError):  # e.g. mixed use of torch's old and new TF32 switches
        return _ABSENT
