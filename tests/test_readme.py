"""The README does what it says: its files are written, its code and commands run in order, and its outputs are true.

A python block whose first line is `# name.py` is that file; the others run one after the other, as in a notebook beside
it. A text block stands below a mark with the command that prints it: its lines are among those printed, in that order;
numbers may differ, as they do from processor to processor. The two set-up commands are run by `.ci/run`.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import nantrace
from benchmarks import cost
from nantrace.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
OUTPUTS = re.findall(r"^<!-- printed by ([^\n]+) -->\n\n```text\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SET_UP = ("# install and run", "# install and test")


def blocks(language: str) -> list[str]:
    return [content for found, content in BLOCKS if found == language]


def commands() -> list[str]:
    """Each line of the shell blocks, the set-up commands left out, without what a comment says of it."""
    found = [content for content in blocks("bash") if not content.startswith(SET_UP)]
    return [line.split("  #")[0].strip() for content in found for line in content.splitlines() if line.strip()]


def printed(command: str) -> str:
    """What a command prints; it succeeds."""
    program, *arguments = shlex.split(command)
    if program == "nantrace":
        done = CliRunner().invoke(main, arguments, env={"COLUMNS": "80"})
        assert done.exit_code == 0, done.output
        return done.output
    assert program == "python", f"the README runs {program}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


def alike(line: str) -> str:
    """A line of which the numbers are left out, and how far columns are apart."""
    return " ".join(re.sub(r"-?\d[\d.,]*(?:e[+-]?\d+)?", "#", line).split())


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """The README was followed in a fresh folder; gives what each of its commands printed."""
    from matplotlib import pyplot

    pyplot.switch_backend("agg")
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("newcomer"))
    run = functools.cache(printed)
    try:
        sys.path.insert(0, "")
        names: dict[str, Any] = {}
        for language, content in BLOCKS:
            named = re.match(r"# (\w+\.py)\n", content)
            if language == "python" and named:
                Path(named[1]).write_text(content)
            elif language == "python":
                exec(content, names)
            elif language == "bash" and not content.startswith(SET_UP):
                for command in (line for line in commands() if line in content):
                    run(command)
        yield run
    finally:
        pyplot.close("all")
        sys.path.remove("")
        sys.modules.pop("train", None)
        os.chdir(before)


def test_each_block_is_code_that_runs_or_output_that_is_compared() -> None:
    assert {language for language, _ in BLOCKS} == {"bash", "python", "text"}
    assert len(OUTPUTS) == len(blocks("text")) >= 3
    assert [content.split("\n")[0] for content in blocks("bash") if content.startswith(SET_UP)] == list(SET_UP)


@pytest.mark.parametrize(("command", "output"), OUTPUTS, ids=[command for command, _ in OUTPUTS])
def test_the_output_shown_is_what_the_command_prints(command: str, output: str, ran: Callable[[str], str]) -> None:
    actual = iter([alike(line) for line in ran(command).splitlines()])
    for line in filter(None, map(alike, output.splitlines())):
        assert any(line in other for other in actual), f"{command} does not print, or not in this place: {line}"


def test_the_loop_that_fails_late_is_replayed_with_the_batch_that_failed(ran: Callable[[str], str]) -> None:
    found = ran("nantrace bisect train.py:step --capture step.capture")
    assert "samples of the batch: 3" in found and "its forward ran at train.py:14 in forward" in found


def test_each_command_line_verb_and_public_name_is_mentioned() -> None:
    verbs = {shlex.split(command)[1] for command in commands() if command.startswith("nantrace ")}
    assert verbs == set(main.commands)
    code = "\n".join(blocks("python"))
    functions = [name for name in nantrace.__all__ if name[0].islower() and name[0] != "_"]
    assert [name for name in functions if f"nantrace.{name}(" not in code] == []


def test_the_table_of_costs_is_made_from_the_rows_that_were_measured() -> None:
    assert cost.refreshed(README) == README


def test_what_the_readme_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links and all((ROOT / link).exists() for link in links if not link.startswith("http"))
    assert len(README.splitlines()) <= 330
