"""report.html as text: escaping, no network, no NaN, the same bytes each time."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest

from qres.records import as_json
from qres.records.result import Result
from qres.report.charts import scan
from qres.report.formatting import plus_minus
from qres.report.html import render_html
from tests.examples.result import example

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Page(HTMLParser):
    """Tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem is None:
            self.words += data


def hostile() -> Result:
    """The example with a hostile string in every place that a user or a file can name."""
    text = as_json.to_json(example())
    for name in (
        "trained llama",
        "Q4_K_M",
        "attention",
        "models/",
        "phone",
        "built-in rank text",
        "held.txt",
        "memory at",
    ):
        assert name in text
        text = text.replace(name, json.dumps(HOSTILE)[1:-1])
    return as_json.from_json(text)


def own_parts(page: str) -> str:
    return page.replace(scan.library(), "")


@pytest.fixture(scope="module")
def page() -> str:
    return render_html(example())


@pytest.fixture(scope="module")
def hostile_page() -> str:
    return render_html(hostile())


def test_hostile_names_are_inert(hostile_page: str) -> None:
    text = own_parts(hostile_page)
    tags = Page(text).tags
    assert [tag for tag, _ in tags].count("script") == 3
    assert "img" not in [tag for tag, _ in tags]
    assert not [key for _, attributes in tags for key in attributes if key.startswith("on")]
    assert "alert(1)</script>" not in text
    assert HOSTILE in Page(text).words


def test_data_survives_escaping(hostile_page: str) -> None:
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', hostile_page, re.DOTALL)
    assert data is not None
    assert HOSTILE in json.dumps(json.loads(data.group(1)), ensure_ascii=False).replace('\\"', '"')


def test_nothing_is_loaded_from_a_network(page: str) -> None:
    for tag, attributes in Page(page).tags:
        assert "src" not in attributes, tag
        for key in ("href", "srcset", "action", "data"):
            assert str(attributes.get(key, "#")).startswith(("#", "data:")), (tag, attributes)
    own = own_parts(page)
    assert "http://" not in own
    assert "https://" not in own
    for word in ("@import", "url(", "fetch(", "XMLHttpRequest", "import("):
        assert word not in own
    assert "default-src 'none'" in own


def test_no_nan_token(page: str) -> None:
    own = own_parts(page)
    assert not re.search(r"\b(NaN|nan|Infinity|None|undefined)\b", re.sub(r"'none'|=== undefined", "", own))


def test_same_result_gives_the_same_bytes(page: str) -> None:
    assert render_html(example()) == page


def test_json_round_trip_gives_the_same_page(page: str) -> None:
    assert render_html(as_json.from_json(as_json.to_json(example()))) == page


def test_verdict_is_the_first_thing_after_the_name(page: str) -> None:
    words = Page(page).words
    verdict = example().verdict
    places = [words.index(line) for line in (verdict.headline, verdict.keep, verdict.details)]
    assert places == sorted(places)
    assert places[-1] < words.index("What each level costs and changes")
    out = example().levels[0].output
    assert plus_minus(out.kld_mean, out.kld_se) in words


def test_ids_are_unique_and_contents_lead_somewhere(page: str) -> None:
    tags = Page(page).tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    targets = {str(attributes["href"])[1:] for tag, attributes in tags if tag == "a"}
    assert targets <= set(ids)


def test_page_without_charts_has_no_library() -> None:
    text = render_html(dataclasses.replace(example(), levels=(), mixes=(), ladder=(), recipes=()))
    assert scan.library() not in text
    assert len(text) < 100_000  # Vega alone is nine times that
    assert "No level was measured." in text
