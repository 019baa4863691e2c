"""Makes examples/report.png, the picture of a real report in the README, with a headless Chromium.

python -m tests.picture
"""

from __future__ import annotations

import contextlib
import io
import runpy
import tempfile
import warnings
from pathlib import Path

from PIL import Image  # comes with matplotlib

import nantrace
from tests.render.test_html_browser import CHROMIUM, playwright

EXAMPLES = Path(__file__).parent.parent / "examples"
_WIDTH, _HEIGHT = 960, 1192  # of what is shown of the page: verdict, evidence, next checks and the way


def main() -> None:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        made = runpy.run_path(str(EXAMPLES / "overflow_in_float16.py"))
    with tempfile.TemporaryDirectory() as folder, playwright.sync_playwright() as driver:
        page = Path(folder) / "report.html"
        nantrace.report(made["tracer"].trace).save(page)
        browser = driver.chromium.launch(executable_path=CHROMIUM)
        shown = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT}, color_scheme="light")
        shown.goto(page.as_uri())
        taken = shown.screenshot()
        browser.close()
    Image.open(io.BytesIO(taken)).convert("RGB").quantize(256).save(EXAMPLES / "report.png", optimize=True)


if __name__ == "__main__":
    main()
