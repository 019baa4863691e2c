"""Which modules of a model are watched and what they are called. Reads the model, changes nothing."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nantrace.events import ModuleEntry

# What wrappers call the module inside them.
INNER = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PARALLEL = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)  # these call it "module"

# With a hook on any of their submodules these leave their fused kernel, and the step would not be the user's any more.
_FUSED = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer)


@dataclass(frozen=True)
class Watched:
    """One module of the model.

    Attributes:
        fqn: its name, without the names of wrappers.
        selected: whether its inputs and outputs are recorded.
        hookable: False where a hook of its own would change which kernels run; global hooks watch it then.
    """

    module: torch.nn.Module
    fqn: str
    selected: bool
    hookable: bool


def plain_name(name: str, wrappers: frozenset[str]) -> str:
    """An FQN without the parts that wrappers put in: "_orig_mod.module.head" is "head"."""
    if not any(wrapper in name for wrapper in wrappers):
        return name
    return ".".join(part for part in name.split(".") if part not in wrappers)


def watched_modules(
    model: torch.nn.Module, patterns: Sequence[str] | None = None, depth: int | None = None
) -> tuple[list[Watched], tuple[ModuleEntry, ...]]:
    """The modules to watch, parents before children, and the table of all modules with their aliases.

    Args:
        model: the traced model; a wrapper (compiled, data parallel, checkpoint) counts as what it wraps.
        patterns: globs on FQNs; None selects by depth alone.
        depth: deepest level of selected modules; 0 selects the model itself, None all.

    Raises:
        ValueError: a pattern matches no module.
    """
    wrapped, wrappers = _wrapped(model), wrapper_parts(model)
    names: dict[int, list[str]] = {}
    modules: dict[int, torch.nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) not in wrapped:
            modules.setdefault(id(module), module)
            fqns = names.setdefault(id(module), [])
            fqn = plain_name(name, wrappers)
            if fqn not in fqns:
                fqns.append(fqn)
    chosen = _chosen([fqn for fqns in names.values() for fqn in fqns], patterns, depth)
    fused = {id(part) for module in modules.values() if isinstance(module, _FUSED) for part in module.modules()}
    table = [
        Watched(
            module,
            names[key][0],
            any(fqn in chosen for fqn in names[key]),
            key not in fused and not isinstance(module, torch.jit.ScriptModule),
        )
        for key, module in modules.items()
    ]
    entries = tuple(
        ModuleEntry(names[key][0], class_name(module), tuple(names[key][1:])) for key, module in modules.items()
    )
    return table, entries


def wrapper_parts(model: torch.nn.Module) -> frozenset[str]:
    """Names of wrappers that this model has; a submodule that the user called "module" keeps its name."""
    outermost = model
    while "_orig_mod" in outermost._modules:
        outermost = outermost._modules["_orig_mod"]  # type: ignore[assignment]
    return INNER | {"module"} if isinstance(outermost, _PARALLEL) else INNER


def _wrapped(model: torch.nn.Module) -> set[int]:
    return {id(module) for module in model.modules() if is_wrapper(module)}


def is_wrapper(module: torch.nn.Module) -> bool:
    """Whether a module only stands around another one, to compile, spread or checkpoint it."""
    return isinstance(module, _PARALLEL) or not INNER.isdisjoint(module._modules)


def class_name(module: torch.nn.Module) -> str:
    """The name of the module's class, as it was before `fully_shard` put one of its own in its place."""
    classes = type(module).__mro__
    sharded = len(classes) > 2 and classes[1].__name__ == "FSDPModule"
    return (classes[2] if sharded else classes[0]).__name__


def _chosen(fqns: list[str], patterns: Sequence[str] | None, depth: int | None) -> set[str]:
    chosen = {fqn for fqn in fqns if depth is None or (fqn.count(".") + 1 if fqn else 0) <= depth}
    if patterns is None:
        return chosen
    matched: set[str] = set()
    for pattern in patterns:
        hits = set(fnmatch.filter(fqns, pattern))
        if not hits:
            some = ", ".join(repr(fqn) for fqn in fqns[:8])
            raise ValueError(f"modules has {pattern!r}, which matches none of the model's {len(fqns)} modules: {some}")
        matched |= hits
    return matched & chosen


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether any part of the model went through `torch.compile`."""
    return any(
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
