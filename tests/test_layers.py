"""The architecture, enforced: who may import whom, how long things may get, and what `import qres.cli` may load."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent
PACKAGE = REPO / "qres"

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 80

NATIVE = {"errors", "native"}
REPORT = {
    "device_records",
    "errors",
    "findings",
    "levels",
    "output_records",
    "recipe_records",
    "records",
    "report",
    "sensitivity_records",
}

ALLOWED: dict[str, set[str]] = {
    "": set(),
    # what everything may know
    "errors": set(),
    "atomic": {"errors"},
    "findings": set(),
    "device_records": set(),
    "output_records": set(),
    "recipe_records": set(),
    "sensitivity_records": set(),
    "records": {"device_records", "findings", "output_records", "recipe_records", "sensitivity_records"},
    "levels": {"errors"},
    "metrics": {"errors", "records"},
    "result_json": {"errors", "recipe_records", "records"},
    # files and texts, without a model
    "gguf_kind": {"branch", "errors"},
    "gguf_cursor": {"errors"},
    "gguf_values": {"gguf_cursor"},
    "gguf_resync": {"gguf_cursor", "gguf_values"},
    "gguf_tensor": {"gguf_cursor", "levels"},
    "gguf_tables": {"gguf_cursor", "gguf_resync", "gguf_tensor", "gguf_values"},
    "gguf_header": {"errors", "gguf_cursor", "gguf_kind", "gguf_tables", "gguf_tensor", "gguf_values"},
    "gguf_pieces": {"gguf_cursor"},
    "gguf_split": {"errors", "gguf_cursor", "gguf_header", "gguf_pieces", "gguf_tensor", "gguf_values"},
    "gguf_inventory": {"gguf_cursor", "gguf_tensor", "gguf_values", "records"},
    "gguf_compare": {"errors", "gguf_cursor", "gguf_inventory", "gguf_tensor", "gguf_values"},
    "gguf_file": {
        "errors",
        "gguf_compare",
        "gguf_cursor",
        "gguf_inventory",
        "gguf_kind",
        "gguf_split",
        "gguf_tensor",
        "gguf_values",
        "levels",
        "records",
    },
    "tensor_values": {"errors", "gguf_cursor", "gguf_file", "levels"},
    "claims": {"branch", "gguf_cursor", "gguf_file", "levels"},
    "bpw_gap": {"claims", "gguf_cursor", "gguf_file", "levels"},
    "inspection": {
        "bpw_gap",
        "claims",
        "errors",
        "gguf_cursor",
        "gguf_file",
        "gguf_values",
        "records",
        "tensor_values",
    },
    "imatrix": {"atomic", "errors", "gguf_cursor", "gguf_header", "gguf_inventory", "gguf_tensor", "gguf_values"},
    "corpus": {"errors"},
    "file_stamp": {"errors"},
    "demo": {"atomic", "errors"},
    # the border to llama.cpp
    "native": set(),
    "native.ggml": NATIVE,
    "native.graph": NATIVE,
    "native.memory": NATIVE,
    "native.quantizer": NATIVE,
    "native.rows": NATIVE,
    "native.session": NATIVE,
    "native.vocabulary": NATIVE,
    "native.worker": NATIVE,
    "quantizing": {"atomic", "errors", "file_stamp", "gguf_file", "imatrix", "native.quantizer", "native.worker"},
    "level_cache": {"atomic", "errors", "file_stamp", "gguf_file", "imatrix", "levels", "quantizing"},
    "ladder": {"errors", "gguf_file", "imatrix", "levels", "quantizing", "recipe_records", "records"},
    # measuring, in the worker
    "branch": set(),
    "residual": {"branch", "errors", "native.graph"},
    "capture": {"errors", "native.ggml", "native.session", "residual"},
    "drift": {"capture", "metrics"},
    "activations": {
        "branch",
        "corpus",
        "findings",
        "native.ggml",
        "native.graph",
        "native.session",
        "residual",
        "sensitivity.patching",
    },
    "lockstep": {
        "activations",
        "capture",
        "corpus",
        "drift",
        "errors",
        "findings",
        "job",
        "levels",
        "metrics",
        "native.session",
        "records",
        "residual",
    },
    "sensitivity": set(),
    "sensitivity.patching": {"residual"},
    "sensitivity.adjoint": {
        "corpus",
        "errors",
        "gguf_file",
        "native.graph",
        "native.session",
        "residual",
        "sensitivity.collector",
        "sensitivity.damage",
        "sensitivity.linear",
        "sensitivity.prediction",
        "sensitivity.replay",
        "sensitivity.scored",
        "sensitivity.weights",
    },
    "sensitivity.collector": {
        "sensitivity.damage",
        "sensitivity.linear",
        "sensitivity.scored",
        "sensitivity.weights",
    },
    "sensitivity.damage": {
        "errors",
        "levels",
        "native.rows",
        "sensitivity.attention",
        "sensitivity.linear",
        "sensitivity.prediction",
        "sensitivity.weights",
    },
    "sensitivity.replay": {
        "errors",
        "levels",
        "native.graph",
        "sensitivity.attention",
        "sensitivity.delta_rule",
        "sensitivity.linear",
        "sensitivity.ops",
        "sensitivity.rare",
        "sensitivity.schedule",
        "sensitivity.state_space",
        "sensitivity.values",
        "sensitivity.weights",
    },
    "sensitivity.attention": {"errors", "native.graph", "sensitivity.ops"},
    "sensitivity.delta_rule": {"native.graph", "sensitivity.ops"},
    "sensitivity.rare": {"errors", "native.graph", "sensitivity.ops"},
    "sensitivity.state_space": {"native.graph", "sensitivity.ops"},
    "sensitivity.ops": {"errors", "native.graph"},
    "sensitivity.linear": {"errors", "sensitivity.weights"},
    "sensitivity.weights": {"errors", "gguf_file", "levels", "native.rows"},
    "sensitivity.values": {"native.graph", "sensitivity.schedule"},
    "sensitivity.schedule": {"native.graph"},
    "sensitivity.scored": set(),
    "sensitivity.prediction": {"metrics"},
    "sensitivity.roles": {"branch"},
    "predicting": {
        "branch",
        "gguf_file",
        "imatrix",
        "job",
        "levels",
        "lockstep",
        "metrics",
        "records",
        "residual",
        "sensitivity.adjoint",
        "sensitivity.collector",
        "sensitivity.patching",
        "sensitivity.prediction",
        "sensitivity.roles",
        "sensitivity_records",
    },
    "summary": {"drift", "lockstep", "metrics", "records", "residual", "sensitivity.patching", "levels"},
    "job": {"corpus", "file_stamp", "findings", "records", "sensitivity_records"},
    "checkpoint": {
        "atomic",
        "drift",
        "errors",
        "findings",
        "lockstep",
        "metrics",
        "records",
        "sensitivity.prediction",
    },
    "preflight": {"corpus", "errors", "job", "native.memory", "native.session", "native.vocabulary"},
    "measure": {
        "advice",
        "checkpoint",
        "drift",
        "errors",
        "file_stamp",
        "job",
        "levels",
        "lockstep",
        "native.session",
        "predicting",
        "records",
        "residual",
        "sensitivity.patching",
        "summary",
    },
    # recipes: chosen from a result alone
    "allocate": set(),
    "budget": {"errors", "levels"},
    "dialects": {"errors", "gguf_cursor", "levels"},
    "correction": {"records", "sensitivity_records"},
    "choices": {"correction", "errors", "levels", "recipe_records", "records"},
    "recipe": {"", "allocate", "branch", "budget", "choices", "errors", "levels", "recipe_records"},
    "recovery": {"allocate", "choices", "levels", "recipe", "recipe_records", "records"},
    "deviations": {"allocate", "choices"},
    "given_types": {
        "choices",
        "deviations",
        "dialects",
        "errors",
        "gguf_cursor",
        "gguf_file",
        "levels",
        "recipe",
        "recipe_records",
    },
    "recipe_files": {"atomic", "dialects", "errors", "gguf_cursor", "levels", "recipe_records", "result_json"},
    # recipes: built, measured and refined
    "build": {
        "atomic",
        "candidates",
        "errors",
        "file_stamp",
        "gguf_cursor",
        "gguf_file",
        "imatrix",
        "levels",
        "quantizing",
        "recipe_records",
    },
    "compared": {"corpus", "metrics"},
    "comparing": {
        "capture",
        "compared",
        "corpus",
        "drift",
        "errors",
        "job",
        "metrics",
        "native.session",
        "preflight",
        "residual",
    },
    "verify": {
        "candidates",
        "compared",
        "comparing",
        "corpus",
        "errors",
        "file_stamp",
        "gguf_cursor",
        "gguf_file",
        "imatrix",
        "levels",
        "metrics",
        "native.worker",
        "recipe_records",
    },
    "exchange": {"choices", "corpus"},
    "refining": {"corpus", "exchange", "gguf_file", "job", "metrics", "native.rows", "native.session", "preflight"},
    "refine": {
        "candidates",
        "choices",
        "corpus",
        "exchange",
        "file_stamp",
        "gguf_file",
        "imatrix",
        "native.worker",
        "recipe",
        "recipe_records",
        "refining",
    },
    "recipes": {
        "budget",
        "build",
        "candidates",
        "choices",
        "errors",
        "gguf_file",
        "imatrix",
        "recipe",
        "recipe_files",
        "recipe_records",
        "records",
        "recovery",
        "verify",
    },
    # the answer
    "advice": {"metrics", "records"},
    "deploy": {"advice", "records"},
    "estimate": {"gguf_file", "levels"},
    "candidates": {
        "claims",
        "errors",
        "file_stamp",
        "findings",
        "gguf_cursor",
        "gguf_file",
        "imatrix",
        "level_cache",
        "levels",
        "records",
    },
    "assemble": {
        "",
        "advice",
        "branch",
        "candidates",
        "corpus",
        "deploy",
        "file_stamp",
        "findings",
        "gguf_file",
        "gguf_tensor",
        "job",
        "levels",
        "recipe_records",
        "records",
        "tensor_values",
    },
    "scan": {
        "",
        "assemble",
        "candidates",
        "corpus",
        "deploy",
        "errors",
        "estimate",
        "file_stamp",
        "gguf_cursor",
        "gguf_file",
        "imatrix",
        "job",
        "ladder",
        "level_cache",
        "measure",
        "native.worker",
        "preflight",
        "recipes",
        "records",
        "tensor_values",
        "verify",
    },
    # out to the user
    "report": REPORT,
    "report.chart_parts": REPORT,
    "report.charts": REPORT,
    "report.file_tables": REPORT,
    "report.formatting": REPORT,
    "report.html": REPORT,
    "report.layer_tables": REPORT,
    "report.markdown": REPORT,
    "report.recipe_charts": REPORT,
    "report.recipe_tables": REPORT,
    "report.sections": REPORT,
    "report.series": REPORT,
    "report.table": REPORT,
    "report.tables": REPORT,
    "report.themes": REPORT,
    "report.plain": REPORT,
    "report.residual_view": REPORT,
    "report.sensitivity_charts": REPORT,
    "report.sensitivity_series": REPORT,
    "report.sensitivity_tables": REPORT,
    "report.words": REPORT,
    "write": {"atomic", "errors", "job", "records", "report", "result_json"},
    "progress": {"records", "report"},
    "inspect_view": {"bpw_gap", "gguf_file", "inspection", "progress", "records", "report", "tensor_values"},
    "recipe_view": {"deviations", "progress", "recipe_records", "report"},
    "cli_options": {"errors"},
    "recipe_commands": {
        "budget",
        "build",
        "candidates",
        "choices",
        "cli_options",
        "corpus",
        "deviations",
        "errors",
        "gguf_file",
        "given_types",
        "imatrix",
        "level_cache",
        "levels",
        "progress",
        "recipe",
        "recipe_files",
        "recipe_records",
        "recipe_view",
        "refine",
        "result_json",
        "verify",
    },
    "cli": {
        "",
        "candidates",
        "cli_options",
        "demo",
        "errors",
        "gguf_file",
        "inspect_view",
        "inspection",
        "job",
        "level_cache",
        "progress",
        "recipe_commands",
        "records",
        "result_json",
        "scan",
        "write",
    },
    "program": {"cli", "errors", "report"},
    "__main__": {"program"},
}
"""Module -> what it may import of qres, at module level or within a function; a package allows its modules."""

ONLY_IN: dict[str, set[str]] = {
    "ctypes": {"native"},
    "llama_cpp": {"native"},
    "multiprocessing": {"native"},
    "typer": {"cli", "cli_options", "program", "recipe_commands"},
    "rich": {"inspect_view", "program", "progress", "recipe_view"},
    "altair": {"report"},
    "vl_convert": {"report"},
    "jinja2": {"report"},
    "msgspec": {"result_json"},
    "torch": {"preflight", "sensitivity"},
}
"""Library -> the modules (or packages) of qres that may import it."""


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


def within(name: str, allowed: set[str]) -> bool:
    return any(name == one or (one and name.startswith(f"{one}.")) for one in allowed)


def test_every_module_is_in_the_table() -> None:
    assert sorted(MODULES) == sorted(ALLOWED), "a new module needs its row: decide what it may know"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_module_imports_what_it_may(module: str) -> None:
    own = {name.removeprefix("qres").lstrip(".") for name in imports(MODULES[module]) if name.split(".")[0] == "qres"}
    assert {name for name in own if not within(name, ALLOWED.get(module, set()))} == set()


def test_imports_are_absolute() -> None:
    assert [module for module, tree in MODULES.items() if any(name.startswith(".") for name in imports(tree))] == []


def test_table_allows_nothing_that_is_not_needed() -> None:
    for module, tree in MODULES.items():
        allowed = ALLOWED.get(module, set())
        if allowed in (NATIVE, REPORT):
            continue
        own = {name.removeprefix("qres").lstrip(".") for name in imports(tree) if name.split(".")[0] == "qres"}
        unused = {one for one in allowed - {"errors"} if not any(within(name, {one}) for name in own)}
        assert not unused, f"{module} no longer imports {unused}: take it out of the table"


@pytest.mark.parametrize("library", sorted(ONLY_IN))
def test_library_is_imported_only_where_it_belongs(library: str) -> None:
    users = {module for module, tree in MODULES.items() if any(n.split(".")[0] == library for n in imports(tree))}
    assert {module for module in users if not within(module, ONLY_IN[library])} == set()


def test_libraries_are_imported_by_import_statements() -> None:
    for module, tree in MODULES.items():
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not calls & {"__import__", "importlib.import_module", "import_module"}, module


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {
        module: {name.removeprefix("qres").lstrip(".") for name in imports(tree) if name.split(".")[0] == "qres"}
        for module, tree in MODULES.items()
    }
    done: set[str] = set()
    while len(done) < len(graph):
        free = {module for module in graph if module not in done and graph[module] <= done | {"", module}}
        assert free, f"a circle among {sorted(set(graph) - done)}"
        done |= free


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


# ---------------------------------------------------------------- what importing the command line loads


def test_importing_the_cli_loads_nothing_heavy() -> None:
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import qres.cli"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {match.strip() for match in re.findall(r"^import time:[^|]*\|[^|]*\|(.+)$", run.stderr, re.MULTILINE)}
    assert loaded >= {"qres.cli", "typer"}
    heavy = {"llama_cpp", "torch", "altair", "vl_convert", "numpy", "gguf", "jinja2", "msgspec", "multiprocessing"}
    assert {name for name in loaded if name.split(".")[0] in heavy} == set()
    ours = {name for name in loaded if name.split(".")[0] == "qres"}
    assert ours == {"qres", "qres.cli", "qres.cli_options", "qres.errors", "qres.recipe_commands"}
