"""report.html in headless Chromium: charts, theme, width, sorting, and silence on the network and the console."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from qres.report.html import render_html
from tests.examples.levels import unpatched
from tests.examples.result import example
from tests.report.test_html import hostile

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page


sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = Path("/usr/bin/chromium")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is not installed"),
]

QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")


class Visit:
    """A page that is open, with everything it asked for and complained about."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def open(self, path: Path) -> None:
        self.page.goto(path.as_uri())
        self.drawn("light")

    def drawn(self, theme: str) -> None:
        self.page.wait_for_function(f"document.documentElement.dataset.drawn === '{theme}'", timeout=15_000)

    def overflow(self) -> int:
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=str(CHROMIUM), args=list(QUIET))
        yield running
        running.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target: Path = tmp_path_factory.mktemp("report") / "report.html"
    first, *others = example().levels
    gap = dataclasses.replace(example(), levels=(unpatched(first, "2.attention"), *others))
    target.write_text(render_html(gap), encoding="utf-8")
    return target


@pytest.fixture(scope="module")
def visit(browser: Browser, path: Path) -> Iterator[Visit]:
    page = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme="light")
    found = Visit(page)
    found.open(path)
    yield found
    page.close()


def contrast(page: Page, selector: str) -> float:
    """WCAG 2 contrast of an element's text against the page."""
    colours = page.evaluate(
        "s => [getComputedStyle(document.querySelector(s)).color, getComputedStyle(document.body).backgroundColor]",
        selector,
    )
    light, dark = sorted((luminance(colour) for colour in colours), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_chart_has_marks(visit: Visit) -> None:
    marks = visit.page.evaluate(
        "[...document.querySelectorAll('[data-chart]')].map(box => [box.dataset.chart, "
        "[...box.querySelectorAll(['symbol', 'rect', 'line', 'area'].map(mark => `svg .mark-${mark} path`).join())]"
        ".filter(path => path.getAttribute('d')?.length > 8 && !path.closest('.role-legend')).length])"
    )
    assert len(marks) == 10
    assert all(count > 0 for _, count in marks), marks


def test_no_requests_and_a_silent_console(visit: Visit) -> None:
    assert [url for url in visit.requests if not url.startswith("file:")] == []
    assert len(visit.requests) == 1
    assert visit.complaints == []


@pytest.mark.parametrize("width", [390, 768, 1400])
def test_page_does_not_scroll_sideways(visit: Visit, width: int) -> None:
    visit.page.set_viewport_size({"width": width, "height": 900})
    visit.page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    visit.page.wait_for_timeout(200)
    assert visit.overflow() <= 0
    outside = visit.page.evaluate(
        "[...document.querySelectorAll('[data-chart]')].filter(box => "
        "box.querySelector('svg').getBoundingClientRect().right > box.getBoundingClientRect().right + 1).length"
    )
    assert outside == 0


def test_header_sorts_by_number_and_keeps_missing_values_last(visit: Visit) -> None:
    visit.page.set_viewport_size({"width": 1400, "height": 900})
    visit.page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    button = visit.page.locator("#units-Q4_K_M thead button", has_text="KLD ± SE")
    read = "[...document.querySelectorAll('#units-Q4_K_M tbody td:nth-child(2)')].map(cell => cell.dataset.key ?? null)"
    for direction, reverse in (("ascending", False), ("descending", True)):
        button.focus()
        visit.page.keyboard.press("Enter")
        assert button.locator("..").get_attribute("aria-sort") == direction
        keys = visit.page.evaluate(read)
        assert keys[-1] is None
        numbers = [float(key) for key in keys[:-1]]
        assert numbers == sorted(numbers, reverse=reverse)
        assert len(numbers) == 9


def test_choosing_a_level_changes_the_chart(visit: Visit) -> None:
    box = visit.page.locator("[data-chart=stream]")
    before = box.locator("svg").inner_html()
    box.get_by_label("Q5_K_M").check()
    visit.page.wait_for_timeout(200)
    assert box.locator("svg").inner_html() != before


@pytest.mark.parametrize(("chart", "choice"), [("trust", "Q5_K_M"), ("tensors", "Q5_K")])
def test_choosing_in_the_charts_of_predictions_changes_them_without_a_warning(
    visit: Visit, chart: str, choice: str
) -> None:
    box = visit.page.locator(f"[data-chart={chart}]")
    before = box.locator("svg").inner_html()
    box.get_by_label(choice).check()
    visit.page.wait_for_timeout(200)
    assert box.locator("svg").inner_html() != before
    assert visit.complaints == []


def test_predicted_numbers_are_italic(visit: Visit) -> None:
    styles = visit.page.evaluate(
        "[...document.querySelectorAll('td, .note span, section > p span')].filter(e => e.textContent.startsWith('≈'))"
        ".map(e => getComputedStyle(e).fontStyle)"
    )
    assert len(styles) > 200
    assert set(styles) == {"italic"}


def test_dark_theme_redraws_keeps_choices_and_stays_readable(visit: Visit) -> None:
    page = visit.page
    backgrounds, axes = [], []
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        visit.drawn(theme)
        backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        axes.append(
            page.evaluate("document.querySelector('[data-chart=drift] .role-axis-label text').getAttribute('fill')")
        )
        for selector in ("main p", ".note", "figcaption p", "nav a", "thead button", ".headline", "footer"):
            assert contrast(page, selector) >= 4.5, (theme, selector)
    assert abs(luminance(backgrounds[0]) - luminance(backgrounds[1])) > 0.8
    assert axes[0] != axes[1]
    assert page.locator("[data-chart=stream]").get_by_label("Q5_K_M").is_checked()
    page.emulate_media(color_scheme="light")
    visit.drawn("light")
    assert visit.complaints == []


def test_hostile_names_run_nothing(browser: Browser, tmp_path: Path) -> None:
    target = tmp_path / "hostile.html"
    target.write_text(render_html(hostile()), encoding="utf-8")
    page = browser.new_page(viewport={"width": 390, "height": 900}, color_scheme="light")
    found = Visit(page)
    dialogs: list[str] = []

    def dismiss(dialog: Dialog) -> None:
        dialogs.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", dismiss)
    found.open(target)
    assert dialogs == []
    assert page.locator("img").count() == 0
    assert found.overflow() <= 0
    assert found.complaints == []
    page.close()
