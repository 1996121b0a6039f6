"""What people pass in, case by case: what is refused says why and what to do, and leaves nothing behind.

The cases are in the modules beside this one; those that need llama.cpp are in `test_with_models.py`.
"""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from qres.cli import output
from qres.cli.program import main
from qres.pipeline import run
from qres.records.result import Result
from tests.examples.result import example
from tests.inputs import case as inputs
from tests.inputs import files as inputs_files
from tests.inputs import imatrix as inputs_imatrix
from tests.inputs import models as inputs_models
from tests.inputs import names as inputs_names
from tests.inputs import options as inputs_options
from tests.inputs import recipes as inputs_recipes
from tests.inputs import results as inputs_results
from tests.inputs import shards as inputs_shards
from tests.inputs import texts as inputs_texts
from tests.inputs.case import Case, Sandbox


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    return inputs.sandbox(tmp_path, monkeypatch)


TABLES = (
    *(inputs_files.NOT_GGUF, inputs_files.DAMAGED, inputs_files.PATHS, inputs_shards.SHARDS),
    *(inputs_models.NO_MODELS, inputs_models.PAIRS, inputs_models.UNLOADABLE),
    *(inputs_texts.TEXTS, inputs_options.OPTIONS, inputs_results.RESULTS),
    *(inputs_names.EVIL, inputs_names.HOSTILE, inputs_imatrix.IMATRICES),
    *(inputs_recipes.RECIPES, inputs_recipes.BUILDS, inputs_recipes.VERIFICATIONS),
)


@pytest.mark.parametrize("case", inputs.params(*TABLES))
def test_input(place: Sandbox, case: Case) -> None:
    inputs.check(case, place.work, place.root)


def test_there_are_many_cases_and_each_is_one() -> None:
    cases = [case for table in TABLES for case in table]
    assert len(cases) >= 140
    assert len({case.id for case in cases}) == len(cases)


# ---------------------------------------------------------------- names that name a folder


def written(_result: Result, folder: Path, *_: object) -> tuple[Path, ...]:
    """Stands for the reports, which take seconds to draw."""
    (folder / "report.html").touch()
    return (folder / "report.html",)


@pytest.mark.parametrize(
    ("name", "folder"),
    list(inputs_names.FOLDERS.items()),
)
def test_reports_go_to_a_folder_that_every_system_takes(
    place: Sandbox, monkeypatch: pytest.MonkeyPatch, name: str, folder: str
) -> None:
    monkeypatch.setattr(run, "scan", lambda *_: example())
    monkeypatch.setattr(output, "reports", written)
    try:
        Path(name).touch()
    except OSError:
        pytest.skip("this system does not take the name")
    found = inputs.run(["scan", "--", name])
    assert found.code == 0, found.err
    inputs.assert_shown(found, ())
    assert [os.fsdecode(path.name) for path in Path("reports").iterdir()] == [folder]
    assert sorted(path.name for path in place.work.iterdir()) == sorted([name, "reports"])


@pytest.mark.parametrize("arguments", [["scan", "-x.gguf"], ["inspect", "-x.gguf"], ["report", "-x.json"]])
def test_leading_dash_is_an_option(place: Sandbox, arguments: list[str]) -> None:
    (place.work / arguments[1]).touch()
    inputs.assert_refused(inputs.run(arguments), 2, ["No such option: -x"])
    for way in ([f"./{arguments[1]}"], ["--", arguments[1]]):
        inputs.assert_refused(inputs.run([arguments[0], *way]), 3, [], ["option"])


# ---------------------------------------------------------------- what is in the metadata


@pytest.mark.parametrize("name", inputs_names.TRICKS)
def test_inspection_as_json_is_text_and_nothing_else(place: Sandbox, name: str) -> None:
    (place.work / "m.gguf").write_bytes(inputs_names.tricked(inputs_names.TRICKS[name]))
    before = inputs.snapshot(place.root)
    found = inputs.run(["inspect", "m.gguf", "--json", "--values"])
    assert (found.code, found.err) == (0, "")
    said = json.loads(found.out)
    shown = inputs_names.SHOWN[name]
    assert said["name"] == said["tokenizer"]["pre"] == shown
    assert said["tokenizer"]["chat_template_length"] == len(inputs_names.TRICKS[name])
    assert {row["key"]: row["value"] for row in said["metadata"]}["tokenizer.chat_template"] == shown
    assert f"blk.0.{shown}.weight" in {row["tensor"] for row in said["values"]}
    assert inputs.snapshot(place.root) == before


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_terminal_that_knows_few_characters(
    place: Sandbox, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    (place.work / "m.gguf").write_bytes(inputs.full({"general.name": "größe 🦙"}))
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="latin-1"))
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(sys, "stderr", io.StringIO())
        main(["inspect", "m.gguf", *options])
    sys.stdout.flush()
    assert "größe" in out.getvalue().decode("latin-1")
