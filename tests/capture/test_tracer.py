"""The life of a tracer: what it refuses, what it raises, what it survives, what it leaves."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nantrace.capture.buffer as buffer_module
from nantrace.capture.buffer import Buffer
from nantrace.capture.observers import Judgement
from nantrace.capture.tracer import Tracer
from nantrace.errors import NantraceError, NantraceWarning, NonfiniteError, TraceExistsError
from nantrace.events import Phase, Role, Site, Trace
from nantrace.lineage import Lineage

from .conftest import Rows, hooks_of

NAN = torch.full((1, 2), float("nan"))


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"depth": -1}, ValueError, "depth is -1: pass 0 for the model alone"),
        ({"on_nonfinite": "stop"}, ValueError, "on_nonfinite is 'stop': pass one of 'warn', 'raise', 'ignore'"),
        ({"stats": "all"}, ValueError, "stats is 'all': pass one of 'auto', 'range', 'full'"),
        (
            {"modules": "2.*"},
            ValueError,
            r"modules has '2\.\*', which matches none of the model's 3 modules: '', '0', '1'",
        ),
        ({"keep_steps": 0}, ValueError, "keep_steps is 0: pass a positive integer"),
    ],
)
def test_options_out_of_range_are_refused_before_the_step(
    options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        Tracer(_model(), **options)


def test_something_that_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"trace got a function as model: pass a torch\.nn\.Module"):
        Tracer(_model)  # type: ignore[arg-type]


def test_a_tracer_is_for_one_block() -> None:
    tracer = Tracer(_model())
    with tracer, pytest.raises(RuntimeError, match="was entered before"):
        tracer.__enter__()
    with pytest.raises(RuntimeError, match="was entered before"):
        tracer.__enter__()


def test_mark_step_belongs_into_the_block() -> None:
    with pytest.raises(RuntimeError, match="mark_step was called outside"):
        Tracer(_model()).mark_step()


def test_traces_nest_on_one_model(rows: Rows) -> None:
    model = _model()
    with Tracer(model) as outer:
        with Tracer(model, depth=0) as inner:
            model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
    assert len(rows(inner.trace, role="grad_output")) == 1
    assert len(rows(outer.trace, role="grad_output", module="0")) == 2
    assert hooks_of(model) == 0


def _poisoned(tracer: Tracer, steps: int = 1) -> None:
    with tracer:
        for _ in range(steps):
            tracer._model(NAN)
            tracer.mark_step()


def test_a_fault_warns_once_a_trace_at_the_users_line() -> None:
    tracer = Tracer(_model(), judge=lambda trace: ("loss is NaN", True))
    with pytest.warns(NantraceWarning, match="^loss is NaN$") as caught:
        _poisoned(tracer, steps=3)
    assert [warning.filename for warning in caught] == [__file__]
    assert tracer.faults == 3


def test_the_same_warning_comes_again_in_the_next_trace() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            _poisoned(Tracer(_model()))
    assert len(caught) == 2


def test_what_is_no_fault_is_not_warned_of() -> None:
    _poisoned(Tracer(_model(), judge=lambda trace: ("only a mask", False)))


def test_a_fault_raises_at_the_end_of_the_step_and_not_in_the_hook() -> None:
    model = _model()
    reached = []
    with (
        pytest.raises(NonfiniteError, match="born here"),
        Tracer(model, on_nonfinite="raise", judge=lambda trace: ("born here", True)) as tracer,
    ):
        model(NAN)
        reached.append("after forward")
        tracer.mark_step()
        reached.append("never")
    assert reached == ["after forward"]
    assert hooks_of(model) == 0


def test_a_fault_raises_at_exit_but_never_in_place_of_the_users_exception() -> None:
    with pytest.raises(NonfiniteError), Tracer(_model(), on_nonfinite="raise") as tracer:
        tracer._model(NAN)
    with (
        pytest.warns(NantraceWarning, match="went nonfinite"),
        pytest.raises(KeyError, match="mine"),
        Tracer(_model(), on_nonfinite="raise") as tracer,
    ):
        tracer._model(NAN)
        raise KeyError("mine")


def test_the_users_exception_passes_where_warnings_are_errors() -> None:
    with pytest.raises(KeyError, match="mine"), Tracer(_model()) as tracer:  # pytest makes warnings errors
        tracer._model(NAN)
        raise KeyError("mine")


def test_a_warning_that_is_an_error_waits_for_the_end_of_the_block() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = 0
    with pytest.raises(NantraceWarning, match="went nonfinite"), Tracer(model):
        for _ in range(2):
            model(NAN).sum().backward()
            optimizer.step()
            done += 1
    assert done == 2


def test_a_failure_of_the_recorder_is_reported_once_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    original = Buffer.observe

    def broken(self: Buffer, module: Any, phase: Any, role: Role, *args: Any, **kwargs: Any) -> Any:
        if role is Role.OUTPUT:
            raise ZeroDivisionError("inside the recorder")
        return original(self, module, phase, role, *args, **kwargs)

    monkeypatch.setattr(Buffer, "observe", broken)
    expected = pytest.warns(NantraceWarning, match="stopped recording after ZeroDivisionError: inside")
    with expected as caught, Tracer(model):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
    assert len(caught) == 1
    assert model[0].weight.grad is not None
    assert hooks_of(model) == 0


def test_a_judge_that_fails_is_a_failure_of_the_recorder() -> None:
    def judge(trace: Trace) -> tuple[str | None, bool]:
        raise LookupError("no opinion")

    with pytest.warns(NantraceWarning, match="LookupError: no opinion"):
        _poisoned(Tracer(_model(), judge=judge), steps=2)


class FullDisk:
    """A writer whose disk is full from the second step on."""

    def __init__(self, path: str, **_: Any) -> None:
        self.steps = 0
        self.closed = False

    def add_sites(self, sites: Any) -> None: ...
    def append(self, rows: Any) -> None:
        self.steps += 1
        if self.steps > 1:
            raise OSError(28, "No space left on device")

    def add_step(self, step: Any, whole: bool = True) -> None: ...
    def set_lineage(self, lineage: Any) -> None: ...
    def set_raised(self, raised: Any) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None:
        self.closed = True


def test_a_full_disk_ends_the_recording_not_the_training() -> None:
    model = _model()
    writers: list[FullDisk] = []

    def opened(path: str, **options: Any) -> FullDisk:
        writers.append(FullDisk(path, **options))
        return writers[0]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(NantraceWarning, match="No space left on device"), Tracer(model, path="x.h5", open_writer=opened):
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert writers[0].steps == 2
    assert writers[0].closed


def test_a_file_holds_what_memory_holds(tmp_path: Path) -> None:
    def run(path: Path | None) -> Trace:
        torch.manual_seed(0)
        model = _model()
        optimizer = torch.optim.Adam(model.parameters())
        with Tracer(model, path=path) as tracer:
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        return tracer.trace

    filed, held = run(tmp_path / "step.h5"), run(None)
    assert filed.events.tobytes() == held.events.tobytes()
    assert filed.sites == held.sites
    assert filed.modules == held.modules
    assert [step["loss"] for step in filed.steps] == [step["loss"] for step in held.steps]
    assert filed.meta["executed"] == "eager"


def test_a_path_that_is_taken_is_refused_before_a_hook_is_placed(tmp_path: Path) -> None:
    (tmp_path / "step.h5").write_bytes(b"mine")
    model = _model()
    with pytest.raises(TraceExistsError), Tracer(model, path=tmp_path / "step.h5"):
        pass
    assert hooks_of(model) == 0
    assert (tmp_path / "step.h5").read_bytes() == b"mine"


def test_a_folder_that_is_not_there_is_an_error_of_nantrace(tmp_path: Path) -> None:
    with pytest.raises((NantraceError, FileNotFoundError)), Tracer(_model(), path=tmp_path / "none" / "step.h5"):
        pass


def _run_until_bad(tracer: Tracer, bad: int, steps: int) -> None:
    with tracer:
        for step in range(steps):
            tracer._model(NAN if step == bad else torch.ones(1, 2))
            tracer.mark_step()


@pytest.mark.parametrize("filed", [True, False])
def test_a_flight_recorder_keeps_the_steps_around_a_fault_and_the_last(filed: bool, tmp_path: Path) -> None:
    path = tmp_path / "step.h5" if filed else None
    tracer = Tracer(_model(), path=path, keep_steps=2, on_nonfinite="ignore")
    _run_until_bad(tracer, bad=4, steps=9)
    trace = tracer.trace
    assert set(trace.events["step"]) == {3, 4, 7, 8}
    assert [step["step"] for step in trace.steps] == list(range(9))
    assert [step["events"] > 0 for step in trace.steps] == [n in (3, 4, 7, 8) for n in range(9)]
    assert (trace.events["seq"] == np.arange(1, len(trace) + 1)).all()
    for step in trace.steps:
        if step["events"]:
            assert trace.events["step"][step["first_seq"] - 1] == step["step"]


def test_a_flight_recorder_holds_no_more_than_its_steps() -> None:
    with Tracer(_model(), keep_steps=2) as tracer:
        for _ in range(20):
            tracer._model(torch.ones(1, 2))
            tracer.mark_step()
        assert set(tracer.trace.events["step"]) == {18, 19}
        assert len(tracer.trace.steps) == 20


class Notebook:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.path: str | None = None

    def block_begins(self) -> None:
        self.told.append("block")

    def step_begins(self, tracer: Tracer) -> None:
        self.told.append("begins")

    def step_reads(self, batch: Any, handed_over: bool) -> None:
        self.told.append(("reads", batch, handed_over))

    def step_closes(self) -> None:
        self.told.append("closes")

    def step_ended(self, trace: Trace, verdict: Judgement | None) -> None:
        self.told.append((set(trace.events["step"]), verdict))


def test_observers_hear_of_every_step() -> None:
    notebook = Notebook()
    _run_until_bad(Tracer(_model(), observers=[notebook], judge=lambda trace: ("x", False)), bad=1, steps=2)
    assert notebook.told == [
        *("block", "begins", ("reads", None, False), ({0}, None)),
        *("begins", ("reads", None, False), ({1}, Judgement("x", False))),
    ]


class Ops:
    """An op recorder that saw one op."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def begin(self, observe: Any) -> None:
        self.events.append("in")
        site = Site("", Phase.FORWARD, Role.OP, "out", "float32", (1,), op="aten.add")
        observe(site, (1, 0, 1, 0, 0, *[float("nan")] * 3, 0, 0, 0, 0, 16))

    def end(self, *_: Any) -> None:
        self.events.append("out")

    def lineage(self) -> Lineage:
        self.events.append("lineage")
        return Lineage(ops=7)


