"""The page in a real browser: it opens, filters and folds by keyboard, and says nothing on the console.

Runs where a headless Chromium is installed; Playwright drives it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nantrace
from tests.render.drawn import overflow

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("page") / "report.html"
    nantrace.report(overflow(module="block.1.</script><img src=x onerror=alert(1)>")).save(path)
    return path.as_uri()


@pytest.fixture
def complaints() -> list[str]:
    return []


@pytest.fixture
def shown(browser: Any, address: str, complaints: list[str]) -> Iterator[Any]:
    """The page as it opens; whatever the console says or the page asks for is a complaint."""
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    page.on("request", lambda request: complaints.append(request.url) if request.url != address else None)
    page.goto(address)
    yield page
    page.close()


def _visible(page: Any) -> list[str]:
    return [node.get_attribute("data-name") for node in page.query_selector_all("#tree details") if node.is_visible()]


def test_it_opens_without_a_complaint(shown: Any, complaints: list[str]) -> None:
    assert shown.title() == "nantrace: contained step.h5"
    assert shown.locator("#verdict").is_visible() and shown.locator("svg").count() == 4
    assert shown.locator("img").count() == 0
    assert complaints == []


def test_it_filters_by_name_and_gives_the_tree_back(shown: Any, complaints: list[str]) -> None:
    before = _visible(shown)
    shown.get_by_label("Filter by name").fill("0.ff.WI")
    assert _visible(shown) == ["(model)", "block", "block.0", "block.0.ff", "block.0.ff.wi"]
    assert shown.locator("#tools output").inner_text().startswith("1 of ")
    shown.get_by_label("Filter by name").fill("")
    assert _visible(shown) == before
    assert complaints == []


def test_it_shows_only_what_is_nonfinite(shown: Any) -> None:
    shown.get_by_label("only nonfinite").check()
    visible = _visible(shown)
    assert "block.0.ff.wi" not in visible and "block.1" in visible and "(model)" in visible


def test_it_folds_by_keyboard(shown: Any) -> None:
    model = shown.locator("#tree details").first
    assert model.get_attribute("open") is not None
    shown.get_by_role("button", name="Fold all", exact=True).focus()
    shown.keyboard.press("Tab")
    shown.keyboard.press("Enter")
    assert model.get_attribute("open") is None
    shown.keyboard.press("Space")
    assert model.get_attribute("open") is not None


def test_all_can_be_folded_and_unfolded(shown: Any) -> None:
    shown.get_by_role("button", name="Unfold all").press("Enter")
    assert len(_visible(shown)) == shown.locator("#tree details").count()
    shown.get_by_role("button", name="Fold all", exact=True).press("Enter")
    assert len(_visible(shown)) == 2  # the model, and what is outside of it


def test_it_can_be_read_without_a_script(browser: Any, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    assert page.locator("#tools").is_hidden()
    assert page.locator("#tree").is_visible() and page.locator("#verdict").is_visible()
    context.close()


@pytest.mark.parametrize("width", [320, 700, 1400])
def test_the_page_itself_never_scrolls_sideways(browser: Any, address: str, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.goto(address)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


def test_it_is_dark_where_the_reader_wants_it_dark(browser: Any, address: str) -> None:
    sums = {}
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(address)
        colours = page.evaluate(
            "['backgroundColor', 'color'].map("
            "name => getComputedStyle(document.body)[name].match(/[0-9]+/g).slice(0, 3))"
        )
        sums[scheme] = [sum(map(int, colour)) for colour in colours]
        page.close()
    assert sums["light"][0] > 700 > 200 > sums["light"][1]
    assert sums["dark"][0] < 200 < 600 < sums["dark"][1]
