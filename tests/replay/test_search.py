"""The search over sites, against simulated steps: births, masks and side branches in any order."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from nantrace.replay.search import Region, Seen, narrow

QUICK = settings(deadline=None, max_examples=150)


class Chain:
    """Leaves one after the other; `births` and `masks` say what each does to the value that passes through."""

    def __init__(self, length: int, births: set[int], masks: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.values, bad = [], False
        for leaf in range(length):
            before = bad
            bad = leaf in births or (bad and leaf not in masks)
            self.values.append(Seen(entered=before, left=bad))
        self.replays = 0
        self.most = 0

    def observe(self, sites: Sequence[int]) -> Mapping[int, Seen]:
        self.replays += 1
        self.most = max(self.most, len(sites))
        return {site: self.values[site] for site in sites}


def random_tree(rng: random.Random, leaves: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Subtree sizes in order of completion, and of each site the leaves [first, last] inside it."""
    sizes: list[int] = []
    spans: list[tuple[int, int]] = []

    def grow(first: int, last: int) -> int:
        start = len(sizes)
        if first < last:
            cuts = sorted(rng.sample(range(first, last), rng.randint(0, min(4, last - first))))
            for a, b in zip([first, *(c + 1 for c in cuts)], [*cuts, last], strict=True):
                grow(a, b) if b - a < last - first else [grow(leaf, leaf) for leaf in range(a, b + 1)]
        sizes.append(len(sizes) - start + 1)
        spans.append((first, last))
        return sizes[-1]

    grow(0, leaves - 1)
    return sizes, spans


@QUICK
@given(st.integers(2, 400), st.integers(1, 20), st.data())
def test_in_a_chain_with_one_birth_the_search_finds_it_within_the_logarithmic_bound(n: int, width: int, data):
    culprit = data.draw(st.integers(0, n - 1))
    chain = Chain(n, {culprit})
    region = narrow([1] * n, chain.observe, width=width, max_replays=n)
    assert region.culprit == culprit and region.finished
    assert chain.replays <= 1 + math.ceil(math.log(n, width + 1))
    assert chain.most <= width and region.replays == chain.replays


@QUICK
@given(st.integers(2, 200), st.integers(1, 30), st.data())
def test_births_and_masks_in_any_order_end_at_a_true_birth(n: int, width: int, data):
    births = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=6))
    masks = data.draw(st.sets(st.integers(0, n - 1), max_size=6)) - births
    chain = Chain(n, births | {n - 1}, masks)  # the end is nonfinite, or there were nothing to search for
    region = narrow([1] * n, chain.observe, width=width, max_replays=2 * n)
    assert region.finished and region.culprit is not None
    seen = chain.values[region.culprit]
    assert (seen.entered, seen.left) == (False, True)
    assert chain.replays <= 1 + math.ceil(math.log(n, width + 1)) + math.ceil(n / width)


@QUICK
@given(st.integers(0, 10**6), st.integers(2, 60), st.integers(1, 40))
def test_in_a_tree_the_innermost_module_that_holds_the_birth_is_found(seed: int, leaves: int, width: int):
    rng = random.Random(seed)
    sizes, spans = random_tree(rng, leaves)
    culprit = rng.randrange(leaves)

    def observe(sites: Sequence[int]) -> Mapping[int, Seen]:
        return {s: Seen(entered=culprit < spans[s][0], left=culprit <= spans[s][1]) for s in sites}

    region = narrow(sizes, observe, width=width, max_replays=10 * len(sizes))
    assert region.finished and region.culprit == spans.index((culprit, culprit))


@QUICK
@given(st.integers(0, 10**6), st.integers(2, 60), st.integers(1, 40))
def test_side_branches_never_lead_past_the_birth(seed: int, nodes: int, width: int):
    rng = random.Random(seed)
    births = {rng.randrange(nodes) for _ in range(3)}
    reads = [rng.sample(range(i), min(i, rng.randint(0, 3))) for i in range(nodes)]
    bad: list[bool] = []
    for i in range(nodes):
        bad.append(i in births or any(bad[j] for j in reads[i]))
    values = [Seen(entered=any(bad[j] for j in reads[i]), left=bad[i]) for i in range(nodes)]

    def observe(sites: Sequence[int]) -> Mapping[int, Seen]:
        return {site: values[site] for site in sites}

    region = narrow([1] * nodes, observe, width=width, max_replays=10 * nodes)
    assert region.finished and region.culprit in births


def test_a_birth_in_a_modules_own_code_names_the_module_and_not_a_child():
    # three children, all finite; the parent's own code (index 3) makes the value
    region = narrow([1, 1, 1, 4], lambda sites: {s: Seen(False, s == 3) for s in sites})
    assert region == Region(culprit=3, sites=(0, 1, 2, 3), reader=None, first=True, finished=True, replays=1)


def test_a_birth_between_two_children_names_the_parent_and_the_child_that_read_it():
    seen = {0: Seen(False, False), 1: Seen(True, True), 2: Seen(False, True)}
    region = narrow([1, 1, 3], lambda sites: {s: seen[s] for s in sites})
    assert (region.culprit, region.reader, region.first) == (2, 1, True)


def test_a_birth_outside_every_site_has_no_culprit_and_says_that_all_was_observed():
    region = narrow([1, 1, 3], lambda sites: {s: Seen(False, False) for s in sites})
    assert (region.culprit, region.reader, region.first, region.finished) == (None, None, True, True)


def test_a_site_that_was_skipped_over_is_not_claimed_to_be_finite():
    chain = Chain(100, {60})
    region = narrow([1] * 100, chain.observe, width=10)
    assert region.culprit == 60 and not region.first


def test_sites_that_did_not_run_are_passed_over():
    region = narrow([1, 1, 1], lambda sites: {s: Seen(False, True) for s in sites if s == 2})
    assert region.culprit == 2


def test_ten_thousand_sites_take_a_handful_of_replays():
    chain = Chain(10_000, {7_778})
    region = narrow([1] * 10_000, chain.observe)
    assert (region.culprit, chain.replays) == (7_778, 2)


def test_an_unfinished_search_returns_what_is_left():
    chain = Chain(10_000, {7_778})
    region = narrow([1] * 10_000, chain.observe, width=3, max_replays=2)
    assert not region.finished and region.culprit is None
    assert 7_778 in region.sites and len(region.sites) < 2_000
