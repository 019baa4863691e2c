"""What is odd in a batch, by tensor and sample."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nantrace.capture.ledger.batch_check import check_batch
from nantrace.capture.tracer import Tracer


def _ramp(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def _bad(tensor: torch.Tensor, at: tuple[int, ...], value: float) -> torch.Tensor:
    tensor[at] = value
    return tensor


@pytest.mark.parametrize(
    ("batch", "finding", "samples"),
    [
        ({"x": _bad(_ramp(4, 3), (2, 1), math.nan)}, "holds nonfinite values", [2]),
        ({"x": _bad(_ramp(4, 3), (1, 0), 1e5)}, "holds values beyond 65504", [1]),
        ({"x": _bad(_ramp(3, 2), (0, 1), 0.0)}, "is constant", [0]),
        ({"attention_mask": torch.tensor([[1, 0], [0, 0]])}, "lets nothing through", [1]),
        ({"labels": torch.tensor([[-100, 1], [-100, -100]])}, "is ignored everywhere (-100)", [1]),
        ({"labels": torch.tensor([1, 7, -3])}, "lies outside of 5 classes", [1, 2]),
        (
            {"input_lengths": torch.tensor([4, 2]), "target_lengths": torch.tensor([4, 3])},
            "is longer than batch.input_lengths",
            [1],
        ),
    ],
)
def test_what_is_odd_is_named_with_its_sample(batch: Any, finding: str, samples: list[int]) -> None:
    (found,) = check_batch(batch, (torch.float16,), classes=5)
    assert (found["finding"], found["samples"]) == (finding, samples)


def test_a_channel_without_variance_is_named() -> None:
    x = _ramp(2, 3, 4)
    x[:, 1] = 5.0
    (found,) = check_batch({"x": x})
    assert found["finding"] == "is constant in channel 1"


def test_targets_that_are_all_ignored_are_told_as_a_whole() -> None:
    (found,) = check_batch({"labels": torch.full((2, 3), -100)})
    assert found == {"tensor": "batch.labels", "finding": "is ignored everywhere (-100)", "count": 6}


def test_an_ordinary_batch_has_nothing_odd() -> None:
    batch = {
        "x": _ramp(4, 3, 2),
        "mask": torch.tensor([[True, False], [True, True]]),
        "labels": torch.tensor([0, 4, -100]),
        "empty": torch.zeros(0),
        "scalar": torch.tensor(1.0),
        "ids": torch.zeros(2, 2, dtype=torch.long),
    }
    assert check_batch(batch, (torch.float16,), classes=5) == []


def test_the_batch_of_a_failed_step_is_looked_into() -> None:
    model = torch.nn.Linear(3, 1)
    batch = {"x": _bad(_ramp(4, 3), (2, 1), math.nan)}
    with Tracer(model, batch=batch, on_nonfinite="ignore") as tracer:
        model(batch["x"]).sum().backward()
        tracer.mark_step()
        batch["x"].copy_(_ramp(4, 3))
        model(batch["x"]).sum().backward()
    failed, fine = tracer.trace.steps
    assert failed["batch_check"] == [
        {"tensor": "batch.x", "finding": "holds nonfinite values", "samples": [2], "count": 1}
    ]
    assert "batch_check" not in fine
