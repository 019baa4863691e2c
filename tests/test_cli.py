"""The command line: what it prints, where, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import nantrace
from nantrace.cli import main
from nantrace.events import Trace
from nantrace.store.writer import TraceWriter
from tests.diagnosis.written import NAN, Written


def stored(trace: Trace, path: Path) -> Path:
    with TraceWriter(path, modules=trace.modules, meta=trace.meta) as writer:
        writer.add_sites(trace.sites)
        writer.append(trace.events)
        for step in trace.steps:
            writer.add_step({"first_seq": 1, "events": len(trace), **step})
        writer.flush()
    return path


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    written = Written()
    with written.call("", made=NAN):
        written.run("block.log", made=NAN)
    written.loss(nan=1)
    return stored(written.trace(), tmp_path / "bad step.h5")


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    written = Written()
    written.run("")
    written.loss()
    return stored(written.trace(), tmp_path / "clean.h5")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_report_prints_the_verdict_and_ends_with_the_next_command(bad: Path) -> None:
    done = run("report", bad)
    assert done.exit_code == 0
    assert "FIRST NONFINITE   forward   block.log" in done.stdout
    assert done.stdout.rstrip("\n").split("\n")[-1].startswith("Next: nantrace bisect ")
    assert done.stderr == ""


def test_without_a_terminal_there_is_no_colour(bad: Path) -> None:
    assert "\x1b" not in run("report", bad).stdout


def test_the_exit_code_tells_a_fault_only_when_asked(bad: Path, clean: Path) -> None:
    assert run("report", bad, "--exit-code").exit_code == 1
    assert run("report", bad).exit_code == 0
    assert run("report", clean, "--exit-code").exit_code == 0


def test_json_is_the_only_thing_on_stdout_and_strict(bad: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"not strict JSON: {constant}")

    found = json.loads(run("report", bad, "--json").stdout, parse_constant=refuse)
    assert found["verdict"]["origin"]["module"] == "block.log"


@pytest.mark.parametrize("suffix", ["txt", "json", "html"])
def test_a_report_is_written_by_its_extension(bad: Path, tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"out.{suffix}"
    done = run("report", bad, "-o", target)
    assert (done.exit_code, done.stdout) == (0, "")
    assert f"Wrote {target}" in done.stderr
    assert "block.log" in target.read_text(encoding="utf-8")


def test_an_unknown_extension_is_wrong_usage(bad: Path, tmp_path: Path) -> None:
    done = run("report", bad, "-o", tmp_path / "out.pdf")
    assert done.exit_code == 2
    assert "use one of .txt, .json, .html" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    "arguments", [["report"], ["report", "a.h5", "b.h5"], ["nonsense"], ["bisect", "a.py:f", "--depth", "deep"]]
)
def test_wrong_usage_exits_with_two(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize("command", ["report", "info"])
def test_a_file_that_is_no_trace_is_one_sentence_and_three(command: str, tmp_path: Path) -> None:
    wrong = tmp_path / "model.pt"
    wrong.write_bytes(b"PK\x03\x04")
    for path in (wrong, tmp_path / "missing.h5"):
        done = run(command, path)
        assert done.exit_code == 3
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1 and str(path) in done.stderr
        assert "Traceback" not in done.stderr


def test_a_report_that_cannot_be_written_is_one_sentence_and_three(bad: Path, tmp_path: Path) -> None:
    done = run("report", bad, "-o", tmp_path / "missing" / "out.txt")
    assert done.exit_code == 3
    assert "No such file or directory" in done.stderr


def test_info_says_what_the_trace_covers_and_quotes_the_next_command(bad: Path) -> None:
    done = run("info", bad)
    assert done.exit_code == 0
    assert "5, 3 of them nonfinite" in done.stdout
    assert done.stdout.rstrip("\n").endswith("bad step.h5'")


def test_the_version_is_the_packages() -> None:
    assert run("--version").stdout == f"nantrace, version {nantrace.__version__}\n"


@pytest.mark.parametrize("command", [[], ["report"], ["info"], ["bisect"]])
def test_every_command_explains_itself(command: list[str]) -> None:
    done = run(*command, "--help")
    assert done.exit_code == 0
    assert done.stdout.startswith("Usage: ")


def test_a_target_that_is_not_there_is_one_sentence_and_three(tmp_path: Path) -> None:
    done = run("bisect", f"{tmp_path}/none.py:step")
    assert done.exit_code == 3
    assert "none.py" in done.stderr and "Traceback" not in done.stderr


def test_reporting_in_a_fresh_interpreter_loads_no_torch(bad: Path) -> None:
    code = (
        "import sys, nantrace.cli\n"
        "try:\n    nantrace.cli.main(['report', sys.argv[1]])\n"
        "except SystemExit as end:\n    assert end.code in (0, None)\n"
        "assert 'torch' not in sys.modules and 'h5py' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(bad)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "FIRST NONFINITE" in done.stdout


def test_a_terminal_that_knows_no_unicode_gets_ascii(tmp_path: Path) -> None:
    written = Written()
    with written.call("", made=NAN):
        written.run("\u5c42", made=NAN)
    written.loss(nan=1)
    path = stored(written.trace(), tmp_path / "wide.h5")
    done = subprocess.run(
        [sys.executable, "-m", "nantrace.cli", "report", str(path)],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"\\u5c42" in done.stdout
