"""What long work says while it goes on: on a terminal one line, rewritten and then gone; elsewhere nothing."""

from __future__ import annotations

import functools
import io
import threading
import time
from pathlib import Path

import pytest

import nantrace
from nantrace.cli import main, reading
from nantrace.cli.console import UnderWay
from nantrace.events import Trace
from nantrace.export.export import FORMATS, export
from tests.diagnosis.written import Written
from tests.test_cli import stored


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """No fixture: what captures the output of a test takes its place before the test begins."""
    seen = Terminal()
    monkeypatch.setattr("sys.stderr", seen)
    monkeypatch.setenv("TERM", "xterm")
    return seen


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    written = Written()
    written.run("block")
    written.loss()
    return nantrace.load(stored(written.trace(), tmp_path / "step.h5"))


def worked(work: UnderWay, *told: str) -> None:
    """Tells lines, and goes on for a while."""
    with work:
        for line in told:
            work.tell(line)
        time.sleep(0.3 if told else 0.0)


def test_a_terminal_shows_the_last_line_told_and_at_the_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    worked(UnderWay(pace=0.01), "early", "read 3 of 5 events")
    shown = terminal.getvalue()
    assert "\r\x1b[Kread 3 of 5 events, 0 s" in shown and "\n" not in shown
    assert shown.endswith("\r\x1b[K")


def test_what_is_done_soon_shows_nothing_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    before = threading.active_count()
    worked(UnderWay())
    assert terminal.getvalue() == "" and threading.active_count() == before


def test_nothing_is_written_where_no_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    work = UnderWay(pace=0.0)
    worked(work, "read 3 of 5 events")
    assert stream.getvalue() == "" and work.shown is None and str(work) == ""


def test_a_name_out_of_a_file_cannot_command_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    worked(UnderWay(pace=0.01), "tensor 1 of 2, w\x1b[31m\nNext: rm")
    assert "w\\x1b[31m\\x0aNext" in terminal.getvalue() and "\x1b[31m" not in terminal.getvalue()


def test_a_terminal_that_cannot_go_back_gets_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    worked(UnderWay(pace=0.01), "read 3 of 5 events")
    assert "\x1b" not in terminal.getvalue() and "read 3 of 5 events, 0 s\n" in terminal.getvalue()


def test_loading_comparing_and_exporting_tell_how_far_they_are(trace: Trace, tmp_path: Path) -> None:
    told: list[str] = []
    assert trace.path is not None
    nantrace.load(trace.path, progress=told.append)
    assert told == [f"read {len(trace)} of {len(trace)} events"]
    nantrace.diff(trace, trace, progress=told.append)
    count = len(trace)
    assert told[1:] == [f"pairing {count} and {count} events", f"compared {count} of {count} events"]
    for form in FORMATS:
        told.clear()
        export(trace, form, tmp_path / form, told.append)
        assert told[-1] == f"wrote {count} of {count} events" and told[0].startswith("wrote "), form


def test_a_command_under_way_shows_its_line_and_wipes_it_before_it_answers(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = a_terminal(monkeypatch)
    work = functools.partial(UnderWay, pace=0.01)
    monkeypatch.setattr(reading, "UnderWay", work)
    slow = nantrace.api.load

    def load(path: str, progress: object) -> Trace:
        loaded: Trace = slow(path, progress=progress)  # type: ignore[arg-type]
        time.sleep(0.2)
        return loaded

    monkeypatch.setattr("nantrace.api.load", load)
    main(["info", str(trace.path)], standalone_mode=False)
    assert f"read {len(trace)} of {len(trace)} events" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K") and "Next: nantrace report" in capsys.readouterr().out