def test_an_op_recorder_runs_within_and_its_rows_join_the_step(rows: Rows) -> None:
    ops = Ops()
    judged: list[int] = []

    def judge(trace: Trace) -> tuple[str | None, bool]:
        assert trace.lineage is not None
        judged.append(trace.lineage.ops)
        return None, False

    with Tracer(_model(), ops=ops, judge=judge) as tracer:
        tracer._model(torch.ones(1, 2))
    assert ops.events == ["in", "out", "lineage"]
    assert judged == [7]
    ((_, _, event),) = rows(tracer.trace, role="op")
    assert event["nan"] == 1


class FakeTable:
    """A device table that hands out slots, and rows only when it is drained."""

    drains = 0
    failure: str | None = None

    def __init__(self, device: Any) -> None:
        self.rows: list[tuple[Any, ...]] = []

    def add(self, tensor: torch.Tensor, full: bool) -> int:
        assert not torch.is_grad_enabled()
        self.rows.append(buffer_module.host.row(tensor, full))
        return len(self.rows) - 1

    def add_all(self, tensors: list[torch.Tensor], full: bool) -> list[int]:
        return [self.add(tensor, full) for tensor in tensors]

    def drain(self) -> list[tuple[Any, ...]]:
        FakeTable.drains += 1
        rows, self.rows = self.rows, []
        return rows


