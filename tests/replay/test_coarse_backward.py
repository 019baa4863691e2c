"""Narrowing a backward pass: to the node in which the first nonfinite gradient was born, in a handful of replays."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nantrace.diagnosis.verdict import Verdict
from nantrace.lineage import Lineage, OpEvent, Sink
from nantrace.replay import bisect as bisect_module
from nantrace.replay.bisect import bisect
from nantrace.replay.coarse import backward as coarse_backward
from nantrace.replay.coarse.backward import Suspects, narrow_backward
from nantrace.replay.coarse.gaps import unobserved
from nantrace.replay.replays import Replays
from nantrace.replay.step import Step


class Root(nn.Module):
    """Backward at 0 gives 0 * inf."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 0).sqrt()


class Branches(nn.Module):
    """The bad one reads the same tensor as a good one, and as the sum: the gradient of that tensor convicts all."""

    def __init__(self) -> None:
        super().__init__()
        self.good, self.bad = nn.Linear(4, 4), Root()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.good(x) + self.bad(x)


class Dropped(nn.Module):
    """An infinity of the forward that `where` drops, and that backward trips over."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, (x * 1e4).exp(), x * 0).clamp(max=1.0)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class Hooked(nn.Module):
    """Divides by zero in a hook, between two nodes."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        y.register_hook(lambda gradient: gradient / 0)
        return y


class Late(nn.Module):
    """Two births: the first in backward is masked away, the second does the harm."""

    def forward(self, x: Tensor) -> Tensor:
        harmful = (x * 0).sqrt()
        masked = torch.where(x > 1e9, (x * 0).sqrt(), x)
        return harmful + masked


def model_with(layer: nn.Module, depth: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)), layer, nn.Linear(4, 4), nn.Dropout(0.1))


def step_of(model: nn.Module, loss: Callable[[Tensor], Tensor] = torch.mean) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def run(m: nn.Module, b: Tensor) -> Tensor:
        optimizer.zero_grad()
        value = loss(m(b))
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return value.detach()

    return Step(run, model, torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), optimizer=optimizer)


def suspects(step: Step, most: int = 5) -> Suspects:
    with Replays(step, 20) as replays:
        found = narrow_backward(replays, most)
    assert found is not None
    return found


def both(step: Step, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Verdict, Verdict]:
    """The verdict of watching every op, and that of narrowing first."""
    whole = bisect(step)
    monkeypatch.setattr(bisect_module, "is_affordable", lambda cost: False)
    return whole, bisect(step, **options)


def said(verdict: Verdict) -> str:
    return " ".join(verdict.evidence)


