"""The report as one HTML page that needs no network: data, charts and the Vega library are all inside."""

from __future__ import annotations

import re
from typing import Any

import jinja2
from markupsafe import Markup, escape

from qres.printable import plain_record
from qres.records.result import Result
from qres.report.charts import scan, themes
from qres.report.formatting import PREDICTED
from qres.report.sections import Figure, figures, sections
from qres.report.tables import levels
from qres.report.tables.table import Table
from qres.report.words import DEFINITIONS

_NUMBER = r"−?\d[\d,]*(?:\.\d+)?(?:e−?\d+)?"
_PREDICTED = re.compile(rf"{PREDICTED}(?:\([^()]*\)e−?\d+|{_NUMBER}(?: ± {_NUMBER})?(?: %)?)")
_SET_APART = r'<span class="predicted" title="predicted, not measured">\g<0></span>'


def render_html(result: Result) -> str:
    """The whole report as a page; the same result always gives the same text."""
    result = plain_record(result)
    parts = sections(result)
    page = _environment().get_template("report.html.j2")
    return page.render(
        result=result,
        sections=parts,
        key_numbers=levels.key_numbers(result),
        definitions=DEFINITIONS,
        data=_data(figures(parts)),
        library=scan.library() if figures(parts) else "",
    )


def marked(text: str) -> Markup:
    """A text, escaped, with its predicted numbers set apart from measured ones."""
    escaped = escape(text)
    if PREDICTED not in text:
        return escaped
    return Markup(_PREDICTED.sub(_SET_APART, str(escaped)))  # of a Markup, sub would escape the tags, too


def _data(drawn: tuple[Figure, ...]) -> dict[str, Any]:
    return {
        "charts": {figure.name: figure.spec for figure in drawn},
        "themes": {"light": themes.light(), "dark": themes.dark()},
    }


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("qres.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.tests["paragraph"] = lambda item: isinstance(item, str)
    environment.filters["marked"] = marked
    environment.tests["table"] = lambda item: isinstance(item, Table)
    return environment
