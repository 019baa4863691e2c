"""Narrowing a trace: which rows are left, that the order of narrowing does not matter, and what unknown names get."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nantrace
from nantrace.errors import MissingExtraError
from nantrace.events import EVENT, Columns, ModuleEntry, Phase, Role, Site, Trace
from tests.diagnosis.written import NAN, Written

FQNS = ["", "block.0", "block.0.norm", "block.1", "block.1.norm", "head", "<Loss>", None]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Up to four steps of rows at a few sites, with or without a ledger."""
    sites = draw(
        st.lists(
            st.builds(
                Site,
                st.sampled_from(FQNS),
                st.sampled_from(Phase),
                st.sampled_from(Role),
                st.just("output[0]"),
                st.just("float16"),
                st.just((2, 4)),
            ),
            min_size=1,
            max_size=8,
        )
    )
    steps = sorted(draw(st.lists(st.integers(0, 3), max_size=25)))
    events = np.zeros(len(steps), EVENT)
    events["seq"] = np.arange(1, len(steps) + 1)
    events["step"] = steps
    for row in events:
        row["site"] = draw(st.integers(0, len(sites) - 1))
        row[draw(st.sampled_from(["nan", "posinf", "neginf", "finite"]))] = draw(st.sampled_from([0, 1, 2**64 - 1]))
    ledger = tuple({"step": number} for number in sorted(set(steps))) if draw(st.booleans()) else ()
    return Trace(events, tuple(sites), tuple(ModuleEntry(fqn, "Module") for fqn in FQNS if fqn is not None), ledger)


def seqs(trace: Trace) -> list[int]:
    return trace.events["seq"].tolist()


@given(traces(), st.sampled_from(["*", "block.*", "block.1", "block.[01].norm", ""]), st.sampled_from(Phase))
@settings(deadline=None, max_examples=80)
def test_each_narrowing_keeps_the_rows_that_a_loop_would_keep(trace: Trace, pattern: str, phase: Phase) -> None:
    matched = {
        "*": {fqn for fqn in FQNS if fqn is not None},
        "block.*": {"block.0", "block.0.norm", "block.1", "block.1.norm"},
        "block.1": {"block.1"},
        "block.[01].norm": {"block.0.norm", "block.1.norm"},
        "": {""},
    }[pattern]
    rows = list(trace.events)
    assert seqs(trace.module(pattern)) == [row["seq"] for row in rows if trace.site(row).module in matched]
    assert seqs(trace.phase(phase.label)) == [row["seq"] for row in rows if trace.site(row).phase == phase]
    bad = [row["seq"] for row in rows if row["nan"] or row["posinf"] or row["neginf"]]
    assert seqs(trace.nonfinite()) == bad
    for number in set(trace.events["step"].tolist()):
        assert seqs(trace.step(number)) == [row["seq"] for row in rows if row["step"] == number]


@given(traces(), st.permutations(range(4)))
@settings(deadline=None, max_examples=60)
def test_the_order_of_narrowing_does_not_matter(trace: Trace, order: list[int]) -> None:
    step = int(trace.events["step"][-1]) if len(trace) else None
    ways: list[Callable[[Trace], Trace]] = [
        lambda t: t.module("block.*", "head"),
        lambda t: t.phase("forward", Phase.BACKWARD),
        lambda t: t.nonfinite(),
        lambda t: t if step is None else t.step(step),
    ]
    straight, turned = trace, trace
    for number in range(4):
        straight = ways[number](straight)
        turned = ways[order[number]](turned)
    assert straight.events.tobytes() == turned.events.tobytes()
    assert straight.steps == turned.steps
    assert straight.sites is turned.sites is trace.sites


@given(traces())
@settings(deadline=None, max_examples=30)
def test_narrowing_twice_is_narrowing_once_and_leaves_the_whole_alone(trace: Trace) -> None:
    before = trace.events.tobytes()
    once = trace.nonfinite()
    assert once.nonfinite().events.tobytes() == once.events.tobytes()
    assert trace.events.tobytes() == before and trace.narrowed is None


def whole() -> Trace:
    written = Written()
    for number in range(2):
        if number:
            written.end()
        with written.call("", made=NAN):
            written.run("block.1.norm", made=NAN)
        written.loss(nan=1)
    return written.trace()