@pytest.mark.parametrize(
    ("layer", "region"),
    [
        (Root(), "SqrtBackward0 in 6"),
        (Branches(), "SqrtBackward0 in 6.bad"),
        (Dropped(), "ExpBackward0 in 6"),
        (Checkpointed(Branches(), False), "SqrtBackward0 in 6.inner.bad"),
        (Checkpointed(Branches(), True), "SqrtBackward0 in 6.inner.bad"),
        (Hooked(), "AddmmBackward0 in 7, MulBackward0 in 6"),
    ],
    ids=["a root", "branches", "a dropped branch", "checkpoint", "reentrant checkpoint", "a hook between nodes"],
)
def test_one_node_is_left_and_the_op_pass_within_it_says_what_the_pass_over_all_says(
    layer: nn.Module, region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, narrowed = both(step_of(model_with(layer)), monkeypatch)
    assert narrowed.status == "fault" and narrowed.origin == whole.origin and narrowed.cause == whole.cause
    assert f"backward nodes were searched first, in 2 replays; only ops within {region} were." in said(narrowed)
    assert narrowed.replays == 5


def test_code_outside_of_modules_is_left_where_the_loss_made_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(model_with(nn.ReLU()), lambda out: out.mean() + (out * 0).pow(2).sum().sqrt())
    whole, narrowed = both(step, monkeypatch)
    assert narrowed.origin == whole.origin and narrowed.status == "fault"
    assert "only ops within SqrtBackward0 were." in said(narrowed)


def test_where_another_birth_did_the_harm_the_answer_is_that_of_watching_all(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, narrowed = both(step_of(model_with(Late())), monkeypatch)
    assert (narrowed.status, narrowed.origin) == (whole.status, whole.origin)
    assert narrowed.status == "fault" and narrowed.cause == "sqrt_at_zero"


def test_an_update_that_makes_the_first_nonfinite_value_is_found_after_a_finite_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_with(nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38)

    def run(m: nn.Module, b: Tensor) -> None:
        (m(b).pow(2).mean() * 1e4).backward()
        optimizer.step()

    step = Step(run, model, torch.ones(6, 4), optimizer=optimizer)
    whole, narrowed = both(step, monkeypatch)
    assert (narrowed.status, narrowed.stage, narrowed.origin) == (whole.status, "optimizer", whole.origin)
    assert "only ops within what comes after backward were." in said(narrowed)


def test_the_pass_and_the_micro_batch_are_the_ones_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with(Root())

    def run(m: nn.Module, b: Tensor) -> None:
        m[:6](b).sum().backward()  # finite
        m(b).sum().backward()
        m[:6](b).sum().backward()

    step = Step(run, model, torch.ones(6, 4))
    found = suspects(step)
    assert found.names() == ("SqrtBackward0 in 6",) and found.map.arrived is not None and found.map.arrived[0] == 1
    whole, narrowed = both(step, monkeypatch)
    assert narrowed.origin == whole.origin and narrowed.status == "fault"


def test_a_gradient_that_goes_bad_before_the_loss_does_is_what_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with(Root())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(m: nn.Module, b: Tensor) -> None:
        for _ in range(2):  # the second loss is NaN
            optimizer.zero_grad()
            m(b).sum().backward()
            optimizer.step()

    whole, narrowed = both(Step(run, model, torch.ones(6, 4), optimizer=optimizer), monkeypatch)
    assert narrowed.origin == whole.origin and narrowed.status == "fault"
    assert "only ops within SqrtBackward0 in 6 were." in said(narrowed)


def test_a_step_that_raises_over_its_gradients_is_searched_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(m: nn.Module, b: Tensor) -> None:
        m(b).sum().backward()
        nn.utils.clip_grad_norm_(m.parameters(), 1.0, error_if_nonfinite=True)

    whole, narrowed = both(Step(run, model_with(Root()), torch.ones(6, 4)), monkeypatch)
    assert narrowed.origin == whole.origin and narrowed.status == "fault"
    assert "only ops within SqrtBackward0 in 6 were." in said(narrowed)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(2, 40), st.integers(1, 30))
def test_in_any_graph_the_node_that_is_left_is_a_true_birth(seed: int, size: int, width: int) -> None:
    rng = random.Random(seed)
    plan = [(rng.choice(["add", "scale", "birth", "mask"]), rng.randrange(n + 1), rng.randrange(n + 1))
            for n in range(size)]  # fmt: skip
    model = nn.Linear(4, 4)

    def run(m: nn.Module, b: Tensor) -> None:
        values = [m(b)]
        for op, one, other in plan:
            x = values[one]
            if op == "birth":
                x = (x * 0).sqrt()  # SqrtBackward0: 0 / 0
            elif op == "mask":
                x = torch.where(x > 1e30, x, x.detach()) + values[other]  # hands back zeros, whatever arrives
            values.append(x + values[other] if op == "add" else x * 0.5)
        values[-1].sum().backward()

    step = Step(run, model, torch.ones(2, 4))
    with Replays(step, 60) as replays:
        assume(replays.plain("the ends only").failed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(coarse_backward, "WIDTH", width)
            found = narrow_backward(replays, 50)
    assert found is not None and found.finished and found.names() == ("SqrtBackward0",)


def test_the_region_is_found_again_in_each_further_run() -> None:
    with Replays(step_of(model_with(Branches())), 20) as replays:
        found = narrow_backward(replays, 5)
        assert found is not None
        lineages = [replays.recorded("ops of the region", within=found.within())[0].lineage for _ in range(3)]
    births = [[(e.op, e.node) for e in lineage.events if e.kind in ("nan", "inf")] for lineage in lineages]
    assert births[0] == births[1] == births[2] and births[0][0] == ("aten.div", "SqrtBackward0")


def test_ten_thousand_nodes_take_a_handful_of_replays() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.root = Root()

        def forward(self, x: Tensor) -> Tensor:
            for number in range(10_000):
                x = x + self.root(x) if number == 2_345 else x + 0.1
            return x

    model = nn.Sequential(nn.Linear(4, 4), Chain())
    step = Step(lambda m, b: m(b).sum().backward(), model, torch.ones(2, 4))
    with Replays(step, 20) as replays:
        found = narrow_backward(replays, 10)
        assert replays.count <= 4
    assert found is not None and found.names() == ("SqrtBackward0 in 1.root",)


def test_a_search_that_runs_out_of_replays_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> Step:
        return step_of(nn.Sequential(nn.Linear(4, 4), Root(), *(nn.Linear(4, 4) for _ in range(30))))

    monkeypatch.setattr(coarse_backward, "WIDTH", 2)
    found = suspects(step(), most=1)
    assert not found.finished and "SqrtBackward0 in 1" in found.names() and 1 < len(found.names()) < 60
    monkeypatch.setattr(bisect_module, "is_affordable", lambda cost: False)
    verdict = bisect(step(), max_replays=3)
    assert (verdict.status, verdict.replays) == ("inconclusive", 3)
    assert "backward nodes were searched first, and the replays ran out." in said(verdict)
    assert "SqrtBackward0 in 1" in verdict.region


def test_nothing_is_left_on_the_model_and_nothing_of_the_step_is_changed() -> None:
    step = step_of(model_with(Branches()))
    with Replays(step, 20) as replays:
        plain = replays.plain("the ends only")
        narrow_backward(replays, 5)
        assert all(ends == plain for ends in replays.probed) and len(replays.probed) == 2
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in step.model.modules())
    assert not nn.modules.module._global_forward_hooks and not nn.modules.module._global_forward_pre_hooks


def event(number: int, category: Any = None, parents: tuple[int, ...] = (), module: str | None = "m") -> OpEvent:
    kind: Any = "external" if category else "propagated"
    return OpEvent(number, number, "aten.mul", kind, "backward", module, None, None, 1, "float32", category=category,
                   nan_parents=parents)  # fmt: skip


def test_only_what_nobody_watched_and_what_reached_a_sink_is_a_gap() -> None:
    dropped, read, last = event(1, "unobserved", module="a"), event(2, "unobserved", module="b"), event(3, None, (2,))
    lineage = Lineage([dropped, read, last], [Sink("grad", "weight", ((3, "nan"),), 1, 9)])
    assert unobserved(lineage) == ("b",)
