"""Rows that wait: finite ones as five numbers, others with all their statistics, in the order in which they came."""

import threading

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nantrace.capture.rows import Rows
from nantrace.events import EVENT

NAN = float("nan")
FINITE = (6, 6, 0, 0, 0, -1.5, 2.0, NAN, -1, 0, 0, 0, 16)
FULL = (6, 6, 0, 0, 0, -1.5, 2.0, 0.25, -1, 2, 1, 0, 31)
BROKEN = (6, 3, 1, 1, 1, -1.0, 1.0, NAN, 4, 0, 0, 0, 16)
EMPTY = (0, 0, 0, 0, 0, NAN, NAN, NAN, -1, 0, 0, 0, 16)
UNREAD = (6, 0, 0, 0, 0, NAN, NAN, NAN, -1, 0, 0, 0, 0)
KINDS = (FINITE, FULL, BROKEN, EMPTY, UNREAD)


def same(event: np.void, expected: tuple[float, ...]) -> bool:
    row = tuple(event)[4:]
    return all(a == b or (a != a and b != b) for a, b in zip(row, expected, strict=True))


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.sampled_from(KINDS), st.booleans()),
        max_size=20,
    )
)
def test_each_row_comes_back_as_it_was_added(added: list[tuple[int, int, tuple[float, ...], bool]]) -> None:
    rows = Rows()
    for site, call, stats, later in added:
        rows.add(site, call, [stats] if later else stats)
    assert len(rows) == len(added)
    events = rows.drain(7, lambda waiting: waiting[0])
    assert events.dtype == EVENT and events["seq"].tolist() == list(range(1, len(added) + 1))
    assert all(events["step"] == 7) and len(rows) == 0
    for event, (site, call, stats, _) in zip(events, added, strict=True):
        assert (event["site"], event["call"]) == (site, call)
        assert same(event, stats)


def test_the_extremes_of_a_float64_tensor_keep_every_bit() -> None:
    rows = Rows()
    low, high, numel = -1.7976931348623157e308, 5e-324, 2**40 + 1
    rows.add(1, 2, (numel, numel, 0, 0, 0, low, high, NAN, -1, 0, 0, 0, 16))
    (event,) = rows.drain(0, tuple)
    assert (event["numel"], event["finite"], event["min"], event["max"]) == (numel, numel, low, high)


def test_rows_of_another_site_keep_their_place_and_their_numbers() -> None:
    rows = Rows()
    for site, stats in enumerate((FINITE, BROKEN, FINITE, FINITE)):
        rows.add(site, 9, stats)
    rows.set_sites(1, [site + 40 for site in rows.sites(1, 3)])
    events = rows.drain(0, tuple)
    assert events["site"].tolist() == [0, 41, 42, 3]
    assert same(events[1], BROKEN) and events["call"].tolist() == [9] * 4


def test_rows_of_several_threads_do_not_mix() -> None:
    rows = Rows()
    kinds = {1: FINITE, 2: BROKEN, 3: FULL, 4: EMPTY}

    def add(site: int) -> None:
        for call in range(2000):
            rows.add(site, call, kinds[site])

    threads = [threading.Thread(target=add, args=(site,)) for site in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = rows.drain(0, tuple)
    for site, stats in kinds.items():
        mine = events[events["site"] == site]
        assert mine["call"].tolist() == list(range(2000))
        assert all(same(event, stats) for event in mine[::97])
