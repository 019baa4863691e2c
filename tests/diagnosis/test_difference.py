"""Comparing two traces: what is aligned with what, which difference comes first, and what rounding explains."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nantrace
from nantrace.diagnosis.difference.alignment import align
from nantrace.diagnosis.difference.compare import Difference, compare
from nantrace.diagnosis.difference.tolerance import absolute, coarsest, relative
from nantrace.events import EVENT, Columns, Phase, Role, Site, Trace
from nantrace.render.cells import columns
from nantrace.render.difference import next_command, text
from tests.diagnosis.written import NAN, Written

MODULES = ("", "block", "block.norm", None)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Up to three steps at a few sites of several dtypes, finite rows and others, some within calls."""
    kinds = st.tuples(
        st.sampled_from(MODULES),
        st.sampled_from([Phase.FORWARD, Phase.BACKWARD]),
        st.sampled_from([Role.OUTPUT, Role.PARAM, Role.STATE]),
        st.sampled_from(["float32", "bfloat16", "int64"]),
    )
    sites = [Site(m, p, r, "output", d, (2, 4)) for m, p, r, d in draw(st.lists(kinds, min_size=1, max_size=6))]
    steps = sorted(draw(st.lists(st.integers(0, 2), min_size=1, max_size=25)))
    events = np.zeros(len(steps), EVENT)
    events["seq"], events["step"] = np.arange(1, len(steps) + 1), steps
    events["numel"], events["columns"] = 8, int(Columns.FIRST_BAD)
    finite = st.floats(-(2.0**100), 2.0**100)
    for row in events:
        bad = draw(st.sampled_from([0, 0, 1, 8]))
        row["site"] = draw(st.integers(0, len(sites) - 1))
        call = draw(st.integers(0, 2))  # a call has one module and lies in one step
        module = MODULES.index(sites[row["site"]].module)
        row["call"] = call and 100 * row["step"] + 10 * module + call
        row[draw(st.sampled_from(["nan", "posinf", "neginf"]))] = bad
        row["finite"], row["first_bad"] = 8 - bad, 8 - bad if bad else -1
        low, high = sorted([draw(finite), draw(finite)])
        row["min"], row["max"] = (np.nan, np.nan) if bad == 8 else (low, high)
    return Trace(events, tuple(sites))


def changed(trace: Trace, row: int, **fields: Any) -> Trace:
    events = trace.events.copy()
    for name, value in fields.items():
        events[row][name] = value
    return dataclasses.replace(trace, events=events)


def without(trace: Trace, rows: np.ndarray) -> Trace:
    """The trace as it were had these rows never been recorded."""
    events = trace.events[~rows].copy()
    events["seq"] = np.arange(1, len(events) + 1)
    return dataclasses.replace(trace, events=events)


@given(traces())
@settings(deadline=None, max_examples=60)
def test_a_trace_does_not_differ_from_itself(trace: Trace) -> None:
    found = compare(trace, trace)
    assert found.same and found.common == len(trace)
    assert f"No difference in {len(trace)} common site" in str(found)
    assert compare(trace, trace, rtol=0, atol=0).same


@given(traces(), traces())
@settings(deadline=None, max_examples=60)
def test_every_event_is_paired_once_or_counted_as_missing_on_the_other_side(a: Trace, b: Trace) -> None:
    aligned = align(a, b)
    assert sorted([*aligned.a, *aligned.only_a]) == list(range(len(a)))
    assert sorted([*aligned.b, *aligned.only_b]) == list(range(len(b)))
    for at, bt in zip(aligned.a, aligned.b, strict=True):
        one, other = a.site(a.events[at]), b.site(b.events[bt])
        assert (one.module, one.phase, one.role, one.slot) == (other.module, other.phase, other.role, other.slot)
    there, back = compare(a, b), compare(b, a)
    assert there.common == back.common and there.counts["nonfinite"] == back.counts["nonfinite"]
    assert (there.a.only, there.b.only) == (back.b.only, back.a.only)
    json.dumps(there.to_dict(), allow_nan=False)


@given(traces(), st.data())
@settings(deadline=None, max_examples=60)
def test_one_changed_count_is_found_and_is_the_first_difference(trace: Trace, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(trace) - 1))
    field = data.draw(st.sampled_from(["nan", "posinf", "neginf"]))
    found = compare(trace, changed(trace, row, **{field: trace.events[row][field] + 1}))
    assert [difference.seq_a for difference in found.nonfinite] == [row + 1]
    assert not found.ranges and found.first is found.nonfinite[0] and not found.same


