"""docs/commands.md and README.md against the command line: options, arguments, levels, exit codes, what is printed."""

from __future__ import annotations

import enum
import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from qres import errors, levels
from qres.cli.app import app
from qres.cli.program import INTERRUPTED, TERMINATED
from qres.cli.terminal import show_answer
from qres.records import as_json
from tests.docs import pages
from tests.docs.pages import README, ROOT, in_one_line, read, require_block

COMMANDS: dict[str, Any] = dict(getattr(get_command(app), "commands"))  # noqa: B009 - typed as a plain command


def options(command: str) -> list[Any]:
    return [p for p in COMMANDS[command].params if p.param_type_name == "option" and "--help" not in p.opts]


def default(option: Any) -> str:  # noqa: ANN401 - click's or typer's own class
    if "--threads" in option.opts:
        return "number of CPUs"
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    if option.required:
        return "required"
    value = option.default.value if isinstance(option.default, enum.Enum) else option.default
    return "unset" if value is None else f"`{value}`"


def meaning(option: Any) -> str:  # noqa: ANN401
    kind = type(option.default)
    choices = [f"`{member.value}`" for member in kind] if issubclass(kind, enum.Enum) else []
    text = f"{option.help}{' One of ' if choices else ''}{', '.join(choices)}{'.' if choices else ''}"
    return text.replace("|", "\\|").replace("<", "&lt;")


def option_table(command: str) -> str:
    rows = [f"| `{'`, `'.join(o.opts)}` | {default(o)} | {meaning(o)} |" for o in options(command)]
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_page_has_every_option_with_its_default(command: str, request: pytest.FixtureRequest) -> None:
    require_block(pages.COMMANDS, f"options: {command}", option_table(command), request)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_page_names_every_argument(command: str) -> None:
    arguments = [p.name for p in COMMANDS[command].params if p.param_type_name == "argument"]
    heading = next(line for line in read(pages.COMMANDS).splitlines() if line.startswith(f"## qres {command}"))
    assert re.findall(r"[A-Z]+", heading) == [name.upper() for name in arguments]


def test_page_and_overview_have_the_commands_that_exist() -> None:
    page = read(pages.COMMANDS)
    assert set(re.findall(r"^## qres (\w+)", page, re.MULTILINE)) == set(COMMANDS)
    assert set(re.findall(r"^\| \[qres (\w+)\]", page, re.MULTILINE)) == set(COMMANDS)


@pytest.mark.parametrize(("page", "at_least"), [(pages.COMMANDS, 17), (README, 5)], ids=["commands", "readme"])
def test_examples_use_commands_and_options_that_exist(page: Path, at_least: int) -> None:
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", read(page), re.DOTALL))
    lines = re.findall(r"(?:^|\| )(qres .*)$", blocks, re.MULTILINE)
    assert len(lines) >= at_least
    for line in lines:
        _, command, *words = line.split("#")[0].split()
        known = {name for option in options(command) for name in option.opts}
        assert {word for word in words if word.startswith("-") and word != "-"} <= known, line


def test_readme_shows_what_the_sample_scan_printed(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("reports", "sample")
    result = as_json.load(ROOT / folder / "result.json")
    show_answer(result, [folder / name for name in ("report.html", "report.md", "result.json")])
    assert f"```\n{capsys.readouterr().out}```\n" in read(README)


def test_page_lists_the_levels_that_can_be_made_and_those_that_need_an_imatrix() -> None:
    text = in_one_line(pages.COMMANDS)
    made = re.search(r"Levels that can be made: ([\w, ]+)\.", text)
    refused = re.search(r"importance matrix \(([\w, ]+)\) can be made with `--imatrix`", text)
    assert made
    assert refused
    assert made[1].split(", ") == [level.name for level in levels.LEVELS if not level.needs_imatrix]
    assert refused[1].split(", ") == [level.name for level in levels.LEVELS if level.needs_imatrix]


def test_page_has_every_exit_code() -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.QresError)]
    codes = {0, INTERRUPTED, TERMINATED} | {kind.exit_code for kind in kinds if kind is not errors.QresError}
    section = read(pages.COMMANDS).split("## Exit codes")[1].split("\n## ")[0]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)} == codes
