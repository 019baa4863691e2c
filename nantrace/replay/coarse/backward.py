"""Coarse narrowing of a backward pass: in which autograd node was the first nonfinite gradient born?

One replay finds the nodes and the first leaf at which a nonfinite gradient arrived. Sites are the nodes that lead
there, in the order in which they run; a few replays look at what goes in and comes out of many of them each. A node's
own gradients are looked at, not those of tensors: what several readers of one tensor hand back is their sum there, and
would convict the wrong one.

It does not see backward passes on other threads, nor ops: those are left to the op pass within the region.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from nantrace.capture.lifecycle import Lifecycle, StepListener
from nantrace.capture.surroundings import eager_instead_of_compiled
from nantrace.flow.links import fqn
from nantrace.flow.values import Scanner, planes, unseen
from nantrace.replay.coarse.graph import ACCUMULATES, Graph, Key, graph_of, key_of, made, walk
from nantrace.replay.replays import Replays, called
from nantrace.replay.search import WIDTH, Region, Seen, narrow

_LEFT_FORWARD = ("forward", "loss", "recompute")


@dataclass
class _Pass:
    """One backward pass of a run.

    Attributes:
        graph: what it runs through; None for one that accumulates nothing.
        inside: number of the pass and key of the node from inside which it was called.
    """

    graph: Graph | None
    inside: tuple[int, Key] | None


@dataclass
class Map:
    """What a run made: its backward passes, which module made which node, and where nonfinite gradients arrived.

    Attributes:
        passes: in the order in which they began.
        owners: of each number of a node, the module in whose own code it was made; None outside of modules.
        arrived: (pass, key) of the first leaf at which a nonfinite gradient arrived.
        complete: whether all of it could be read.
    """

    passes: list[_Pass] = field(default_factory=list)
    owners: list[str | None] = field(default_factory=list)
    arrived: tuple[int, Key] | None = None
    complete: bool = True

    def owner(self, key: Key) -> str | None:
        return self.owners[key[0]] if 0 <= key[0] < len(self.owners) else None

    def chain(self) -> list[tuple[int, Key]]:
        """The nodes that lead to the first leaf with a nonfinite gradient, and the leaf itself, as they run."""
        if self.arrived is None:
            return []
        number, target = self.arrived
        found = [self.arrived]
        while True:
            this = self.passes[number]
            if this.graph is None or target not in this.graph.keys:
                return found
            found[:0] = [(number, key) for key in this.graph.leading_to(this.graph.keys.index(target))]
            if this.inside is None:
                return found
            number, target = this.inside


@dataclass(frozen=True)
class Suspects:
    """The part of a step that is left: nodes of its backward, and the modules whose own code made them.

    Attributes:
        keys: of the nodes; none if every gradient arrived finite: then what came after is left.
        finished: one node is left, or what runs between two.
    """

    map: Map
    keys: frozenset[Key]
    finished: bool = True

    @property
    def modules(self) -> frozenset[str]:
        return frozenset(owner for key in self.keys if (owner := self.map.owner(key)) is not None)

    def names(self) -> tuple[str, ...]:
        """For people: "PowBackward0 in block.3", in the order in which they run."""
        if not self.keys:
            return ("what comes after backward",)
        return tuple(dict.fromkeys(self._name(key) for key in sorted(self.keys, reverse=True)))

    def _name(self, key: Key) -> str:
        owner = self.map.owner(key)
        place = "" if owner is None else f" in {owner}" if owner else " in the model's own code"
        return f"{key[1].rpartition('::')[2]}{place}"

    def widened(self, modules: Iterable[str | None]) -> Suspects:
        """With all that the own code of these modules made."""
        wanted = frozenset(modules)
        graphs = [each.graph for each in self.map.passes if each.graph is not None]
        more = {key for graph in graphs for key in graph.keys if key[0] >= 0 and self.map.owner(key) in wanted}
        return Suspects(self.map, self.keys | more, self.finished)

    def within(self) -> Callable[[str | None, str], bool]:
        """What to watch of each op; to be asked for right before the run.

        Of backward the nodes, of forward the own code of the modules that made them; always what runs in no module,
        what adds gradients to those of leaves, and what comes after backward.
        """
        began, keys, modules = made(), self.keys, self.modules

        def watched(module: str | None, phase: str) -> bool:
            if phase == "backward":
                node = torch._C._current_autograd_node()
                return node is None or node.name().endswith(ACCUMULATES) or key_of(node, began) in keys
            if phase not in _LEFT_FORWARD or module is None or module.startswith("<"):
                return True
            return module in modules

        return watched


def narrow_backward(replays: Replays, most: int) -> Suspects | None:
    """Search for the node in which the first nonfinite gradient was born, in at most `most` replays and one before.

    None if the backward passes could not be read.
    """
    found = _mapped(replays)
    if not found.complete:
        return None
    sites = found.chain()
    if not sites:
        return Suspects(found, frozenset())

    def observe(chosen: Sequence[int]) -> Mapping[int, Seen]:
        what = f"{len(chosen):,} of {len(sites):,} backward nodes watched"
        watch = _Watch({sites[index]: index for index in chosen})
        _replay(replays, what, watch)
        return watch.seen

    region = narrow([1] * len(sites), observe, width=WIDTH, max_replays=most)
    return Suspects(found, frozenset(_left(found, sites, region)), region.finished)


def _left(found: Map, sites: Sequence[tuple[int, Key]], region: Region) -> Iterator[Key]:
    """The keys that a region stands for; of a gap before a node, those that hand something to it too."""
    if region.culprit is not None:
        yield sites[region.culprit][1]
        return
    yield from (sites[index][1] for index in region.sites if index < len(sites))
    if region.reader is not None:
        number, key = sites[region.reader]
        graph = found.passes[number].graph
        if graph is not None:
            yield from graph.writers_of(key)


# ---------------------------------------------------------------------------------------------------- runs
class _Passes(StepListener):
    """Counts the backward passes of one run, and puts hooks on nodes of some."""

    def __init__(self) -> None:
        self.began = 0
        self.failure: Exception | None = None
        self._count = 0
        self._open: list[int] = []
        self._handles: list[Any] = []
        self._scanner = Scanner()

    def backward_begins(self, roots: tuple[torch.Tensor, ...], accumulates: bool, nested: bool) -> None:
        number, self._count = self._count, self._count + 1
        outer = self._open[-1] if nested and self._open else None
        self._open.append(number)
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            self.backward(number, roots, accumulates, outer)

    def backward_ends(self, accumulates: bool, nested: bool, failed: bool) -> None:
        self._open.pop()

    def recorder_failed(self, error: Exception) -> None:
        self.failure = self.failure or error

    def backward(self, number: int, roots: Sequence[torch.Tensor], accumulates: bool, outer: int | None) -> None:
        raise NotImplementedError

    def hook(self, node: Any, before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
        """Put hooks on a node that tell what goes in and what comes out, and change nothing."""
        self._handles.append(node.register_prehook(lambda given: self._told(before, given)))
        self._handles.append(node.register_hook(lambda handed_on, _: self._told(after, handed_on)))

    def _told(self, do: Callable[[Any], None], gradients: Any) -> None:
        try:
            with unseen():
                do(gradients)
        except Exception as error:  # nothing may be raised into the step
            self.recorder_failed(error)

    def is_bad(self, gradients: Iterable[torch.Tensor | None]) -> bool:
        """Whether one of them holds something nonfinite."""
        tensors = (gradient for gradient in gradients if gradient is not None)
        return any(not self._scanner.is_finite(plane) for tensor in tensors for plane in planes(tensor))

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()


class _Mapping(_Passes):
    """Reads the graphs, and looks at what arrives at the leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.map = Map()

    def backward(self, number: int, roots: Sequence[torch.Tensor], accumulates: bool, outer: int | None) -> None:
        node = torch._C._current_autograd_node() if outer is not None else None
        inside = None if outer is None or node is None else (outer, key_of(node, self.began))
        self.map.passes.append(_Pass(None, inside))
        if not accumulates:
            return
        self.map.passes[-1].graph, leaves = graph_of(roots, self.began)
        for leaf, key in leaves:
            self._watch_leaf(leaf, (number, key))

    def _watch_leaf(self, leaf: Any, place: tuple[int, Key]) -> None:
        def arrives(gradients: Any) -> None:
            if self.map.arrived is None and self.is_bad(gradients):
                self.map.arrived = place

        self.hook(leaf, arrives, lambda _: None)


