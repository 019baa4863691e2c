"""The nodes of a backward pass: found by walking from its roots, and known again in the next run of the step.

A node is known by how many nodes the run had made before it, and by its name: a step that does the same each time makes
the same ones. Says nothing about values, and keeps no node alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: The number of the next autograd node of this thread.
made: Callable[[], int] = torch._C._autograd._get_sequence_nr
#: (nodes made in the run before it, its name); where a gradient is accumulated, a negative number in order of the walk.
Key = tuple[int, str]
#: What a node is called that adds a gradient to a leaf's.
ACCUMULATES = "AccumulateGrad"


@dataclass(frozen=True)
class Graph:
    """What one backward pass runs through.

    Attributes:
        keys: its nodes, as the walk met them.
        reads: of each node, the places in `keys` of those that it hands gradients to.
    """

    keys: tuple[Key, ...]
    reads: tuple[tuple[int, ...], ...]

    def leading_to(self, target: int) -> list[Key]:
        """Those whose gradients can reach the node at `target`, in the order in which they run.

        The engine runs what was made last first; whoever hands something to a node was made after it.
        """
        writers: dict[int, list[int]] = {}
        for place, read in enumerate(self.reads):
            for each in read:
                writers.setdefault(each, []).append(place)
        found, todo = {target}, [target]
        while todo:
            for place in writers.get(todo.pop(), ()):
                if place not in found:
                    found.add(place)
                    todo.append(place)
        found.discard(target)
        return sorted((self.keys[place] for place in found), reverse=True)

    def writers_of(self, key: Key) -> list[Key]:
        """Those that hand a gradient to the node, right before it runs."""
        place = self.keys.index(key)
        return [self.keys[writer] for writer, read in enumerate(self.reads) if place in read]


def key_of(node: Any, began: int) -> Key:
    """The key of a node other than a leaf's; `began`: `made()` when the run began."""
    return node._sequence_nr() - began, node.name()


def walk(roots: Sequence[torch.Tensor], began: int) -> Iterator[tuple[Any, Key]]:
    """Every node that a backward pass from `roots` can reach, with its key."""
    for node, key, _ in _walk(roots, began):
        yield node, key


def graph_of(roots: Sequence[torch.Tensor], began: int) -> tuple[Graph, list[tuple[Any, Key]]]:
    """The graph of the backward pass that is about to start from `roots`, and the nodes of its leaves."""
    found = list(_walk(roots, began))  # keeps all nodes until the end, so that no two have the same id
    places = {id(node): place for place, (node, _, _) in enumerate(found)}
    reads = tuple(tuple(places[id(each)] for each in then) for _, _, then in found)
    return Graph(tuple(key for _, key, _ in found), reads), [(node, key) for node, key, _ in found if key[0] < 0]


def _walk(roots: Sequence[torch.Tensor], began: int) -> Iterator[tuple[Any, Key, tuple[Any, ...]]]:
    todo: list[Any] = [root.grad_fn for root in reversed(roots) if root.grad_fn is not None]
    seen: dict[int, Any] = {}
    leaves = 0
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        following = tuple(each for each, _ in node.next_functions if each is not None)
        todo.extend(reversed(following))
        leaf = node.name().endswith(ACCUMULATES)
        leaves += leaf
        yield node, (-leaves, node.name()) if leaf else key_of(node, began), following
