"""The architecture beside import-linter's contracts: sizes, names, docstrings, and what the command line may load."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qres.cli.app import app

REPO = Path(__file__).parent.parent
PACKAGE = REPO / "qres"

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_COMMAND_LINES = 30


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


MODULES: dict[str, ast.Module] = {
    module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))
}
PATHS = {module_name(path): path for path in PACKAGE.rglob("*.py")}


def imports(tree: ast.Module) -> Iterator[str]:
    """Full names of all modules imported, wherever; relative imports come with their dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full.removeprefix("qres.") in MODULES else base


def test_imports_are_absolute() -> None:
    assert [module for module, tree in MODULES.items() if any(name.startswith(".") for name in imports(tree))] == []


def test_private_names_stay_in_their_module() -> None:
    for module, tree in MODULES.items():
        names = (alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names)
        assert [name for name in names if name.startswith("_") and not name.startswith("__")] == [], module


def test_libraries_are_imported_by_import_statements() -> None:
    for module, tree in MODULES.items():
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not calls & {"__import__", "importlib.import_module", "import_module"}, module


# ---------------------------------------------------------------- sizes and docstrings


@pytest.mark.parametrize("module", sorted(MODULES))
def test_module_is_short(module: str) -> None:
    assert len(PATHS[module].read_text(encoding="utf-8").splitlines()) <= MAX_MODULE_LINES


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_functions_are_short() -> None:
    long = {
        f"{module}.{f.name}": lines
        for module, tree in MODULES.items()
        for f in functions(tree)
        if (lines := (f.end_lineno or 0) - f.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_commands_parse_call_and_print() -> None:
    """What a command does beside that belongs below `cli`."""
    commands = {command.callback.__name__ for command in app.registered_commands if command.callback}
    assert len(commands) == 7
    bodies = {
        f.name: (f.body[-1].end_lineno or 0) - f.body[1].lineno + 1  # behind the docstring, which is the help
        for module, tree in MODULES.items()
        if module.startswith("cli.")
        for f in functions(tree)
        if f.name in commands
    }
    assert bodies.keys() == commands
    assert {name: lines for name, lines in bodies.items() if lines > MAX_COMMAND_LINES} == {}


def undocumented(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            if not ast.get_docstring(child):
                yield f"{prefix}.{child.name}"
            if isinstance(child, ast.ClassDef):
                yield from undocumented(child, f"{prefix}.{child.name}")


def test_everything_public_has_a_docstring() -> None:
    assert [module for module, tree in MODULES.items() if not ast.get_docstring(tree)] == []
    assert [name for module, tree in MODULES.items() for name in undocumented(tree, module)] == []


# ---------------------------------------------------------------- names


def test_no_class_name_twice() -> None:
    places: dict[str, list[str]] = {}
    for module, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


# ---------------------------------------------------------------- what importing the command line loads


def test_importing_the_cli_loads_nothing_heavy() -> None:
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import qres.cli.app"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {match.strip() for match in re.findall(r"^import time:[^|]*\|[^|]*\|(.+)$", run.stderr, re.MULTILINE)}
    assert loaded >= {"qres.cli.app", "typer"}
    heavy = {"llama_cpp", "torch", "altair", "vl_convert", "numpy", "gguf", "jinja2", "msgspec", "multiprocessing"}
    assert {name for name in loaded if name.split(".")[0] in heavy} == set()
    ours = {name for name in loaded if name.split(".")[0] == "qres"}
    assert {name for name in ours if not name.startswith("qres.cli")} == {
        "qres",
        "qres.cpus",
        "qres.errors",
        "qres.version",
    }