class _Watch(_Passes):
    """Looks at chosen nodes: a site for each (pass, key)."""

    def __init__(self, chosen: Mapping[tuple[int, Key], int]) -> None:
        super().__init__()
        self.seen: dict[int, Seen] = {}
        self._chosen = chosen
        self._wanted = {number for number, _ in chosen}

    def backward(self, number: int, roots: Sequence[torch.Tensor], accumulates: bool, outer: int | None) -> None:
        if number not in self._wanted:
            return
        for node, key in walk(roots, self.began):
            site = self._chosen.get((number, key))
            if site is not None:
                self._watch(node, site)

    def _watch(self, node: Any, site: int) -> None:
        def enters(gradients: Any) -> None:
            self.seen[site] = Seen(entered=self.is_bad(gradients), left=False)

        def leaves(gradients: Any) -> None:
            entered = self.seen[site].entered
            self.seen[site] = Seen(entered, entered if node_is_leaf else self.is_bad(gradients))

        node_is_leaf = node.name().endswith(ACCUMULATES)
        self.hook(node, enters, leaves)


def _replay(replays: Replays, what: str, passes: _Passes) -> None:
    """One run under these hooks; compiled code runs eagerly."""
    with replays.one(what) as listener:
        try:
            with Lifecycle(passes), eager_instead_of_compiled():
                passes.began = made()
                returned, error = called(replays.step)
        finally:
            passes.remove()
        listener.ended(returned, error)


