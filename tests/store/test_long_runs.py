"""Steps of which only numbers are kept: what they amount to, what older and damaged files give, long ledgers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nantrace.diagnosis.verdict import plain
from nantrace.errors import TraceFormatError
from nantrace.steps import (
    STEP,
    Steps,
    by_number,
    figures,
    had_nonfinite_numbers,
    had_scale,
    likely,
    likely_places,
    numbers_of,
    packed,
    told,
    unpacked,
    was_skipped,
)
from nantrace.store import TraceWriter, lines, load

NUMBERS = {
    "attempted": 1,
    "committed": 0,
    "skipped": 1,
    "seconds": 0.25,
    "loss": 2.5,
    "lr": 1e-3,
    "gradient_norm": 7.0,
    "scale_before": 65536.0,
    "scale_after": 32768.0,
    "detailed": False,
}


def a_step(number: int, **more: Any) -> dict[str, Any]:
    return {"step": number, "first_seq": 0, "events": 0, **NUMBERS, **more}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Ten steps; 0, 5 and, said later, 3 with all that is known of them."""
    with TraceWriter(tmp_path / "step.h5") as writer:
        for number in range(10):
            writer.add_step(a_step(number, notes=("one",)), whole=number in (0, 5))
        writer.complete_step(3, a_step(3, notes=("late",)))
    return tmp_path / "step.h5"


def test_a_step_without_a_line_is_its_numbers(path: Path) -> None:
    steps = load(path).steps
    assert len(steps) == 10
    assert steps[4] == a_step(4)
    assert steps[5] == a_step(5, notes=("one",))
    assert steps[3] == a_step(3, notes=("late",))


def test_steps_behave_as_a_tuple_of_mappings(path: Path) -> None:
    steps = load(path).steps
    whole = tuple(
        a_step(n, **({0: {"notes": ("one",)}, 3: {"notes": ("late",)}, 5: {"notes": ("one",)}}.get(n, {})))
        for n in range(10)
    )
    assert steps == whole and tuple(steps) == whole
    assert steps != whole[:-1] and steps != whole[::-1]
    assert steps[-2] == whole[-2] and steps[2:9:3] == whole[2:9:3] and steps[:0] == ()
    assert list(reversed(steps)) == list(reversed(whole))
    with pytest.raises(IndexError):
        steps[10]


def test_steps_are_mappings_in_strict_json_too(path: Path) -> None:
    steps = plain(load(path).steps)
    assert type(steps) is list and steps[4] == plain(a_step(4))
    assert steps[3]["notes"] == ["late"]


def test_steps_of_which_more_is_known_are_found_without_the_others(path: Path) -> None:
    steps = load(path).steps
    assert [step["step"] for step in told(steps)] == [0, 3, 5]
    assert numbers_of(steps) == list(range(10))
    assert list(told(tuple(steps))) == list(steps) and numbers_of(tuple(steps)) == list(range(10))


def test_steps_are_found_by_number_without_making_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # Row 0 holds notes that belong to no step: its number counts as 0 among the columns and is none.
    rows = np.array([packed({}), *(packed(a_step(number)) for number in (0, 7, 8, 9, 9))], STEP)
    steps = Steps(rows, {0: {"notes": ("none",)}, 4: a_step(9, notes=("first",))})
    expected = {0: a_step(0), 8: a_step(8), 9: a_step(9, notes=("first",))}
    assert by_number(tuple(steps), (0, 8, 9, 11)) == expected
    made: list[Any] = []
    monkeypatch.setattr("nantrace.steps.unpacked", lambda row: made.append(row[0]) or unpacked(row))
    assert by_number(steps, (0, 8, 9, 11)) == expected
    assert by_number(steps, ()) == {}
    assert made == [0, 8, 9]  # 7 was not asked for; the first of those numbered 9 is not made of its row


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 0.0])
def test_a_nonfinite_loss_is_told_from_an_absent_one(loss: float) -> None:
    assert repr(unpacked(packed({"step": 1, "loss": loss}))["loss"]) == repr(loss)
    assert "loss" not in unpacked(packed({"step": 1}))
    assert "loss" not in unpacked(packed({"step": 1, "loss": [1.0, 2.0]}))


def test_events_that_were_seen_and_dropped_are_counted() -> None:
    step = unpacked(packed({"step": 1, "events": 40, "first_seq": 7, "nonfinite": 2}))
    assert (step["events"], step["first_seq"], step["not_kept"], step["nonfinite"]) == (0, 0, 40, 2)
    assert "detailed" not in step


floats = st.none() | st.floats(width=64)


