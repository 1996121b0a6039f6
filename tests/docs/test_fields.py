"""docs/result.md against the records: every field, with its type and the words that stand beside it in the source."""

from __future__ import annotations

import ast
import dataclasses
import importlib

import pytest

from qres.records.recipe import RECIPE_VERSION
from qres.records.result import SCHEMA_VERSION
from tests.docs import fields
from tests.docs.pages import RESULT, read, require_block

RECORDS = fields.records()
BY_FILE = fields.by_file(RECORDS)


@pytest.mark.parametrize("root", fields.ROOTS)
def test_page_has_every_field_with_its_type_and_meaning(root: str, request: pytest.FixtureRequest) -> None:
    require_block(RESULT, f"fields: {root}", fields.tables(BY_FILE[root], RECORDS), request)


def test_every_field_says_what_it_is() -> None:
    assert [f"{one.name}.{field.name}" for one in RECORDS.values() for field in one.fields if not field.words] == []


def test_every_record_is_in_a_file_that_is_written() -> None:
    assert set(RECORDS) == {name for names in BY_FILE.values() for name in names}


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_fields_in_the_source_are_those_of_the_dataclass(name: str) -> None:
    record = RECORDS[name]
    kind = getattr(importlib.import_module(record.module), name)
    assert [field.name for field in record.fields] == [field.name for field in dataclasses.fields(kind)]
    for field, real in zip(record.fields, dataclasses.fields(kind), strict=True):
        assert ast.unparse(field.annotation) == str(real.type)
        assert (field.default is None) == (
            real.default is dataclasses.MISSING and real.default_factory is dataclasses.MISSING
        )


def test_page_has_the_versions_of_the_formats() -> None:
    assert f"`schema_version` is {SCHEMA_VERSION}." in read(RESULT)
    assert f"`recipe_version` of a recipe is {RECIPE_VERSION}," in read(RESULT)


# -- how the tables are made

MADE_UP = '''
@dataclass(frozen=True)
class Result:
    """A file; None of <it> is `Part`."""

    parts: tuple[Part, ...]
    """Several |parts|, such as
    `a<b`; None never."""
    gone: Recipe | None = None
    """True or False."""
    counts: tuple[int | None, ...] = dataclasses.field(default=())
    """Numbers."""
    name: str = ""
    whole: bool = True
    """Yes."""
    files: int = 1
    """One."""
    more: tuple[str, ...] = field(default_factory=tuple)
    """None."""


@dataclass(frozen=True)
class Part:
    """One of them."""

    size: float
    """MiB."""


@dataclass
class Recipe:
    """Another file."""

    part: Part
    """One."""
    pairs: Mapping[str, tuple[str, int]]
    """Two of each."""


class NoRecord:
    size: float
'''
TABLES = {
    "Result": """### Result

A file; null of &lt;it> is [Part](#part).

| field | type | meaning |
|---|---|---|
| `parts` | list of [Part](#part) | Several \\|parts\\|, such as `a<b`; null never. |
| `gone` | [Recipe](#recipe) or null | true or false. May be missing, which means null. |
| `counts` | list of integer or null | Numbers. May be missing, which means an empty list. |
| `name` | text |  May be missing, which means empty text. |
| `whole` | true or false | Yes. May be missing, which means true. |
| `files` | integer | One. May be missing, which means `1`. |
| `more` | list of text | null. May be missing, which means an empty list. |

### Part

One of them.

| field | type | meaning |
|---|---|---|
| `size` | number | MiB. |""",
    "Recipe": """### Recipe

Another file.

| field | type | meaning |
|---|---|---|
| `part` | [Part](#part) | One. |
| `pairs` | object from text to list of text, integer | Two of each. |""",
}


def test_tables_of_made_up_records() -> None:
    known = {record.name: record for record in fields.in_source(MADE_UP, "made_up")}
    assert {root: fields.tables(names, known) for root, names in fields.by_file(known).items()} == TABLES
    assert [field.name for field in known["Result"].fields if not field.words] == ["name"]


@pytest.mark.parametrize("annotation", ["Unknown", "list[int]", "tuple[bytes, ...]", "dict[int, str]"])
def test_type_without_words_is_named(annotation: str) -> None:
    with pytest.raises(ValueError, match="no words for the type"):
        fields.type_in_words(ast.parse(annotation, mode="eval").body, RECORDS)
