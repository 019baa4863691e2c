"""Gradients: every way in which autograd delivers them, or does not."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nantrace.capture.tracer import Tracer
from nantrace.events import Trace

from .conftest import Rows


def _backward_order(trace: Trace) -> list[tuple[str | None, str]]:
    sites = [trace.site(event) for event in trace.events]
    return [(s.module, s.role.label) for s in sites if s.role.label in ("grad_output", "grad_input")]


def test_a_gradient_between_two_modules_is_a_row_of_both() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with Tracer(model) as tracer:
        model(torch.ones(1, 2)).sum().backward()
    assert _backward_order(tracer.trace) == [
        ("", "grad_output"),
        ("1", "grad_output"),
        ("1", "grad_input"),
        ("0", "grad_output"),
    ]


def test_an_inplace_op_after_a_module_leaves_its_gradient_before_the_op(rows: Rows) -> None:
    first = nn.Linear(1, 1, bias=False)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, nn.Linear(1, 1, bias=False)
            nn.init.constant_(self.second.weight, 3.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).mul_(5))

    model = Model()
    with Tracer(model) as tracer:
        model(torch.ones(1, 1)).sum().backward()
    assert rows(tracer.trace, role="grad_input", module="second")[0][2]["max"] == 3.0
    assert rows(tracer.trace, role="grad_output", module="first")[0][2]["max"] == 15.0


def test_an_inplace_op_after_a_module_is_judged_by_the_values_the_next_module_reads(rows: Rows) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).mul_(float("inf")))

    model = Model()
    nn.init.constant_(model.first.weight, 1.0)
    nn.init.constant_(model.first.bias, 1.0)
    with Tracer(model, on_nonfinite="ignore") as tracer:
        model(torch.ones(1, 1))
    assert rows(tracer.trace, role="output", module="first")[0][2]["posinf"] == 0
    assert rows(tracer.trace, role="input", module="second")[0][2]["posinf"] == 1


def test_a_view_that_its_parent_writes_to_is_counted_as_unobserved() -> None:
    class Half(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :1]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.part = nn.Linear(2, 2), Half()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x) * 1
            view = self.part(hidden)
            hidden.mul_(2)
            return view.sum() + hidden.sum()

    model = Model()
    with Tracer(model) as tracer:
        model(torch.ones(1, 2)).backward()
    assert tracer.trace.steps[0]["unobserved"] >= 1
    assert "part output" in " ".join(tracer.trace.steps[0]["notes"])


def test_an_unused_output_of_an_op_with_several_is_awaited_in_vain() -> None:
    class Split(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.unbind(1)

    model = nn.Sequential(nn.Linear(2, 2), Split())
    with Tracer(model) as tracer:
        model(torch.ones(1, 2))[0].sum().backward()
    step = tracer.trace.steps[0]
    assert step["unobserved"] == 2  # as the output of Split and of the model
    assert "no gradient came: 1 output[1] (grad_output, 1)" in step["notes"]


def test_a_tensor_with_many_readers_has_one_accumulated_gradient(rows: Rows) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.left, self.right = nn.Identity(), nn.Identity(), nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x * 1)
            return self.left(hidden * 1).sum() * 2 + self.right(hidden * 1).sum() * 3

    model = Model()
    with Tracer(model) as tracer:
        model(torch.ones(1, requires_grad=True)).backward()
    assert [event["max"] for _, _, event in rows(tracer.trace, role="grad_output", module="first")] == [5.0]


def test_identities_share_a_tensor_and_each_has_its_row() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Identity(), nn.Identity())
    with Tracer(model) as tracer:
        model(torch.ones(1, 1)).sum().backward()
    order = _backward_order(tracer.trace)
    assert [module for module, role in order if role == "grad_output"] == ["", "2", "1", "0"]


def test_a_leaf_input_has_its_gradient_recorded_and_loses_the_hook_at_exit(rows: Rows) -> None:
    x = torch.ones(1, 2, requires_grad=True)
    model = nn.Linear(2, 2)
    with Tracer(model) as tracer:
        model(x).sum().backward()
        assert x._backward_hooks
    assert not x._backward_hooks
    assert len(rows(tracer.trace, role="grad_input", slot="args[0]")) == 1


def test_hooks_of_the_user_on_a_tensor_that_is_watched_run_in_their_order_and_stay() -> None:
    heard: list[str] = []
    model, body = nn.Identity(), nn.Linear(2, 2)
    hidden = body(torch.ones(1, 2))
    hidden.register_hook(lambda gradient: heard.append("before"))
    with Tracer(model) as tracer:
        output = model(hidden)
        kept = output.register_hook(lambda gradient: heard.append("within"))
        gone = output.register_hook(lambda gradient: heard.append("never"))
        gone.remove()
        output.sum().backward(retain_graph=True)
    assert [role for _, role in _backward_order(tracer.trace)] == ["grad_output", "grad_input"]
    output.sum().backward()
    assert heard == ["before", "within", "before", "within"]
    kept.remove()
    assert len(output._backward_hooks) == 1


def test_hooks_are_inert_after_exit() -> None:
    model = nn.Linear(2, 2)
    with Tracer(model) as tracer:
        output = model(torch.ones(1, 2))
        loss = output.sum()
    seen = len(tracer.trace)
    loss.backward()
    assert len(tracer.trace) == seen
    assert not output._backward_hooks


def test_each_backward_of_a_retained_graph_is_recorded(rows: Rows) -> None:
    model = nn.Linear(2, 2)
    with Tracer(model) as tracer:
        loss = model(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert [event["max"] for _, _, event in rows(tracer.trace, role="grad", phase="backward", slot="bias")] == [
        1.0,
        2.0,
    ]
    assert len(rows(tracer.trace, role="loss", slot="loss")) == 2
    assert len(tracer.trace.steps) == 1


def test_double_backward_records_the_differentiated_value(rows: Rows) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with Tracer(model) as tracer:
        x = torch.ones(1, 2, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
    assert len(rows(tracer.trace, role="loss", slot="differentiated value")) == 1
    assert len(rows(tracer.trace, role="loss", slot="loss")) == 1
    assert len(rows(tracer.trace, role="grad", slot="0.weight", phase="backward")) == 1


class Block(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner, self.last = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.inner, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_a_phase_of_its_own(reentrant: bool, rows: Rows) -> None:
    model = Block(reentrant)
    with Tracer(model) as tracer:
        for _ in range(2):
            model(torch.ones(1, 2, requires_grad=True)).sum().backward()
            tracer.mark_step()
    trace = tracer.trace
    first = [row for row in rows(trace, role="output", module="inner.0") if row[2]["step"] == 0]
    assert [trace.site(event).phase.label for _, _, event in first] == ["forward", "recompute"]
    assert first[0][2]["max"] == first[1][2]["max"]
    assert len(rows(trace, role="grad_output", module="inner.0")) == 2
    assert [step["unobserved"] for step in trace.steps] == [0, 0]


def test_an_early_stop_of_recomputation_leaves_no_open_call(rows: Rows) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Dropout(0.0)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False).sum()

    model = Model()
    with Tracer(model) as tracer:
        model(torch.ones(1, 2)).backward()
        assert all(not stack for stack in tracer._steps.calls._stacks.values())
    assert rows(tracer.trace, role="input", phase="recompute", module="inner.0")


def test_gradients_are_kept_alive_by_nobody() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with Tracer(model):
        output = model(torch.ones(1, 2))
        alive = weakref.ref(output)
        output.sum().backward()
        gradient = weakref.ref(model[0].weight.grad)
        model.zero_grad(set_to_none=True)
        del output
        gc.collect()
        assert alive() is None
        assert gradient() is None


def test_backward_on_only_some_inputs_records_only_their_gradients(rows: Rows) -> None:
    model = nn.Linear(2, 2)
    with Tracer(model) as tracer:
        model(torch.ones(1, 2)).sum().backward(inputs=[model.weight])
    assert [slot for _, slot, _ in rows(tracer.trace, role="grad", phase="backward")] == ["weight"]


def test_gradients_that_no_optimizer_takes_are_seen_at_the_end(rows: Rows) -> None:
    model = nn.Linear(2, 2)
    with Tracer(model, on_nonfinite="ignore") as tracer:
        model(torch.ones(1, 2)).sum().backward()
        model.bias.grad.fill_(float("nan"))
        tracer.mark_step()
    ((_, _, event),) = rows(tracer.trace, role="grad", phase="post_backward", slot="bias")
    assert event["nan"] == 2


@pytest.mark.filterwarnings("ignore::nantrace.errors.NantraceWarning")
def test_another_thread_has_a_call_stack_of_its_own(rows: Rows) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with Tracer(model) as tracer:
        threads = [threading.Thread(target=lambda: model(torch.ones(1, 2)).sum().backward()) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(rows(tracer.trace, role="output", module="0")) == 3
    calls = {int(event["call"]) for _, _, event in rows(tracer.trace, role="output")}
    assert len(calls) == 9


def test_a_nonfinite_gradient_alone_is_seen_where_it_was_born(rows: Rows) -> None:
    class Root(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.clamp(min=0).sqrt()

    model = nn.Sequential(nn.Linear(2, 2), Root())
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    with Tracer(model, on_nonfinite="ignore") as tracer:
        (model(torch.ones(1, 2)).sum() * 0).backward()
    assert rows(tracer.trace, role="grad_output", module="1")[0][2]["nan"] == 0
    assert rows(tracer.trace, role="grad_output", module="0")[0][2]["nan"] == 2