@given(st.fixed_dictionaries({name: floats for name in ("loss", "gradient_norm")}), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=50)
def test_numbers_survive_a_row(given_: dict[str, float | None], number: int) -> None:
    row = np.array([packed({"step": number, **given_})], STEP)
    back = unpacked(row[0].tolist())
    assert back["step"] == number
    for name, value in given_.items():
        assert repr(back.get(name)) == repr(value)


def test_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "step.h5") as writer:
        writer.add_step({"step": 0, "not_kept": 9})
        writer.add_step({"step": 1})
        writer.complete_step(0, {"step": 0, "events": 9})
    assert load(tmp_path / "step.h5").steps == ({"step": 0, "events": 9}, {"step": 1})


def test_a_file_of_format_1_0_has_a_line_for_every_step(tmp_path: Path) -> None:
    old = np.dtype([(name, STEP[name]) for name in ("step", "first_seq", "events", "loss", "lr", "seconds")])
    with TraceWriter(tmp_path / "step.h5") as writer:
        for number in range(3):
            writer.add_step({"step": number, "loss": 1.0, "notes": (number,)})
    with h5py.File(tmp_path / "step.h5", "r+") as file:
        file["meta"].attrs.modify("format_version", "1.0")
        rows = file["steps"][:]
        del file["lines"], file["steps"]
        file["steps"] = np.array([tuple(row)[:6] for row in rows], old)
    assert load(tmp_path / "step.h5").steps == tuple({"step": n, "loss": 1.0, "notes": (n,)} for n in range(3))


def test_a_ledger_that_is_missing_leaves_the_numbers(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        del file["ledger"]
    assert load(path).steps == tuple(a_step(number) for number in range(10))


def test_a_line_of_a_step_that_is_not_there_is_refused(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["lines"][1] = 10
    with pytest.raises(TraceFormatError, match="line of step 10 of 10 in the ledger: it is damaged"):
        load(path)


def test_a_long_ledger_is_parsed_when_it_is_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = load(path).steps
    monkeypatch.setattr(lines, "_AT_ONCE", 10)
    steps = load(path).steps
    assert isinstance(steps, Steps) and not isinstance(steps.said, dict)
    assert steps == at_once and list(told(steps)) == list(told(at_once))
    with h5py.File(path, "r+") as file:
        file["ledger"][20] = ord("{")
    later = load(path).steps
    assert later[5] == at_once[5]
    with pytest.raises(TraceFormatError, match="damaged line of step 0 in the ledger"):
        later[0]


def test_a_long_ledger_that_is_not_lines_of_objects_is_refused_at_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_AT_ONCE", 10)
    with h5py.File(path, "r+") as file:
        file["ledger"][0] = ord("[")
    with pytest.raises(TraceFormatError, match="as line 0 of the ledger: it is damaged"):
        load(path)


_LEDGER_NUMBERS = st.fixed_dictionaries(
    {},
    optional={
        "loss": st.one_of(st.none(), st.floats(allow_nan=True)),
        "gradient_norm": st.floats(allow_nan=True),
        "scale_before": st.floats(min_value=1, max_value=1e6),
        "attempted": st.integers(0, 3),
        "skipped": st.integers(0, 3),
    },
)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(_LEDGER_NUMBERS, st.booleans()), max_size=12))
def test_numbers_rule_out_no_step_that_its_mapping_would_choose(written: list[tuple[dict[str, Any], bool]]) -> None:
    plain = [{"step": number, **step} for number, (step, _) in enumerate(written)]
    said = {place: plain[place] for place, (_, whole) in enumerate(written) if whole}
    steps = Steps(np.array([packed(step) for step in plain], STEP), said)
    tests = {
        was_skipped: lambda step: step.get("skipped"),
        had_scale: lambda step: step.get("scale_before") is not None,
        had_nonfinite_numbers: lambda step: any(
            isinstance(step.get(name), float) and not math.isfinite(step[name]) for name in ("loss", "gradient_norm")
        ),
    }
    for could, holds in tests.items():
        expected = [step["step"] for step in plain if holds(step)]
        assert [step["step"] for step in likely(steps, could) if holds(step)] == expected
        assert [place for place in likely_places(steps, could) if place not in said] == [
            place for place in expected if place not in said
        ]
        assert [step["step"] for step in likely(plain, could) if holds(step)] == expected
    for name in ("loss", "attempted"):
        found, wanted = figures(steps, name), figures(plain, name)
        assert [(number, _or_absent(value)) for number, value in found] == [
            (number, _or_absent(value)) for number, value in wanted
        ]


def _or_absent(value: Any) -> Any:
    return None if value is None or value != value or value == 0 else value
