"""The Triton kernel against the slow reference, run by Triton's interpreter; and what it compiles to, without a GPU."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

pytest.importorskip("triton", reason="triton is not installed")

from nantrace.events import Columns
from nantrace.stats import fused, fused_launch, fused_table
from nantrace.stats.fused_table import FusedTable
from nantrace.stats.reference import reference_row
from tests.stats.tensors import BYTES, COMPLEX, DTYPES, IEEE, INTEGERS, LAYOUTS, PATTERNS, fill, in_range_mode, same
from tests.stats.test_properties import tensors

KERNEL = tuple(dtype for dtype in (*IEEE, *COMPLEX, *BYTES) if dtype in fused.FORMATS)
NAN, INF = math.nan, math.inf


@pytest.fixture
def blocks_of_16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small tensors then take several programs, several blocks each, and an unfull last one."""
    monkeypatch.setattr(fused_launch, "_block", lambda codes, walk: 16)
    monkeypatch.setattr(fused_launch, "_programs", lambda device: 3)
    fused_launch._variant.cache_clear()
    yield
    fused_launch._variant.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        (dtype, layout)
        for dtype in KERNEL
        for layout in LAYOUTS
        if dtype in (torch.float32, torch.complex128) or layout in ("contiguous", "transposed", "sliced")
    ],
    ids=str,
)
def test_a_fused_row_says_what_the_reference_says(dtype: torch.dtype, layout: str) -> None:
    table = FusedTable("cpu")
    patterns = ("all kinds", "subnormal", "nan last") if layout != "contiguous" else PATTERNS
    put = [LAYOUTS[layout](fill(dtype, pattern, 240)) for pattern in patterns]
    slots = [table.add(tensor, full=pattern != "nan last") for tensor, pattern in zip(put, patterns, strict=True)]
    assert all(not isinstance(kept, int) for _, kept in table._slots)  # none went to the table of several passes
    rows = table.drain()
    for tensor, slot, pattern in zip(put, slots, patterns, strict=True):
        expected = reference_row(tensor)
        expected = in_range_mode(expected) if pattern == "nan last" else expected
        assert same(rows[slot], expected), (pattern, rows[slot], expected)


@pytest.mark.usefixtures("blocks_of_16")
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "unaligned"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64, torch.float64, torch.float8_e5m2], ids=str)
def test_programs_share_a_tensor(dtype: torch.dtype, layout: str) -> None:
    table = FusedTable("cpu")
    tensor = LAYOUTS[layout](fill(dtype, "all kinds", 240))
    table.add(tensor, full=True)
    assert same(table.drain()[0], reference_row(tensor))


@pytest.mark.parametrize("dtype", [dtype for dtype in BYTES if dtype in fused.FORMATS], ids=str)
def test_each_of_the_256_codes_of_a_float8_is_known(dtype: torch.dtype) -> None:
    table = FusedTable("cpu")
    codes = torch.arange(256).to(torch.uint8).view(dtype)
    order = torch.arange(256).view(32, 8)
    slots = table.add_all([codes[order[:, i]] for i in range(8)] + [codes[row] for row in order[-4:]], full=True)
    rows = table.drain()
    for i, slot in enumerate(slots):
        assert same(rows[slot], reference_row(codes[order[:, i] if i < 8 else order[i - 12]])), i


@pytest.mark.usefixtures("blocks_of_16")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64], ids=str)
def test_many_small_tensors_share_a_launch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    monkeypatch.setattr(
        fused_table, "launch_batch", lambda *args: (launches.append(len(args[0])), fused_launch.launch_batch(*args))
    )
    source = fill(dtype, "all kinds", 240)
    put = [source[i : i + 1 + 37 * (i % 5)] for i in range(12)]
    put.insert(5, source.view(12, 20).t())
    put.insert(7, torch.tensor([1, 0, 3]))
    table = FusedTable("cpu")
    table.add(torch.tensor([NAN]), full=True)
    slots = table.add_all(put, full=True)
    rows = table.drain()
    assert launches == [12] and len(set(slots)) == len(put)
    for tensor, slot in zip(put, slots, strict=True):
        assert same(rows[slot], reference_row(tensor)), (tensor, rows[slot])


