"""The pages of the documentation: sizes, thresholds, packages, facts, paths and links."""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import qres
from qres.advice import verdict
from qres.recipes import recovery
from qres.recipes.choices import INTERVAL_CHUNKS
from tests.docs.pages import DOCS, FACTS, MEASURES, PAGES, README, REPORT, RESULT, ROOT, in_one_line, read

MODULES = sorted(p for p in (ROOT / "qres").rglob("*.py") if p.name != "__init__.py")
CITATION = re.compile(r"docs/facts\.md,\s+(\d+(?:(?:,| and| to|, and)\s+\d+)*)")
README_LINES = 150


def targets(path: Path) -> list[str]:
    """Where a page leads to within the repository: links, and the images of both themes."""
    found = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", read(path))
    return [target for target in (link or image for link, image in found) if not target.startswith("https://")]


def test_readme_is_read_in_one_go() -> None:
    assert len(read(README).splitlines()) <= README_LINES


def test_readme_leads_to_every_page() -> None:
    linked = {(ROOT / target.partition("#")[0]).resolve() for target in targets(README)}
    assert {path.name for path in DOCS.iterdir() if path not in linked} == set()


def test_thresholds_are_those_of_the_code() -> None:
    share, change = (
        f"{verdict.GOOD_SAME_TOP:.0%}".replace("%", " %"),
        f"{verdict.GOOD_LN_PPL_RATIO:.0%}".replace("%", " %"),
    )
    good = f"good at {share} same top token or more and less than {change} more perplexity"
    assert good in in_one_line(README)
    assert good in in_one_line(REPORT)
    measures, result = in_one_line(MEASURES), in_one_line(RESULT)
    assert f"at {share} of the scored positions or more" in measures
    assert f"stays below {verdict.GOOD_LN_PPL_RATIO}," in measures
    assert f"the {INTERVAL_CHUNKS} chunks that recipes are verified on" in measures
    assert f"measures on {INTERVAL_CHUNKS} chunks of text like the scan's" in result
    *shares, most = (f"{share:.2f}" for share in recovery.SHARES)
    assert f"| {', '.join(shares)} or {most} of its predicted KLD. |" in result


def test_readme_has_every_package_in_the_order_of_imports() -> None:
    """The tree in README.md against the layers that import-linter enforces."""
    contracts = tomllib.loads(read(ROOT / "pyproject.toml"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    block = read(README).split("## How the pieces flow")[1].split("```")[1]
    rows = re.findall(r"^  ([a-z_]+(?:, [a-z_]+)*)  ", block, re.MULTILINE)
    assert [set(row.split(", ")) for row in rows] == [set(layer.split(" | ")) for layer in layers]


# -- citations, links, commands


def test_facts_are_numbered_without_gaps() -> None:
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", read(FACTS), re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 28


def test_citations_lead_to_facts() -> None:
    known = set(re.findall(r"^(\d+)\. ", read(FACTS), re.MULTILINE))
    cited: set[str] = set()
    for path in MODULES:
        text = read(path)
        found = CITATION.findall(text)
        assert len(found) == text.count("docs/facts.md"), f"{path}: a citation without a number"
        cited.update(number for citation in found for number in re.findall(r"\d+", citation))
        assert "DESIGN.md" not in text, path
    assert cited
    assert cited <= known


def test_pages_that_the_code_cites_exist() -> None:
    cited = {name for path in MODULES for name in re.findall(r"docs/\w+\.md", read(path))}
    assert "docs/facts.md" in cited
    assert {name for name in cited if not (ROOT / name).is_file()} == set()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_files_that_a_page_names_exist(path: Path) -> None:
    named = set(re.findall(r"(?<![\w/])(?:qres|tests|docs)/[\w/.-]*\w/?(?=[`:,)\s])", read(path)))
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_code_in_pages_imports_what_exists() -> None:
    """Found in the source: importing it would load llama.cpp into the tests."""
    blocks = [code for path in PAGES for code in re.findall(r"^ *```python\n(.*?)^ *```", read(path), re.M | re.S)]
    lines = [node for code in blocks for node in ast.parse(textwrap.dedent(code)).body]
    imports = [node for node in lines if isinstance(node, ast.ImportFrom) and str(node.module).startswith("qres")]
    assert imports
    for node in imports:
        place = ROOT / str(node.module).replace(".", "/")
        if node.module == "qres":
            assert {alias.name for alias in node.names} <= set(qres.__all__), ast.unparse(node)
            continue
        for name in (alias.name for alias in node.names):
            if place.is_dir():
                assert (place / f"{name}.py").is_file(), ast.unparse(node)
            else:
                known = re.findall(r"^(?:class |def )?(\w+)", read(place.with_suffix(".py")), re.M)
                assert name in known, ast.unparse(node)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in targets(path):
        file, _, anchor = target.partition("#")
        page = path.parent / file if file else path
        assert page.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", read(page), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, target


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_make_targets_exist(path: Path) -> None:
    known = set(re.findall(r"^([\w-]+):", read(ROOT / "Makefile"), re.MULTILINE))
    used = re.findall(r"(?:`|^    )make ([a-z][\w-]*)", read(path), re.MULTILINE)
    assert set(used) <= known
