"""Coarse narrowing: in which module was the value of a failing forward born? A few replays, many modules in each.

Sites are the model's modules in post-order of the module tree, which is the order in which they complete in most
models. Where it is not, the region may miss the birth: the op pass within the region then finds no origin, and the
caller falls back to watching every op. A module that is called more than once counts as one site.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nantrace.capture.sites import watched_modules
from nantrace.flow.values import Scanner, planes, tensors_in
from nantrace.replay.replays import Replays, called
from nantrace.replay.search import WIDTH, Region, Seen, narrow


@dataclass(frozen=True)
class Tree:
    """Modules in post-order: their FQNs, the modules themselves, and how many sites each one's subtree has."""

    names: tuple[str, ...]
    modules: tuple[torch.nn.Module, ...]
    sizes: tuple[int, ...]


def tree_of(model: torch.nn.Module) -> Tree:
    """The modules that can be watched without changing which kernels run."""
    table = [watched for watched in watched_modules(model)[0] if watched.hookable]
    first = {watched.fqn: position for position, watched in enumerate(table)}
    order = sorted(range(len(table)), key=lambda i: _post_order(first, table[i].fqn))
    names = tuple(table[i].fqn for i in order)
    sizes = tuple(_subtree(names, i) for i in range(len(names)))
    return Tree(names, tuple(table[i].module for i in order), sizes)


def _post_order(first: Mapping[str, int], name: str) -> tuple[float, ...]:
    """Sorts children, in their order of definition, before their parent."""
    parts = name.split(".") if name else []
    path = [first.get(".".join(parts[: n + 1]), first[name]) for n in range(len(parts))]
    return (*path, float("inf"))


def _subtree(names: tuple[str, ...], index: int) -> int:
    """How many consecutive sites up to this one lie within it."""
    prefix = f"{names[index]}." if names[index] else ""
    size = 1
    while index - size >= 0 and names[index - size].startswith(prefix):
        size += 1
    return size


def narrow_forward(replays: Replays, tree: Tree, most: int) -> Region:
    """Search for the module in whose own code the value was born, in at most `most` replays of many modules each."""

    def observe(chosen: Sequence[int]) -> Mapping[int, Seen]:
        with replays.one(f"{len(chosen):,} of {len(tree.names):,} modules watched") as listener:
            with _watching(tree, chosen) as found, torch.compiler.set_stance("force_eager"):
                returned, error = called(replays.step)
            listener.ended(returned, error)
        return found

    return narrow(tree.sizes, observe, width=WIDTH, max_replays=most)


@contextlib.contextmanager
def _watching(tree: Tree, chosen: Sequence[int]) -> Iterator[dict[int, Seen]]:
    found: dict[int, Seen] = {}
    scanner = Scanner()
    handles: list[Any] = []

    def look(value: Any) -> bool:
        with contextlib.suppress(Exception), torch.no_grad(), torch._C._DisableTorchDispatch():
            return any(not scanner.is_finite(plane) for _, t in tensors_in(value, "") for plane in planes(t))
        return False  # unreadable: nothing may be raised into the step

    def hook(site: int) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            # Before the call: in-place ops destroy what went in.
            old = found.get(site, Seen(entered=False, left=False))
            found[site] = Seen(old.entered or (not old.left and look((args, kwargs))), old.left)

        def after(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            old = found.get(site, Seen(entered=False, left=False))
            found[site] = Seen(old.entered, old.left or look(output))

        return before, after

    try:
        for site in chosen:
            before, after = hook(site)
            handles.append(tree.modules[site].register_forward_pre_hook(before, with_kwargs=True))
            handles.append(tree.modules[site].register_forward_hook(after, with_kwargs=True))
        yield found
    finally:
        for handle in handles:
            handle.remove()


def modules_of(tree: Tree, region: Region) -> tuple[str, ...]:
    """The FQNs that a region stands for: the culprit's, else those under suspicion."""
    if region.culprit is not None:
        return (tree.names[region.culprit],)
    return tuple(tree.names[site] for site in region.sites if site < len(tree.names))


def inside(names: tuple[str, ...]) -> Callable[[str | None, str], bool]:
    """What to watch of each op: the named modules with all they hold, and everything outside of modules."""
    chosen = frozenset(names)

    def within(module: str | None, phase: str) -> bool:
        if module is None or module.startswith("<"):
            return True
        if module in chosen or "" in chosen:
            return True
        return any(module.startswith(f"{name}.") for name in chosen)

    return within
