"""Which modules have to run in float32 for a step to be finite: a search over the tree of modules, and what it costs.

First the whole model, then the modules within it, then within those: on each level delta debugging (see `samples`)
drops what is not needed. A module counts with everything inside it, and stays whole where its own code needs float32.
The result cannot be made smaller by leaving one out or by going into one; another set may be as small.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence

from nantrace.capture.surroundings import eager_instead_of_compiled
from nantrace.diagnosis.contrast.rows import Smallest
from nantrace.replay.change.axes import Scene, modules_by_name
from nantrace.replay.change.observed_run import Ran, run
from nantrace.replay.change.precision import InFloat32
from nantrace.replay.replays import Replays
from nantrace.replay.samples import reduced
from nantrace.replay.step import Step

_PAIRS = 5  # of runs that are timed
_KEPT = 1  # replay that the caller still needs
_TIMING = 2 * 3  # replays that the search leaves for the timing


def fewest(replays: Replays, scene: Scene, finite: Callable[[Ran], bool]) -> Smallest:
    """Search, then time; `finite` judges a run. The step fails as it is."""
    tree = _Tree(scene)
    before = replays.count

    def finite_in(room: contextlib.AbstractContextManager[Step], what: str) -> bool:
        with contextlib.suppress(RuntimeError):  # a change that cannot be made helps nothing
            return finite(run(replays, what, room, traced=False))
        return False

    def passes(names: Sequence[str]) -> bool:
        what = f"in float32: {', '.join(name or '(model)' for name in names[:3])}{', ...' if len(names) > 3 else ''}"
        return finite_in(tree.in_float32(names), what)

    def may() -> bool:
        return replays.left > _KEPT + _TIMING

    if not may():
        return Smallest(reason="no replay was left to search for one")
    if not finite_in(tree.whole(), "in float32: (model)"):
        return Smallest(replays=replays.count - before, reason="with the whole model in float32 it is nonfinite too")
    names, minimal = _narrowed(tree, passes, may)
    found = Smallest(tuple(names), minimal, replays.count - before)
    return _timed(replays, tree, found)


def _narrowed(tree: _Tree, passes: Callable[[Sequence[str]], bool], may: Callable[[], bool]) -> tuple[list[str], bool]:
    """The names that are left, and whether the search came to its end."""
    done: list[str] = []
    todo = [""]
    while todo:
        name = todo.pop()
        inner = tree.children(name)
        if not inner:
            done.append(name)
            continue
        if not may():
            return sorted([*done, *todo, name], key=tree.order), False
        others = [*done, *todo]
        if not passes([*others, *inner]):
            done.append(name)  # its own code needs it
            continue

        def enough(chosen: Sequence[int], others: list[str] = others, inner: list[str] = inner) -> bool:
            return passes([*others, *(inner[n] for n in chosen)])

        kept, whole = reduced(list(range(len(inner))), enough, may)
        todo += [inner[n] for n in kept]
        if not whole:
            return sorted([*done, *todo], key=tree.order), False
    return _without_spare(sorted(done, key=tree.order), passes, may)


def _without_spare(
    names: list[str], passes: Callable[[Sequence[str]], bool], may: Callable[[], bool]
) -> tuple[list[str], bool]:
    """Leave out what a later step of the search made superfluous."""
    for name in list(names) if len(names) > 1 else ():
        rest = [other for other in names if other != name]
        if not may():
            return names, False
        if rest and passes(rest):
            names = rest
    return names, True


class _Tree:
    """The modules that run, by name, and which of them lies within which; known once `whole` was run."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._modules = modules_by_name(scene.step.model)
        self._place = {name: place for place, name in enumerate(self._modules)}
        self._ran: set[str] = set()

    @contextlib.contextmanager
    def whole(self) -> Iterator[Step]:
        """The whole model in float32; notes which modules are called. Those that are not have nothing to change."""
        with contextlib.ExitStack() as exits:
            step = exits.enter_context(self.in_float32([""]))
            for name, module in self._modules.items():
                handle = module.register_forward_pre_hook(lambda *_, name=name: self._ran.add(name))
                exits.callback(handle.remove)
            yield step

    def order(self, name: str) -> int:
        return self._place[name]

    def children(self, name: str) -> list[str]:
        """The nearest modules within `name` that ran."""
        inside = [other for other in self._modules if other in self._ran and other != name and _within(other, name)]
        return [one for one in inside if not any(other != one and _within(one, other) for other in inside)]

    @contextlib.contextmanager
    def in_float32(self, names: Sequence[str]) -> Iterator[Step]:
        step = self._scene.step
        with InFloat32(step.model, [self._modules[name] for name in names]), self._eager():
            yield step

    @contextlib.contextmanager
    def plain(self) -> Iterator[Step]:
        with self._eager():
            yield self._scene.step

    def _eager(self) -> contextlib.AbstractContextManager[None]:
        return eager_instead_of_compiled() if self._scene.compiles else contextlib.nullcontext()


def _within(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


def _timed(replays: Replays, tree: _Tree, found: Smallest) -> Smallest:
    """The time of a step with these modules in float32 over that without: the median of pairs run side by side."""
    pairs: list[tuple[float, float]] = []
    while len(pairs) < _PAIRS and replays.left >= _KEPT + 2:
        without = run(replays, "timed, as it was", tree.plain(), traced=False).seconds
        using = run(replays, "timed, in float32", tree.in_float32(found.modules), traced=False).seconds
        pairs.append((without, using))
    if not pairs:
        return found
    return dataclasses.replace(
        found,
        ratio=statistics.median(using / without for without, using in pairs),
        pairs=len(pairs),
        seconds=(statistics.median(w for w, _ in pairs), statistics.median(u for _, u in pairs)),
    )
