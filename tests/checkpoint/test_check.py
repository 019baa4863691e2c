"""Checking checkpoints: what is found by which name, what is refused, what is never run."""

from __future__ import annotations

import argparse
import collections
import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from torch import nn

import nantrace
from nantrace.checkpoint.result import CheckedFile, CheckedTensor
from nantrace.cli import main
from nantrace.render.checkpoint import text

NAN, INF = float("nan"), float("inf")


def checked(path: Path) -> CheckedFile:
    return nantrace.check_checkpoint(path).files[0]


def saved(content: Any, path: Path, **options: Any) -> CheckedFile:
    torch.save(content, path, **options)
    return checked(path)


def by_name(file: CheckedFile) -> dict[str, CheckedTensor]:
    return {tensor.name: tensor for tensor in file.tensors}


def training() -> dict[str, Any]:
    """State after two steps, as programs save it: with an averaged copy, a history, and a tied weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
    state = model.state_dict()
    return {
        "model": state,
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000},
        "ema": {"decay": 0.99, "shadow": {name: value.clone() for name, value in state.items()}},
        "history": [torch.ones(2), [torch.ones(3)]],
        "tied": state["2.weight"],
    }


@pytest.mark.parametrize("zipped", [True, False])
def test_a_sound_checkpoint_passes_with_each_memory_once(zipped: bool, tmp_path: Path) -> None:
    file = saved(training(), tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    assert (file.status, file.format) == ("passes", "torch" if zipped else "torch (legacy)")
    assert by_name(file)["model.2.weight"].aliases == ("tied",)
    assert collections.Counter(t.role for t in file.tensors) == {"model": 20, "optimizer": 18}
    assert file.objects == ()


@pytest.mark.parametrize("zipped", [True, False])
def test_nonfinite_state_is_named_with_its_parameter_and_index(zipped: bool, tmp_path: Path) -> None:
    state = training()
    state["optimizer"]["state"][4]["exp_avg"][1, 2] = INF
    state["ema"]["shadow"]["0.bias"].fill_(NAN)
    state["history"][1][0][2] = -INF
    file = saved(state, tmp_path / "a.bin", _use_new_zipfile_serialization=zipped)
    found = {tensor.name: (tensor.role, tensor.parameter, tensor.index) for tensor in file.bad}
    assert found == {
        "optimizer.state.4.exp_avg": ("optimizer", "2.weight", (1, 2)),
        "ema.shadow.0.bias": ("model", None, (0,)),
        "history.1.0": ("model", None, (2,)),
    }
    assert file.status == "fails"


def test_parameters_are_named_only_where_the_file_leaves_no_doubt(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    weights, biases = ([getattr(layer, kind) for layer in model] for kind in ("weight", "bias"))
    optimizer = torch.optim.Adam([{"params": weights}, {"params": biases}])
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    file = saved(state, tmp_path / "a.pt")
    assert {tensor.parameter for tensor in file.tensors} == {None}
    state["optimizer"]["param_groups"][0]["param_names"] = ["0.weight", "1.weight"]
    state["optimizer"]["param_groups"][1]["param_names"] = ["0.bias", "1.bias"]
    assert by_name(saved(state, tmp_path / "b.pt"))["optimizer.state.2.exp_avg"].parameter == "0.bias"


def test_a_tied_weight_counts_as_one_parameter(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    file = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    assert by_name(file)["optimizer.state.3.exp_avg"].parameter == "2.weight"


def test_numbers_of_the_state_fail_and_others_are_told(tmp_path: Path) -> None:
    state = training() | {"best_loss": INF}
    state["scaler"]["scale"] = NAN
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    state["plateau"] = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer).state_dict()
    file = saved(state, tmp_path / "a.pt")
    judged = {number.name: number.bad for number in file.numbers}
    assert judged == {"scaler.scale": True, "best_loss": False, "plateau.best": False, "plateau.mode_worse": False}
    assert file.status == "fails"


def test_every_kind_of_tensor_has_an_answer(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kinds = {
            "f8": torch.tensor([NAN, 1.0]).to(torch.float8_e5m2),
            "bf16": torch.tensor([1.0, NAN], dtype=torch.bfloat16),
            "coo": torch.tensor([[0, INF], [1, 0]]).to_sparse(),
            "csr": torch.tensor([[0, NAN], [1, 0]]).to_sparse_csr(),
            "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "empty": torch.empty(0, 3),
            "complex": torch.tensor([1 + 1j, complex(NAN, 1)]),
            "scalar": torch.tensor(NAN),
            "all": torch.full((2, 2), NAN),
            "bool": torch.ones(2, dtype=torch.bool),
            "parameter": nn.Parameter(torch.ones(2)),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.tensor([1.0, NAN, 1.0])]),
            "meta": torch.empty(3, device="meta"),
        }
        file = saved(kinds, tmp_path / "a.pt")
    counts = {tensor.name: tensor.stats.nonfinite for tensor in file.tensors}
    once = dict.fromkeys(("f8", "bf16", "coo", "csr", "complex", "scalar", "nested"), 1)
    assert counts == {**dict.fromkeys(kinds, 0), **once, "all": 4}
    assert [tensor.name for tensor in file.unread] == ["meta"]


def test_a_file_of_which_something_could_not_be_read_does_not_pass(tmp_path: Path) -> None:
    assert saved({"w": torch.empty(2, device="meta")}, tmp_path / "a.pt").status == "undecided"
    assert saved({"epoch": 3}, tmp_path / "b.pt").status == "undecided"
    assert nantrace.check_checkpoint(tmp_path / "a.pt", tmp_path / "b.pt").newest is None


def test_what_float16_cannot_hold_is_counted_as_the_cast_does(tmp_path: Path) -> None:
    values = torch.cat([torch.logspace(-10, 6, 999), torch.tensor([65504, 65519.9, 65520, 2**-25, 2.0**-24, 0, INF])])
    file = saved({"w": values, "step": torch.tensor(1e6)}, tmp_path / "a.pt")
    found, half = by_name(file)["w"], values.half()
    assert found.float16_overflow == int((half.isinf() & values.isfinite()).sum())
    assert found.float16_zero == int(((half == 0) & (values != 0)).sum())
    assert found.float16_overflow and found.float16_zero and found.huge == 1e6
    assert by_name(file)["step"].float16_overflow == 0  # a counter is never cast


def test_masks_and_unused_observers_are_infinite_on_purpose(tmp_path: Path) -> None:
    mask = torch.full((4, 4), -INF).triu(1)
    observer = {"o.min_val": torch.tensor(INF), "o.max_val": torch.tensor(-INF)}
    assert saved({"mask": mask, **observer}, tmp_path / "a.pt").status == "passes"
    assert saved({"mask": mask + 0.5}, tmp_path / "b.pt").status == "fails"
    assert saved({"o.min_val": torch.tensor(INF), "o.max_val": torch.tensor(1.0)}, tmp_path / "c.pt").status == "fails"


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("function", [os.system, eval, subprocess.Popen])
def test_a_file_that_asks_to_run_something_is_refused_and_nothing_runs(
    function: Any, zipped: bool, tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    given = f"open({str(mark)!r}, 'w')" if function is eval else f"touch {mark}"
    file = saved(
        {"w": torch.ones(2), "e": Calls(function, given)}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped
    )
    assert "asks to call" in str(file.error) and function.__name__ in str(file.error)
    assert not mark.exists()


def test_objects_are_named_and_the_tensors_inside_them_checked(tmp_path: Path) -> None:
    content = {
        "args": argparse.Namespace(lr=0.1, mean=torch.tensor([NAN])),
        "queue": collections.deque([torch.tensor([INF])]),
        "lists": collections.defaultdict(list, {"x": torch.ones(1)}),
        "path": Path("x"),
    }
    file = saved(content, tmp_path / "a.pt")
    assert [tensor.name for tensor in file.bad] == ["args.mean", "queue.0"]
    assert (file.objects[0].name, file.objects[0].kind) == ("args", "argparse.Namespace")
    assert {thing.name for thing in file.objects} == {"args", "path"}


def test_a_whole_module_is_read_by_the_names_of_its_state_dict(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    file = saved(model, tmp_path / "a.pt")
    assert {tensor.name for tensor in file.tensors} == set(model.state_dict())
    assert file.objects[0].kind.endswith("Sequential")


def test_a_container_met_twice_and_one_that_holds_itself_end(tmp_path: Path) -> None:
    inner: dict[str, Any] = {"w": torch.tensor([NAN])}
    inner["self"] = inner
    nested: Any = [torch.ones(1)]
    for _ in range(60):
        nested = [nested, nested]
    file = saved({"a": inner, "b": inner, "n": nested}, tmp_path / "a.pt")
    assert [tensor.name for tensor in file.bad] == ["a.w"]
    assert "b is the same object as a: it was read once." in file.notes


def test_broken_files_are_one_sentence_each(tmp_path: Path) -> None:
    torch.save(training(), tmp_path / "whole.pt")
    torch.save(training(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"w": torch.ones(1)}, tmp_path / "four.pt", pickle_protocol=4)
    whole, old = ((tmp_path / name).read_bytes() for name in ("whole.pt", "old.pt"))
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "cut_old.pt").write_bytes(old[:-10])
    (tmp_path / "short_old.pt").write_bytes(old[:300])
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "text.pt").write_text("this is no checkpoint\n")
    (tmp_path / "folder").mkdir()
    expected = {
        "cut.pt": "cut short or damaged",
        "cut_old.pt": "cut short or damaged",
        "short_old.pt": "cut short or damaged",
        "empty.pt": "is empty",
        "text.pt": "is no checkpoint",
        "four.pt": "of another protocol",
        "folder": "is a folder without .metadata",
        "missing.pt": "No such file or directory",
    }
    for name, said in expected.items():
        file = checked(tmp_path / name)
        assert file.status == "unreadable"
        assert said in str(file.error) and str(tmp_path / name) in str(file.error) and "\n" not in str(file.error)


def test_safetensors_are_read_in_their_dtypes_and_damage_is_told(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    stored = {
        "b.weight": torch.tensor([[1, 2], [NAN, INF]]),
        "h": torch.ones(3, dtype=torch.bfloat16),
        "q": torch.ones(3).to(torch.float8_e4m3fn),
        "i": torch.arange(3),
        "e": torch.empty(0, 2),
        "s": torch.tensor(7e4),
    }
    safetensors.torch.save_file(stored, path, metadata={"format": "pt"})
    file = checked(path)
    assert {t.name: (t.stats.dtype, t.stats.shape) for t in file.tensors} == {
        name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in stored.items()
    }
    assert [(t.name, t.index, t.stats.nan, t.stats.posinf) for t in file.bad] == [("b.weight", (1, 0), 1, 1)]
    assert by_name(file)["s"].float16_overflow == 1
    content = path.read_bytes()
    for cut in (5, 100, len(content) - 3):
        path.write_bytes(content[:cut])
        assert "cut short" in str(checked(path).error)
    path.write_bytes(content[:8] + b"x" + content[9:])
    assert "no JSON" in str(checked(path).error)


def distributed(folder: Path, state: dict[str, Any]) -> Path:
    import torch.distributed.checkpoint as distributed_checkpoint

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed_checkpoint.save(state, checkpoint_id=folder)
    return folder


def test_a_distributed_checkpoint_is_read_by_its_metadata(tmp_path: Path) -> None:
    state = training()
    state["model"]["2.weight"][1, 3] = NAN
    del state["tied"]
    state["scheduler"] = {"lr": NAN, "last_epoch": 1}
    folder = distributed(tmp_path / "d", state)
    file = checked(folder)
    assert (file.status, file.format) == ("fails", "torch distributed")
    assert [(t.name, t.index) for t in file.bad] == [("model.2.weight", (1, 3))]
    assert [number.name for number in file.numbers if number.bad] == ["scheduler.lr"]
    part = next(folder.glob("*.distcp"))
    assert "pass its folder" in str(checked(part).error)
    content = part.read_bytes()
    part.write_bytes(content[:-100])
    assert "cut short" in str(checked(folder).error)
    part.unlink()
    assert "is missing" in str(checked(folder).error)


def test_each_part_of_a_complex_number_in_a_distributed_checkpoint_is_checked(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "scheduler": {"factor": complex(1.0, NAN), "sound": complex(1.0, 2.0)}}
    file = checked(distributed(tmp_path / "d", state))
    assert (file.status, file.error, file.counted) == ("fails", None, 4)
    assert [(number.name, str(number.value)) for number in file.numbers] == [("scheduler.factor", "nan")]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_in_a_distributed_checkpoint_is_checked(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.tensor([1.0, NAN, 1.0])])
    file = checked(distributed(tmp_path / "d", {"w": torch.ones(2), "pair": (nested,)}))
    assert (file.status, file.error) == ("fails", None)
    assert [(tensor.name, tensor.stats.nan) for tensor in file.bad] == [("pair.0", 1)]


def test_metadata_that_asks_to_run_something_or_leads_out_is_refused(tmp_path: Path) -> None:
    folder = distributed(tmp_path / "d", {"w": torch.ones(2)})
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(metadata.replace(b"__0_0.distcp", b"../../../../x"[:12]))
    assert "points outside the folder" in str(checked(folder).error)
    (folder / ".metadata").write_bytes(pickle.dumps(Calls(os.system, f"touch {tmp_path / 'ran'}")))
    assert "asks to call" in str(checked(folder).error)
    assert not (tmp_path / "ran").exists()
    (folder / ".metadata").write_bytes(metadata[:50])
    assert "damaged" in str(checked(folder).error)


def test_the_newest_that_passes_is_named(tmp_path: Path) -> None:
    for age, (name, value) in enumerate([("c", NAN), ("a", 1.0), ("b", 1.0)]):
        torch.save({"w": torch.tensor([value])}, tmp_path / name)
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    newest = nantrace.check_checkpoint(tmp_path / "b", tmp_path / "c", tmp_path / "a").newest
    assert newest is not None and newest.path == str(tmp_path / "a")


def test_the_command_prints_goes_on_and_ends_as_asked(tmp_path: Path) -> None:
    good, bad, broken = (str(tmp_path / name) for name in ("good.pt", "bad.pt", "broken.pt"))
    torch.save({"w": torch.ones(1)}, good)
    torch.save({"w\x1b[31m": torch.tensor([NAN]), "scaler": {"scale": INF}}, bad)
    Path(broken).write_bytes(b"")
    run = CliRunner().invoke
    assert run(main, ["checkpoint", good, "--exit-code"]).exit_code == 0
    assert run(main, ["checkpoint", good, bad]).exit_code == 0
    assert run(main, ["checkpoint", good, bad, "--exit-code"]).exit_code == 1
    assert run(main, ["checkpoint"]).exit_code == 2
    done = run(main, ["checkpoint", broken, good, bad], env={"COLUMNS": "200"})
    assert done.exit_code == 3 and done.output.count("is empty") == 1 and "is empty" in done.stdout
    assert done.stderr.endswith("nantrace: 1 of 3 files could not be read.\n")
    assert f"Newest that passes: {good}" in done.stdout and "\x1b" not in done.stdout and "\\x1b[31m" in done.stdout

    def refuse(constant: str) -> None:
        raise AssertionError(f"not strict JSON: {constant}")

    found = json.loads(run(main, ["checkpoint", bad, "--json"]).stdout, parse_constant=refuse)
    assert found["files"][0]["numbers"][0]["value"] == {"finite": False, "value": "inf"}
    assert found["files"][0]["nonfinite_tensors"] == ["w\x1b[31m"] and found["newest_that_passes"] is None


def test_text_keeps_to_its_width(tmp_path: Path) -> None:
    torch.save({"layer." * 60 + "w": torch.tensor([NAN])}, tmp_path / "a")
    lines = text(nantrace.check_checkpoint(tmp_path / "a"), width=60).splitlines()
    assert max(map(len, lines)) <= 60


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back, and measured in KiB, on Linux")
def test_a_large_file_needs_the_memory_of_one_tensor(tmp_path: Path) -> None:
    path = tmp_path / "big.pt"
    torch.save({f"w{number}": torch.zeros(1 << 20) for number in range(40)}, path)  # 160 MiB in pieces of 4
    code = f"""
import nantrace, torch
def peak():  # not ru_maxrss, which a child takes over from its parent
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
nantrace.check_checkpoint({str(path)!r}[:-6] + "small.pt")
before = peak()
assert nantrace.check_checkpoint({str(path)!r}).files[0].status == "passes"
print(peak() - before)
"""
    torch.save({"w": torch.zeros(10)}, tmp_path / "small.pt")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 48 << 20
