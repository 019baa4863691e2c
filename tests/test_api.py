"""The public functions together: trace to file, load, diagnose, report; modules first, then ops."""

from __future__ import annotations

import inspect
import pydoc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nantrace
from nantrace.capture.tracer import Tracer
from nantrace.events import Role


class Unit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.pow(2).sum(-1).sqrt()


def build() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    x[1] = 0
    return nn.Sequential(nn.Linear(4, 4, bias=False), Unit()), x


def train(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).mean().backward()
    optimizer.step()


def test_a_trace_in_memory_and_one_in_a_file_get_the_same_verdict(tmp_path: Path) -> None:
    verdicts = []
    for path in (None, tmp_path / "step.h5"):
        model, x = build()
        with nantrace.trace(model, path, batch={"x": x}, on_nonfinite="ignore") as tracer:
            train(model, x)
        trace = tracer.trace if path is None else nantrace.load(path)
        verdicts.append(nantrace.diagnose(trace))
    assert verdicts[0] == verdicts[1]
    assert (verdicts[0].status, verdicts[0].stage) == ("fault", "backward")
    assert verdicts[0].origin is not None and verdicts[0].origin.module == "1"


def test_with_ops_the_verdict_names_the_op_its_node_and_the_users_line(tmp_path: Path) -> None:
    model, x = build()
    path = tmp_path / "step.h5"
    with nantrace.trace(model, path, batch={"x": x}, ops=True, on_nonfinite="ignore"):
        train(model, x)
    report = nantrace.report(nantrace.load(path))
    origin = report.verdict.origin
    assert report.verdict.status == "fault" and origin is not None
    assert (origin.op, origin.node, origin.module) == ("aten.div", "SqrtBackward0", "1")
    assert origin.where is not None and origin.where.startswith("test_api.py")
    marked = [line for line in str(report).split("\n") if line.startswith(">")]
    assert len(marked) == 1 and "aten.div" in marked[0]


def test_rows_of_ops_stand_in_order_of_execution_in_the_step_that_made_them() -> None:
    model, x = build()
    healthy = x.clone()
    healthy[1] = 1.0
    with nantrace.trace(model, ops=True, on_nonfinite="ignore") as tracer:
        for batch in (healthy, x, healthy):
            train(model, batch)
            tracer.mark_step()
    trace = tracer.trace
    rows = [(int(event["step"]), int(event["seq"])) for event in trace.events if trace.site(event).role == Role.OP]
    assert rows
    assert {step for step, _ in rows[:1]} == {1}
    last_of_step = [int(trace.events["seq"][trace.events["step"] == step].max()) for step in (0, 1)]
    assert last_of_step[0] < rows[0][1] < last_of_step[1]


def test_ops_can_be_asked_for_in_some_modules_only() -> None:
    for globs, op in (("1", "aten.div"), (["0"], None)):
        model, x = build()
        with nantrace.trace(model, batch={"x": x}, ops=globs, on_nonfinite="ignore") as tracer:
            train(model, x)
        origin = nantrace.diagnose(tracer.trace).origin
        assert origin is not None
        assert origin.op == op or (op is None and origin.where is None)


def test_ops_leave_the_step_as_it_is_and_the_model_untouched() -> None:
    results = []
    for ops in (False, True):
        model, x = build()
        x[1] = 1.0
        with nantrace.trace(model, ops=ops):
            train(model, x)
        results.append(next(model.parameters()).detach().clone())
        assert not model._forward_hooks and not model._forward_pre_hooks
    assert torch.equal(results[0], results[1])


def test_several_optimizers_are_taken_with_ops_as_well() -> None:
    model, x = build()
    x[1] = 1.0
    optimizers = (torch.optim.Adam(model.parameters(), 1e-3),)
    with nantrace.trace(model, optimizer=optimizers, ops=True) as tracer:
        model(x).mean().backward()
        optimizers[0].step()
    assert nantrace.diagnose(tracer.trace).status == "clean"


def test_the_help_of_trace_shows_what_a_user_passes_and_what_comes_back() -> None:
    told = pydoc.render_doc(nantrace.trace, renderer=pydoc.plaintext)
    arguments = told.partition("Args:")[2].partition("Returns:")[0]
    assert [name for name in inspect.signature(nantrace.trace).parameters if name not in arguments] == []
    assert [word for word in ("judge", "departures", "observers", "open_writer") if word in told] == []
    for member in ("trace", "mark_step", "note", "faults"):
        assert f"`tracer.{member}" in told.partition("Returns:")[2] and hasattr(Tracer, member)


def test_bisect_refuses_a_step_with_a_model_and_a_run_without_one() -> None:
    pytest.importorskip("nantrace.replay.bisect")
    model, x = build()
    step = nantrace.Step(train, model, x)
    with pytest.raises(TypeError, match="the Step holds these already"):
        nantrace.bisect(step, model)
    with pytest.raises(TypeError, match=r"pass bisect\(run, model, batch\)"):
        nantrace.bisect(train)


def test_a_trace_that_is_given_none_for_ops_records_none() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with nantrace.trace(model, ops=None, on_nonfinite="ignore") as tracer:
        (model(torch.ones(1, 2)) * float("nan")).sum().backward()
    assert tracer.trace.lineage is None and len(tracer.trace)
