"""Tensors that were there before the step: the batch, parameters, buffers, moments, and what modules are handed.

Names them by their storage, and holds them, so that no later tensor can take the address of a named one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nantrace.flow.links import fqn
from nantrace.flow.rows import BatchRows
from nantrace.flow.values import planes, storage_key, tensors_in
from nantrace.lineage import Category


class External(NamedTuple):  # three times as quick to make as a frozen dataclass, and there is one a parameter
    """A named tensor from before the step."""

    category: Category
    name: str
    tensor: Tensor


class Externals:
    """Storage -> name and category, filled at the start and whenever the step shows another optimizer or criterion."""

    def __init__(self, model: torch.nn.Module, batch: Any) -> None:
        self._known: dict[int, list[External]] = {}  # several that share a storage: the last named first
        self.parameters: dict[int, str] = {}  # id(parameter) -> name
        self._foreign: set[int] = set()
        self._model = model
        self._old_gradients = {storage_key(p.grad) for p in model.parameters() if p.grad is not None} - {None}
        self.rows = BatchRows()
        self._batch: list[External] = []
        self.take_batch(batch)
        self._add_module(model, "")

    def take_batch(self, batch: Any) -> None:
        """Name the tensors of the batch; those of the one before are let go."""
        self._given = batch
        gone = {id(each) for each in self._batch}
        for key in {each.tensor.untyped_storage()._cdata for each in self._batch}:
            self._known[key] = [each for each in self._known.get(key, []) if id(each) not in gone]
            if not self._known[key]:
                del self._known[key]
        self._batch = []
        self._name_batch()

    def read_batch(self) -> None:
        """A step begins: the batch that was handed over may hold other tensors by now."""
        self.take_batch(self._given)

    def _name_batch(self) -> None:
        """Name what the batch holds and what has no name yet."""
        named = {(each.name, each.tensor.untyped_storage()._cdata) for each in self._batch}
        tensors = list(tensors_in(self._given, "batch"))
        for path, tensor in tensors:
            if (path, storage_key(tensor)) not in named:
                self._batch += self._hold("batch", path, tensor, False)
        if tensors:
            self.rows.begin([tensor for _, tensor in tensors])

    def read_arguments(self, args: Sequence[Any]) -> None:
        """What the model is called with has the samples of a batch that nobody handed over."""
        tensors = [value for value in args if isinstance(value, Tensor)]
        if tensors and tensors[0].dim() and not self._batch:
            self.rows.begin(tensors, tensors[0].shape[0])

    def _add_module(self, module: torch.nn.Module, prefix: str) -> None:
        for name, buffer in module.named_buffers():
            self.add("buffer", prefix + fqn(name, module), buffer)
        for name, parameter in module.named_parameters():
            name = prefix + fqn(name, module)
            self.parameters.setdefault(id(parameter), name)
            self.add("param", name, parameter)

    def add(self, category: Category, name: str, tensor: Tensor, keep_first: bool = False) -> None:
        """Name a tensor's storage. A later name replaces an earlier one unless `keep_first`."""
        if torch.nn.parameter.is_lazy(tensor):
            return  # a lazy module's: no memory yet
        self._hold(category, name, tensor, keep_first)

    def _hold(self, category: Category, name: str, tensor: Tensor, keep_first: bool) -> list[External]:
        """What was named now."""
        held = []
        for plane in planes(tensor):
            key = plane.untyped_storage()._cdata
            known = self._known.setdefault(key, [])
            if not known or not keep_first:
                known.insert(0, External(category, name, plane))
                held.append(known[0])
        return held

    def get(self, key: int | None, offset: int | None = None) -> External | None:
        """The named tensor of a storage; of several (slices of one table) the one that holds element `offset` of it."""
        known = self._known.get(key, []) if key is not None else []
        if not known and key in self._old_gradients:
            return self._old_gradient(key)
        if offset is None or len(known) < 2:
            return known[0] if known else None
        return next((each for each in known if _holds(each.tensor, offset)), known[0])

    def find(self, key: int, offset: int) -> External | None:
        """As `get`, also of what has come into the batch since the step began."""
        if key not in self._known:
            self._name_batch()
        return self.get(key, offset)

    def _old_gradient(self, key: int | None) -> External | None:
        """The gradient that has lain in `.grad` since before the step; held by nobody here, so that it can be freed."""
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None and storage_key(parameter.grad) == key:
                return External("grad", f"{fqn(name, self._model)}.grad", parameter.grad)
        return None

    def is_state(self, key: int | None, category: Category | None = None) -> bool:
        """Whether this storage holds a parameter or buffer (of `category`)."""
        found = self.get(key)
        return found is not None and found.category in ((category,) if category else ("param", "buffer"))

    def add_criterion(self, module: torch.nn.Module) -> None:
        """A module outside the model keeps state too: class weights are buffers of their loss."""
        if id(module) not in self._foreign:
            self._foreign.add(id(module))
            prefix = f"{type(module).__name__}."
            for name, buffer in module.named_buffers():
                self.add("buffer", prefix + fqn(name, module), buffer, keep_first=True)
            for name, parameter in module.named_parameters():
                self.add("param", prefix + fqn(name, module), parameter, keep_first=True)

    def parameter_name(self, parameter: Tensor) -> str:
        """The parameter's FQN; a number in order of appearance if it is none of the model's."""
        name = self.parameters.get(id(parameter))
        if name is None:
            name = self.parameters[id(parameter)] = f"param{len(self.parameters)}"
        return name

    def add_moments(self, optimizer: torch.optim.Optimizer) -> None:
        """Name what an optimizer remembers: "optimizer.state.head.weight.exp_avg"."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor) and storage_key(value) not in self._known:
                        name = f"optimizer.state.{self.parameter_name(parameter)}.{key}"
                        self._hold("moment", name, value, keep_first=True)


def _holds(tensor: Tensor, offset: int) -> bool:
    """Whether element `offset` of its storage is one of the tensor's, whose elements do not overlap."""
    rest = offset - tensor.storage_offset()
    if rest < 0 or not tensor.numel():
        return False
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True):
        if stride > 0:
            rest -= min(rest // stride, size - 1) * stride
    return rest == 0
