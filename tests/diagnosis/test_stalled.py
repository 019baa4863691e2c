"""What is said of weights that stand still in real runs, and that nothing is said of those that have a reason to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nantrace
from nantrace.diagnosis.observation import Observation
from nantrace.diagnosis.stalled import stalled

_CLASSES = 5


def said(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], train: Callable[[int], None], steps: int = 12
) -> dict[str, Observation]:
    """What stands still in a run, by kind; `train` is told the step and steps the optimizers."""
    with nantrace.trace(model, on_nonfinite="ignore") as tracer:
        for step in range(steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            train(step)
    return {found.kind: found for found in stalled(tracer.trace)}


def classified(
    model: nn.Module, forward: Callable[[int], torch.Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, Observation]:
    targets = torch.arange(8) % _CLASSES

    def train(step: int) -> None:
        F.cross_entropy(forward(step), targets).backward()
        optimizer.step()

    return said(model, [optimizer], train)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("tokens", [(3, 6), (0, 10_000)])
def test_an_embedding_whose_tokens_are_rare_is_left_alone(sparse: bool, tokens: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10_000, 64, sparse=sparse), nn.Linear(64, _CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    assert classified(model, lambda _: model(torch.randint(*tokens, (8, 16))).mean(1), optimizer) == {}


def test_a_tied_embedding_whose_sampled_rows_have_faint_gradients_is_left_alone() -> None:
    """In bfloat16 only the rows of frequent tokens move: the gradient of the others is far smaller."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(4096, 16, dtype=torch.bfloat16))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = F.embedding(tokens, self.table)
            faint = 1e-5 * (hidden @ self.table.T).sum(-1, keepdim=True) * torch.arange(_CLASSES)
            return hidden @ self.table[:_CLASSES].T + faint

    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.tensor([7, 7, 7, 9, 9, 11, 11, 13])
    assert classified(model, lambda _: model(tokens).float(), optimizer) == {}


@pytest.mark.parametrize("rate", [0.1, 1e-6])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam])
def test_an_adapter_that_begins_at_zero_beside_frozen_weights_is_left_alone(
    cls: Callable[..., torch.optim.Optimizer], rate: float
) -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(16, 16).requires_grad_(False)
            self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.frozen(x) + self.up(self.down(x))
            return y

    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), nn.ReLU(), nn.Linear(16, _CLASSES))
    optimizer = cls([p for p in model.parameters() if p.requires_grad], lr=rate)
    x = torch.randn(8, 16)
    assert classified(model, lambda _: model(x), optimizer) == {}


def test_an_expert_that_is_used_between_the_sampled_steps_is_left_alone() -> None:
    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Linear(8, _CLASSES) for _ in range(4))
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
    x = torch.randn(8, 8)
    found = classified(experts, lambda step: experts[2 if step == 5 else step % 2](x), optimizer)
    assert set(found) == {"no_gradient"}
    assert found["no_gradient"].sentence == (
        "2 of 8 parameters (25 %) never had a gradient in 5 sampled steps: 3.weight, 3.bias."
    )
    assert "or are in other steps" in found["no_gradient"].leaves_open


@pytest.mark.parametrize("detached", [True, False])
def test_a_generator_that_is_updated_between_the_sampled_steps_is_left_alone(detached: bool) -> None:
    torch.manual_seed(0)
    generator, critic = nn.Linear(8, 16), nn.Linear(16, 1)
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    own, its = (torch.optim.Adam(each.parameters(), lr=1e-3) for each in (generator, critic))

    def train(step: int) -> None:
        made = generator(torch.randn(4, 8))
        made = made.detach() if detached else made
        F.softplus(critic(made) - critic(torch.randn(4, 16)).square()).mean().backward()
        its.step()
        if step % 5 == 4:
            own.zero_grad()
            critic(generator(torch.randn(4, 8))).mean().backward()
            own.step()

    assert said(model, [its], train) == {}


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_weights_that_rounding_holds_still_are_told_with_what_was_looked_at(format: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.Linear(64 * 36, _CLASSES)).to(memory_format=format)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    x = torch.randn(8, 3, 8, 8)
    found = classified(model, lambda _: model(x), optimizer)
    assert set(found) == {"unmoved"}
    assert "4 of 4 parameters (100 %) had a gradient and were not moved by any update" in found["unmoved"].sentence
    assert found["unmoved"].evidence == (
        "Looked at were at least 64 evenly spread elements of each, or all of a small one, whose gradient was like "
        "that of the rest.",
    )


def test_a_sample_of_a_matrix_does_not_lie_in_one_column() -> None:
    """The first feature is always zero, as the corner of a picture is: all its weights stand still."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 64)
    x[:, 0] = 0
    with nantrace.trace(model, on_nonfinite="ignore") as tracer:
        model(x).square().mean().backward()
        optimizer.step()
    weights = tracer.trace.steps[0]["weights"]
    assert weights["names"] == ["weight", "bias"]
    assert all(update is not None and update > 1e-5 for update in weights["update"])