def test_on_a_device_nothing_is_fetched_before_the_step_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Trace:
        torch.manual_seed(0)
        model = _model()
        optimizer = torch.optim.Adam(model.parameters())
        with Tracer(model) as tracer:
            for step in range(3):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                drains.append((step, FakeTable.drains))
        return tracer.trace

    drains: list[tuple[int, int]] = []
    direct = run()
    table = FakeTable(None)
    drains.clear()
    monkeypatch.setattr(
        Buffer,
        "observe",
        _observe_as_on_a_device(table),
    )
    monkeypatch.setattr(Buffer, "measure", lambda self, tensor: _pending(self, table, tensor))
    deferred = run()
    assert drains == [(0, 0), (1, 1), (2, 2)]
    assert deferred.events.tobytes() == direct.events.tobytes()


def test_a_kernel_that_fails_is_told_once_and_noted_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buffer, "failures", {torch.device("cuda:1"): "CompilationError: no such arch"})
    model = _model()
    said = r"kernel failed on cuda:1 \(CompilationError: no such arch\)"
    with pytest.warns(NantraceWarning, match=said) as told, Tracer(model) as tracer:
        for _ in range(2):
            model(torch.ones(1, 2))
            tracer.mark_step()
    assert len(told) == 1
    notes = [step["notes"] for step in tracer.trace.steps]
    assert all("the fused kernel failed on cuda:1: CompilationError: no such arch" in note for note in notes)


