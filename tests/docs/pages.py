"""The pages of the documentation, and the blocks in them that are written by the tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
COMMANDS = DOCS / "commands.md"
FACTS = DOCS / "facts.md"
MEASURES = DOCS / "measures.md"
REPORT = DOCS / "report.md"
RESULT = DOCS / "result.md"
PAGES = sorted((*ROOT.glob("*.md"), *DOCS.glob("*.md")))


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def in_one_line(path: Path) -> str:
    """A page without its line ends, to look for sentences in."""
    return " ".join(read(path).split())


def block(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {re.escape(name)} -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def require_block(path: Path, name: str, text: str, request: pytest.FixtureRequest) -> None:
    """The block of that name holds this text; with --update-golden it is written there first."""
    expected = f"\n{text}\n\n"
    if request.config.getoption("--update-golden"):
        written = block(name).sub(lambda m: m[1] + expected + m[3], read(path))
        path.write_text(written, encoding="utf-8", newline="\n")
    found = block(name).search(read(path))
    assert found, f"{path.name} has no block <!-- {name} -->"
    assert found[2] == expected, "run pytest --update-golden if the change is meant"
