"""The documentation against the code: options, fields, levels, modules, citations and links. Loads no model."""

from __future__ import annotations

import dataclasses
import enum
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from qres import errors, levels
from qres.advice import verdict
from qres.cli.app import app
from qres.cli.program import INTERRUPTED, TERMINATED
from qres.recipes import recovery
from qres.recipes.choices import INTERVAL_CHUNKS
from qres.records import devices, files, output, prediction, recipe, result, stream, units
from qres.records.recipe import RECIPE_VERSION
from qres.records.result import SCHEMA_VERSION

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULT = ROOT / "docs" / "result.md"
FACTS = ROOT / "docs" / "facts.md"
PAGES = sorted(path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))

COMMANDS: dict[str, Any] = dict(getattr(get_command(app), "commands"))  # noqa: B009 - typed as a plain command
RECORDS = {
    name: kind
    for module in (result, devices, files, output, recipe, prediction, stream, units)
    for name, kind in vars(module).items()
    if dataclasses.is_dataclass(kind)
}
MODULES = sorted(p for p in (ROOT / "qres").rglob("*.py") if p.name != "__init__.py")
CITATION = re.compile(r"docs/facts\.md,\s+(\d+(?:(?:,| and| to|, and)\s+\d+)*)")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# -- options


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


def option_block(command: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- options: {command} -->\n)(.*?)(<!-- end -->)", re.DOTALL)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_readme_has_every_option_with_its_default(command: str, request: pytest.FixtureRequest) -> None:
    expected = f"\n{option_table(command)}\n\n"
    if request.config.getoption("--update-golden"):
        written = option_block(command).sub(lambda m: m[1] + expected + m[3], read(README))
        README.write_text(written, encoding="utf-8", newline="\n")
    found = option_block(command).search(read(README))
    assert found, f"README.md has no block of options for qres {command}"
    assert found[2] == expected, "run pytest --update-golden if the change is meant"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_readme_names_every_argument(command: str) -> None:
    arguments = [p.name for p in COMMANDS[command].params if p.param_type_name == "argument"]
    heading = next(line for line in read(README).splitlines() if line.startswith(f"### qres {command}"))
    assert re.findall(r"[A-Z]+", heading) == [name.upper() for name in arguments]


def test_examples_use_commands_and_options_that_exist() -> None:
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", read(README), re.DOTALL))
    lines = re.findall(r"(?:^|\| )(qres .*)$", blocks, re.MULTILINE)
    assert len(lines) > 5
    for line in lines:
        _, command, *words = line.split("#")[0].split()
        known = {name for option in options(command) for name in option.opts}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_readme_lists_the_levels_that_can_be_made_and_those_that_need_an_imatrix() -> None:
    text = " ".join(read(README).split())
    made = re.search(r"Levels that can be made: ([\w, ]+)\.", text)
    refused = re.search(r"importance matrix \(([\w, ]+)\) can be made with `--imatrix`", text)
    assert made
    assert refused
    assert made[1].split(", ") == [level.name for level in levels.LEVELS if not level.needs_imatrix]
    assert refused[1].split(", ") == [level.name for level in levels.LEVELS if level.needs_imatrix]


def test_readme_has_every_exit_code() -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.QresError)]
    codes = {0, INTERRUPTED, TERMINATED} | {kind.exit_code for kind in kinds if kind is not errors.QresError}
    section = read(README).split("### Exit codes")[1].split("\n## ")[0]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)} == codes


def test_thresholds_are_those_of_the_code() -> None:
    share, change = (
        f"{verdict.GOOD_SAME_TOP:.0%}".replace("%", " %"),
        f"{verdict.GOOD_LN_PPL_RATIO:.0%}".replace("%", " %"),
    )
    assert f"good at {share} same top token or more and less than {change} more perplexity" in " ".join(
        read(README).split()
    )
    page = " ".join(read(RESULT).split())
    assert f"below {verdict.GOOD_LN_PPL_RATIO}" in page
    assert f"the {INTERVAL_CHUNKS} chunks that recipes are verified on" in page
    assert f"interval of what {INTERVAL_CHUNKS} chunks of text like the scan's measure" in page
    *shares, most = (f"{share:.2f}" for share in recovery.SHARES)
    assert f"| {', '.join(shares)} or {most} of its predicted KLD |" in page


# -- fields


def type_in_words(annotation: str) -> str:
    """What JSON holds for an annotation of `records`, as docs/result.md says it."""
    if annotation.endswith(" | None"):
        return f"{type_in_words(annotation.removesuffix(' | None'))} or null"
    many = re.fullmatch(r"tuple\[(.+), \.\.\.\]", annotation)
    if many:
        return f"list of {type_in_words(many[1])}"
    simple = {"int": "integer", "float": "number", "str": "text", "bool": "true or false"}
    return simple.get(annotation) or f"[{annotation}](#{annotation.lower()})"


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_result_page_has_every_field_with_its_type(name: str) -> None:
    page = read(RESULT)
    assert f"\n### {name}\n" in page
    section = page.split(f"\n### {name}\n")[1].split("\n### ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", section, re.MULTILINE)
    assert [(field, kind) for field, kind, _ in rows] == [
        (field.name, type_in_words(str(field.type))) for field in dataclasses.fields(RECORDS[name])
    ]


def test_result_page_has_no_record_that_is_gone() -> None:
    fields = read(RESULT).split("\n## Fields\n")[1]
    assert set(re.findall(r"^### (\w+)$", fields, re.MULTILINE)) == set(RECORDS)
    assert f"`schema_version` is {SCHEMA_VERSION}." in read(RESULT)
    assert f"`recipe_version` of a recipe is {RECIPE_VERSION}," in read(RESULT)


# -- packages


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


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", read(path)):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        page = path.parent / file if file else path
        assert page.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", read(page), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, target


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_make_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", read(ROOT / "Makefile"), re.MULTILINE))
    used = re.findall(r"(?:`|^    )make ([a-z][\w-]*)", read(path), re.MULTILINE)
    assert set(used) <= targets
