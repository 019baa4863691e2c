"""`Report`: a value that shows itself and saves itself by extension."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import nantrace
from nantrace.diagnosis.verdict import Origin, Verdict
from nantrace.events import TensorStats
from tests.diagnosis.written import NAN, Written


def of_trace() -> nantrace.report:  # type: ignore[valid-type]
    written = Written()
    with written.call("", made=NAN):
        written.run("<u>", made=NAN)
    written.loss(nan=1)
    return nantrace.report(written.trace())


def test_a_report_of_a_trace_holds_its_verdict() -> None:
    report = of_trace()
    assert report.verdict.status == "fault"
    assert "FIRST NONFINITE" in str(report)
    assert repr(report) == str(report)


def test_a_notebook_gets_escaped_names() -> None:
    shown = of_trace()._repr_html_()
    assert shown.startswith("<") and "&lt;u&gt;" in shown and "<u>" not in shown


@pytest.mark.parametrize("suffix", [".txt", ".json", ".html"])
def test_the_extension_chooses_the_form_and_an_old_report_is_replaced(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"out{suffix}"
    path.write_text("stale")
    of_trace().save(path)
    written = path.read_text(encoding="utf-8")
    assert "stale" not in written
    if suffix == ".json":
        assert json.loads(written)["verdict"]["status"] == "fault"
    else:
        assert "FAULT in" in written
    assert written.startswith("<!doctype html>") == (suffix == ".html")


@pytest.mark.parametrize("name", ["report.pdf", "report", ".html.gz"])
def test_another_extension_is_refused_with_those_that_are_allowed(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"use one of \.txt, \.json, \.html") as error:
        of_trace().save(tmp_path / name)
    assert name in str(error.value)
    assert not list(tmp_path.iterdir())


def test_json_is_strict_even_with_infinite_statistics() -> None:
    stats = TensorStats("float32", (1,), 1, 0, posinf=1, max=float("inf"))
    verdict = Verdict("fault", origin=Origin(output=stats), path=({"value": float("nan")},))
    plain = nantrace.report(verdict).to_dict()
    assert plain["verdict"]["origin"]["output"]["max"] == {"finite": False, "value": "inf"}
    json.dumps(plain, allow_nan=False)
    assert plain["trace"] is None


def test_a_report_of_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="report got a str: pass a Trace"):
        nantrace.report("step.h5")  # type: ignore[arg-type]
