"""Which part of the training state a container is, and which parameter a number in an optimizer's state stands for.

Knows the layout of `state_dict()`s; reads no value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nantrace.checkpoint.result import Role

_SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval"}
_SCHEDULER = ({"base_lrs", "last_epoch"}, {"last_epoch", "_step_count"}, {"mode_worse", "patience"})
_NAMES: dict[str, Role] = {
    **dict.fromkeys(("optim", "optimizer", "optimizers", "optimizer_states", "opt"), "optimizer"),
    **dict.fromkeys(("scheduler", "schedulers", "lr_scheduler", "lr_schedulers", "sched"), "scheduler"),
    **dict.fromkeys(("scaler", "grad_scaler", "scalers"), "scaler"),
}
#: Numbers of a scheduler that start at infinity: the best value so far, and one that is worse than any.
_STARTS_INFINITE = ("best", "mode_worse")
#: Buffers of normalisation layers, which stand between parameters in a `state_dict`.
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def role_of(container: Mapping[Any, Any]) -> Role | None:
    """By its keys; None where they say nothing, as those of a model."""
    keys = set(key for key in container if isinstance(key, str))
    if "param_groups" in keys and "state" in keys:
        return "optimizer"
    if keys >= _SCALER:
        return "scaler"
    if any(keys >= some for some in _SCHEDULER):
        return "scheduler"
    return None


def named_role(name: str) -> Role:
    """By the first part of a dotted name, where the container doesn't tell."""
    return _NAMES.get(name.split(".")[0], "model")


def is_state(name: str, role: Role) -> bool:
    """Whether training reads this number as state, so that it must be finite."""
    return role != "model" and name.rsplit(".", 1)[-1] not in _STARTS_INFINITE


def parameter_names(optimizer: Mapping[Any, Any], state_dicts: Sequence[Mapping[str, torch.Tensor]]) -> dict[Any, str]:
    """From the keys of the optimizer's state to names of parameters; empty unless the file leaves no doubt.

    No doubt: the groups carry `param_names`; or there is one group, as many parameters as the model's `state_dict` has
    once tied weights and normalisation buffers are left out, and every moment has the shape of the parameter in its
    place.
    """
    groups = optimizer.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return {}
    named = _told(groups)
    if named or len(groups) != 1 or not isinstance(groups[0].get("params"), list):
        return named
    keys = groups[0]["params"]
    found = [_by_order(keys, optimizer.get("state"), each) for each in state_dicts]
    fitting = [names for names in found if names]
    return fitting[0] if fitting and all(names == fitting[0] for names in fitting) else {}


def _told(groups: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    names: dict[Any, str] = {}
    for group in groups:
        keys, told = group.get("params"), group.get("param_names")
        if not isinstance(keys, list) or not isinstance(told, list) or len(keys) != len(told):
            return {}
        names |= {key: str(name) for key, name in zip(keys, told, strict=True) if isinstance(key, (int, str))}
    return names


def _by_order(keys: Sequence[Any], state: Any, state_dict: Mapping[str, torch.Tensor]) -> dict[Any, str]:
    parameters = _parameters(state_dict)
    if len(parameters) != len(keys) or not isinstance(state, Mapping):
        return {}
    names: dict[Any, str] = {}
    for key, (name, shape) in zip(keys, parameters, strict=True):
        if not isinstance(key, int):
            return {}
        moments = state.get(key, {})
        moments = moments.values() if isinstance(moments, Mapping) else ()
        shapes = {tuple(moment.shape) for moment in moments if isinstance(moment, torch.Tensor) and moment.dim()}
        if shapes - {shape}:
            return {}
        names[key] = name
    return names


def _parameters(state_dict: Mapping[str, torch.Tensor]) -> list[tuple[str, tuple[int, ...]]]:
    found, seen = [], set()
    for name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        key = identity(tensor)
        if str(name).rsplit(".", 1)[-1] not in _BUFFERS and key not in seen:
            found.append((str(name), tuple(tensor.shape)))
        seen.add(key)
    return found


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that show the same memory in the same way."""
    try:
        address = tensor.untyped_storage().data_ptr()
        if address and tensor.numel() and tensor.layout is torch.strided and not tensor.is_quantized:
            return (address, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    except (RuntimeError, NotImplementedError):  # sparse, nested, wrapped
        pass
    return (id(tensor),)