def test_other_kinds_of_tensors_go_through_the_other_table() -> None:
    table = FusedTable("cpu")
    put = [fill(dtype, "plain", 240) for dtype in DTYPES if dtype in INTEGERS or dtype not in fused.FORMATS]
    put.append(torch.randn(3, 2, 5, 2, 3, 2)[:, :1, ::2, :, ::2, :1].permute(2, 1, 0, 3, 5, 4))
    for tensor in put:
        table.add(tensor, full=True)
    for tensor, row in zip(put, table.drain(), strict=True):
        assert same(row, reference_row(tensor))


def test_what_cannot_be_read_has_no_columns() -> None:
    table = FusedTable("cpu")
    freed = torch.randn(4)
    freed.untyped_storage().resize_(0)
    slots = table.add_all([torch.empty(3, device="meta"), freed], full=True)
    rows = table.drain()
    assert [(rows[slot][0], rows[slot][-1]) for slot in slots] == [(3, 0), (4, 0)]


def test_a_fused_table_grows_and_starts_anew_after_each_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_table, "_ROWS", 4)
    table = FusedTable("cpu")
    for _ in range(2):
        table.add(torch.tensor([NAN, -INF]), full=True)
        slots = table.add_all([torch.tensor([float(i)]) for i in range(7)], full=False)
        rows = table.drain()
        assert rows[0][:5] == (2, 0, 1, 0, 1) and rows[0][8] == 0
        assert [rows[slot][5] for slot in slots] == [float(i) for i in range(7)]


@pytest.mark.parametrize("which", ["launch", "launch_batch"])
def test_a_kernel_that_fails_gives_way_to_several_passes(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, attempts = FusedTable("cpu"), []

    def fail(*_: object) -> None:
        attempts.append(which)
        raise RuntimeError("no such arch\nand a long tail")

    put = [torch.tensor([1.0, NAN, -INF, 4.0]), torch.tensor([2.0, 3.0])]
    before = table.add(put[0], full=True)
    with monkeypatch.context() as patch:
        patch.setattr(fused_table, which, fail)
        slots = table.add_all(put, full=True) if which == "launch_batch" else [table.add(t, full=True) for t in put]
    slots += [table.add(put[0], full=True)]  # the kernel is not tried again
    rows = table.drain()
    assert table.failure == "RuntimeError: no such arch" and len(attempts) == 1
    for slot, tensor in zip([before, *slots], [put[0], *put, put[0]], strict=True):
        assert same(rows[slot], reference_row(tensor))
    assert [Columns(rows[slot][12]) & ~Columns.full() for slot in (before, *slots)] == [
        Columns.KERNEL,
        *[Columns.PASSES] * 3,
    ]


@settings(deadline=None, max_examples=40)
@given(tensors())
def test_any_float_tensor_has_the_row_of_the_reference(tensor: torch.Tensor) -> None:
    table = FusedTable("cpu")
    table.add(tensor, full=True)
    assert same(table.drain()[0], reference_row(tensor))


COMPILE = """
import pathlib, re, subprocess, sys, tempfile, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nantrace.stats import fused, fused_launch

POINTERS = {torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"}
folder = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
for arch, dtype, walk in ((80, torch.bfloat16, 0), (90, torch.float32, 1), (90, torch.float8_e4m3fn, 0),
                          (100, torch.complex128, 2)):
    codes = fused.FORMATS[dtype]
    constants = dict(codes.constants(), PAIR=dtype.is_complex, WALK=walk, BLOCK=fused_launch._block(codes, walk))
    types = {"data": POINTERS[codes.bits], "table": "*i64", **dict.fromkeys(constants, "constexpr")}
    signature = {name: types.get(name, "i64") for name in fused.row_kernel.arg_names}
    source = ASTSource(fused.row_kernel, signature, constexprs=constants, attrs={(0,): [["tt.divisibility", 16]]})
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": fused_launch.WARPS})
    assert compiled.asm["cubin"]
    assembler = folder / ("ptxas-blackwell" if arch >= 100 and (folder / "ptxas-blackwell").exists() else "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        target = re.search(r"\\.target (\\w+)", compiled.asm["ptx"]).group(1)
        command = [assembler, "-v", "--gpu-name=" + target, file.name, "-o", file.name + ".cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        pathlib.Path(file.name + ".cubin").unlink()
    print(arch, dtype, walk, re.findall(r"[1-9]\\d* bytes spill", said))
"""


def test_the_kernel_compiles_for_real_devices_without_spilling_registers(tmp_path: Path) -> None:
    environment = {"TRITON_INTERPRET": "0", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and all(line.endswith("[]") for line in lines), done.stdout
