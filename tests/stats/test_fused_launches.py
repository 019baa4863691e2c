"""Launches without Triton's share: what they pass beside the real Triton, when they give way, what rows they write."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is not installed")

from hypothesis import given, settings

from nantrace.events import Columns
from nantrace.stats import fused_launch, fused_table, launches
from nantrace.stats.fused_table import FusedTable
from nantrace.stats.launches import Launches
from nantrace.stats.reference import reference_row
from tests.stats.interpreted import Drivers, Interpreted, kernels
from tests.stats.kinds import READABLE, READABLE_ON_HOST, UNREADABLE
from tests.stats.tensors import LAYOUTS, fill, same
from tests.stats.test_properties import tensors

ROOT = Path(__file__).parents[2]
STREAM = 0x5EED  # of launch_scenarios.py


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What happened in a program whose Triton compiles; launch_scenarios.py says what it does."""
    home = tmp_path_factory.mktemp("home")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "HOME": str(home), "TRITON_CACHE_DIR": str(home / "cache")}
    command = [sys.executable, "-m", "tests.stats.launch_scenarios"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_direct_launch_passes_what_triton_passes(scenarios: dict[str, Any]) -> None:
    beside = scenarios["beside triton"]
    assert len(beside) == 10
    for name, (direct, by_triton) in beside.items():
        assert [call.pop("direct") for call in direct] == [True], name
        assert [call.pop("direct") for call in by_triton] == [False], name
        assert direct == by_triton, name


def test_launches_of_different_kinds_use_different_kernels(scenarios: dict[str, Any]) -> None:
    functions = {name: direct[0]["function"] for name, (direct, _) in scenarios["beside triton"].items()}
    assert functions.pop("float8 of 2**33 elements") == functions["float8_e4m3fn"]  # numbers are never another kind
    assert len(set(functions.values())) == len(functions) == 9


def test_a_number_beyond_32_bits_is_passed_whole(scenarios: dict[str, Any]) -> None:
    ((call,), _) = scenarios["beside triton"]["float8 of 2**33 elements"]
    assert call["arguments"][3] == 2**33 and call["types"][3] == "i64"


def test_a_kernel_of_one_device_is_not_launched_on_another(scenarios: dict[str, Any]) -> None:
    assert scenarios["elsewhere"] is False


def test_whatever_watches_launches_has_them_go_through_triton(scenarios: dict[str, Any]) -> None:
    direct = scenarios["watched"]["direct"]
    assert direct.pop("nothing") == [True] and scenarios["watched"]["afterwards"] == [True]
    assert len(direct) == 9 and all(calls == [False] for calls in direct.values()), direct
    hooks = ["launch_enter_hook"] * 2 + ["launch_exit_hook"] * 2 + ["pre_run"]
    assert scenarios["watched"]["seen"] == hooks


def test_a_direct_launch_that_fails_gives_way_to_triton_and_that_to_several_passes(scenarios: dict[str, Any]) -> None:
    failing = scenarios["failing"]
    assert failing["gave way"] == failing["never again"] == [False] and failing["after"] == []
    assert failing["failures"] == [None, "RuntimeError: out of luck"] and failing["last"] == [0, 63]


def test_the_launcher_in_c_takes_what_a_direct_launch_passes(tmp_path: Path) -> None:
    """Addresses as integers, constants that it skips, no hooks."""
    nvidia = Path(sys.modules["triton"].__file__ or "").parent / "backends" / "nvidia"
    compiler, headers = shutil.which("cc"), Path(sysconfig.get_path("include")) / "Python.h"
    if not (compiler and headers.exists() and (nvidia / "include" / "cuda.h").exists()):
        pytest.skip("building Triton's launcher takes a C compiler and the headers of Python and CUDA")
    source, library = ROOT / "tests" / "stats" / "no_device.c", tmp_path / "libcuda.so.1"
    build = [compiler, "-shared", "-fPIC", "-w", f"-I{nvidia / 'include'}", str(source), "-o", str(library)]
    subprocess.run([*build, "-Wl,-soname,libcuda.so.1"], check=True)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "HOME": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_LIBCUDA_PATH": str(tmp_path)}
    command = [sys.executable, "-m", "tests.stats.launcher_scenario"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    addresses, *lines = done.stdout.splitlines()
    where = f"launch 4 1 1 256 {STREAM - 1} 7 {addresses} 7"  # grid, threads, stream, function, pointers, slot
    assert lines == [f"{where} 5000 1 1 1 0 0 0 0"] * 4 + [f"{where} {2**33} 1 1 1 0 0 0 0"]


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Interpreted, Interpreted]]:
    """Kernels that look compiled; launches of a kind are direct from the third one on."""
    found = kernels()
    monkeypatch.setattr(launches, "driver", Drivers())
    for name, kernel in zip(("_ROW", "_BATCH"), found, strict=True):
        monkeypatch.setattr(fused_launch, name, Launches(kernel, num_warps=8))
    yield found


