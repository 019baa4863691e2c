"""What an op's schema says about it: which arguments it reads and writes, and whether it makes new values at all.

Learnt once per op. Ops are judged by their schema; the few names below are those whose schema does not tell.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

#: Ops that hand out memory which nobody has written yet.
_UNWRITTEN = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "empty_strided", "empty_permuted"),
        *("new_empty", "new_empty_strided", "resize_"),
    )
)
#: In-place ops that overwrite `self` without reading it.
_OVERWRITING = frozenset(
    f"aten::{name}"
    for name in (
        *("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "normal_", "uniform_", "random_"),
        *("bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_"),
    )
)
#: Ops that take memory which somebody else wrote: a queue between processes, a checkpoint, a file.
_ADOPTING = frozenset(("aten::set_", "aten::from_file"))
#: Ops through which the host reads a value off the device.
_HOST_READS = frozenset(("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"))
#: Namespaces whose ops hand memory to other processes, which write into it until somebody waits for them.
_COLLECTIVE = ("c10d::", "c10d_functional::", "_c10d_functional")
#: Namespaces whose schemas can be trusted to announce every write.
_ANNOUNCING = ("aten::", "prims::", "quantized::", "_c10d_functional::")


class OpFacts:
    """One op overload, as the recorder needs it.

    Attributes:
        op: "aten.addmm", or "namespace.name" of a custom op.
        arguments: the schema's argument names; `position` maps them back.
        writes, reads: by position.
        view: only hands out its input's memory (or, where the schema leaves that open, `maybe_view`), or memory from
            elsewhere.
        unwritten: its result is memory that nobody has written.
        host_read: its result is a Python number.
        listwise: element i of every list argument belongs together (`_foreach_*`, `_fused_*`).
        announces: writes nothing that its schema does not say.
        collective: other processes write into its outputs, after it has returned.
        received: names of the arguments that a collective fills.
        writes_self: writes into its first argument, one tensor, into nothing else, and returns it.
        touches: changes memory that was there before, by its schema or as a collective.
        makes: "tensor" for an op that puts out one tensor, either new or the `self` it wrote into, "tensors" for one
            that puts out several new ones, "number" for a host read; None for all others. Those write nothing else.
        func: the op itself; holding it keeps its id its own.
    """

    __slots__ = (
        "announces", "arguments", "collective", "func", "host_read", "listwise", "makes", "maybe_view", "mutates",
        "op", "position", "reads", "received", "touches", "unwritten", "view", "writes", "writes_self",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.func = func
        name: str = schema.name
        self.op = name.replace("::", ".")
        self.arguments = tuple(argument.name for argument in schema.arguments)
        self.position = {argument: i for i, argument in enumerate(self.arguments)}
        self.writes = tuple(bool(a.alias_info is not None and a.alias_info.is_write) for a in schema.arguments)
        result_only = tuple(a.kwarg_only and w for a, w in zip(schema.arguments, self.writes, strict=True))
        overwrites = name in _OVERWRITING
        self.reads = tuple(not (r or (w and overwrites)) for r, w in zip(result_only, self.writes, strict=True))
        self.mutates = any(self.writes)
        self.collective = name.startswith(_COLLECTIVE) and not name.endswith("::wait_tensor")
        self.received = _received(name, self.arguments) if self.collective else ()
        if self.collective:  # what only takes results holds nothing yet
            self.reads = tuple(not name.startswith("output") for name in self.arguments)
        self.touches = self.mutates or self.collective
        aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        # Under inference mode `reshape`, `to` and the like arrive whole: they may copy.
        self.maybe_view = aliases and bool(getattr(func, "_can_decompose", bool)())
        self.view = (aliases and not self.maybe_view) or name in _ADOPTING or name.endswith("::wait_tensor")
        self.unwritten = name in _UNWRITTEN
        self.host_read = name in _HOST_READS
        self.listwise = "_foreach_" in name or "_fused_" in name
        self.announces = name.startswith(_ANNOUNCING) and "batch_norm" not in name
        single = len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"
        self.writes_self = single and sum(self.writes) == 1 and self.writes[0] and _is_tensor(schema.arguments[0])
        self.makes = self._makes([str(each.type) for each in schema.returns])

    def _makes(self, returns: list[str]) -> Literal["tensor", "tensors", "number"] | None:
        if not self.announces or self.collective or self.maybe_view or (self.mutates and not self.writes_self):
            return None
        if self.host_read:
            return "number"
        if returns == ["Tensor"]:
            return "tensor"
        return "tensors" if returns == ["List[Tensor]"] or (returns and set(returns) == {"Tensor"}) else None


def _received(name: str, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Which arguments of a collective are filled, by their names: the schemas of "c10d" do not say."""
    if not name.startswith("c10d::") or name.endswith(("::send", "::barrier")):
        return ()
    return tuple(each for each in arguments if each.startswith("output") or each == "tensors")


@functools.cache
def facts_of(func: Any) -> OpFacts:
    """What the schema of an op overload says."""
    return OpFacts(func)


def _is_tensor(argument: Any) -> bool:
    return str(argument.type) == "Tensor"
