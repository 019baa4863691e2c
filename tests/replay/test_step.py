"""Steps as values, and TARGETs as users write them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from nantrace.errors import ReplayError
from nantrace.replay.step import Step, load_target

SCRIPT = """
import sys, torch
import nantrace
from neighbour import SIZE

model = torch.nn.Linear(SIZE, 1)
learning_rate = 0.1

def train(model, batch):
    import late_neighbour
    return model(batch).sum() * late_neighbour.FACTOR, list(sys.argv)

def make_step():
    return nantrace.Step(train, model, torch.ones(1, SIZE))

ready = make_step()

def forgot():
    return model

def loop(epochs):
    pass

if __name__ == "__main__":
    raise RuntimeError("the script itself must not run")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("SIZE = 3\n")
    (tmp_path / "late_neighbour.py").write_text("FACTOR = 2.0\n")
    yield tmp_path / "train.py"
    for name in ("neighbour", "late_neighbour", "_nantrace_target_train"):
        sys.modules.pop(name, None)


def test_a_step_runs_with_its_model_and_batch_or_without_arguments():
    model = torch.nn.Linear(1, 1)
    assert Step(lambda m, b: (m, b), model, 3)() == (model, 3)
    assert Step(lambda: "ran", model)() == "ran"


@pytest.mark.parametrize("name", ["make_step", "ready"])
def test_a_target_is_a_step_or_a_function_that_returns_one(script: Path, name: str):
    step = load_target(f"{script}:{name}")
    assert isinstance(step, Step) and step.batch.shape == (1, 3)


def test_a_script_finds_its_neighbours_and_arguments_when_loaded_and_when_run_later(script: Path):
    path, argv, cwd = list(sys.path), list(sys.argv), os.getcwd()
    step = load_target(f"{script}:ready", ["--lr", "1"])
    assert (sys.path, sys.argv, os.getcwd()) == (path, argv, cwd)
    _, seen = step()
    assert seen == [str(script), "--lr", "1"]
    assert (sys.path, sys.argv) == (path, argv)


def test_a_relative_target_finds_its_neighbours(script: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(script.parent)
    assert isinstance(load_target("train.py:ready"), Step)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere.py:step", "There is no file 'nowhere.py'"),
        ("{script}", "names no step; write {script}:NAME, where {script} defines make_step(), forgot(), "),
        ("{script}:", "names no step"),
        ("{script}:stepp", "has no 'stepp'; it defines make_step(), forgot(), ready."),
        ("{script}:learning_rate", "is 0.1 (float); it must be a nantrace.Step or a function"),
        ("{script}:loop", "needs the arguments epochs; it must be a function without arguments"),
        ("{script}:model", "is a Module (Linear), not a nantrace.Step or a function without arguments: make a"),
        ("{script}:forgot", "returned an object of type Linear; it must return nantrace.Step"),
    ],
)
def test_a_bad_target_is_told_in_one_sentence(script: Path, target: str, message: str):
    with pytest.raises(ReplayError) as caught:
        load_target(target.format(script=script))
    assert message.format(script=script) in str(caught.value)
    assert "_nantrace" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("".join(f"def f{n}(): ...\n" for n in range(9)), "defines f0(), f1(), f2(), f3(), f4(), f5() and 3 more."),
        ("x = 1\ny = [2]\ndef f(a): ...\ndef g(*, a): ...\n", "defines no Step and no function without arguments."),
        ("def f(a=1, *b, c=2, **d): ...\nasync def g(): ...\n", "defines f()."),
        ("import nantrace\na = nantrace.Step(print, None)\nb: object = Step(1, 2)\nc = int()\n", "defines a, b."),
        ("_a = Step()\ndef _b(): ...\n", "defines no Step and no function without arguments."),
    ],
)
def test_a_target_without_a_name_is_told_a_handful_of_names_that_could_be_one(tmp_path: Path, source: str, said: str):
    (tmp_path / "train.py").write_text(source)
    with pytest.raises(ReplayError) as caught:
        load_target(str(tmp_path / "train.py"))
    assert str(caught.value).endswith(said)


def test_an_error_in_the_file_itself_is_the_users_own(tmp_path: Path):
    (tmp_path / "broken.py").write_text("def step(:\n")
    with pytest.raises(SyntaxError):
        load_target(f"{tmp_path / 'broken.py'}:step")
    (tmp_path / "raises.py").write_text("raise KeyError('mine')\n")
    path = list(sys.path)
    with pytest.raises(KeyError, match="mine"):
        load_target(f"{tmp_path / 'raises.py'}:step")
    assert sys.path == path and "_nantrace_target_raises" not in sys.modules


@pytest.mark.parametrize(
    ("run", "model", "message"),
    [
        (3, torch.nn.Linear(1, 1), "got 3 (int) as run"),
        (print, None, "got None as model; give the torch.nn.Module"),
        (print, "m", "got 'm' (str) as model"),
    ],
)
def test_a_step_without_function_or_model_is_refused(run: object, model: object, message: str):
    with pytest.raises(ReplayError) as caught:
        Step(run, model)  # type: ignore[arg-type]
    assert message in str(caught.value)
