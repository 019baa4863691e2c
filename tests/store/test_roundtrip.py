"""What is written comes back equal, however strange the names, the values and the sizes of the pieces."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nantrace.events import EVENT, ModuleEntry, Phase, Role, Site
from nantrace.lineage import Lineage, OpEvent, Sink
from nantrace.store import TraceWriter, load, rank_path
from nantrace.store.schema import NAME_WIDTH, escape, join_names, split_name, unescape
from tests.store.flat_out import rows

SITE = Site("head", Phase.FORWARD, Role.OUTPUT, "output[0]", "float16", (8, 3))
HOSTILE = [
    "",
    "a/b",
    "x\0y",
    "\0",
    "\n\r\t",
    " ",
    "\\",
    "\\x41",
    "json:",
    "\ud800",
    "\ud83d\ude00",
    "\N{GRINNING FACE}",
    "\x85\u2028\ufeff",
    "a" * (NAME_WIDTH - 1),
    "a" * NAME_WIDTH,
    "a" * 2 * NAME_WIDTH,
    "\N{GRINNING FACE}\\" * 5_000,
    "../../etc/passwd",
    "%s{}",
]

texts = st.text(st.characters(), max_size=200) | st.sampled_from(HOSTILE)
optional_texts = st.none() | texts
sites = st.builds(
    Site,
    module=optional_texts,
    phase=st.sampled_from(Phase),
    role=st.sampled_from(Role),
    slot=texts,
    dtype=texts,
    shape=st.lists(st.integers(0, 2**63)).map(tuple),
    op=optional_texts,
    node=optional_texts,
    where=optional_texts,
)
modules = st.builds(ModuleEntry, fqn=texts, cls=texts, aliases=st.lists(texts, max_size=3).map(tuple))
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
plain = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)
keys = st.text(st.characters(), min_size=1, max_size=20)


def same(one: Any, other: Any) -> bool:
    """Equal, with NaN equal to NaN, and 0.0 different from -0.0 and from 0."""
    return repr(one) == repr(other)


@given(st.text(st.characters()) | st.sampled_from(HOSTILE))
@settings(deadline=None)
def test_every_text_survives_the_name_table(text: str) -> None:
    pieces = split_name(text)
    assert all(len(piece) <= NAME_WIDTH and piece.isascii() and b"\0" not in piece for piece in pieces)
    assert join_names([*split_name("before"), *pieces, *split_name("behind")])[1] == text


@pytest.mark.parametrize("text", ["\\", "a\\q", "\\x4", "\\N{DIGIT ONE}", "\\U00110000", "\\101", "\\\n"])
def test_an_escape_that_no_writer_makes_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        unescape(text)


def test_escapes_are_those_of_python() -> None:
    assert [escape(text).encode() for text in HOSTILE] == [text.encode("unicode_escape") for text in HOSTILE]


@given(st.data())
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_a_trace_comes_back_equal(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = str(tmp_path_factory.mktemp("trace") / "step.h5")
    entries = data.draw(st.lists(modules, max_size=4))
    meta = data.draw(
        st.dictionaries(keys.filter(lambda key: key not in ("complete", "format_version")), plain, max_size=4)
    )
    ledger = data.draw(st.lists(st.dictionaries(keys, plain, max_size=4), max_size=4))
    table = data.draw(st.lists(sites, min_size=1, max_size=6))
    count = data.draw(st.integers(0, 3000))
    raw = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 256, count * EVENT.itemsize, np.uint8)
    events = raw.view(EVENT)  # any bits: signalling NaN, subnormal numbers, the largest integers
    events["seq"] = np.arange(1, count + 1)
    events["site"] %= len(table)
    with TraceWriter(path, modules=entries, meta=meta) as writer:
        writer.add_sites(table[:1])
        writer.add_sites(table[1:])
        begin = 0
        while begin < count:
            end = min(count, begin + data.draw(st.integers(1, 1500)))
            writer.append(events[begin:end])
            begin = end
            if data.draw(st.booleans()):
                writer.flush()
        for step in ledger:
            writer.add_step(step)
    trace = load(path)
    assert trace.events.tobytes() == events.tobytes()
    assert trace.sites == tuple(table)
    assert trace.modules == tuple(entries)
    assert same(trace.steps, tuple(ledger))
    assert same(sorted(trace.meta.items()), sorted(meta.items()))
    assert trace.complete and trace.lineage is None and trace.path == path


def test_the_empty_module_name_is_not_none(tmp_path: Path) -> None:
    table = [Site(name, Phase.LOSS, Role.LOSS, "loss", "float32", ()) for name in ("", None, "None", "null")]
    with TraceWriter(tmp_path / "step.h5") as writer:
        writer.add_sites(table)
    assert [site.module for site in load(tmp_path / "step.h5").sites] == ["", None, "None", "null"]


def test_nonfinite_ledger_values_and_numpy_scalars_come_back_as_floats(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "step.h5") as writer:
        writer.add_step({"step": 0, "loss": np.float32(np.inf), "lr": [1e-3, math.nan], "skipped": np.bool_(True)})
        writer.add_step({"step": 1, "loss": -math.inf, "batch_id": "\ud83d\ude00"})
    first, second = load(tmp_path / "step.h5").steps
    assert same(first, {"step": 0, "loss": math.inf, "lr": (1e-3, math.nan), "skipped": True})
    assert second == {"step": 1, "loss": -math.inf, "batch_id": "\ud83d\ude00"}
    with h5py.File(tmp_path / "step.h5") as file:
        assert same(file["steps"]["loss"].tolist(), [math.inf, -math.inf])
        assert same(file["steps"]["lr"].tolist(), [math.nan, math.nan])
        for line in bytes(file["ledger"][:]).splitlines():
            json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_long_metadata_comes_back(tmp_path: Path) -> None:
    meta = {"options": ["block.*"] * 50_000, "note": "n" * 60_000, "longer": "n" * 60_001, "empty": ""}
    TraceWriter(tmp_path / "step.h5", meta=meta).close()
    assert load(tmp_path / "step.h5").meta == {**meta, "options": tuple(meta["options"])}


def test_the_last_lineage_counts(tmp_path: Path) -> None:
    event = OpEvent(
        1, 7, "aten.log", "inf", "forward", "head", None, "model.py:3 in forward", 1, "float16", (2, 3), neginf=1,
        max=3.0, node_key=(0, 12, "LogBackward0"), scalars={"value": -math.inf},
    )  # fmt: skip
    lineage = Lineage([event], [Sink("grad", "head.weight", ((1, "inf"),), 1, 9)], [(1, 1.0, math.inf, 9)], notes=["x"])
    with TraceWriter(tmp_path / "step.h5") as writer:
        writer.set_lineage(Lineage(notes=["long" * 100_000]))
        writer.set_lineage(lineage)
    assert load(tmp_path / "step.h5").lineage == lineage


def test_plain_h5py_reads_a_closed_trace_in_a_few_lines(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "step.h5", meta={"torch": "2.13.0"}) as writer:
        writer.add_sites([SITE])
        writer.append(rows(1, 5, 1))
    with h5py.File(tmp_path / "step.h5", "r") as file:
        events, site, names = file["events"][:], file["sites"][0], file["names"][:]
        assert events["seq"].tolist() == [1, 2, 3, 4, 5]
        assert names[site["module"]] == b"head" and json.loads(names[site["shape"]]) == [8, 3]
        labels = h5py.check_enum_dtype(file["sites"].dtype["phase"])
        assert labels is not None and labels["forward"] == site["phase"]
        assert file["meta"].attrs["torch"] == b"2.13.0" and bool(file["meta"].attrs["complete"])
        assert file["events"].chunks == (1024,) and file["events"].compression is None


def test_many_rows_cost_little_more_than_their_own_bytes(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "step.h5") as writer:
        writer.add_sites([SITE])
        for begin in range(0, 200_000, 10_000):
            writer.append(rows(begin + 1, 10_000, 1))
    assert (tmp_path / "step.h5").stat().st_size / 200_000 < 110


def test_a_rank_writes_beside_the_others() -> None:
    assert rank_path("step.h5", 1) == "step.r00001.h5"
    assert rank_path(Path("runs.d/step"), 12) == "runs.d/step.r00012"


def test_the_store_imports_no_torch() -> None:
    code = "import sys, nantrace.store; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    code = "import sys, nantrace.store, torch; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 1
