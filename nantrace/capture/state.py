"""State that training keeps: the batch, parameters, buffers, accumulated gradients and optimizer state, by name.

Only tensors that can hold a nonfinite value are read: not integers, not booleans. Knows nothing of hooks or steps.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from nantrace.capture.buffer import Buffer, Stats
from nantrace.capture.sites import plain_name, wrapper_parts
from nantrace.capture.walk import tensors_in
from nantrace.events import Phase, Role


@dataclass(frozen=True)
class Named:
    """A parameter or buffer of the model: "block.0" owns "block.0.weight" under the leaf name "weight"."""

    tensor: torch.Tensor
    owner: str
    leaf: str

    @functools.cached_property
    def name(self) -> str:
        return f"{self.owner}.{self.leaf}" if self.owner else self.leaf


#: A tensor with the module that owns it and the name that its row gets.
Owned: TypeAlias = "tuple[str | None, str, torch.Tensor]"


class StateRecorder:
    """Observes state.

    Args:
        model: the traced model.
        buffer: receives the rows.

    Attributes:
        aliases: other names of shared parameters and buffers, by the name that rows use.
        unopened: classes of batch or optimizer values that were not looked into.
    """

    def __init__(self, model: torch.nn.Module, buffer: Buffer) -> None:
        self.aliases: dict[str, list[str]] = {}
        self.unopened: set[str] = set()
        self.parameters: dict[int, Named] = {}
        self.buffers: dict[int, Named] = {}
        self._modules = _all_names(model)
        self._buffer = buffer
        self._left: dict[int, tuple[weakref.ref[torch.Tensor], int, Stats]] = {}

    def read_names(self) -> None:
        """Learn the model's parameters and buffers anew: they may have been replaced, frozen or made since."""
        self.parameters = self._named("_parameters", self.parameters)
        self.buffers = self._named("_buffers", self.buffers)
        self._left = {key: left for key, left in self._left.items() if left[0]() is not None}

    def is_on_host(self) -> bool:
        """Whether all the model's parameters lie in host memory."""
        return all(entry.tensor.is_cpu for entry in self.parameters.values())

    def observe_batch(self, batch: Any) -> None:
        for slot, tensor in tensors_in(batch, "batch", self.unopened):
            if tensor.dtype is not torch.bool:
                self._buffer.observe(None, Phase.FORWARD, Role.INPUT, slot, tensor)

    def observe_parameters(self, phase: Phase, optimizer: torch.optim.Optimizer | None = None) -> None:
        """All the model's parameters, or those of them that an optimizer holds."""
        held = None if optimizer is None else {id(parameter) for _, parameter in _members(optimizer)}
        entries = [entry for key, entry in self.parameters.items() if held is None or key in held]
        self._observe([(entry.owner, entry.leaf, entry.tensor) for entry in entries], phase, Role.PARAM)

    def observe_buffers(self, phase: Phase) -> None:
        self._observe([(entry.owner, entry.leaf, entry.tensor) for entry in self.buffers.values()], phase, Role.BUFFER)

    def observe_gradients(self, found: list[Owned], phase: Phase) -> None:
        """Gradients that `gradients` gave."""
        self._observe(found, phase, Role.GRAD)

    def _observe(self, found: Sequence[Owned], phase: Phase, role: Role) -> list[Stats]:
        measured = self._buffer.measure_all([tensor for _, _, tensor in found])
        return [
            self._buffer.observe(owner, phase, role, slot, tensor, 0, stats)
            for (owner, slot, tensor), stats in zip(found, measured, strict=True)
        ]

    def trained(self) -> list[tuple[str, torch.Tensor]]:
        """The model's parameters that require a gradient, by name."""
        return [(entry.name, entry.tensor) for entry in self.parameters.values() if entry.tensor.requires_grad]

    def gradients(self, optimizer: torch.optim.Optimizer | None = None) -> list[Owned]:
        """Gradients that lie in `.grad`: of an optimizer's parameters, or of all the model's."""
        if optimizer is None:
            entries: list[Owned] = [(entry.owner, entry.name, entry.tensor) for entry in self.parameters.values()]
        else:
            entries = [(*self._name(optimizer, place), tensor) for place, tensor in _members(optimizer)]
        return [(owner, name, tensor.grad) for owner, name, tensor in entries if tensor.grad is not None]

    def observe_optimizer(self, optimizer: torch.optim.Optimizer, phase: Phase) -> None:
        """Every tensor of the optimizer's state but "step", a counter.

        What the last update left is not read again at the start of the next step if it is still the same value.
        """
        found = self._state_of(optimizer)
        if phase is Phase.FORWARD:
            for owner, slot, tensor in found:
                self._buffer.observe(owner, phase, Role.STATE, slot, tensor, 0, self._left_by_update(tensor))
            return
        measured = self._observe(found, phase, Role.STATE)
        if phase is Phase.UPDATE:
            for (_, _, tensor), stats in zip(found, measured, strict=True):
                self._left[id(tensor)] = (weakref.ref(tensor), tensor._version, stats)

    def _state_of(self, optimizer: torch.optim.Optimizer) -> list[Owned]:
        found: list[Owned] = []
        for place, parameter in _members(optimizer):
            state = optimizer.state.get(parameter)
            if not state:
                continue
            owner, name = self._name(optimizer, place)
            for key, value in state.items():
                if key != "step":
                    for slot, tensor in tensors_in(value, f"optimizer.state.{name}.{key}", self.unopened):
                        if tensor.is_floating_point() or tensor.is_complex():
                            found.append((owner, slot, tensor))
        return found

    def _left_by_update(self, tensor: torch.Tensor) -> Stats | None:
        """Statistics of what the last update left, if the tensor is still the same value."""
        known = self._left.pop(id(tensor), None)
        return None if known is None or known[0]() is not tensor or known[1] != tensor._version else known[2]

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer holds a parameter of the model."""
        return any(id(parameter) in self.parameters for _, parameter in _members(optimizer))

    def _name(self, optimizer: torch.optim.Optimizer, place: tuple[int, int]) -> tuple[str | None, str]:
        parameter = optimizer.param_groups[place[0]]["params"][place[1]]
        entry = self.parameters.get(id(parameter))
        if entry is None:
            return None, f"param_groups[{place[0]}][{place[1]}]"
        return entry.owner, entry.name

    def _named(self, kind: Literal["_parameters", "_buffers"], before: dict[int, Named]) -> dict[int, Named]:
        """The modules' own dicts are read: `named_parameters` takes as long as reading the tensors would."""
        named: dict[int, Named] = {}
        for module, fqns in self._modules:
            for leaf, tensor in getattr(module, kind).items():
                if tensor is None:
                    continue
                known = before.get(id(tensor))
                if known is None or known.tensor is not tensor:
                    if torch.nn.parameter.is_lazy(tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
                        continue
                    known = Named(tensor, fqns[0], leaf)
                first = named.setdefault(id(tensor), known)
                if len(fqns) > 1 or first.owner != fqns[0] or first.leaf != leaf:
                    self._add_aliases(first.name, fqns, leaf)
        lent = self._lent(named, before)
        places = {(known.owner, known.leaf) for known in lent.values()}
        return {key: known for key, known in named.items() if (known.owner, known.leaf) not in places} | lent

    def _lent(self, named: dict[int, Named], before: dict[int, Named]) -> dict[int, Named]:
        """Parameters in whose place FSDP has put what it gathered, for now: a plain tensor, or a whole for a shard."""
        gone = {key: known for key, known in before.items() if key not in named}
        if not gone:
            return {}
        owners = {fqns[0]: module for module, fqns in self._modules}
        return {key: known for key, known in gone.items() if _is_lent(known, owners[known.owner])}

    def _add_aliases(self, first: str, fqns: list[str], leaf: str) -> None:
        aliases = self.aliases.setdefault(first, [])
        for fqn in fqns:
            name = f"{fqn}.{leaf}" if fqn else leaf
            if name != first and name not in aliases:
                aliases.append(name)


def _is_lent(known: Named, owner: torch.nn.Module) -> bool:
    whole = owner._parameters.get(known.leaf)
    gathered = whole is not None and hasattr(known.tensor, "_local_tensor") and not hasattr(whole, "_local_tensor")
    return gathered or isinstance(vars(owner).get(known.leaf), torch.Tensor)


def _all_names(model: torch.nn.Module) -> list[tuple[torch.nn.Module, list[str]]]:
    """Every module, wrappers included, with all names it is reached by."""
    wrappers = wrapper_parts(model)
    names: dict[int, tuple[torch.nn.Module, list[str]]] = {}
    for full_name, module in model.named_modules(remove_duplicate=False):
        fqns = names.setdefault(id(module), (module, []))[1]
        fqn = plain_name(full_name, wrappers)
        if fqn not in fqns:
            fqns.append(fqn)
    return list(names.values())


def _members(optimizer: torch.optim.Optimizer) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield (number, index), parameter