def rows_of(put: list[torch.Tensor]) -> list[Any]:
    """The rows of tensors, each added three times."""
    table = FusedTable("cpu")
    for _ in range(2):
        for tensor in put:
            table.add(tensor, full=True)
    slots = [table.add(tensor, full=True) for tensor in put]
    rows = table.drain()
    assert table.failure is None
    return [rows[slot] for slot in slots]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float8_e5m2], ids=str)
def test_a_direct_launch_says_what_the_reference_says(
    dtype: torch.dtype, warm: tuple[Interpreted, Interpreted]
) -> None:
    put = [LAYOUTS[layout](fill(dtype, "all kinds", 240)) for layout in LAYOUTS]
    rows = rows_of(put)
    through_triton = warm[0].launches
    for layout, row, tensor in zip(LAYOUTS, rows, put, strict=True):
        assert same(row, reference_row(tensor)), layout
    table = FusedTable("cpu")
    for tensor in put:
        table.add(tensor, full=True)
    assert warm[0].launches == through_triton > 0  # all that came then was direct


@settings(deadline=None, max_examples=25)
@given(tensors())
def test_any_float_tensor_has_the_row_of_the_reference_from_a_direct_launch(tensor: torch.Tensor) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "driver", Drivers())
        patch.setattr(fused_launch, "_ROW", Launches(kernels()[0], num_warps=8))
        assert same(rows_of([tensor])[0], reference_row(tensor))


def test_small_tensors_share_a_direct_launch(warm: tuple[Interpreted, Interpreted]) -> None:
    put = [fill(torch.float16, "all kinds", 240)[i : i + 1 + 37 * (i % 5)] for i in range(6)]
    table, through_triton = FusedTable("cpu"), []
    for _ in range(3):
        slots = table.add_all(put, full=True)
        through_triton.append(warm[1].launches)
    rows = table.drain()
    assert through_triton == [1, 2, 2] and warm[0].launches == 0
    for slot, tensor in zip(slots, put, strict=True):
        assert same(rows[slot], reference_row(tensor))


class Silent:
    """A kernel that does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **options: None


class Seen(TorchDispatchMode):
    """Writes down the operations that a mode of the user's sees."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_mode_of_the_user_sees_a_launch(warm: tuple[Interpreted, Interpreted]) -> None:
    plain = torch.tensor([1.0, -2.0])
    rows_of([plain])
    for compiled in warm[0].compiled.values():
        compiled.interpreted = Silent()  # the interpreter has operations of its own
    before = warm[0].launches
    with Seen() as seen:
        table = FusedTable("cpu")
        table.add(plain, full=True)
        table.add_all([plain, plain.new_empty(0)], full=True)
        table.drain()
    assert seen.ops == ["aten.new_empty.default"] and warm[0].launches == before


