"""Reports for tests that read their words: each result is rendered once, and its charts are compiled, not drawn.

What is drawn is looked at in test_markdown.py, test_browser.py and tests/inputs/test_shown.py.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any
from unittest import mock

import vl_convert

from qres.records.result import Result
from qres.report import html, markdown
from qres.report import sections as sections_module
from qres.report.charts import scan
from qres.report.sections import Section

LIBRARY = "/* Vega */"
"""In place of Vega, which is most of a page."""


def text_anew(result: Result) -> str:
    """report.md, of charts that were compiled."""
    with mock.patch.object(scan, "to_svg", compiled):
        return markdown.render_markdown(result).text


@lru_cache(maxsize=64)
def sections(result: Result) -> tuple[Section, ...]:
    """The parts of a report; the charts in them take longer than all the rest."""
    return sections_module.sections(result)


@lru_cache(maxsize=64)
def page(result: Result) -> str:
    """report.html."""
    with mock.patch.object(html, "sections", sections), mock.patch.object(scan, "library", return_value=LIBRARY):
        return html.render_html(result)


@lru_cache(maxsize=64)
def text(result: Result) -> str:
    """report.md."""
    with mock.patch.object(markdown, "sections", sections):
        return text_anew(result)


def compiled(spec: dict[str, Any], _config: dict[str, Any]) -> str:
    """An image without anything in it, of a chart that Vega-Lite takes: drawing it takes five times as long.

    Raises:
        ValueError: Vega-Lite does not take it.
    """
    return _compiled(json.dumps(spec))


@lru_cache(maxsize=256)
def _compiled(spec: str) -> str:
    vl_convert.vegalite_to_vega(spec, vl_version=scan.VEGA_LITE)
    return '<svg xmlns="http://www.w3.org/2000/svg"/>'
