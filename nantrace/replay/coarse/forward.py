"""Coarse narrowing: in which module was the value of a failing forward born? A few replays, many modules in each.

Sites are the modules that ran, in the order in which their first calls completed, which one replay observes. A module
that is called more than once counts as one site, so the region may miss the birth: the op pass within the region then
finds no origin, and the caller falls back to watching every op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nantrace.capture.sites import watched_modules
from nantrace.capture.surroundings import eager_instead_of_compiled
from nantrace.flow.values import Scanner, planes, tensors_in, unseen
from nantrace.replay.replays import Replays, called
from nantrace.replay.search import WIDTH, Region, Seen, narrow


@dataclass(frozen=True)
class Tree:
    """Modules, children before parents: their FQNs, the modules themselves, and the sites in each one's subtree."""

    names: tuple[str, ...]
    modules: tuple[torch.nn.Module, ...]
    sizes: tuple[int, ...]


def tree_of(model: torch.nn.Module) -> Tree:
    """The modules that can be watched without changing which kernels run, in the order of their definition."""
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


def as_called(replays: Replays, tree: Tree) -> Tree:
    """The modules that ran, in the order in which their first calls completed, and nested as those were; one replay."""
    order = _Order()
    handles: list[Any] = []
    with replays.one("the order of modules") as listener:
        try:
            for site, module in enumerate(tree.modules):
                handles.append(module.register_forward_pre_hook(lambda *_, site=site: order.begins(site)))
                handles.append(module.register_forward_hook(lambda *_, site=site: order.ends(site)))
            with eager_instead_of_compiled():
                returned, error = called(replays.step)
        finally:
            for handle in handles:
                handle.remove()
        listener.ended(returned, error)
    order.all_end()
    sites = order.completed
    return Tree(
        tuple(tree.names[site] for site in sites), tuple(tree.modules[site] for site in sites), tuple(order.sizes)
    )


class _Order:
    """Calls as they begin and end; the first of each site counts."""

    def __init__(self) -> None:
        self.completed: list[int] = []
        self.sizes: list[int] = []  # of the subtree of each of them
        self._open: list[tuple[int, int | None]] = []  # (site, sites completed before its first call)
        self._begun: set[int] = set()

    def begins(self, site: int) -> None:
        self._open.append((site, None if site in self._begun else len(self.completed)))
        self._begun.add(site)

    def ends(self, site: int) -> None:
        if any(each == site for each, _ in self._open):
            while self._close() != site:  # those within it raised
                pass

    def all_end(self) -> None:
        """The step raised: what is open ends here."""
        while self._open:
            self._close()

    def _close(self) -> int:
        site, before = self._open.pop()
        if before is not None:
            self.completed.append(site)
            self.sizes.append(len(self.completed) - before)
        return site


def narrow_forward(replays: Replays, tree: Tree, most: int) -> Region:
    """Search for the module in whose own code the value was born, in at most `most` replays of many modules each."""

    def observe(chosen: Sequence[int]) -> Mapping[int, Seen]:
        with replays.one(f"{len(chosen):,} of {len(tree.names):,} modules watched") as listener:
            with _watching(tree, chosen) as found, eager_instead_of_compiled():
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
        with contextlib.suppress(Exception), unseen():
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


@dataclass(frozen=True)
class Inside:
    """The part of a step that is left: modules with all they hold, and everything outside of modules."""

    modules: tuple[str, ...]

    def names(self) -> tuple[str, ...]:
        """For people."""
        return tuple(name or "(model)" for name in self.modules)

    def widened(self, modules: Iterable[str | None]) -> Inside:
        """With these modules too."""
        return Inside(tuple(dict.fromkeys((*self.modules, *(name for name in modules if name is not None)))))

    def within(self) -> Callable[[str | None, str], bool]:
        """What to watch of each op."""
        chosen = frozenset(self.modules)

        def watched(module: str | None, phase: str) -> bool:
            if module is None or module.startswith("<") or module in chosen or "" in chosen:
                return True
            return any(module.startswith(f"{name}.") for name in chosen)

        return watched
