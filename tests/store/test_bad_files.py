"""Files that are damaged, foreign, newer or hostile: one sentence with path and way out, and nothing is followed."""

import json
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from nantrace.errors import NantraceError, TraceFormatError
from nantrace.events import EVENT
from nantrace.lineage import Lineage, OpEvent
from nantrace.store import TraceWriter, load
from nantrace.store.schema import NULL, SITE
from tests.store.flat_out import rows, site

COUNT = 3000


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "step.h5"
    with TraceWriter(path, meta={"torch": "2.13.0"}) as writer:
        writer.add_sites([site(0), site(1)])
        writer.append(rows(1, COUNT, 2))
        writer.add_step({"step": 0})
    return path


def change(path: Path, how: Callable[[h5py.File], Any]) -> None:
    with h5py.File(path, "r+") as file:
        how(file)


def replace(file: h5py.File, name: str, **dataset: Any) -> None:
    del file[name]
    file.create_dataset(name, **dataset)


def refused(path: Path, words: str) -> None:
    with pytest.raises(TraceFormatError, match=words) as caught:
        load(path)
    sentence = str(caught.value)
    assert sentence.startswith(str(path)) and sentence.endswith(".") and "\n" not in sentence
    assert len(sentence) - len(str(path)) < 400


def without(field: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype([(name, dtype[name]) for name in dtype.names or () if name != field])


def retyped(field: str, kind: Any) -> np.dtype[Any]:
    return np.dtype([(name, kind if name == field else EVENT[name]) for name in EVENT.names or ()])


# No trace at all.


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(NantraceError, match=r"none\.h5 does not exist: pass"):
        load(tmp_path / "none.h5")


def test_a_folder_and_a_device(tmp_path: Path) -> None:
    for path in (tmp_path, os.devnull):
        with pytest.raises(NantraceError, match="is not a file"):
            load(path)


def test_a_path_with_a_nul(trace: Path) -> None:
    with pytest.raises(NantraceError, match="NUL"):
        load(f"{trace}\0.h5")


@pytest.mark.parametrize("content", [b"", b"loss,nan\n", pickle.dumps({"a": 1}), b"\0" * 10_000])
def test_a_file_that_is_not_hdf5(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.h5").write_bytes(content)
    refused(tmp_path / "x.h5", "it is not an HDF5 file")


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "run"),)

    (tmp_path / "x.h5").write_bytes(pickle.dumps(Trap()))
    refused(tmp_path / "x.h5", "not an HDF5 file")
    assert not (tmp_path / "run").exists()


