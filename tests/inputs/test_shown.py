"""Names made to mislead, in all that a scan shows: terminal, page, Markdown, JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from qres.pipeline import run
from qres.records.as_json import to_json
from qres.records.result import Result, Skipped
from qres.report.charts import scan
from qres.report.markdown import render_markdown
from tests.examples.result import example
from tests.inputs import case as inputs
from tests.inputs.names import SHOWN, TRICKS

EVERYTHING, ITS_LOOK = (" ".join(texts.values()) for texts in (TRICKS, SHOWN))


def tricked(trick: str, look: str) -> Result:
    """A result in which all that comes from files or names is that text; a level's name is shown before it is one."""
    result = example()
    return replace(
        result,
        reference=replace(result.reference, path=f"{trick}.gguf", name=trick, architecture=trick),
        settings=replace(result.settings, text=trick, rank_text=trick),
        levels=(replace(result.levels[0], name=look), *result.levels[1:]),
        verdict=replace(result.verdict, headline=f"Ship {trick}", keep=trick, details=trick),
        skipped=(Skipped(trick, trick),),
        warnings=(trick,),
    )


class _Page(HTMLParser):
    """Collects what an HTML page would load, run, or lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.active: list[str] = []
        self._script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._script = tag == "script"
        for name, text in attrs:
            if name.startswith("on") or (name in ("src", "srcset", "href", "style") and "x.invalid" in (text or "")):
                self.active.append(f"{tag} {name}")

    def handle_endtag(self, tag: str) -> None:
        self._script = False

    def handle_data(self, data: str) -> None:
        if self._script and data.strip().startswith("alert(1)"):
            self.active.append(data)


def active(html: str) -> list[str]:
    """What of the tricks would do something."""
    page = _Page()
    page.feed(html)
    return page.active


def active_markdown(text: str) -> list[str]:
    """The same, of Markdown that is shown by something that takes HTML in it."""
    return active(MarkdownIt("commonmark", {"html": True}).enable("table").render(text))


def test_the_checks_would_see_it() -> None:
    assert active("<p title='<script>alert(1)'>&lt;script>alert(1)</p>") == []
    assert active(TRICKS["html"]) == ["alert(1)"]
    assert active("<img src='http://x.invalid/a' onerror=x>") == ["img src", "img onerror"]
    assert active_markdown(TRICKS["markdown"]) == ["img src"]
    assert active_markdown(TRICKS["html"]) == ["alert(1)"]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The texts that a scan of such files leaves, by kind, when all tricks are in one; nothing else is written."""
    with pytest.MonkeyPatch.context() as patches:
        place = inputs.sandbox(tmp_path_factory.mktemp("shown"), patches)
        patches.setattr(run, "scan", lambda *_: tricked(EVERYTHING, ITS_LOOK))
        before = inputs.snapshot(place.root)
        found = inputs.run(["scan", "m.gguf", "--out", "out"])
        assert found.code == 0, found.err
        files = {name.removeprefix("work/out") for name in inputs.snapshot(place.root).keys() - before.keys()}
    assert {name for name in files if not name.startswith("/charts")} == {
        "",
        "/report.html",
        "/report.md",
        "/result.json",
    }
    texts = {path.suffix[1:]: path.read_text(encoding="utf-8") for path in (place.work / "out").glob("re*.*")}
    return {**texts, "svg": "".join(p.read_text(encoding="utf-8") for p in place.root.rglob("*.svg")), "out": found.out}


def test_page_loads_and_runs_nothing(shown: dict[str, str]) -> None:
    assert active(shown["html"]) == []
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown["html"]


def test_markdown_loads_and_runs_nothing(shown: dict[str, str]) -> None:
    assert active_markdown(shown["md"]) == []
    assert "http://x.invalid" in shown["md"]


def test_images_load_and_run_nothing(shown: dict[str, str]) -> None:
    assert active(shown["svg"]) == []


def test_json_has_the_texts_as_they_are(shown: dict[str, str]) -> None:
    assert json.loads(shown["json"])["reference"]["name"] == EVERYTHING
    assert not any(ord(mark) < 32 and mark != "\n" for mark in shown["json"])


@pytest.mark.parametrize("kind", ["html", "md", "svg", "json", "out"])
def test_no_template_is_filled_in(shown: dict[str, str], kind: str) -> None:
    for filled in ("xxxxxxxxx", "{self.__init__}", "{{ 7 * 7 }}"):
        assert (filled in shown[kind].replace("\\", "")) == (filled != "xxxxxxxxx"), filled


@pytest.mark.parametrize("kind", ["html", "md", "out"])
def test_nothing_steers_a_terminal(shown: dict[str, str], kind: str) -> None:
    assert not any(mark in shown[kind] for mark in ("\x1b", "\x07", "\x9b"))


def test_result_with_an_odd_level_is_drawn_or_refused(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(to_json(tricked("x", "Q4\x01")), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "qres", "report", tmp_path / "result.json", "--format", "md"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 3), done.stderr[-200:]


def test_level_that_knows_nothing_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of thousands, as a broken level has them, are 800 nats off; the scan is done by then."""
    monkeypatch.setattr(scan, "to_svg", lambda *_: "<svg/>")
    result = example()
    bad = replace(result.levels[0], output=replace(result.levels[0].output, ln_ppl_ratio=800.0))
    text = render_markdown(replace(result, levels=(bad, *result.levels[1:]))).text
    assert bad.name in text
