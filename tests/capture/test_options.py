"""Options of a wrong kind or out of range: one sentence each, before anything is placed or written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nantrace
from nantrace.errors import NantraceError, TraceExistsError

from .conftest import hooks_of


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"modules": 5}, TypeError, "modules is 5: pass a glob on names of modules ('encoder.*') or a list of them"),
        ({"modules": [1]}, TypeError, "modules is [1]: pass a glob"),
        ({"modules": []}, ValueError, "modules is [], which selects nothing: pass at least one glob, or leave it out"),
        ({"optimizer": torch.optim.Adam}, TypeError, "optimizer is the class Adam: pass a torch.optim.Optimizer"),
        ({"optimizer": "adam"}, TypeError, "optimizer is 'adam': pass a torch.optim.Optimizer, several in a list"),
        ({"optimizer": ["adam"]}, TypeError, "optimizer is a list with 'adam' in it: pass a torch.optim.Optimizer"),
        ({"optimizer": 3}, TypeError, "optimizer is 3: pass"),
        ({"scaler": 5}, TypeError, "scaler is 5: pass a torch.amp.GradScaler, or None"),
        ({"scaler": torch.amp.GradScaler}, TypeError, "scaler is the class GradScaler: pass"),
        ({"path": 5}, TypeError, "path is 5: pass a file name, or None"),
        ({"path": b"x.h5"}, TypeError, "path is b'x.h5': pass a file name"),
        ({"path": ""}, ValueError, "path is '': pass a file name"),
        ({"capture": 5}, TypeError, "capture is 5: pass a file name, or None"),
        ({"ops": 5}, TypeError, "ops is 5: pass a glob"),
        ({"ops": []}, ValueError, "ops is [], which selects nothing"),
        (
            {"ops": "nosuch*"},
            ValueError,
            "ops has 'nosuch*', which matches none of the model's 3 modules: '', '0', '1'",
        ),
        ({"ops": ["0", "2"]}, ValueError, "ops has '2', which matches none"),
        ({"stats": "x"}, ValueError, "stats is 'x': pass one of 'auto', 'range', 'full', 'none'"),
        ({"stats": 1}, ValueError, "stats is 1: pass one of"),
        ({"on_nonfinite": None}, ValueError, "on_nonfinite is None: pass one of"),
        ({"keep_steps": 0}, ValueError, "keep_steps is 0: pass a positive integer"),
        ({"keep_steps": -1}, ValueError, "keep_steps is -1: pass a positive integer"),
        ({"keep_steps": 1.5}, ValueError, "keep_steps is 1.5: pass a positive integer"),
        ({"keep_steps": True}, ValueError, "keep_steps is True: pass a positive integer"),
        ({"depth": 1.5}, ValueError, "depth is 1.5: pass 0 for the model alone, a larger integer, or None"),
        (
            {"batch": open},
            TypeError,
            "batch is a builtin_function_or_method, which is no batch: pass what the step",
        ),
        ({"batch": 32}, TypeError, "batch is 32, which is no batch: pass"),
        ({"batch": (x for x in ())}, TypeError, "batch is a generator, which is no batch: pass"),
        ({"batch": nn.Linear(2, 2)}, TypeError, "batch is a Linear, which is no batch: pass"),
        ({"batch": torch.utils.data.DataLoader([1])}, TypeError, "batch is a DataLoader, which is no batch: pass"),
        ({"stats": "none", "ops": True}, ValueError, "stats is 'none', which reads no tensor, with ops, which do:"),
        ({"overwrite": "no"}, TypeError, "overwrite is 'no': pass True"),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_what_to_pass(
    options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error) as caught:
        nantrace.trace(_model(), **options)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_the_model_is_looked_at_first() -> None:
    with pytest.raises(TypeError, match=r"trace got a dict as model: pass a torch\.nn\.Module"):
        nantrace.trace({}, capture="step.capture", ops=True)  # type: ignore[arg-type]


def test_globs_and_optimizers_may_come_out_of_any_iterable() -> None:
    model = _model()
    optimizers = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)  # type: ignore[union-attr]
    with nantrace.trace(model, optimizer=optimizers, modules={"0"}, ops=("1", "<Loss>")) as tracer:  # type: ignore[arg-type]
        model(torch.ones(1, 2)).sum().backward()
    assert {s.module for s in tracer.trace.sites if s.role.label == "output"} == {"0"}


@pytest.mark.parametrize(("path", "shown"), [(None, "None"), (5, "5"), (b"x", "b'x'"), ([1] * 99, "a list")])
def test_what_is_no_path_cannot_be_loaded(path: Any, shown: str) -> None:
    with pytest.raises(TypeError) as caught:
        nantrace.load(path)
    assert str(caught.value) == f"load got {shown}: pass the path of a trace that nantrace.trace wrote"


def test_there_is_no_trace_before_the_block_and_an_open_one_within_it() -> None:
    model = _model()
    tracer = nantrace.trace(model)
    with pytest.raises(RuntimeError, match=r"tracer\.trace was asked for before the block: record within `with"):
        tracer.trace  # noqa: B018
    with tracer:
        model(torch.ones(1, 2))
        tracer.mark_step()
        assert not tracer.trace.complete
        assert nantrace.diagnose(tracer.trace).status == "inconclusive"
    assert tracer.trace.complete
    assert nantrace.diagnose(tracer.trace).status == "clean"


def _entered(**options: Any) -> None:
    model = _model()
    try:
        with nantrace.trace(model, **options):
            raise AssertionError("the block was entered")
    finally:
        assert hooks_of(model) == 0


def _captured(path: Path, **options: Any) -> None:
    model, x = _model(), torch.full((1, 2), float("inf"))
    with nantrace.trace(model, batch=x, capture=path, on_nonfinite="ignore", **options):
        model(x).sum().backward()


def test_a_capture_that_is_taken_is_refused_and_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "step.capture"
    _captured(path)
    before = path.read_bytes()
    with pytest.raises(TraceExistsError, match=r"step\.capture exists already: choose another path, or pass overwrite"):
        _entered(capture=path)
    assert path.read_bytes() == before
    path.touch()
    _captured(path, overwrite=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step.capture"]


@pytest.mark.parametrize(("option", "kind"), [("path", "a trace"), ("capture", "a captured step")])
@pytest.mark.parametrize("content", [b"thesis", b"PK\x03\x04 some archive", b"\x89HDF\r\n\x1a\n and more"])
def test_overwrite_replaces_nothing_but_its_like(option: str, kind: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(content)
    with pytest.raises(TraceExistsError, match=f"mine is not {kind}, and overwrite=True replaces nothing else"):
        _entered(**{option: tmp_path / "mine"}, overwrite=True)
    assert (tmp_path / "mine").read_bytes() == content


def test_overwrite_does_not_mistake_a_model_for_a_capture_nor_a_capture_for_a_trace(tmp_path: Path) -> None:
    torch.save(_model().state_dict(), tmp_path / "model.pt")
    _captured(tmp_path / "step.capture")
    with pytest.raises(TraceExistsError, match="is not a captured step"):
        _entered(capture=tmp_path / "model.pt", overwrite=True)
    with pytest.raises(TraceExistsError, match="is not a trace"):
        _entered(path=tmp_path / "step.capture", overwrite=True)


def test_overwrite_replaces_a_trace_and_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "step.h5"
    path.touch()
    for _ in range(2):
        with nantrace.trace(_model(), path, overwrite=True):
            pass
    assert nantrace.load(path).complete


def test_a_capture_that_cannot_be_written_is_refused_before_the_step(tmp_path: Path) -> None:
    with pytest.raises(NantraceError, match=r"there is no folder .*none: create it or choose another path"):
        _entered(capture=tmp_path / "none" / "step.capture", path=tmp_path / "step.h5")
    (tmp_path / "file").touch()
    with pytest.raises(NantraceError, match="cannot be created"):
        _entered(capture=tmp_path / "file" / "step.capture")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_file_is_written_by_one_block_at_a_time(tmp_path: Path) -> None:
    path, capture = tmp_path / "step.h5", tmp_path / "step.capture"
    with nantrace.trace(_model(), path, capture=capture):
        for options in ({"path": path}, {"path": tmp_path / "x" / ".." / "step.h5"}, {"capture": capture}):
            with pytest.raises(NantraceError, match="is being written by another tracer whose block goes on"):
                _entered(**options, overwrite=True)
    assert nantrace.load(path).complete
    with nantrace.trace(_model(), path, overwrite=True):
        pass


def test_one_file_cannot_be_the_trace_and_the_capture(tmp_path: Path) -> None:
    with pytest.raises(NantraceError, match="was given for both the trace and the captured step: choose two paths"):
        _entered(path=tmp_path / "step", capture=tmp_path / "step")
    assert list(tmp_path.iterdir()) == []