def test_state_on_a_device_is_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    table, together = FakeTable(None), []
    original = FakeTable.add_all
    monkeypatch.setattr(
        FakeTable, "add_all", lambda self, some, full: together.append(len(some)) or original(self, some, full)
    )
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Tracer(model, optimizer=optimizer) as tracer:
        tracer._buffer._tables[torch.device("cpu")] = table
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
    assert together == [4, 4, 2, 4]  # gradients before the update, parameters, buffers and momenta after it
    parameters = [e for e in tracer.trace.events if tracer.trace.site(e).role is Role.PARAM]
    after = [(float(e["min"]), float(e["max"])) for e in parameters[4:]]
    assert after == [(p.min().item(), p.max().item()) for p in model.parameters()]


def _pending(buffer: Buffer, table: FakeTable, tensor: torch.Tensor) -> Any:
    buffer._tables.setdefault(torch.device("meta"), table)
    with torch.no_grad():
        return buffer_module.Pending(table, table.add(tensor, False))


def _observe_as_on_a_device(table: FakeTable) -> Any:
    original = Buffer.observe

    def observe(self: Buffer, *args: Any, **kwargs: Any) -> Any:
        module, phase, role, slot, tensor, call, stats = (*args, *(0, None)[len(args) - 5 :])[:7]
        return original(self, module, phase, role, slot, tensor, call, stats or self.measure(tensor))

    return observe


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_records_and_writes_nothing(tmp_path: Path) -> None:
    model = _model()
    with Tracer(model, path=tmp_path / "step.h5") as tracer:
        model(torch.ones(1, 2))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                model(torch.ones(1, 2))
                tracer.mark_step()
                code = 0 if not tracer._steps.active and tracer._steps.step is not None else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    outputs = [tracer.trace.site(e).role for e in tracer.trace.events].count(Role.OUTPUT)
    assert outputs == 3


def test_each_rank_of_a_distributed_run_has_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with Tracer(_model(), path=tmp_path / "step.h5") as tracer:
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["step.r00003.h5"]
    assert (tracer.trace.meta["rank"], tracer.trace.meta["world"]) == (3, 4)
