"""The page and the cells: what they hold, that no name can break them, that nothing is fetched, how large they get."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nantrace
from nantrace.diagnosis.diagnose import diagnose
from nantrace.diagnosis.verdict import Origin, Verdict
from nantrace.events import TensorStats, Trace
from nantrace.render.html import cell, page, trace_cell
from nantrace.render.svg.ledger import ledger_svg
from tests.render.drawn import all_nan, clean, empty, masked, one_event, overflow, wide

SNAPSHOTS = Path(__file__).parent / "snapshots"
EVIL = "</script><img src=x onerror=alert(1)>"
#: Pieces that mean something to a parser, so that few examples meet many of them.
_MARKUP = ("<b>", "</details>", "<", ">", '"', "'", "&", "&lt;", "<!--", "]]>", "\x1b[2J", "</style>", "x=1")
_VOID = {"meta", "link", "input", "img", "br"}
_CLOSED_BY_OTHERS = {"li", "td", "th", "tr", "dt", "dd", "thead", "tbody", "p"}


class _Reader(HTMLParser):
    """Reads a page strictly: what it holds by tag, and that what must be closed is closed in order."""

    def __init__(self, markup: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(markup)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID and tag not in _CLOSED_BY_OTHERS and self.get_starttag_text()[-2:] != "/>":  # type: ignore[index]
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in _CLOSED_BY_OTHERS:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def _verdict(module: str = "block.1.ff.wo") -> Verdict:
    """Written out, so that what it is told by does not depend on how others word a diagnosis."""
    stats = TensorStats("float16", (2, 4), 8, 3, posinf=5, min=-6e4, max=6e4, first_bad=3)
    origin = Origin(2, "forward", module, tensor=f"{module} output", kind="inf", dtype="float16", output=stats)
    steps = ((61, module, "output"), (62, "block.1", "output"), (64, None, "loss"))
    path = tuple(
        {"seq": seq, "step": 2, "phase": "forward", "module": place, "role": role, "slot": role, "dtype": "float16"}
        for seq, place, role in steps
    )
    evidence = ("The result left the range.", "All before it was finite.")
    return Verdict("fault", "forward", "overflow", origin, evidence, ("Try bfloat16.",), path=path)


def _report(trace: Trace) -> str:
    return page(trace, diagnose(trace))


@pytest.mark.parametrize("name", ["page", "cell", "verdict_cell", "trace_cell"])
def test_a_page_reads_as_it_did(name: str, update_snapshots: bool) -> None:
    trace, verdict = overflow(), _verdict()
    made = {
        "page": lambda: page(trace, verdict),
        "cell": lambda: cell(trace, verdict),
        "verdict_cell": lambda: cell(None, verdict),
        "trace_cell": lambda: trace_cell(trace),
    }[name]()
    made = re.sub(r"<style>.*?</style>|<script>.*?</script>|'sha256-[^']*'", "", made, flags=re.DOTALL)
    path = SNAPSHOTS / f"{name}.html"
    if update_snapshots:
        SNAPSHOTS.mkdir(exist_ok=True)
        path.write_text(made, encoding="utf-8")
    assert made == path.read_text(encoding="utf-8")


def test_the_page_has_every_part_and_the_links_lead_to_them() -> None:
    reader = _Reader(_report(overflow()))
    names = [attributes["id"] for attributes in reader.all("section")]
    assert names == ["verdict", "evidence", "next", "path", "pictures", "modules", "ledger", "steps", "environment"]
    assert [attributes["href"] for attributes in reader.all("a")] == [f"#{name}" for name in names]
    assert len(reader.all("svg")) == 4
    assert all(attributes["aria-label"] for attributes in reader.all("svg"))
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for said in (
        "block.1.ff.wo",
        "float16",
        "GradScaler skipped",
        "5 +inf of 8 elements",
        "nantrace bisect FILE.py:step",
    ):
        assert said in reader.text


def test_nothing_is_fetched_and_only_the_own_script_may_run() -> None:
    markup = _report(overflow())
    reader = _Reader(markup)
    assert "http:" not in markup and "https:" not in markup and "@import" not in markup
    assert [attributes.get("src") for attributes in reader.all("script")] == [None]
    assert [attributes["href"] for attributes in reader.all("link")] == ["data:,"]
    script = markup.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = (each["content"] for each in reader.all("meta") if "http-equiv" in each)
    assert policy is not None and policy.startswith("default-src 'none'") and f"'sha256-{digest}'" in policy


def test_a_module_called_like_markup_is_only_text() -> None:
    for markup in (_report(overflow(module=EVIL)), cell(overflow(module=EVIL), _verdict(EVIL))):
        reader = _Reader(markup)
        assert EVIL in reader.text
        assert reader.all("img") == [] and len(reader.all("script")) == markup.count("<script>") <= 1


@given(st.lists(st.sampled_from(_MARKUP) | st.text(max_size=4), max_size=8).map("".join))
@settings(deadline=None, max_examples=25)
def test_any_name_is_text(name: str) -> None:
    usual = {tag for tag, _ in _Reader(_report(overflow())).tags}
    verdict = Verdict(
        "fault", "forward", name, Origin(module=name, tensor=name, where=name), (name,), (name,), region=(name,)
    )
    for markup in (_report(overflow(module=f"block.1.{name}")), page(None, verdict)):
        assert {tag for tag, _ in _Reader(markup).tags} <= usual
        assert all(character.isprintable() or character == "\n" for character in markup)


def test_the_tree_is_open_along_the_way_to_the_failure_and_closed_beside_it() -> None:
    for markup in (_report(overflow()), cell(overflow(), _verdict()), trace_cell(overflow())):
        branches = {each["data-name"]: "open" in each for each in _Reader(markup).all("details") if "data-name" in each}
        assert all(branches[name] for name in ("(model)", "block", "block.1", "block.1.ff", "block.1.ff.wo"))
        assert not branches["block.0"] and not branches["block.1.ff.wi"]
        assert markup.count("class=culprit><td>\u25b6") >= 1


@pytest.mark.parametrize("make", [empty, one_event, all_nan, clean, masked, overflow], ids=lambda make: make.__name__)
def test_small_and_odd_traces_have_a_page_and_cells(make: Callable[[], Trace]) -> None:
    trace = make()
    reader = _Reader(_report(trace))
    assert diagnose(trace).status.split("_")[0].upper() in reader.text
    _Reader(cell(trace, diagnose(trace)))
    _Reader(trace_cell(trace))


def test_a_trace_without_ledger_has_no_empty_table() -> None:
    assert 'id="ledger"' not in _report(one_event())


def test_ten_thousand_events_fit_and_what_was_joined_is_said() -> None:
    trace = wide(2000, born=0.9)
    verdict = _verdict("layers.390.ln")
    markup = page(trace, verdict)
    assert len(trace) == 10_001 and len(markup.encode()) < 5_000_000
    said = _Reader(markup).text
    assert "Of 10,001 sites, all sites of a module are joined, but for the modules that failed." in said
    assert "consecutive events" in said and "each cell is the worst of what it joins" in said


def test_a_cell_of_a_large_trace_stays_small() -> None:
    assert len(cell(wide(2000, born=0.5), _verdict()).encode()) < 200_000
    assert "Of 3,203 modules, 2,903 are not shown." in _Reader(trace_cell(wide(2000, born=0.5))).text


def test_of_a_long_trace_the_ledger_shows_the_steps_that_went_wrong() -> None:
    trace = wide(1)
    rows = tuple(
        {"step": n, "loss": 1.0, "attempted": 1, "committed": 1, "skipped": int(n == 900)} for n in range(1000)
    )
    markup = page(Trace(trace.events, trace.sites, steps=rows), Verdict("clean"))
    assert ">900<" in markup and ">500<" not in markup.split('id="ledger"')[1]
    assert "and 800 more steps" in markup


def test_names_that_nest_deeper_than_calls_may_still_make_a_page() -> None:
    _Reader(_report(overflow(module=".".join("a" * 3000))))


def test_values_show_themselves_in_a_notebook_and_load_the_renderer_only_then() -> None:
    trace, verdict = overflow(), _verdict()
    assert trace._repr_html_() == trace_cell(trace)
    assert verdict._repr_html_() == cell(None, verdict)
    assert nantrace.report(verdict)._repr_html_() == cell(None, verdict)
    code = (
        "import sys; from nantrace.diagnosis.verdict import Verdict; import nantrace.events\n"
        "assert not [name for name in sys.modules if name.startswith('nantrace.render')]\n"
        "assert 'CLEAN' in Verdict('clean')._repr_html_()\n"
        "assert not {'torch', 'h5py', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_saved_report_is_the_page(tmp_path: Path) -> None:
    report = nantrace.report(overflow())
    report.save(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page(report.trace, report.verdict)


def test_the_legend_of_a_long_ledger_shows_lines_and_that_of_a_short_one_marks() -> None:
    rows = [{"step": n, "loss": 1.0 + n, "gradient_norm": 2.0, "scale_before": 65536.0} for n in range(200)]
    for count, dashes in ((200, 3), (20, 1)):  # the scale has no marks of its own
        picture, _ = ledger_svg(Trace(overflow().events[:0], (), steps=tuple(rows[:count])))
        assert picture.count('d="M-9 0H9"') == dashes
        assert ">65,536</text>" in picture
    assert [f">{step}</text>" in picture for step in (0, 2, 18, 19)] == [True, True, True, False]


def test_a_single_step_has_no_picture_of_its_ledger() -> None:
    """One mark on an empty plane says less than the table below it."""
    assert ledger_svg(overflow(1)) == ("", "") and ledger_svg(overflow(2))[0]


def test_words_beside_lines_keep_an_edge_of_paper() -> None:
    markup = _report(overflow())
    assert markup.count('class="told small"') >= 3 and 'class="told born small"' in markup
    assert ".told { stroke: var(--paper);" in markup