@given(traces(), st.data())
@settings(deadline=None, max_examples=60)
def test_a_module_that_one_side_did_not_record_leaves_the_rest_aligned(trace: Trace, data: st.DataObject) -> None:
    module = data.draw(st.sampled_from([site.module for site in trace.sites]))
    lost = np.array([trace.site(event).module == module for event in trace.events])
    found = compare(trace, without(trace, lost))
    assert (found.common, found.a.only, found.b.only) == (int((~lost).sum()), int(lost.sum()), 0)
    assert found.first is None


@given(traces(), traces(), st.integers(1, 9))
@settings(deadline=None, max_examples=40)
def test_blocks_of_any_size_give_the_same_difference(a: Trace, b: Trace, size: int) -> None:
    whole = compare(a, b)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nantrace.diagnosis.difference.compare._BLOCK", size)
        patch.setattr("nantrace.diagnosis.difference.alignment._WINDOW", size)
        assert compare(a, b).to_dict() == whole.to_dict()


def written(dtype: str = "float32", **made: Any) -> Trace:
    """A step: batch, two blocks of which the second is called twice, loss, gradient."""
    step = Written(dtype)
    step.batch("x")
    with step.call(""):
        step.run("block.0")
        step.run("block.1")
        step.run("block.1", made=made)
    step.loss(nan=1 if made.get("posinf") else 0)
    step.grad("block.0.weight", size=0.5)
    return step.trace()


def test_the_first_site_of_different_finiteness_is_named_with_counts_position_and_call() -> None:
    found = compare(written(), dataclasses.replace(written("float16", posinf=5, size=6e4), path="half.h5"))
    assert found.first is not None
    assert (found.first.module, found.first.phase, found.first.role, found.first.call) == (
        "block.1", "forward", "output", 2
    )  # fmt: skip
    assert (found.first.a.nonfinite, found.first.b.posinf, found.first.b.first_bad) == (0, 5, 3)
    said = str(found)
    assert "FIRST DIFFERENCE IN NONFINITE VALUES   forward   block.1   output   call 2" in said
    assert "A: float32 [2, 4], all finite, -1 to 1; event 8" in said
    assert "B: float16 [2, 4], 5 +inf of 8 elements, first at [0, 3], -60000 to 60000; event 8" in said
    assert "then loss   loss: finite against 1 NaN" in said
    assert "not its elements" in said
    assert next_command(found) == "nantrace report half.h5"


def test_only_then_come_ranges_and_never_where_a_side_is_nonfinite() -> None:
    overflowed, finite = written(posinf=5, size=6e4), written(size=1.5)
    assert compare(overflowed, finite).ranges == compare(finite, overflowed).ranges == ()
    found = compare(written(), written(size=1.5))
    assert [(d.seq_a, d.error, d.relative) for d in found.ranges] == [(8, 0.5, 0.5)]
    assert "An end of the range moved by 0.5, 50.00% of A's largest magnitude" in str(found)


def test_equal_counts_at_another_position_differ() -> None:
    trace = written(posinf=2)
    moved = changed(trace, 7, first_bad=1)
    assert [d.seq_a for d in compare(trace, moved).nonfinite] == [8]
    unknown = changed(moved, 7, columns=0)
    found = compare(trace, unknown)
    assert found.same and found.counts["position_unknown"] == 1
    assert "1 of these without a position to compare" in str(found)


def test_ranges_that_rounding_explains_do_not_differ_and_the_options_decide_otherwise() -> None:
    a, b = written("float32"), written("float16", size=1.02)
    assert compare(a, b).same and compare(a, b).dtype == "float16"
    assert [d.seq_a for d in compare(a, b, rtol=0.01, atol=0).ranges] == [8]
    assert not compare(a, written("float32", size=1.02)).same
    assert compare(a, written("float32", size=1.02), atol=0.05).same


def test_near_zero_the_error_is_absolute() -> None:
    tiny = changed(written(), 7, min=-1e-8, max=1e-8)
    noise = changed(written(), 7, min=-9e-8, max=2e-8)
    assert compare(tiny, noise).same  # rounding of numbers near 1, whatever the relative error
    found = compare(tiny, noise, atol=1e-8, rtol=0.01)
    assert found.ranges[0].relative is None and "where A is near zero" in str(found)


def test_a_tensor_that_underflowed_to_zero_differs_however_coarse_its_dtype() -> None:
    small = changed(written("float32"), 7, min=-1e-4, max=1e-4)
    gone = changed(written("float16"), 7, min=0.0, max=0.0)
    found = compare(small, gone)
    assert [d.seq_a for d in found.ranges] == [8]
    assert "B: float16 [2, 4], all finite, all 0" in str(found)


def test_integers_are_compared_exactly() -> None:
    a, b = written("int64"), written("int64", size=2)
    assert compare(a, changed(a, 7, max=1 + 2**-40)).counts["range"] == 1
    assert "compared exactly" in str(compare(a, b))