def _mapped(replays: Replays) -> Map:
    """One run that finds the nodes, who made them, and the first leaf at which a nonfinite gradient arrived."""
    passes = _Mapping()
    spans: list[tuple[int, int, str]] = []
    with _module_calls(replays.step.model, passes, spans):
        _replay(replays, "the nodes of backward", passes)
    found = passes.map
    found.complete = passes.failure is None
    found.owners = _painted(spans)
    return found


@contextlib.contextmanager
def _module_calls(model: torch.nn.Module, passes: _Passes, spans: list[tuple[int, int, str]]) -> Iterator[None]:
    """Keeps of each module call which numbers of nodes were taken in it: (first, one past the last, FQN).

    The hooks are those for all modules: they change no module and no kernel.
    """
    names = {id(module): fqn(name, model) for name, module in model.named_modules()}
    open_calls: list[tuple[torch.nn.Module, int]] = []
    thread = threading.get_ident()  # each thread numbers its own nodes

    def begins(module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() == thread:
            open_calls.append((module, made() - passes.began))

    def ends(module: torch.nn.Module, args: Any, output: Any) -> None:
        while threading.get_ident() == thread and any(each is module for each, _ in open_calls):
            called_module, first = open_calls.pop()
            name = names.get(id(called_module))
            if name is not None:
                spans.append((first, made() - passes.began, name))
            if called_module is module:
                return

    handles = [register_module_forward_pre_hook(begins), register_module_forward_hook(ends, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _painted(spans: Sequence[tuple[int, int, str]]) -> list[str | None]:
    """Of each number the innermost call that took it: calls end before those around them, so the first ended wins."""
    owners: list[str | None] = [None] * max((end for _, end, _ in spans), default=0)
    for first, end, name in reversed(spans):
        owners[first:end] = [name] * (end - first)
    return owners