def test_an_hdf5_file_of_somebody_else(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["weights"] = np.zeros(3)
    refused(tmp_path / "x.h5", "without the group /meta")


# Damaged.


@pytest.mark.parametrize("length", [8, 96, 2000, 50_000, 150_000])
def test_a_truncated_file(trace: Path, length: int) -> None:
    trace.write_bytes(trace.read_bytes()[:length])
    refused(trace, "damaged or cut short")


def test_flipped_bytes_never_raise_anything_else(trace: Path) -> None:
    whole = trace.read_bytes()
    random = np.random.default_rng(0)
    for _ in range(150):
        torn = bytearray(whole)
        for at in random.integers(0, 4096, 4):  # where the metadata lies
            torn[at] = random.integers(256)
        trace.write_bytes(torn)
        try:
            load(trace)
        except TraceFormatError as error:
            assert str(trace) in str(error)


@pytest.mark.parametrize("name", ["names", "sites", "events"])
def test_a_missing_table(trace: Path, name: str) -> None:
    change(trace, lambda file: file.pop(name))
    refused(trace, f"no dataset /{name}")


@pytest.mark.parametrize("name", ["modules", "steps", "ledger", "lineage", "committed"])
def test_a_table_that_may_be_missing(trace: Path, name: str) -> None:
    change(trace, lambda file: file.pop(name))
    assert len(load(trace)) == COUNT


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("events", np.zeros(3), "no column seq in /events"),
        ("events", np.zeros(3, without("nan", EVENT)), "no column nan in /events"),
        ("events", np.zeros(3, retyped("min", "S8")), r"\|S8 in events\.min, not float64"),
        ("events", np.zeros(3, retyped("seq", "<f8")), r"float64 in events\.seq, not uint64"),
        ("events", np.zeros(3, retyped("step", "<u8")), r"uint64 in events\.step, not uint32"),
        ("events", np.zeros(3, retyped("numel", ("<u8", 2))), "events.numel"),
        ("events", np.zeros(3, retyped("nan", h5py.vlen_dtype("u8"))), "events.nan"),
        ("events", np.zeros(3, retyped("site", h5py.ref_dtype)), "events.site"),
        ("events", np.zeros((3, 2), EVENT), r"shape \(3, 2\) at /events"),
        ("events", np.zeros((), EVENT), r"shape \(\) at /events"),
        ("names", np.zeros(3, "S8"), r"\|S8 at /names where \|S96 belongs"),
        ("names", np.array(["a"], h5py.string_dtype()), "at /names"),
        ("sites", np.zeros(3, without("where", SITE)), "no column where in /sites"),
        ("ledger", np.zeros(3, "i8"), "int64 at /ledger"),
        ("ledger", np.zeros(3, h5py.vlen_dtype("u1")), "at /ledger"),
        ("committed", np.zeros(3), "float64 at /committed"),
        ("committed", np.zeros((), [("events", h5py.string_dtype())]), "at /committed"),
    ],
)
def test_a_table_of_the_wrong_type(trace: Path, name: str, data: np.ndarray, words: str) -> None:
    change(trace, lambda file: replace(file, name, shape=data.shape, dtype=data.dtype))
    refused(trace, words)


def test_a_group_in_the_place_of_a_table(trace: Path) -> None:
    def swap(file: h5py.File) -> None:
        del file["events"]
        file.create_group("events")

    change(trace, swap)
    refused(trace, "has a group at /events where a dataset belongs")


@pytest.mark.parametrize("column", ["module", "slot", "dtype", "shape", "op", "node", "where"])
def test_a_reference_out_of_range(trace: Path, column: str) -> None:
    def point(file: h5py.File) -> None:
        table = file["sites"][:]
        table[column][1] = 77
        file["sites"][:] = table

    change(trace, point)
    refused(trace, "site 1 with name 77, where no name begins")


def test_none_where_a_name_is_needed(trace: Path) -> None:
    def point(file: h5py.File) -> None:
        table = file["sites"][:]
        table["slot"][0] = NULL
        file["sites"][:] = table

    change(trace, point)
    refused(trace, "site 0 without a name")


@pytest.mark.parametrize("column", ["phase", "role"])
def test_an_enum_out_of_range(trace: Path, column: str) -> None:
    def point(file: h5py.File) -> None:
        table = file["sites"][:]
        table[column][1] = 200
        file["sites"][:] = table

    change(trace, point)
    refused(trace, f"site 1 in {column} 200, which this version does not know: update nantrace")


@pytest.mark.parametrize("text", [b"8", b'["8"]', b"[8,", b"[true]", b"[1e3]", b"\\q", b"[NaN]", b"\xff"])
def test_a_shape_that_is_none(trace: Path, text: bytes) -> None:
    def spoil(file: h5py.File) -> None:
        file["names"][int(file["sites"]["shape"][0])] = text

    change(trace, spoil)
    refused(trace, "damaged")


@pytest.mark.parametrize(
    "line", [b"{\n", b"[]\n", b"3\n", b'{"a": NaN}\n', b"[" * 100_000 + b"\n", b"9" * 9999 + b"\n"]
)
def test_a_ledger_that_is_not_json(trace: Path, line: bytes) -> None:
    def spoil(file: h5py.File) -> None:
        del file["committed"]
        replace(file, "ledger", data=np.frombuffer(line, "u1"))

    change(trace, spoil)
    refused(trace, "damaged")