def test_another_shape_is_a_difference_of_its_own() -> None:
    a = written(posinf=3)
    cut = tuple(dataclasses.replace(site, shape=(1, 4)) for site in a.sites)
    b = dataclasses.replace(a, sites=cut)
    found = compare(a, b)
    assert found.counts["shape"] == found.common and not found.nonfinite and not found.ranges and not found.same
    assert "FIRST DIFFERENCE IN SHAPE" in str(found)


def test_calls_are_counted_within_their_step_whatever_ran_before() -> None:
    plain, more = Written(), Written()
    for step, extra in ((plain, 0), (more, 3)):
        for _ in range(extra):
            step.run("other")
        step.run("block")
        step.run("block", made=NAN)
    found = compare(plain.trace(), more.trace())
    assert found.first is None and found.counts["nonfinite_alike"] == 1
    assert (found.a.only, found.b.only, found.b.only_by) == (0, 6, {"forward input": 3, "forward output": 3})
    assert "Only in B: 6 events (3 forward input, 3 forward output), first forward other" in str(found)


def test_gradients_meet_whether_or_not_the_forward_was_recomputed() -> None:
    plain, again = Written(), Written()
    for step in (plain, again):
        step.run("block")
        if step is again:
            step.phase = Phase.RECOMPUTE
            step.run("block")
        step.grad_output("block", 1 if step is plain else 2, nan=1)
    found = compare(plain.trace(), again.trace())
    assert found.counts["nonfinite_alike"] == 1 and (found.a.only, found.b.only) == (0, 2)


def test_traces_of_one_step_each_are_aligned_whatever_its_number() -> None:
    late = written()
    late.events["step"] = 7
    late = dataclasses.replace(late, steps=({"step": 7},))
    found = compare(written(), late)
    assert found.same and found.steps == (0, 7)
    assert "Step 0 of A is compared with step 7 of B." in str(found)


def test_a_nonfinite_event_without_counterpart_is_no_agreement() -> None:
    trace = written(posinf=5)
    found = compare(trace, without(trace, np.arange(len(trace)) >= 7))
    assert found.first is None and found.a.only_nonfinite == 2 and not found.same
    assert "of them nonfinite" in str(found)


def test_traces_of_models_without_a_common_module_say_so_first() -> None:
    found = []
    for name in ("encoder", "mlp"):
        one = Written()
        with one.call(""):
            one.run(name)
        one.loss()
        found.append(one.trace())
    difference = compare(*found)
    assert difference.common and difference.modules == (1, 1, 0)
    assert str(difference).startswith("No module has the same name in both (1 in A, 1 in B, 0 in common)")
    assert not str(compare(found[0], found[0])).startswith("No module")


def test_traces_with_nothing_in_common_do_not_agree() -> None:
    found = compare(written(), Trace(np.zeros(0, EVENT), ()))
    assert not found.same and "No common site" in str(found)
    assert compare(Trace(np.zeros(0, EVENT), ()), Trace(np.zeros(0, EVENT), ())).common == 0


def test_tensors_of_which_nothing_was_read_are_counted_and_not_compared() -> None:
    trace = written()
    found = compare(trace, changed(trace, 7, finite=0, min=np.nan, max=np.nan))
    assert found.counts["unreadable"] == 1 and found.first is None


def test_more_differences_than_are_kept_are_counted() -> None:
    a, b = Written(), Written()
    for number in range(150):
        a.run(f"block.{number}")
        b.run(f"block.{number}", made=NAN)
    found = compare(a.trace(), b.trace())
    assert (len(found.nonfinite), found.counts["nonfinite"]) == (100, 150)
    assert "Of 300 common sites differ 150 in nonfinite values." in str(found)


def test_extreme_ranges_do_not_warn_and_stay_strict_json() -> None:
    a = changed(written("float64"), 7, min=-1.7e308, max=1.7e308)
    b = changed(written("float64"), 7, min=1.7e308, max=1.7e308)
    found = compare(a, b).to_dict()
    assert found["ranges"][0]["error"] == {"finite": False, "value": "inf"}


@given(st.text(max_size=30), st.integers(40, 100), st.booleans())
@settings(deadline=None, max_examples=40)
def test_any_name_leaves_the_text_printable_and_in_its_width(name: str, width: int, ascii_only: bool) -> None:
    step = Written()
    step.run(name, made=NAN)
    other = Written()
    other.run(name)
    other.run(f"{name}.other")
    found = compare(step.trace(), other.trace())
    for line in text(found, width=width, ascii=ascii_only).split("\n"):
        assert columns(line) <= width
        assert line.isprintable() and (line.isascii() or not ascii_only)
    assert all(line.isprintable() for line in str(found).split("\n"))


