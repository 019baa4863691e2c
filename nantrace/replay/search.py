"""Which sites to look at in the next replay, until one is left: a search over an ordered tree. Pure.

Knows neither torch nor what a site is. Sites stand in the order in which they complete, a parent after its children
(the forward of modules, or mirrored their backward). One replay observes many sites at once and tells for each whether
something nonfinite went in and came out.

Nothing is assumed to be monotone: nonfinite values may be masked and others be born later, and may travel around a
site in a side branch. A finite site therefore rules out nobody but itself; the search uses the order to guess where to
look, and stops only at proof: a site that nothing nonfinite entered and something nonfinite left, or a nonfinite
input before which every site was seen to be finite. The one assumption is about the tree: what a module's own code is
made of went through its children's outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

#: How many sites one replay observes unless told otherwise.
WIDTH = 2048


@dataclass(frozen=True)
class Seen:
    """What one replay saw at one site."""

    entered: bool  # something nonfinite went in
    left: bool  # something nonfinite came out


#: Observes the given sites in one replay. A site that did not run is left out.
Oracle = Callable[[Sequence[int]], Mapping[int, Seen]]


@dataclass(frozen=True)
class Region:
    """Where the search ended.

    Attributes:
        culprit: the site inside whose own code, none of its children's, the value was born; None: outside any site.
        sites: those still under suspicion, in order; if the search did not finish, the likely ones: between the last
            site seen finite and the first seen nonfinite.
        reader: the site that was the first to read the value, if it was born in the gap before that site.
        first: every site that completes before the culprit or the reader was observed, and was finite.
        finished: False when the replays ran out before one site was left.
        replays: how many replays were used.
    """

    culprit: int | None
    sites: tuple[int, ...]
    reader: int | None
    first: bool
    finished: bool
    replays: int


def narrow(sizes: Sequence[int], observe: Oracle, *, width: int = WIDTH, max_replays: int = 20) -> Region:
    """Find the site in which something nonfinite was born.

    Args:
        sizes: of each site, in order of completion, the number of sites in its subtree, itself included (leaf: 1).
        observe: runs one replay.
        width: how many sites one replay may observe.
        max_replays: the search gives up after so many.

    Returns:
        The region. In a chain of n sites the search takes at most `1 + log(n, width + 1)` replays, and in any order of
        births and masks at most `depth + log(n, width + 1) + n / width`.
    """
    search = _Search(sizes, width)
    for replay in range(max_replays):
        chosen = search.choose()
        if not chosen:
            return search.region(finished=True, replays=replay)
        search.learn(chosen, observe(chosen))
    return search.region(finished=not search.choose(), replays=max_replays)


class _Search:
    """The state of one search: an interval of suspects that ends in the earliest site known to be nonfinite."""

    def __init__(self, sizes: Sequence[int], width: int) -> None:
        self.sizes = sizes
        self.width = max(1, width)
        self.seen: dict[int, Seen] = {}
        self.low = 0
        self.bad = len(sizes)  # one past the end: the sink, which the caller knows to be nonfinite
        self.enclosing: int | None = None  # the innermost site proved to hold the birth

    def learn(self, chosen: Sequence[int], seen: Mapping[int, Seen]) -> None:
        for site in chosen:
            self.seen[site] = seen.get(site, Seen(entered=False, left=False))
        self.bad = min((site for site in self._before() if self.seen[site].left), default=self.bad)
        proved = [site for site in self._around() if site in self.seen and not self.seen[site].entered]
        if proved:  # nothing nonfinite entered it: the value was born inside
            self.enclosing = proved[0]
            self.low = self.enclosing - self.sizes[self.enclosing] + 1

    def choose(self) -> list[int]:
        """The sites to observe next; none when the search is over."""
        unknown = self._unknown()
        if not unknown and self.bad != self.enclosing:  # born in a gap: whose own code is it?
            return [site for site in self._around() if site not in self.seen]
        if len(unknown) <= self.width:
            return unknown
        if self.enclosing == self.bad:
            return _spread([site for site in self._children(self.bad) if site not in self.seen], self.width)
        return _spread(self._likely(unknown), self.width)

    def region(self, finished: bool, replays: int) -> Region:
        inside = self.enclosing == self.bad
        ends = [self.bad] if self.bad < len(self.sizes) else []
        return Region(
            culprit=self.enclosing if finished else None,
            sites=tuple(range(self.low, self.bad + 1)) if inside else tuple(self._likely(self._unknown()) + ends),
            reader=self.bad if ends and not inside else None,
            first=all(site in self.seen for site in range(self.bad)),  # none of them nonfinite: `bad` is the earliest
            finished=finished,
            replays=replays,
        )

    def _likely(self, unknown: list[int]) -> list[int]:
        """Those after the last site seen finite, if there are any."""
        last = max(self._before(), default=-1)
        return [site for site in unknown if site > last] or unknown

    def _around(self) -> list[int]:
        """The earliest nonfinite site and those whose subtree holds it, inside out."""
        return [s for s in range(self.bad, len(self.sizes)) if s - self.sizes[s] < self.bad]

    def _before(self) -> list[int]:
        return [site for site in self.seen if self.low <= site < self.bad]

    def _unknown(self) -> list[int]:
        """Suspects not observed, outside what is settled.

        Settled is the inside of a site whose output was finite, and of one that was given something nonfinite: that
        was born earlier.
        """
        settled = bytearray(self.bad - self.low)
        for site in self.seen:
            if self.low <= site < self.bad or (site == self.bad and self.seen[site].entered):
                start = max(0, site - self.sizes[site] + 1 - self.low)
                settled[start : site + 1 - self.low] = b"\x01" * (min(site + 1, self.bad) - self.low - start)
        return [self.low + i for i, known in enumerate(settled) if not known]

    def _children(self, site: int) -> list[int]:
        children, child = [], site - 1
        while child > site - self.sizes[site]:
            children.append(child)
            child -= self.sizes[child]
        return children[::-1]


def _spread(sites: Sequence[int], count: int) -> list[int]:
    """At most `count` of the sites, evenly spaced."""
    if len(sites) <= count:
        return list(sites)
    return [sites[(i + 1) * len(sites) // (count + 1)] for i in range(count)]