@pytest.mark.parametrize(
    ("narrow", "said"),
    [
        (lambda t: t.module("block.1.nrom"), r"'block.1.nrom' matches none of the trace's 2 modules: did you mean "
         r"'block.1.norm'"),
        (lambda t: t.module("encoder"), r"there are '', 'block.1.norm'"),
        (lambda t: t.module(), "pass one or more globs"),
        (lambda t: t.phase("backwards"), "phase is 'backwards': did you mean 'backward'"),
        (lambda t: t.phase("training"), "there are 'forward', 'loss', 'backward', 'recompute', 'post_backward' and 2"),
        (lambda t: t.phase(), "pass one or more of 'forward'"),
        (lambda t: t.step(7), "no step 7: it holds steps 0 to 1"),
        (lambda t: t.step(1).step(0), "no step 0: it holds step 1"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_a_value_error_with_what_was_probably_meant(
    narrow: Callable[[Trace], Trace], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        narrow(whole())


def test_what_exists_but_has_no_rows_left_is_empty_and_no_error() -> None:
    left = whole().nonfinite().phase("backward")
    assert len(left) == len(left.module("block.1.*").step(1)) == 0


def test_a_module_is_found_by_an_alias() -> None:
    trace = whole()
    shared = Trace(trace.events, trace.sites, (ModuleEntry("block.1.norm", "LayerNorm", ("head.norm",)),))
    assert seqs(shared.module("head.*")) == seqs(trace.module("block.1.norm"))


def test_a_step_keeps_its_own_ledger_and_can_be_diagnosed() -> None:
    second = whole().step(1)
    assert [step["step"] for step in second.steps] == [1]
    verdict = nantrace.diagnose(second)
    assert (verdict.status, verdict.origin and verdict.origin.module) == ("fault", "block.1.norm")


def test_a_trace_from_which_causes_were_taken_is_not_diagnosed() -> None:
    with pytest.raises(ValueError, match=r"narrowed by module 'block.1.norm', which hides causes: diagnose the whole"):
        nantrace.diagnose(whole().step(1).module("block.1.norm"))


def test_a_trace_without_events_narrows_to_itself() -> None:
    empty = Trace(np.zeros(0, EVENT), ())
    assert len(empty.nonfinite()) == len(empty.phase("forward")) == len(empty.to_frame()) == 0
    with pytest.raises(ValueError, match="it holds no step"):
        empty.step(0)
    with pytest.raises(ValueError, match="it names no module"):
        empty.module("*")


def test_the_events_go_into_a_frame_as_they_are() -> None:
    trace = whole()
    frame = pandas.DataFrame(trace.events)
    assert list(frame.columns) == list(EVENT.names or ())
    assert frame["nan"].tolist() == trace.events["nan"].tolist()


def test_a_frame_has_names_for_ids() -> None:
    frame = whole().nonfinite().to_frame()
    assert frame[["step", "module", "phase", "role", "slot", "dtype", "shape"]].iloc[0].tolist() == [
        0, "block.1.norm", "forward", "output", "output", "float32", "[2, 4]"
    ]  # fmt: skip
    assert frame["op"].isna().all()
    assert frame.loc[frame["role"] == "loss", "module"].isna().all()
    assert (frame.loc[frame["module"] == "", "role"] == "output").all()


def test_what_was_not_measured_is_missing_in_a_frame() -> None:
    events = np.zeros(3, EVENT)
    events["seq"] = [1, 2, 3]
    events["columns"] = [0, int(Columns.full()), int(Columns.FIRST_BAD)]
    events["first_bad"] = [-1, -1, 5]
    events["min"] = events["absmin"] = [np.nan, 1.0, np.nan]
    frame = Trace(events, (Site("\ud800", Phase.FORWARD, Role.OUTPUT, "output", "float32", ()),)).to_frame()
    assert frame["zero"].isna().tolist() == [True, False, True]
    assert frame["absmin"].isna().tolist() == [True, False, True]
    assert frame["first_bad"].isna().tolist() == [True, True, False] and frame["first_bad"][2] == 5
    assert frame["module"].tolist() == ["\ud800"] * 3


def test_without_pandas_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(MissingExtraError, match="to_frame needs pandas, which cannot be imported: pip install pandas"):
        whole().to_frame()
    assert issubclass(MissingExtraError, ImportError)
