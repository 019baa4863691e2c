"""The life of a trace file: who may create it, who may write it, and what an error leaves."""

import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from nantrace.errors import NantraceError, TraceExistsError
from nantrace.events import EVENT
from nantrace.store import TraceWriter, load
from tests.store.flat_out import rows, site

ROOT = Path(__file__).parents[2]


def written(path: Path, count: int) -> TraceWriter:
    writer = TraceWriter(path)
    writer.add_sites([site(0)])
    writer.append(rows(1, count, 1))
    writer.flush()
    return writer


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "step.h5"
    path.write_bytes(b"precious")
    with pytest.raises(TraceExistsError, match=r"step\.h5 exists already: .*overwrite=True"):
        TraceWriter(path)
    assert path.read_bytes() == b"precious"


def test_overwrite_replaces_an_existing_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "step.h5"
    path.write_bytes(b"old")
    with TraceWriter(path, overwrite=True) as writer:
        writer.add_sites([site(0)])
        writer.append(rows(1, 3000, 1))
    assert len(load(path)) == 3000
    assert os.listdir(tmp_path) == ["step.h5"]


def test_a_failed_creation_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "step.h5"
    path.write_bytes(b"old")
    with pytest.raises(NantraceError, match="cannot be created"):
        TraceWriter(path, overwrite=True, meta={"n" * 70_000: 1})
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["step.h5"]


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "step.h5").mkdir()
    with pytest.raises(NantraceError, match="cannot be created"):
        TraceWriter(tmp_path / "step.h5", overwrite=True)
    assert os.listdir(tmp_path) == ["step.h5"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(NantraceError, match=r"there is no folder .*runs: create it"):
        TraceWriter(tmp_path / "runs" / "step.h5")


def test_a_bad_path_is_one_sentence() -> None:
    with pytest.raises(NantraceError, match="cannot be created") as caught:
        TraceWriter("a\0b.h5")
    assert "\n" not in str(caught.value)


def test_closing_twice_and_writing_afterwards_do_nothing(tmp_path: Path) -> None:
    writer = written(tmp_path / "step.h5", 5)
    writer.close()
    before = (tmp_path / "step.h5").read_bytes()
    writer.append(rows(6, 5, 1))
    writer.add_sites([site(1)])
    writer.add_step({"step": 0})
    writer.flush()
    writer.close()
    assert (tmp_path / "step.h5").read_bytes() == before


def test_rows_out_of_order_are_refused_and_the_trace_goes_on(tmp_path: Path) -> None:
    writer = written(tmp_path / "step.h5", 5)
    with pytest.raises(ValueError, match="does not run from 6"):
        writer.append(rows(7, 2, 1))
    writer.append(rows(6, 2, 1))
    writer.close()
    assert len(load(tmp_path / "step.h5")) == 7


def test_an_event_of_an_unknown_site_is_refused(tmp_path: Path) -> None:
    writer = written(tmp_path / "step.h5", 5)
    strange = rows(6, 1, 1)
    strange["site"] = 1
    with pytest.raises(ValueError, match="site 1 is unknown"):
        writer.append(strange)
    with pytest.raises(ValueError, match="dtype"):
        writer.append(np.zeros(3, "f8"))  # type: ignore[arg-type]
    writer.close()


def test_a_reader_in_the_same_process_and_one_in_another_see_what_was_flushed(tmp_path: Path) -> None:
    path = tmp_path / "step.h5"
    writer = written(path, 1500)
    writer.append(rows(1501, 10, 1))  # not flushed
    trace = load(path)
    assert len(trace) == 1500 and not trace.complete
    other = run("import sys; from nantrace.store import load; print(len(load(sys.argv[1])))", path)
    assert other.stdout == "1500\n", other.stderr
    writer.append(rows(1511, 5000, 1))
    writer.close()
    assert load(path).events.tobytes() == rows(1, 6510, 1).tobytes()


def test_a_second_writer_is_kept_out(tmp_path: Path) -> None:
    writer = written(tmp_path / "step.h5", 5)
    other = run("import sys, h5py; h5py.File(sys.argv[1], 'r+')", tmp_path / "step.h5")
    assert "lock" in other.stderr
    writer.close()


def test_rows_are_copied_when_they_are_appended(tmp_path: Path) -> None:
    writer = written(tmp_path / "step.h5", 5)
    reused = rows(6, 5, 1)
    writer.append(reused)
    reused["nan"] = 99
    writer.close()
    assert load(tmp_path / "step.h5").events["nan"].tolist() == [0] * 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_never_touches_the_file(tmp_path: Path) -> None:
    # In a process of its own: the child goes through the whole end of the interpreter, HDF5's included.
    code = """if True:
        import gc, os, sys
        from nantrace.store import TraceWriter, load
        from tests.store.flat_out import rows, site
        writer = TraceWriter(sys.argv[1])
        writer.add_sites([site(0)])
        writer.append(rows(1, 100, 1))
        writer.flush()
        writer.append(rows(101, 100, 1))
        ready, go = os.pipe()
        if os.fork() == 0:
            os.read(ready, 1)  # until the parent has grown the file
            writer.append(rows(201, 5000, 1))
            writer.add_sites([site(1)])
            writer.flush()
            writer.close()
            del writer
            gc.collect()
            sys.exit()
        writer.append(rows(201, 50_000, 1))
        writer.flush()
        os.write(go, b"x")
        os.wait()
        assert len(load(sys.argv[1])) == 50_200
        writer.append(rows(50_201, 10, 1))
        writer.close()
    """
    done = run(code, tmp_path / "step.h5")
    assert done.returncode == 0, done.stderr
    trace = load(tmp_path / "step.h5")
    assert trace.complete and len(trace.sites) == 1
    assert trace.events.tobytes() == rows(1, 50_210, 1).tobytes()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on file sizes")
@pytest.mark.parametrize("limit", [300_000, 1_000_000, 3_333_333])
def test_a_full_disk_ends_the_trace_once_and_keeps_what_was_flushed(tmp_path: Path, limit: int) -> None:
    code = """if True:
        import resource, sys
        from nantrace.errors import NantraceError
        from nantrace.store import TraceWriter
        from tests.store.flat_out import rows, site
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
        writer = TraceWriter(sys.argv[1])
        flushed = 0
        try:
            while True:
                writer.add_sites([site(flushed)])
                writer.append(rows(flushed + 1, 64, 1))
                writer.flush()
                flushed += 64
        except NantraceError as error:
            print(error)
        assert writer.error is not None
        writer.append(rows(flushed + 65, 64, 1))
        writer.add_step({})
        writer.flush()
        writer.close()
        print(flushed)
    """
    done = run(code, tmp_path / "step.h5", limit)
    assert done.returncode == 0, done.stderr
    sentence, flushed = done.stdout.splitlines()
    assert "failed (File too large)" in sentence and "make room" in sentence
    trace = load(tmp_path / "step.h5")
    assert not trace.complete
    assert len(trace) >= int(flushed) > 0
    assert trace.events.tobytes() == rows(1, len(trace), 1).tobytes()
    with h5py.File(tmp_path / "step.h5", "r") as file:  # the index as well: rows ahead of the trace can be read
        assert len(file["events"][:]) == file["events"].shape[0]


def test_a_removed_file_is_reported_at_the_next_flush(tmp_path: Path) -> None:
    writer = written(tmp_path / "step.h5", 5)
    (tmp_path / "step.h5").unlink()
    with pytest.raises(NantraceError, match="the file was removed or replaced"):
        writer.flush()
    writer.close()


def test_leaving_the_context_with_an_exception_keeps_the_rows(tmp_path: Path) -> None:
    with pytest.raises(KeyError), TraceWriter(tmp_path / "step.h5") as writer:
        writer.add_sites([site(0)])
        writer.append(rows(1, 5, 1))
        raise KeyError
    assert len(load(tmp_path / "step.h5")) == 5


def test_the_count_is_written_behind_the_rows(tmp_path: Path) -> None:
    """The commit record is at most one page, and no flush leaves a row for later."""
    writer = written(tmp_path / "step.h5", 5)
    for batch in range(50):
        writer.append(rows(6 + 300 * batch, 300, 1))
        writer.flush()
        with h5py.File(tmp_path / "step.h5", "r") as file:
            offset = file["committed"].id.get_offset()
            chunks = [file["events"].id.get_chunk_info(at) for at in range(file["events"].id.get_num_chunks())]
        raw = (tmp_path / "step.h5").read_bytes()
        stored = b"".join(raw[chunk.byte_offset : chunk.byte_offset + chunk.size] for chunk in chunks)
        seqs = np.frombuffer(stored, EVENT)["seq"]
        count = np.frombuffer(raw, "<u8", 8, offset)[6]
        assert count == 305 + 300 * batch == np.count_nonzero(seqs)
    assert offset // 4096 == (offset + 63) // 4096  # a page is written whole or not at all
    writer.close()
