"""Where an op ran: phase, module, node, the user's line, and the forward code of a backward op."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nantrace.flow.recorder import OpRecorder
from nantrace.lineage import Lineage, OpEvent
from tests.flow.steps import Log, Net, only, recorded, recording_of


def line_of(event: OpEvent) -> str:
    """The name of the function that the event's line lies in."""
    return str(event.where).rpartition(" in ")[2]


def place(event: OpEvent) -> tuple[str | None, str | None]:
    return event.phase, event.module


def test_forward_loss_and_backward_are_told_apart() -> None:
    model = Net()

    def run() -> None:
        out = model(torch.zeros(1, 2))
        (out * 2).sum().backward()

    found = [(e.op, *place(e)) for e in recorded(run, model).events]
    assert found[0] == ("aten.log", "forward", "log")
    assert ("aten.mul", "loss", None) in found
    assert any(op == "aten.div" and where == ("backward", "log") for op, *rest in found if (where := tuple(rest)))


def test_a_backward_op_is_named_with_its_node_and_its_forward_line() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt(x)

    model = nn.Sequential(nn.Identity(), Root())
    x = torch.zeros(2, requires_grad=True)
    event = only(recorded(lambda: model(x).sum().backward(), model), "aten.div")
    assert (event.phase, event.module, event.node, event.forward_op) == ("backward", "1", "SqrtBackward0", "aten.sqrt")
    assert line_of(event) == "forward"
    assert event.node_key is not None and event.node_key[2] == "SqrtBackward0"


def test_an_inplace_op_that_clones_what_it_saves_keeps_its_node() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x * 1
        y.pow_(-1.0)
        return y.sum()

    x = torch.zeros(2, requires_grad=True)
    lineage = recorded(lambda: forward(x).backward())
    first = next(e for e in lineage.events if e.phase == "backward" and e.kind == "inf")
    assert (first.node, first.forward_op, line_of(first)) == ("PowBackward0", "aten.pow_", "forward")


def test_writing_into_a_view_is_named_by_the_writing_op() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x * 1
        y[:1].sqrt_()
        return y.sum()

    x = torch.zeros(2, requires_grad=True)
    event = next(e for e in recorded(lambda: forward(x).backward()).events if e.phase == "backward")
    assert (event.node, event.forward_op) == ("torch::autograd::CopySlices", "aten.sqrt_")


def test_double_backward_is_linked_to_the_first_forward() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt(x)

    model = nn.Sequential(Root())
    x = torch.full((2,), 1e-30, requires_grad=True)

    def run() -> None:
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()

    found = [e for e in recorded(run, model).events if e.kind == "inf" and e.phase == "backward"]
    assert found and {e.module for e in found} == {"0"}


def test_a_line_of_a_custom_backward_wins_over_the_forward_line() -> None:
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x / 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient / torch.zeros(1)

    x = torch.ones(2, requires_grad=True)
    event = only(recorded(lambda: Half.apply(x).sum().backward()), "aten.div")
    assert (event.node, line_of(event), event.own_line) == ("HalfBackward", "backward", True)
    event = only(recorded(lambda: (torch.zeros(2, requires_grad=True) ** 0.5).sum().backward()), "aten.pow")
    assert (event.node, event.own_line) == ("PowBackward0", False)


def test_an_uncalled_forward_of_a_submodule_is_its_own() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Log()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner.forward(x)

    model = Outer()
    assert place(only(recorded(lambda: model(torch.zeros(1)), model), "aten.log")) == ("forward", "inner")
    assert place(only(recorded(lambda: model.inner.forward(torch.zeros(1)), model), "aten.log")) == ("forward", "inner")


def test_an_uncalled_forward_of_a_module_of_the_same_class_is_its_own() -> None:
    class Nested(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.inner = Nested(depth - 1) if depth else None

        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x) if self.inner is None else self.inner.forward(x)

    model = Nested(2)
    assert only(recorded(lambda: model(torch.zeros(1)), model), "aten.log").module == "inner.inner"


def test_a_module_outside_the_model_is_named_by_its_class() -> None:
    loss = Log()
    assert place(only(recorded(lambda: loss(torch.zeros(1)), nn.Linear(1, 1)), "aten.log")) == ("loss", "<Log>")


def test_wrappers_leave_no_level_in_a_name() -> None:
    model = nn.Sequential(Net())
    model._modules["0"] = torch.compile(model[0], backend="eager")
    assert only(recorded(lambda: model(torch.zeros(1, 2)), model), "aten.log").module == "0.log"


