"""The smallest failing batch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nantrace.errors import ReplayError
from nantrace.replay.samples import Samples, reduced, sliced, smallest_failing_batch
from nantrace.replay.snapshot import Snapshot
from nantrace.replay.step import Step


def run(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = (model(batch["x"]).squeeze(1).exp() * batch["weight"]).mean()
    loss.backward()
    return loss


def step_of(x: Tensor) -> Step:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    nn.init.ones_(model.weight)
    return Step(run, model, {"x": x, "weight": torch.ones(len(x)), "scale": torch.ones(3)})


def test_the_one_sample_that_overflows_is_found_and_the_state_comes_back() -> None:
    x = torch.randn(16, 2)
    x[11] = 500.0
    step = step_of(x)
    before = Snapshot(step)
    found = smallest_failing_batch(step)
    assert (found.indices, found.size, found.minimal) == ((11,), 16, True)
    assert "Not bit-exact" in str(found)
    assert before.differences() == ()


def test_one_sample_and_several_are_told_in_english() -> None:
    assert str(Samples((11,), 16, 9, True)).startswith("Of 16 samples, 1 fails by itself (sample 11). Not bit-exact")
    several = "Of 16 samples, 2 fail together (samples 3, 7); none of them can be left out. Not bit-exact"
    assert str(Samples((3, 7), 16, 9, True)).startswith(several)
    every = str(Samples(tuple(range(16)), 16, 9, True))
    assert every.startswith("All 16 samples fail together, every sample of the batch; none of them can be left out.")


def test_when_the_replays_run_out_it_says_so() -> None:
    x = torch.randn(64, 2)
    x[40] = 500.0
    found = smallest_failing_batch(step_of(x), max_replays=4)
    assert 40 in found.indices and not found.minimal and found.replays == 4
    assert "the replays ran out" in str(found)


def test_a_step_that_does_not_fail_or_has_no_batch_is_refused() -> None:
    with pytest.raises(ReplayError, match="does not fail with its 4 samples"):
        smallest_failing_batch(step_of(torch.zeros(4, 2)))
    with pytest.raises(ReplayError, match="has no batch with two or more samples"):
        smallest_failing_batch(Step(lambda: None, nn.Linear(1, 1)))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_exactly_the_samples_that_fail_together_are_left(given_: tuple[int, set[int]]) -> None:
    size, culprits = given_
    found, minimal = reduced(list(range(size)), lambda chosen: culprits <= set(chosen), lambda: True)
    assert (set(found), minimal) == (culprits, True)


@dataclass
class Record:
    x: Tensor
    note: str


class Closed:
    def __init__(self) -> None:
        self.x = torch.zeros(3)


def test_nested_batches_are_sliced_and_closed_objects_refused() -> None:
    batch = {"a": (torch.arange(3), [torch.zeros(2)]), "r": Record(torch.arange(3), "n"), "s": "text"}
    out = sliced(batch, 3, [0, 2])
    assert out["a"][0].tolist() == [0, 2] and out["a"][1][0].shape == (2,)
    assert out["r"].x.tolist() == [0, 2] and batch["r"].x.shape == (3,)
    with pytest.raises(ReplayError, match="in a Closed, which cannot be sliced"):
        sliced({"c": Closed()}, 3, [0])


def test_where_every_sample_fails_none_is_blamed() -> None:
    step = step_of(torch.randn(4, 2))
    nn.init.constant_(step.model.weight, float("nan"))  # type: ignore[arg-type]
    found = smallest_failing_batch(step)
    assert (found.alone, found.tried) == ((0, 1, 2, 3), 4)
    assert str(found).startswith("Each of the 4 samples fails by itself: the reason is in no one of them alone.")


def test_of_a_large_batch_some_more_samples_are_tried_alone() -> None:
    step = step_of(torch.randn(40, 2))
    nn.init.constant_(step.model.weight, float("nan"))  # type: ignore[arg-type]
    found = smallest_failing_batch(step)
    assert found.tried == len(found.alone) == 8
    assert str(found).startswith("Each of the 8 samples that were tried fails by itself")


def test_one_sample_among_sound_ones_is_still_blamed() -> None:
    x = torch.randn(8, 2)
    x[0] = 500.0
    found = smallest_failing_batch(step_of(x))
    assert (found.indices, found.alone, found.tried) == ((0,), (0,), 2)
    assert "1 fails by itself (sample 0)" in str(found)