@pytest.mark.parametrize(
    ("lineage", "words"),
    [
        ("[]", "lineage"),
        ('{"events": 3}', "lineage|damaged"),
        ('{"events": [{"id": 1}]}', "lineage"),
        (Lineage([OpEvent(2, 1, None, "nan", None, None, None, None, 1, "float32")]).to_json(), "not numbered from 1"),
        (
            Lineage([OpEvent(1, 1, None, "nan", None, None, None, None, 1, "float32", nan_parents=(7,))]).to_json(),
            "refers to event 7 of 1",
        ),
    ],
)
def test_a_damaged_lineage(trace: Path, lineage: str, words: str) -> None:
    def spoil(file: h5py.File) -> None:
        del file["committed"]
        replace(file, "lineage", data=np.frombuffer(lineage.encode() + b"\n", "u1"))

    change(trace, spoil)
    refused(trace, words)


# The longest valid prefix.


def test_rows_that_break_the_sequence_and_all_behind_them_are_ignored(trace: Path) -> None:
    def skip(file: h5py.File) -> None:
        table = file["events"][:]
        table["seq"][1700] = 9
        file["events"][:] = table

    change(trace, skip)
    assert len(load(trace)) == 1700


def test_a_row_of_an_unknown_site_ends_the_trace(trace: Path) -> None:
    def point(file: h5py.File) -> None:
        table = file["events"][:]
        table["site"][1234] = 2
        file["events"][:] = table

    change(trace, point)
    assert len(load(trace)) == 1234


def test_rows_behind_the_committed_count_are_ignored(trace: Path) -> None:
    def lower(file: h5py.File) -> None:
        counts = file["committed"][()]
        counts["events"] = 77
        file["committed"][()] = counts

    change(trace, lower)
    assert len(load(trace)) == 77


def test_a_count_ahead_of_the_rows_does_no_harm(trace: Path) -> None:
    def raise_(file: h5py.File) -> None:
        counts = file["committed"][()]
        for name in counts.dtype.names:
            counts[name] = 2**63
        file["committed"][()] = counts

    change(trace, raise_)
    assert len(load(trace)) == COUNT


# Versions.


@pytest.mark.parametrize("version", ["2.0", "10.3", "999.0"])
def test_a_newer_major_version_names_both_numbers(trace: Path, version: str) -> None:
    change(trace, lambda file: file["meta"].attrs.modify("format_version", version))
    refused(trace, rf"has format {version}, and this nantrace reads up to 1\.1: update nantrace")


@pytest.mark.parametrize("version", ["", "1", "one", "1.0.0", "json:1", "-1.0", 1.0, np.zeros(3), "1." + "9" * 5000])
def test_a_version_that_is_none(trace: Path, version: Any) -> None:
    def spoil(file: h5py.File) -> None:
        del file["meta"].attrs["format_version"]
        file["meta"].attrs["format_version"] = version

    change(trace, spoil)
    refused(trace, "format_version")


def test_a_newer_table_is_refused(trace: Path) -> None:
    change(trace, lambda file: file["sites"].attrs.modify("version", np.int64(2)))
    refused(trace, "version 2 of /sites, and this nantrace reads up to 1: update nantrace")


def test_what_a_newer_minor_version_adds_is_ignored(trace: Path) -> None:
    wider = np.dtype(
        [("note", h5py.string_dtype()), *[(name, EVENT[name]) for name in reversed(EVENT.names or ())], ("p99", "f4")]
    )

    def widen(file: h5py.File) -> None:
        file["meta"].attrs["format_version"] = "1.9"
        file["meta"].attrs["shape"] = np.zeros(3)
        file["meta"].attrs["words"] = np.array(["a", "b"], h5py.string_dtype())
        file["meta"].attrs["reference"] = file["events"].ref
        file["events"].attrs["novel"] = "x"
        file.create_group("histograms")["a"] = np.zeros(3)
        file["more"] = h5py.ExternalLink("/etc/passwd", "/")
        table = np.zeros(COUNT, wider)
        for name in EVENT.names or ():
            table[name] = file["events"][name]
        table["note"] = "novel"
        replace(file, "events", data=table, chunks=(500,), compression="gzip", shuffle=True)

    change(trace, widen)
    loaded = load(trace)
    assert loaded.events.dtype == EVENT
    assert loaded.events.tobytes() == rows(1, COUNT, 2).tobytes()
    assert loaded.meta == {"torch": "2.13.0"}


