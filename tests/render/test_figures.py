"""What the pictures show, before anybody draws it: what is joined, what is marked, what is left out and said."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nantrace.diagnosis.diagnose import diagnose
from nantrace.diagnosis.verdict import Origin, Verdict
from nantrace.events import Phase, Role, nonfinite_rows
from nantrace.render.figures import numbers
from nantrace.render.figures.births import births
from nantrace.render.figures.headroom import MOST_MODULES, MOST_STEPS, grouped, headroom_map
from nantrace.render.figures.ledger import MOST_POINTS, ledger
from nantrace.render.figures.matrix import MOST_AXES, matrix
from nantrace.render.figures.ranges import MOST_BARS, ranges
from nantrace.render.figures.way import MOST_STOPS, way
from tests.diagnosis.written import Written
from tests.render.drawn import all_nan, clean, empty, one_event, overflow, wide

_OUTPUT = (Phase.FORWARD, Role.OUTPUT, "output")


def test_a_small_step_has_a_bar_for_every_event_and_births_are_marked() -> None:
    trace = overflow()
    shown = ranges(trace, diagnose(trace))
    assert (shown.step, shown.joined, shown.note) == (2, 1, "")
    assert len(shown.high) == int((trace.events["step"] == 2).sum())
    assert [shown.names[n] for n in np.flatnonzero(shown.birth)] == ["block.1.ff.wo output", "(model) output"]
    assert [shown.names[n] for n in np.flatnonzero(shown.inf)] == ["block.1.ff.wo output", "block.1 output"]


def test_the_parts_of_a_step_follow_each_other_and_cover_it() -> None:
    shown = ranges(overflow())
    assert [side.name for side in shown.sides] == ["forward", "before", "forward", "backward"]
    assert [side.start for side in shown.sides[1:]] == [side.stop for side in shown.sides[:-1]]
    assert shown.sides[-1].stop == len(shown.high)


def test_the_smallest_magnitude_is_known_only_if_measured_or_of_one_sign() -> None:
    written = Written()
    written.row("a", *_OUTPUT, low=2.0, high=8.0)
    written.row("b", *_OUTPUT, low=-8.0, high=-3.0)
    written.row("c", *_OUTPUT, low=-8.0, high=3.0)
    shown = ranges(written.trace())
    assert shown.low.tolist()[:2] == [2.0, 3.0] and np.isnan(shown.low[2])
    assert shown.high.tolist() == [8.0, 8.0, 8.0]
    assert ranges(wide(1)).low[0] == pytest.approx(1e-5)  # measured


def test_many_events_are_joined_without_losing_an_extreme_or_a_birth() -> None:
    trace = wide(2000, born=0.5)
    verdict = diagnose(trace)
    shown = ranges(trace, verdict)
    assert len(shown.high) <= MOST_BARS + 4 and shown.joined > 1
    assert f"up to {shown.joined} consecutive events" in shown.note
    assert np.nanmax(shown.high) == trace.events["max"].max()
    assert shown.birth.sum() == 1 and bool(shown.inf[shown.birth][0])


def test_the_limits_far_from_the_data_stay_off_the_axis_and_are_named() -> None:
    shown = ranges(clean())
    bottom, top = shown.window()
    assert bottom < 1.0 < top < 1e10
    assert shown.note == "Off the axis: float32 largest 3.4e+38, float32 smallest normal 1.2e-38."
    assert ranges(overflow()).window()[1] > 65504


def test_a_step_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"step 7 is not in the trace: it holds steps 0 to 2\."):
        ranges(overflow(), step=7)
    assert ranges(overflow(), step=1).step == 1


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_the_first_nonfinite_row_is_found_in_whichever_chunk_it_lies(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbers, "CHUNK", chunk)
    trace = overflow()
    assert trace.events["nan"].any() or trace.events["posinf"].any()
    assert numbers.first_nonfinite(trace) == int(np.flatnonzero(nonfinite_rows(trace.events))[0]) > 3
    assert numbers.first_nonfinite(clean()) is None
    assert ranges(trace).step == 2  # without a verdict, that of the first nonfinite event
    assert ranges(clean()).step == clean().events["step"][-1]


def test_the_birth_of_a_verdict_without_rows_is_looked_up_by_its_place() -> None:
    trace = overflow()
    verdict = Verdict("fault", "forward", "overflow", Origin(phase="forward", module="block.1", op="aten.add"))
    assert [trace.site(trace.events[row]).module for row in births(trace, verdict)] == ["block.1"]
    assert births(trace, Verdict("fault", origin=Origin(module="nowhere"))) == []


def test_headroom_is_in_bits_below_the_largest_value_of_the_dtype() -> None:
    written = Written("float16")
    written.row("a", *_OUTPUT, size=65504.0 / 8)
    written.end()
    written.row("a", *_OUTPUT, posinf=3, size=65504.0 / 2)
    shown = headroom_map(written.trace())
    assert shown.modules == ("a",) and shown.steps == ((0, 0), (1, 1))
    assert shown.bits[0].tolist() == pytest.approx([3.0, 1.0])
    assert shown.bad.tolist() == [[False, True]]


def test_a_birth_has_its_cell() -> None:
    trace = overflow()
    shown = headroom_map(trace, diagnose(trace))
    row, column = shown.births[0]
    assert shown.modules[row] == "block.1.ff.wo" and shown.steps[column] == (2, 2)
    assert shown.bad[row, column]


def test_headroom_of_one_step_tells_its_parts_apart() -> None:
    """Where a step failed, nearly every module ends nonfinite: as one column the map would be hatched all over."""
    trace = overflow(1)
    shown = headroom_map(trace, diagnose(trace))
    assert shown.columns == ["before", "forward", "backward"] and shown.axis == "part of step 0"
    assert shown.bits.shape == shown.bad.shape == (len(shown.modules), 3)
    assert [shown.modules[row] for row in np.flatnonzero(shown.bad[:, 1])][:3] == [
        "(model)",
        "block.1",
        "block.1.ff.wo",
    ]
    assert not shown.bad[:, 0].any() and shown.when(0, 2) == "before to forward" and shown.when(1) == "forward"
    row, column = shown.births[0]
    assert (shown.modules[row], column) == ("block.1.ff.wo", 1)


@given(st.integers(0, 10_000))
@settings(deadline=None, max_examples=80)
def test_ticks_are_few_evenly_spaced_and_reach_the_end(count: int) -> None:
    places = numbers.ticks(count)
    assert places == sorted(set(places)) and len(places) <= 11 and places[:1] == [0][:count]
    gaps = set(np.diff(places[:-1]).tolist())
    assert len(gaps) <= 1 and all(str(gap).rstrip("0") in ("1", "2", "5") for gap in gaps)
    assert count == 0 or count - 1 - places[-1] < 0.6 * max(gaps, default=count)


def test_a_large_model_over_many_steps_is_grouped_and_the_map_says_so() -> None:
    trace = wide(400, steps=300, born=0.5)
    shown = headroom_map(trace)
    assert len(shown.modules) <= MOST_MODULES and len(shown.steps) <= MOST_STEPS
    assert shown.modules[0] == "layers.0 to layers.2 (15 modules)"
    assert shown.note == "401 modules in 28 rows and 300 steps in 100 columns: each cell is the worst of what it joins."
    assert shown.bad[:, -1].any() and not shown.bad[:, :-1].any()
    assert np.nanmin(shown.bits) == pytest.approx(np.log2(65504.0 / trace.events["max"].max()), abs=0.2)


@given(st.lists(st.from_regex(r"[a-c](\.[0-9a-c]{1,2}){0,3}", fullmatch=True), max_size=80, unique=True))
@settings(deadline=None, max_examples=60)
def test_groups_hold_every_module_once_and_are_few(modules: list[str]) -> None:
    groups = grouped(modules, 7)
    assert sorted(member for _, members in groups for member in members) == sorted(modules)
    assert len(groups) <= 7


def test_the_ledger_separates_attempted_from_committed_and_marks_what_is_not_finite() -> None:
    shown = ledger(overflow())
    assert shown.attempted.tolist() == [1, 1, 1]
    assert (shown.committed.tolist(), shown.skipped.tolist()) == ([1, 1, 0], [0, 0, 1])
    assert shown.loss.tolist()[:2] == [2.0, 1.0] and shown.loss_bad.tolist() == [False, False, True]
    assert shown.gradient.tolist() == [3.0 / 65536, 6.0 / 65536, 12.0 / 65536]
    assert shown.gradient_bad.tolist() == [False, False, True]


def test_norms_of_the_ledger_go_before_magnitudes_and_the_figure_says_which_it_shows() -> None:
    trace = overflow()
    assert ledger(trace).gradient_name == "largest gradient magnitude, unscaled"
    norms = (0.5, float("inf"), 0.25)
    rows = tuple({**row, "gradient_norm": norm} for row, norm in zip(trace.steps, norms, strict=True))
    shown = ledger(dataclasses.replace(trace, steps=rows))
    assert shown.gradient_name == "gradient norm, unscaled"
    assert shown.gradient[[0, 2]].tolist() == [0.5, 0.25] and np.isnan(shown.gradient[1])
    assert shown.gradient_bad.tolist() == [False, True, True]


def test_a_trace_without_ledger_still_shows_gradients_and_says_what_is_missing() -> None:
    shown = ledger(dataclasses.replace(overflow(), steps=()))
    assert shown.steps.tolist() == [0, 1, 2] and np.isnan(shown.loss).all()
    assert shown.gradient[0] == 3.0
    assert shown.note == "The trace holds no ledger: only gradients are shown."


def test_many_steps_become_points_that_keep_every_skip_and_the_worst_loss() -> None:
    rows = tuple(
        {"step": n, "loss": float(n % 7), "attempted": 1, "committed": int(n != 777), "skipped": int(n == 777)}
        for n in range(1000)
    )
    shown = ledger(dataclasses.replace(empty(), steps=rows))
    assert len(shown.steps) <= MOST_POINTS
    assert shown.skipped.sum() == 1 and shown.committed.sum() == 999
    assert shown.note == "1,000 steps in 334 points: the largest loss and gradient and the smallest scale of each."


def test_the_way_leads_from_birth_to_sink_below_the_modules_that_hold_it() -> None:
    trace = overflow()
    shown = way(trace, diagnose(trace))
    assert [lane.name for lane in shown.lanes[:2]] == ["(model)", "block"]
    lanes = [shown.lanes[stop.lane].name for stop in shown.stops]
    assert lanes[0] == "block.1.ff.wo" and shown.stops[0].kind == "birth"
    assert shown.stops[-1].kind == "sink" and lanes[-1].startswith(("loss", "grad"))


def test_modules_with_numbers_stand_in_their_order_even_without_a_module_table() -> None:
    path = tuple({"module": f"layers.{n}", "op": "aten.add", "phase": "forward"} for n in (2, 10, 1))
    shown = way(None, Verdict("fault", path=path))
    assert [lane.name for lane in shown.lanes] == ["(model)", "layers", "layers.1", "layers.2", "layers.10"]


def test_a_long_way_is_cut_in_the_middle_and_says_how_much() -> None:
    path = tuple({"module": f"layers.{n}", "op": "aten.add"} for n in range(1000))
    shown = way(None, Verdict("fault", path=path))
    assert len(shown.stops) == MOST_STOPS and len(shown.lanes) <= MOST_STOPS
    assert shown.note == "976 stops in the middle of the way are not shown."
    assert shown.lanes[shown.stops[-1].lane].name == "layers.999"


def test_the_matrix_puts_the_worst_outcome_first_and_counts_repetitions() -> None:
    records = [("fp32", "clean", "a"), ("fp16", "odd", ""), ("fp16", "fault", "x"), ("fp16", "fault", "y")]
    shown = matrix(records)
    assert shown.axes == ("fp32", "fp16") and shown.outcomes == ("fault", "clean", "odd")
    assert shown.counts == ((0, 1, 0), (2, 0, 1))
    assert shown.details == ("a", "x; y")


@pytest.mark.parametrize(
    ("extra", "said"), [(0, ""), (1, "1 more axis is not shown."), (9, "9 more axes are not shown.")]
)
def test_a_long_matrix_says_what_is_not_shown(extra: int, said: str) -> None:
    shown = matrix([(f"seed={n}", "clean", "") for n in range(MOST_AXES + extra)])
    assert len(shown.axes) == MOST_AXES and shown.note == said


@pytest.mark.parametrize("make", [empty, one_event, all_nan, clean], ids=lambda make: make.__name__)
def test_small_and_odd_traces_give_a_figure(make) -> None:  # type: ignore[no-untyped-def]
    trace = make()
    verdict = diagnose(trace)
    assert len(ranges(trace, verdict).high) == len(ranges(trace, verdict).names)
    assert headroom_map(trace, verdict).bits.shape == headroom_map(trace, verdict).bad.shape
    assert len(ledger(trace).loss) == len(ledger(trace).steps)
    assert len(way(trace, verdict).stops) == 0 or verdict.status != "clean"


def test_words_at_a_stop_stand_where_its_line_does_not() -> None:
    path = tuple({"module": name, "op": "aten.add", "phase": "forward"} for name in ("b", "a", "c"))
    shown = way(None, Verdict("fault", path=path))
    assert [lane.name for lane in shown.lanes] == ["(model)", "a", "b", "c"]
    assert [shown.rises(number) for number in range(3)] == [True, False, False]
    assert [shown.rises(number, before=True) for number in range(3)] == [False, False, True]