def test_the_stack_of_modules_survives_an_exception_that_the_step_catches() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    model = nn.Sequential(nn.Sequential(Raises()), Log())

    def run() -> None:
        with contextlib.suppress(ValueError):
            model[0](torch.zeros(1))
        torch.sqrt(-torch.ones(1))

    assert place(only(recorded(run, model), "aten.sqrt")) == ("loss", None)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_no_backward_of_its_own(reentrant: bool) -> None:
    class Exp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(x)

    model = nn.Sequential(nn.Linear(2, 2, bias=False), Exp())
    nn.init.constant_(model[0].weight, 1000.0)
    x = torch.ones(1, 2, requires_grad=True)

    def run() -> None:
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()

    found = [e for e in recorded(run, model).events if e.op == "aten.exp"]
    assert [place(e) for e in found] == [("forward", "1"), ("recompute", "1")]


def test_a_recomputation_that_stops_early_leaves_no_module_open() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.tail = nn.Linear(2, 2), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.tail(torch.exp(self.lin(x)))

    model = Block()
    x = torch.ones(1, 2, requires_grad=True)

    def run() -> None:
        checkpoint(model, x, use_reentrant=False).sum().backward()
        torch.log(torch.zeros(1))

    assert place(only(recorded(run, model), "aten.log"))[1] is None


def test_phases_around_an_update() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=float("inf"))

    def run() -> None:
        torch.log(torch.zeros(1))
        with torch.no_grad():
            (model.weight * 1e38).mul(10)
        model(torch.ones(1, 2)).sum().backward()
        torch.log(model.weight.grad * 0)
        optimizer.step()
        with torch.no_grad():
            model.weight.div_(0.0)

    found = [(e.op, e.phase) for e in recorded(run, model).events if e.kind != "propagated"]
    assert found[0] == ("aten.log", "loss")
    assert ("aten.log", "post_backward") in found
    assert ("aten.add_", "optimizer") in found


def test_work_on_parameters_after_an_update_is_an_update() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.weight.div_(0.0)

    assert only(recorded(run, model), "aten.div_").phase == "update"


def test_an_update_by_hand_after_backward_is_the_optimizer() -> None:
    model = nn.Linear(2, 1, bias=False)

    def run() -> None:
        model(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            model.weight.div_(0.0)

    assert only(recorded(run, model), "aten.div_").phase == "optimizer"


def test_a_closure_inside_an_optimizer_is_forward_not_update() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.log(model(torch.ones(1, 1))).sum()
        loss.backward()
        return loss

    lineage: Lineage = recorded(lambda: optimizer.step(closure), model)
    assert only(lineage, "aten.log").phase == "loss"


def test_iterations_count_updates_and_what_follows_belongs_to_the_last() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        for _ in range(2):
            torch.log(model(torch.ones(1, 1)) * 0).sum().detach()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            torch.log(torch.zeros(1))

    iterations = [e.iteration for e in recorded(run, model).events if e.op == "aten.log"]
    assert iterations == [1, 1, 2, 2]


def test_ops_and_modules_of_other_threads_are_not_mixed_in() -> None:
    model = nn.Sequential(Net())
    begun, finish = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            begun.set()
            finish.wait(10)
            return torch.log(x)

    thread = threading.Thread(target=lambda: Slow()(torch.zeros(1)))

    def run() -> None:
        thread.start()
        begun.wait(10)
        torch.sqrt(-torch.ones(1))
        finish.set()
        thread.join()

    assert [(e.op, *place(e)) for e in recorded(run, model).events] == [("aten.sqrt", "loss", None)]


def test_outside_the_region_births_are_found_where_they_are_read() -> None:
    model = nn.Sequential(Net(), nn.Linear(2, 1))

    def run() -> Tensor:
        return model(torch.zeros(1, 2))

    lineage = recorded(run, model, within=lambda module, phase: module == "1")
    first = lineage.events[0]
    assert (first.kind, first.category, first.op, *place(first)) == (
        "external",
        "unobserved",
        "aten.log",
        "forward",
        "0.log",
    )
    assert lineage.events[1].op in ("aten.addmm", "aten.mm")
    inside = recorded(run, model, within=lambda module, phase: str(module).startswith("0"))
    assert inside.events[0].kind == "inf"


def test_compiled_code_is_recorded_op_by_op() -> None:
    model = torch.compile(Net(), backend="eager")
    assert recording_of(lambda: model(torch.zeros(1, 2)), model).lineage.events[0].op == "aten.log"


def test_growing_module_outputs_are_noted() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer in model:
        nn.init.constant_(layer.weight, 100.0)
    recorder = OpRecorder(model)
    with recorder:
        model(torch.ones(1, 1))
    assert [(name, size) for _, name, size in recorder.lineage().magnitudes] == [("0", 100.0), ("1", 1e4), ("", 1e4)]
