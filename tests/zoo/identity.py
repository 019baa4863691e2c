"""Whether a context manager around a step leaves the step, and the process, exactly as they were.

Knows PyTorch's registers of hooks, modes and patched functions; knows nothing of what the context manager does.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as module_registry
from torch.optim import optimizer as optimizer_registry
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tests.zoo.case import Program, Step

Bits = Any
Traced = Callable[[nn.Module, Step], AbstractContextManager[Any]]


def untraced_equals_traced(build: Callable[[], Program], traced: Traced) -> list[str]:
    """Runs a step bare and within `traced(model, step)`, both from the same seed, and compares bit for bit.

    Compared are the returned values, gradients, parameters, buffers and optimizer state after the step, each with
    dtype, shape and strides; the random streams of torch, NumPy and Python; and, before against after the context
    manager, everything that could be left behind: hooks, modes, patched functions, attributes, flags.

    Returns:
        What differs, by name ("gradient fc1.weight", "left behind: module hooks"); empty if nothing does.
    """
    bare, _ = _run(build, None)
    watched, left = _run(build, traced)
    return [name for name in bare if bare[name] != watched.get(name)] + [n for n in watched if n not in bare] + left


def _run(build: Callable[[], Program], traced: Traced | None) -> tuple[dict[str, Bits], list[str]]:
    _seed()
    model, batch, step = build()
    before = surroundings(model, step)
    _seed()
    if traced is None:
        returned = step(model, batch)
    else:
        with traced(model, step):
            returned = step(model, batch)
    result = {"returned values": bits(returned), **_state(model, step), **_random_streams()}
    after = surroundings(model, step)
    return result, [f"left behind: {what}" for what in after if after[what] != before[what]]


def _seed() -> None:
    torch.manual_seed(1234)
    np.random.seed(1234)
    random.seed(1234)


def _random_streams() -> dict[str, Bits]:
    name, key, *rest = np.random.get_state()
    return {
        "random stream of torch": bits(torch.get_rng_state()),
        "random stream of numpy": (name, key.tobytes(), rest),
        "random stream of python": random.getstate(),
    }


def _state(model: nn.Module, step: Step) -> dict[str, Bits]:
    parameters = dict(model.named_parameters())
    optimizer = getattr(step, "optimizer", None)
    return {
        **{f"parameter {name}": bits(p) for name, p in parameters.items()},
        **{f"gradient {name}": bits(p.grad) for name, p in parameters.items()},
        **{f"buffer {name}": bits(b) for name, b in model.named_buffers()},
        "optimizer state": bits(optimizer.state_dict()["state"]) if optimizer is not None else None,
    }


def bits(value: Any) -> Bits:
    """A value with each tensor replaced by whether it requires grad, its dtype, layout, shape, strides and bytes."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad, _tensor_bits(value.detach())
    if isinstance(value, Mapping):
        return {key: bits(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return [bits(entry) for entry in value]
    return repr(value) if isinstance(value, float) else value


def _tensor_bits(tensor: torch.Tensor) -> Bits:
    if tensor.layout is torch.sparse_coo:
        return "sparse", tuple(tensor.shape), _tensor_bits(tensor._indices()), _tensor_bits(tensor._values())
    raw = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
    return str(tensor.dtype), tuple(tensor.shape), tensor.stride(), raw.cpu().numpy().tobytes()


def surroundings(model: nn.Module, step: Step) -> dict[str, Any]:
    """Everything that a tracer could forget to put back, by kind.

    Functions, hooks and modes compare equal only if they are the same.
    """
    modules = list(model.modules())
    optimizer = getattr(step, "optimizer", None)
    return {
        "module hooks": [_registers(vars(m), "_hooks") for m in modules],
        "module attributes": [sorted(vars(m)) for m in modules],
        "module flags": [m.training for m in modules],
        "global module hooks": _registers(vars(module_registry), "_hooks"),
        "tensor hooks": [_tensor_hooks(p) for p in model.parameters()],
        "parameter attributes": [sorted(vars(p)) for p in model.parameters()],
        "optimizer hooks": _registers(vars(optimizer), "_hooks") if optimizer is not None else None,
        "global optimizer hooks": _registers(vars(optimizer_registry), "_hooks"),
        "dispatch modes": list(_get_current_dispatch_mode_stack()),
        "function modes": list(_get_current_function_mode_stack()),
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "autograd settings": (torch.is_grad_enabled(), torch.is_anomaly_enabled(), torch.is_inference_mode_enabled()),
        "patched functions": _functions(model, optimizer),
        "interpreter": (sys.gettrace(), sys.getprofile(), sys.excepthook),
        "warning filters": list(warnings.filters),
    }


def _registers(namespace: Mapping[str, Any], ending: str) -> dict[str, list[Any]]:
    """The entries of every nonempty register of hooks; an empty one that was created meanwhile is no difference."""
    return {
        name: list(entries.values())
        for name, entries in namespace.items()
        if name.endswith(ending) and isinstance(entries, dict) and entries
    }


def _tensor_hooks(parameter: nn.Parameter) -> list[Any]:
    registers = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return [hook for register in registers if register for hook in register.values()]


def _functions(model: nn.Module, optimizer: Any) -> list[Any]:
    """The functions that a tracer could be tempted to replace."""
    scaler = torch.amp.GradScaler
    classes = [
        nn.Module,
        torch.Tensor,
        scaler,
        torch.optim.Optimizer,
        *sorted({type(m) for m in model.modules()}, key=id),
    ]
    return [
        torch.autograd._engine_run_backward,
        torch.autograd.graph._engine_run_backward,
        torch.autograd.backward,
        torch.autograd.grad,
        *(dict(vars(cls)) for cls in classes[:4]),
        *(cls.forward for cls in classes[4:]),
        None if optimizer is None else type(optimizer).step,
    ]
