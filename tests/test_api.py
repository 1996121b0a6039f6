"""The public interface: every name is there, light to import, and the examples of docs/api.md run as they stand."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qres
from qres.cli.terminal import RichListener
from qres.events import Event, Listener, Logged, Remote
from tests import tiny
from tests.listening import Heard

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_public_name_exists_and_is_on_the_page() -> None:
    from qres import api

    assert qres.__all__ == sorted((*api.__all__, "__version__"))
    assert dir(qres) == qres.__all__
    for name in api.__all__:
        assert getattr(qres, name) is getattr(api, name)
        assert f"`{name}`" in PAGE, name


def test_names_stay_what_they_are_when_packages_are_imported() -> None:
    """A subpackage of the same name would take the place of a function."""
    import qres.pipeline.run
    import qres.recipes.plan

    assert callable(qres.scan)
    assert callable(qres.recipe)


def test_name_that_does_not_exist_is_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'scam'"):
        _ = qres.scam


def test_importing_qres_loads_nothing() -> None:
    code = "import sys, qres; print(*(name for name in sys.modules if name.split('.')[0] == 'qres'))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(ended.stdout.split()) == {"qres", "qres.version"}


def test_every_listener_has_every_call_and_says_nothing_more() -> None:
    calls = {name for name in vars(Listener) if not name.startswith("_")}
    for kind in (Logged, Remote, RichListener, Heard):
        assert {name for name in vars(kind) if not name.startswith("_")} - {"texts"} == calls, kind


def test_without_a_listener_work_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "qres"):
        for event in (
            *(Event("stage", ("measuring",)), Event("step", (1, 2, "reference")), Event("working", ("Q4_K_M",))),
            *(Event("note", ("100 % sure",)), Event("warn", ("mind this",))),
        ):
            event.repeat(Logged())
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "measuring"),
        ("DEBUG", "1 of 2 reference"),
        ("DEBUG", "Q4_K_M works"),
        ("INFO", "100 % sure"),
        ("WARNING", "mind this"),
    ]


def test_a_program_that_asks_for_no_log_gets_none() -> None:
    code = "from qres.events import Logged; Logged().warn('mind'); Logged().note('note')"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")


@pytest.mark.model
def test_examples_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 6
    tiny.write_llama(tmp_path / "model-f16.gguf", change=tiny.predictive)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QRES_CACHE", str(tmp_path / "cache"))
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/api.md", "exec"), names)
    said = capsys.readouterr().out
    assert said.startswith("Ship Q8_0 ")
    assert "missing.gguf does not exist" in said
    assert "reading weights, MiB" in said
    assert {path.name for path in tmp_path.iterdir()} >= {"result.json", "report.html", "model-mix.gguf"}
    assert "<!DOCTYPE html>" in (tmp_path / "report.html").read_text(encoding="utf-8")