def test_the_tolerance_is_half_of_the_digits_and_some_roundings_near_zero() -> None:
    assert relative("float16") == 2.0**-5 and relative("float32") == 2.0**-11.5
    assert absolute("float32", np.array([2.0])).tolist() == [64 * 2.0**-23]
    assert absolute("bfloat16", np.array([1.0])).tolist() == [2.0**-3.5]
    assert coarsest(written("float32"), written("bfloat16")) == "bfloat16"
    assert coarsest(written("int64")) is None


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda: nantrace.diff("a.h5", written()), TypeError, r"diff got a str: pass two Traces"),  # type: ignore[arg-type]
        (lambda: nantrace.diff(written(), written(), rtol=-1), ValueError, r"rtol is -1: pass a number of 0 or more"),
        (lambda: nantrace.diff(written(), written(), atol=float("nan")), ValueError, r"atol is nan"),
    ],
)
def test_wrong_use_gets_one_sentence(call: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        call()


def test_the_public_function_gives_a_value() -> None:
    found = nantrace.diff(written(), written())
    assert isinstance(found, Difference) and found == nantrace.diff(written(), written())
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.common = 3  # type: ignore[misc]


def healthy(dtype: Any, scale: float | None, clips: bool = False, backwards: int = 1) -> Trace:
    """Two steps of a tiny model under autocast, with a scaler or without."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    batch = torch.randn(16, 4)
    with nantrace.trace(model, optimizer=optimizer) as tracer:
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(backwards):
                with torch.autocast("cpu", dtype=dtype):
                    loss = model(batch).square().mean()
                scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    return tracer.trace


@pytest.mark.parametrize(("clips", "backwards"), [(False, 1), (True, 1), (False, 2)])
def test_a_loss_scale_is_no_difference(clips: bool, backwards: int) -> None:
    import torch

    bfloat16 = healthy(torch.bfloat16, None, clips, backwards)
    scaled, other = (healthy(torch.float16, scale, clips, backwards) for scale in (1024.0, 16.0))
    found = compare(bfloat16, scaled)
    assert found.same and found.common == len(scaled)
    assert "Gradients and loss are compared without the loss scale (1,024 in B)." in str(found)
    assert compare(scaled, bfloat16).same
    assert "scale (1,024 in A, 16 in B)" in str(compare(scaled, other)) and compare(scaled, other).same
    assert "loss scale" not in str(compare(bfloat16, bfloat16)) and compare(bfloat16, bfloat16).a.scales is None


def test_what_differs_beside_a_loss_scale_is_still_found_and_shown_without_it() -> None:
    import torch

    a, b = healthy(torch.bfloat16, None), healthy(torch.float16, 1024.0)
    row = next(at for at in range(len(b)) if b.site(b.events[at]).role is Role.LOSS)
    was = float(b.events[row]["max"])
    first = compare(a, changed(b, row, min=2 * was, max=2 * was)).first
    assert first is not None and first.kind == "range" and first.slot == "loss"
    assert first.b.max == 2 * was / 1024 and first.relative == pytest.approx(1.0, rel=0.02)


def gradient(phase: Phase, size: float, **ledger: Any) -> Trace:
    written = Written()
    written.row("block", phase, Role.GRAD, "block.weight", size=size)
    return dataclasses.replace(written.trace(), steps=({"step": 0, **ledger},))


def test_where_it_is_unknown_whether_a_scale_was_taken_off_both_readings_agree() -> None:
    a = gradient(Phase.POST_BACKWARD, 2.0)
    for size in (2.0, 2.0 * 4096):
        assert compare(a, gradient(Phase.POST_BACKWARD, size, scale_before=4096.0)).same
        assert compare(gradient(Phase.POST_BACKWARD, size, scale_before=4096.0), a).same
    assert compare(a, gradient(Phase.POST_BACKWARD, 3.0 * 4096, scale_before=4096.0)).counts["range"] == 1


def test_a_scale_that_an_optimizer_was_given_though_it_was_taken_off_is_a_difference() -> None:
    a = gradient(Phase.OPTIMIZER, 2.0)
    off = {"scale_before": 4096.0, "gradient_read": "by the optimizer, after unscale_"}
    assert compare(a, gradient(Phase.OPTIMIZER, 2.0, **off)).same
    assert compare(a, gradient(Phase.OPTIMIZER, 2.0 * 4096, **off)).counts["range"] == 1
    fused = {"scale_before": 4096.0, "gradient_read": "by the optimizer, before unscale_ and divided by the scale here"}
    assert compare(a, gradient(Phase.OPTIMIZER, 2.0 * 4096, **fused)).same
