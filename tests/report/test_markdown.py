"""report.md: the whole text against a golden file, escaping, and the images it refers to."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from qres.report.markdown import Markdown, code, escape, render_markdown
from tests.examples.result import example
from tests.report import rendered

GOLDEN = Path(__file__).parents[1] / "golden" / "report.md"
HOSTILE = "a|b `c` <script>alert(1)</script> [x](javascript:y) *z* \n# not a heading"


@pytest.fixture(scope="module")
def report() -> Markdown:
    return render_markdown(example())


def test_report_is_the_golden_text(report: Markdown, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(report.text, encoding="utf-8")
    assert report.text == GOLDEN.read_text(encoding="utf-8"), "run pytest --update-golden if the change is meant"


def test_verdict_comes_first(report: Markdown) -> None:
    blocks = report.text.split("\n\n")
    verdict = example().verdict
    assert blocks[1:4] == [f"**{verdict.headline}**", verdict.keep, verdict.details]


def test_warnings_stand_before_the_first_section() -> None:
    warnings = ("Q4_K_M: 37 of 43 tensors are on a fallback type.", "Only 8 chunks: standard errors are rough.")
    text = rendered.text(dataclasses.replace(example(), warnings=warnings))
    before, after = text.split("\n## ", 1)
    assert before.endswith("".join(f"> ⚠ {warning}  \n" for warning in warnings))
    assert "⚠" not in after
    assert "⚠" not in rendered.text(example())


def test_every_image_is_referred_to_and_is_svg(report: Markdown) -> None:
    paths = set(re.findall(r'(?:src|srcset)="([^"]+)"', report.text))
    assert paths == set(report.images)
    assert len(paths) == 20
    for image in report.images.values():
        assert ElementTree.fromstring(image).tag == "{http://www.w3.org/2000/svg}svg"
        assert "NaN" not in image


def test_same_result_gives_the_same_bytes(report: Markdown) -> None:
    assert render_markdown(example()) == report


def test_hostile_names_stay_text() -> None:
    result = example()
    level = dataclasses.replace(result.levels[0], name=HOSTILE)
    verdict = dataclasses.replace(result.verdict, level=HOSTILE, headline=HOSTILE)
    reference = dataclasses.replace(result.reference, name=HOSTILE, path=HOSTILE)
    text = rendered.text(
        dataclasses.replace(result, levels=(level,), verdict=verdict, reference=reference, warnings=(HOSTILE,))
    )
    assert "<script" not in text
    assert not re.search(r"(?<!\\)\[x", re.sub("<summary>.*", "", text))  # HTML there: Markdown leaves it alone
    assert "\n# not" not in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(cells) == 1, table


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Q4_K_M", "Q4_K_M"),
        ("_x_", r"\_x\_"),
        ("a\\b", r"a\\b"),
        ("# x", r"\# x"),
        ("- x", r"\- x"),
        ("1. x", r"1\. x"),
        ("0.5", "0.5"),
        ("+4.4 %", "+4.4 %"),
        ("$x$ & y", r"\$x\$ &amp; y"),
    ],
)
def test_escape(text: str, shown: str) -> None:
    assert escape(text) == shown


def test_code_span_outgrows_the_backticks_inside() -> None:
    assert code("blk.0.ffn_up.weight") == "`blk.0.ffn_up.weight`"
    assert code("`") == "`` ` ``"
