"""A gradient scaler that skips every update over a loss that no scale makes finite: nothing is learnt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from nantrace.diagnosis.blame import blame
from nantrace.diagnosis.verdict import Verdict
from tests.flow.steps import recorded


def judged(bad: Sequence[bool], scaled_overflow: bool = False) -> Verdict:
    """A loop under a scaler; the loss of an iteration takes the log of 0 where `bad` says so."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16 if not scaled_overflow else 2.0**127)
    x = torch.linspace(-1, 1, 12).reshape(4, 3)

    def run() -> None:
        for broken in bad:
            optimizer.zero_grad()
            output = model(x).pow(2).mean() + 1.0
            loss = torch.log(output * 0.0) if broken else output * (1e3 if scaled_overflow else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return blame(recorded(run, model)).verdict


def two_optimizers(iterations: int) -> Callable[[], None]:
    """Both halves of a pair skip in each iteration, over one bad batch."""
    model = nn.ModuleDict({"g": nn.Linear(3, 3), "d": nn.Linear(3, 1)})
    optimizers = [torch.optim.SGD(model[name].parameters(), lr=0.1) for name in ("d", "g")]
    scaler = torch.amp.GradScaler("cpu")

    def run() -> None:
        for _ in range(iterations):
            for optimizer in optimizers:
                optimizer.zero_grad()
                loss = torch.log(model["d"](model["g"](torch.ones(2, 3))).sum() * 0.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
            scaler.update()

    return run


def test_a_bad_loss_in_every_iteration_is_a_fault() -> None:
    verdict = judged([True] * 4)
    assert (verdict.status, verdict.stage, verdict.cause) == ("fault", "loss", "log_of_zero")
    assert "In iterations 0 to 3 the loss was nonfinite before it was scaled" in " ".join(verdict.evidence)
    assert "training stands still" in " ".join(verdict.evidence)


def test_the_last_iterations_are_enough() -> None:
    verdict = judged([False, True, True])
    assert verdict.status == "fault" and verdict.origin is not None and verdict.origin.step == 1


def test_one_bad_loss_is_contained_and_the_evidence_says_what_follows_if_it_stays() -> None:
    verdict = judged([True])
    assert (verdict.status, verdict.stage) == ("contained", "loss")
    assert "no lower scale helps" in " ".join(verdict.evidence)


def test_bad_losses_after_which_updates_went_on_are_contained() -> None:
    assert judged([True, True, False]).status == "contained"


def test_a_loss_that_only_its_scale_made_infinite_is_calibration() -> None:
    verdict = judged([False] * 3, scaled_overflow=True)
    assert verdict.status == "contained"
    assert "stands still" not in " ".join(verdict.evidence)


def test_two_optimizers_that_skip_once_each_are_no_row_of_skips() -> None:
    assert blame(recorded(two_optimizers(1))).verdict.status == "contained"
    assert blame(recorded(two_optimizers(2))).verdict.status == "fault"
