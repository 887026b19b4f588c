"""A real browser loads the page, keys and clicks through it."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.report_runs import BAD, add, message, rounds, site, usual, whole, write_run

from dilocox.tools.report.folder import read_run
from dilocox.tools.report.live import Server
from dilocox.tools.report.page import build
from dilocox.tools.report.render import SECTIONS, render

pytestmark = pytest.mark.waits

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
                None)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    # Chromium's own sandbox refuses to start for root.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


def open_page(browser: Any, url: str, **options: Any) -> tuple[Any, list[str]]:
    """A tab of its own, and everything it complains about."""
    page = browser.new_context(**options).new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    page.on("request", lambda r: problems.append(r.url) if not r.url.startswith(url) else None)
    page.goto(url)
    return page, problems


@pytest.fixture
def written(tmp_path: Path) -> str:
    folder = write_run(tmp_path / "toy", [message(BAD, "members"), *usual()])
    (folder / "report.html").write_text(render(build(read_run(folder), 0.0)), encoding="utf-8")
    return (folder / "report.html").as_uri()


def test_keys_and_clicks(browser: Any, written: str) -> None:
    page, problems = open_page(browser, written, offline=True)
    assert page.locator("section").count() == len(SECTIONS)
    assert page.locator("#events").inner_text().count("onerror") == 1
    assert page.evaluate("window.harmed") is None
    # The first key leads past the sections' links.
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "plot-loss"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    plot, reading = page.locator("#plot-loss"), page.locator("#chart-loss .reading")
    assert plot.get_attribute("aria-valuetext") == reading.inner_text()
    page.keyboard.press("Home")
    assert reading.inner_text() == "step 0: held-out 6.000"
    page.keyboard.press("ArrowRight")
    assert reading.inner_text() == "step 20: paris 5.000, lyon 5.000, all sites 5.000"
    assert plot.get_attribute("aria-valuetext") == reading.inner_text()
    assert page.locator("#chart-loss .cursor").get_attribute("visibility") == "visible"
    # Values of a chart as a table, with the keyboard.
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.locator("#values-loss table tbody tr").count() == 4
    assert page.locator("#values-loss").get_attribute("open") is not None
    # The pointer reads charts too.
    page.locator("#plot-phases").hover(position={"x": 90, "y": 60})
    assert page.locator("#chart-phases .reading").inner_text().startswith("round 0: training 9.0 s")
    page.get_by_role("link", name="Verification").click()
    assert page.evaluate("location.hash") == "#verify"
    assert problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_it_fits_and_can_be_read(browser: Any, written: str, scheme: str, width: int) -> None:
    size = {"width": width, "height": 800}
    page, problems = open_page(browser, written, color_scheme=scheme, viewport=size)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for details in page.locator("details").all():
        details.evaluate("each => { each.open = true; }")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(LEAST_CONTRAST) >= 4.5
    smallest = page.evaluate(
        "Math.min(...[...document.querySelectorAll('.tick')].map(t => t.getBoundingClientRect()"
        ".height))"
    )
    assert smallest >= 10
    assert problems == []


LEAST_CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const light = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((v) => {
      v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (each) => {
    for (; each; each = each.parentElement) {
      const found = getComputedStyle(each).backgroundColor;
      if (!found.startsWith('rgba(0, 0, 0, 0')) return found;
    }
    return 'white';
  };
  let least = 21;
  for (const each of document.querySelectorAll('main *, header a, footer *, .tick')) {
    const own = [...each.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || each.closest('script')) continue;
    const style = getComputedStyle(each);
    const text = light(each.closest('svg') ? style.fill : style.color), back = light(ground(each));
    least = Math.min(least, (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05));
  }
  return least;
}"""
"""Least contrast of any text (WCAG 2.2, success criterion 1.4.3: 4.5 for text of this size)."""


def test_it_prints(browser: Any, written: str) -> None:
    page, _ = open_page(browser, written)
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    assert page.locator("#chart-loss svg").first.is_visible()
    assert page.pdf().startswith(b"%PDF")


def test_a_live_page_renews_itself(browser: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "toy", rounds(0), phase="")
    with Server(folder, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        page, problems = open_page(browser, server.url)
        page.locator("#plot-bytes").focus()
        page.locator("#values-bytes summary").evaluate("each => each.click()")
        page.locator("#plot-bytes").focus()
        add(folder, [site(1, BAD), whole(1)])
        page.locator("#values-bytes tbody tr").nth(1).wait_for()
        # What was open and focused stays so.
        assert page.evaluate("document.activeElement.id") == "plot-bytes"
        page.keyboard.press("Home")
        assert page.locator("#chart-bytes .reading").inner_text().startswith("step 20: sent 1.0 kB")
        page.locator("#sites article", has_text="onerror").wait_for()
        assert page.evaluate("window.harmed") is None
        assert problems == []
        server.shutdown()
        thread.join()
    page.get_by_text("The server does not answer any more").wait_for()