# Hostile.


def secret(folder: Path) -> Path:
    """A valid trace in another file, which nobody is to read through a link."""
    with TraceWriter(folder / "secret.h5") as writer:
        writer.add_sites([site(0)])
        writer.append(rows(1, 10, 1))
    return folder / "secret.h5"


@pytest.mark.parametrize("name", ["events", "names", "meta", "committed", "lineage"])
def test_external_and_soft_links_are_not_followed(trace: Path, tmp_path: Path, name: str) -> None:
    other = secret(tmp_path)
    for link in (h5py.ExternalLink(str(other), name), h5py.SoftLink("/elsewhere")):

        def relink(file: h5py.File, link: Any = link) -> None:
            if name in file or file.get(name, getlink=True) is not None:
                del file[name]
            file[name] = link

        change(trace, relink)
        refused(trace, f"link at /{name} that leads elsewhere, which is not followed")


def test_virtual_datasets_are_not_followed(trace: Path, tmp_path: Path) -> None:
    layout = h5py.VirtualLayout((10,), EVENT)
    layout[:] = h5py.VirtualSource(str(secret(tmp_path)), "events", (10,))

    def swap(file: h5py.File) -> None:
        del file["events"]
        file.create_virtual_dataset("events", layout)

    change(trace, swap)
    refused(trace, "keeps the values of /events in another file, which is not followed")


def test_external_storage_is_not_followed(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b'{"key": "hunter2"}\n')

    def swap(file: h5py.File) -> None:
        replace(file, "ledger", shape=(19,), dtype="u1", external=[(str(tmp_path / "secret"), 0, 19)])

    change(trace, swap)
    refused(trace, "keeps the values of /ledger in another file, which is not followed")


@pytest.mark.parametrize("name", ["events", "names", "sites", "ledger"])
@pytest.mark.parametrize("options", [{"chunks": (1024,)}, {"chunks": (1024,), "compression": "gzip"}, {}])
def test_a_declared_size_is_checked_before_memory_is_taken(trace: Path, name: str, options: dict[str, Any]) -> None:
    def swell(file: h5py.File) -> None:
        del file["committed"]
        replace(file, name, shape=(10**15,), dtype=file[name].dtype, **options)

    change(trace, swell)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(trace, rf"declares 1{'0' * 15} rows in /{name} but has only \d+ bytes|damaged")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_a_chunk_larger_than_any_writer_makes_is_refused(trace: Path) -> None:
    def swell(file: h5py.File) -> None:
        replace(file, "ledger", shape=(3,), maxshape=(None,), dtype="u1", chunks=(2**31,), compression="gzip")

    change(trace, swell)
    refused(trace, "chunks of 2147483648 rows at /ledger")


def test_metadata_of_odd_types_is_ignored_and_odd_json_refused(trace: Path) -> None:
    ragged = np.empty(2, h5py.vlen_dtype("f4"))
    ragged[:] = [np.zeros(2, "f4"), np.zeros(3, "f4")]
    change(trace, lambda file: file["meta"].attrs.create("ragged", ragged, dtype=ragged.dtype))
    assert load(trace).meta == {"torch": "2.13.0"}
    change(trace, lambda file: file["meta"].attrs.create("odd", "json:{"))
    refused(trace, "damaged")


def test_every_line_of_the_ledger_is_strict_json(trace: Path) -> None:
    with h5py.File(trace) as file:
        assert [json.loads(line) for line in bytes(file["ledger"][:]).splitlines()] == [{"step": 0}]
