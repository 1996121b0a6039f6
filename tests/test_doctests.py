"""The examples in docstrings: they run, and every public name of qres.metrics has one."""

from __future__ import annotations

import ast
import doctest
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "qres"
PATHS = {
    ".".join(("qres", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in sorted(PACKAGE.rglob("*.py"))
}
WITH_EXAMPLES = [name for name, path in PATHS.items() if ">>>" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.attempted > 0
    assert outcome.failed == 0


@pytest.mark.parametrize("name", [name for name in PATHS if name.startswith("qres.metrics.")])
def test_every_metric_has_an_example(name: str) -> None:
    tree = ast.parse(PATHS[name].read_text(encoding="utf-8"))
    public = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"]
    assert [node.name for node in public if ">>>" not in (ast.get_docstring(node) or "")] == []