def test_a_torch_function_mode_does_not_see_a_launch(warm: tuple[Interpreted, Interpreted]) -> None:
    asked = []

    class Asked(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return func(*args, **(kwargs or {}))

    plain, table = torch.tensor([1.0, -2.0]), FusedTable("cpu")
    rows_of([plain])
    with Asked():
        table.add(plain, full=True)
        table.add_all([plain], full=True)
    assert asked == [] and all(same(row, reference_row(plain)) for row in table.drain())


def test_what_hides_its_values_takes_no_direct_launch(warm: tuple[Interpreted, Interpreted]) -> None:
    rows_of([torch.tensor([1.0, -2.0]), torch.complex(torch.ones(2), torch.ones(2))])  # both are known
    table, kinds = FusedTable("cpu"), {**READABLE, **UNREADABLE}
    made = {kind: each[0]() for kind, each in kinds.items() if kind not in READABLE_ON_HOST}
    plain = {"parameter", "not a leaf", "inference", "freed", "huge by expansion"}
    assert {kind for kind, tensor in made.items() if table._is_plain(tensor)} == plain
    wrapped: list[bool] = []
    torch.vmap(lambda x: (wrapped.append(table._is_plain(x)), x)[1])(torch.ones(2, 3))
    torch.func.grad(lambda x: (wrapped.append(table._is_plain(x)), x.sum())[1])(torch.ones(3))
    assert wrapped == [False, False]
    slots = {kind: table.add(tensor, full=True) for kind, tensor in made.items()}
    rows = table.drain()
    for kind, slot in slots.items():
        if kind in UNREADABLE:
            assert (rows[slot][0], Columns(rows[slot][12])) == (UNREADABLE[kind][1], Columns(0)), kind
        else:
            assert same(rows[slot], reference_row(READABLE[kind][1])), kind


def test_a_storage_that_was_cut_is_never_read(warm: tuple[Interpreted, Interpreted]) -> None:
    whole, table = torch.ones(64), FusedTable("cpu")
    rows_of([whole])
    part = whole[48:]
    whole.untyped_storage().resize_(4 * 63)
    slots = [table.add(part, full=True), *table.add_all([part], full=True), table.add(part[:15], full=True)]
    assert [(row[0], row[12]) for row in table.drain()][: slots[2]] == [(16, 0), (16, 0)]


def test_what_is_recorded_does_not_stay_alive_until_the_drain(warm: tuple[Interpreted, Interpreted]) -> None:
    table = FusedTable("cpu")
    for tensor in (torch.ones(8, 4), torch.ones(8, 4).t(), torch.ones(8, 4)[:, :3]):
        storage = tensor.untyped_storage()
        before = torch._C._storage_Use_Count(storage._cdata)
        for _ in range(3):
            table.add(tensor, full=True)
        table.add_all([tensor], full=True)
        assert torch._C._storage_Use_Count(storage._cdata) == before


def test_contiguous_tensors_of_many_dimensions_take_the_kernel() -> None:
    table, tensor = FusedTable("cpu"), fill(torch.float32, "all kinds", 240).view(2, 3, 2, 5, 2, 2)
    table.add(tensor, full=True)
    (row,) = table.drain()
    assert same(row, reference_row(tensor)) and Columns.KERNEL in Columns(row[12])


@pytest.fixture
def on_cuda(warm: tuple[Interpreted, Interpreted], monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A table that believes that its device, of index -1, is a CUDA device, and what that device says."""
    device = SimpleNamespace(current=-1, capturing=False, entered=[], table=FusedTable("cpu"), plain=torch.ones(8))
    rows_of([device.plain])
    device.table._cuda = True
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda which: device.entered.append(which) or nullcontext())
    return device


def test_a_launch_enters_its_device_if_another_is_the_current_one(on_cuda: SimpleNamespace) -> None:
    on_cuda.table.add(on_cuda.plain, full=True)
    assert on_cuda.entered == []
    on_cuda.current = 3
    on_cuda.table.add(on_cuda.plain, full=True)
    assert on_cuda.entered == [torch.device("cpu")]
    on_cuda.table._cuda = False
    assert all(same(row, reference_row(on_cuda.plain)) for row in on_cuda.table.drain())


def test_nothing_is_launched_into_a_graph_that_is_captured(
    on_cuda: SimpleNamespace, warm: tuple[Interpreted, Interpreted]
) -> None:
    table, plain = on_cuda.table, on_cuda.plain
    before, on_cuda.capturing = warm[0].launches, True
    slots = [table.add(plain, full=True), *table.add_all([plain, plain], full=True)]
    on_cuda.capturing = table._cuda = False
    rows = table.drain()
    assert table.skipped == 3 and [rows[slot][12] for slot in slots] == [0, 0, 0]
    assert (warm[0].launches, warm[1].launches) == (before, 0) and table._rows._used == 0


def test_rows_of_several_threads_and_drains_in_between_are_not_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(dtype: torch.dtype, address: int, numel: int, device: int, table: int, slot: int, *_: Any) -> bool:
        row = (ctypes.c_int64 * 10).from_address(table + 80 * slot)
        row[0], row[6] = row[0] + numel, 0  # all are NaN, the first one too
        time.sleep(0)  # another thread's turn
        return True

    monkeypatch.setattr(fused_table, "relaunch", count)
    monkeypatch.setattr(fused_table, "_ROWS", 8)
    table, rows = FusedTable("cpu"), []

    def add(first: int) -> None:
        for numel in range(first, first + 200):
            table.add(torch.empty(numel), full=False)

    threads = [threading.Thread(target=add, args=(1 + 200 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        rows += table.drain()
    rows += table.drain()
    assert sorted(row[0] for row in rows) == list(range(1, 801))
    assert all(row[2] == row[0] for row in rows)


class Kernel:
    """A kernel of one tensor, one number and one constant; `passed` makes of its arguments what its launcher gets."""

    def __init__(self, passed: Callable[..., tuple[Any, ...]] = lambda *arguments: arguments) -> None:
        self.pre_run_hooks: list[Any] = []
        self.passed, self.direct, self.through_triton = passed, 0, 0
        self.returned: Any = SimpleNamespace(
            function=5,
            packed_metadata=(4, 1, 0),
            metadata=SimpleNamespace(target=SimpleNamespace(backend="cuda")),
            src=SimpleNamespace(signature={"data": "*i32", "count": "i64", "BLOCK": "constexpr"}),
        )
        self.returned.run = self.returned._run = self.launcher
        self.returned = Compiled(**vars(self.returned))
        self.error: Exception | None = None

    def launcher(self, *arguments: Any) -> None:
        if isinstance(arguments[9], int):
            self.direct += 1
            if self.error:
                raise self.error
        else:
            self.through_triton += 1

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*arguments: Any) -> Any:
            compiled = self.returned
            if isinstance(compiled, Compiled):
                compiled.run(*grid, 1, 999, 5, (4, 1, 0), None, None, None, *self.passed(*arguments))
            else:
                self.through_triton += 1
            return compiled

        return launch


class Compiled:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update({name: value for name, value in attributes.items() if name != "run"})

    @property
    def run(self) -> Any:
        return self._run


def launched(kernel: Kernel, times: int = 4) -> tuple[int, int]:
    """How many of some launches were direct, and how many went through Triton."""
    ways, data = Launches(kernel), torch.zeros(4, dtype=torch.int32)
    for _ in range(times):
        if not ways.again("key", (3, 2), -1, (data.data_ptr(), 4, 16)):
            ways.through_triton("key", (3, 2), (data, 4, 16))
    return kernel.direct, kernel.through_triton


@pytest.mark.usefixtures("warm")
def test_the_third_launch_of_a_kind_is_direct() -> None:
    assert launched(Kernel()) == (2, 2)


def _without(*path: str) -> Callable[[Kernel], None]:
    def change(kernel: Kernel) -> None:
        owner: Any = kernel.returned
        for name in path[:-1]:
            owner = getattr(owner, name)
        delattr(owner, path[-1])

    return change


def _with_types(**types: str) -> Callable[[Kernel], None]:
    return lambda kernel: kernel.returned.src.signature.update(types)


@pytest.mark.parametrize(
    "change",
    {
        "interpreted": lambda kernel: setattr(kernel, "returned", None),
        "no launcher": _without("_run"),
        "no function": _without("function"),
        "no metadata": _without("packed_metadata"),
        "no signature": _without("src", "signature"),
        "no target": _without("metadata", "target"),
        "a target that may specialize on more": lambda kernel: setattr(
            kernel.returned.metadata.target, "backend", "hip"
        ),
        "a number of 32 bits": _with_types(count="i32"),
        "a type too many": _with_types(other="i64"),
        "constants left out": lambda kernel: setattr(kernel, "passed", lambda data, count, block: (data, count)),
        "a constant wrapped": lambda kernel: setattr(
            kernel, "passed", lambda data, count, block: (data, count, SimpleNamespace(value=block))
        ),
        "another tensor": lambda kernel: setattr(
            kernel, "passed", lambda data, count, block: (data.clone(), count, block)
        ),
        "another function": lambda kernel: setattr(kernel.returned, "function", 6),
        "no hooks known": _without("missing"),
    }.items(),
    ids=lambda item: item[0],
)
@pytest.mark.usefixtures("warm")
def test_a_triton_of_another_make_launches_everything_itself(
    change: tuple[str, Callable[[Kernel], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, (name, apply) = Kernel(), change
    if name == "no hooks known":
        monkeypatch.setattr(launches, "knobs", None)
    else:
        apply(kernel)
    if name == "no launcher":  # what has none runs by other means
        type(kernel.returned).run, before = (lambda *arguments: kernel.launcher(*arguments[1:])), Compiled.run
        try:
            assert launched(kernel) == (0, 4)
        finally:
            Compiled.run = before  # type: ignore[method-assign]
    else:
        assert launched(kernel) == (0, 4)


@pytest.mark.usefixtures("warm")
def test_a_kernel_that_triton_compiled_anew_is_learned_anew() -> None:
    kernel, data = Kernel(), torch.zeros(4, dtype=torch.int32)
    ways = Launches(kernel)
    ways.through_triton("key", (3, 2), (data, 4, 16))
    kernel.returned = Kernel().returned
    for _ in range(2):
        assert not ways.again("key", (3, 2), -1, (data.data_ptr(), 4, 16))
        ways.through_triton("key", (3, 2), (data, 4, 16))
    assert ways.again("key", (3, 2), -1, (data.data_ptr(), 4, 16))


@pytest.mark.usefixtures("warm")
def test_a_launcher_that_failed_once_is_not_called_directly_again() -> None:
    kernel = Kernel()
    kernel.error = RuntimeError("invalid handle")
    assert launched(kernel, 6) == (1, 6)


@pytest.mark.usefixtures("warm")
def test_the_launcher_is_put_back_after_a_launch_that_raises() -> None:
    kernel, data = Kernel(), torch.zeros(4, dtype=torch.int32)
    ways, launcher = Launches(kernel), kernel.returned._run
    ways.through_triton("key", (3, 2), (data, 4, 16))
    kernel.passed = lambda *_: 1 / 0  # type: ignore[assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        ways.through_triton("key", (3, 2), (data, 4, 16))
    assert kernel.returned._run == launcher
