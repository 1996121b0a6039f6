"""The tables of fields in docs/result.md, made from the source of the records, where the words about a field stand."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from tests.docs.pages import ROOT, read

FOLDER = ROOT / "qres" / "records"
ROOTS = ("Result", "Recipe")
"""The records that are whole files."""
SIMPLE = {"int": "integer", "float": "number", "str": "text", "bool": "true or false", "None": "null"}
IN_JSON = {"None": "null", "True": "true", "False": "false"}


@dataclass(frozen=True)
class Field:
    """One field of a record as its source has it."""

    name: str
    annotation: ast.expr
    default: ast.expr | None
    words: str
    """The text literal behind it; empty where there is none."""


@dataclass(frozen=True)
class Record:
    """One dataclass as its source has it."""

    name: str
    module: str
    words: str
    fields: tuple[Field, ...]


def records() -> dict[str, Record]:
    """Every record of `qres.records`, by name."""
    found: dict[str, Record] = {}
    for path in sorted(FOLDER.glob("*.py")):
        for record in in_source(read(path), f"qres.records.{path.stem}"):
            assert record.name not in found, f"two records are called {record.name}"
            found[record.name] = record
    return found


def in_source(source: str, module: str) -> Iterator[Record]:
    """The dataclasses of one module."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(one) for one in node.decorator_list):
            yield Record(node.name, module, ast.get_docstring(node) or "", tuple(_fields(node)))


def _fields(node: ast.ClassDef) -> Iterator[Field]:
    for line, behind in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            words = ""
            if isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant):
                words = " ".join(str(behind.value.value).split())
            yield Field(line.target.id, line.annotation, line.value, words)


def by_file(known: Mapping[str, Record]) -> dict[str, tuple[str, ...]]:
    """The records of each file, depth first; what two files hold is listed with the first."""
    listed: dict[str, tuple[str, ...]] = {}
    for root in ROOTS:
        order: list[str] = []
        _descend(root, known, {*(name for names in listed.values() for name in names), *ROOTS} - {root}, order)
        listed[root] = tuple(order)
    return listed


def _descend(name: str, known: Mapping[str, Record], elsewhere: Collection[str], order: list[str]) -> None:
    if name in order or name in elsewhere:
        return
    order.append(name)
    for field in known[name].fields:
        for node in ast.walk(field.annotation):
            if isinstance(node, ast.Name) and node.id in known:
                _descend(node.id, known, elsewhere, order)


def tables(names: Collection[str], known: Mapping[str, Record]) -> str:
    """A heading, the record's own words and its table, for each of these records."""
    return "\n\n".join(_section(known[name], known) for name in names)


def _section(record: Record, known: Mapping[str, Record]) -> str:
    rows = [
        f"| `{field.name}` | {type_in_words(field.annotation, known)} | {_meaning(field, known)} |"
        for field in record.fields
    ]
    head = [f"### {record.name}", "", _for_json(record.words, known), ""]
    return "\n".join([*head, "| field | type | meaning |", "|---|---|---|", *rows])


def type_in_words(node: ast.expr, known: Collection[str]) -> str:
    """What JSON holds for an annotation.

    Raises:
        ValueError: an annotation that has no words yet.
    """
    simple = SIMPLE | {name: _link(name) for name in known}
    match node:
        case ast.Name() | ast.Constant() if ast.unparse(node) in simple:
            return simple[ast.unparse(node)]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return f"{type_in_words(left, known)} or {type_in_words(right, known)}"
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=[one, ast.Constant(value=value)])) if (
            value is ...
        ):
            return f"list of {type_in_words(one, known)}"
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=several)):
            return f"list of {', '.join(type_in_words(one, known) for one in several)}"
        case ast.Subscript(value=ast.Name(id="dict" | "Mapping"), slice=ast.Tuple(elts=[ast.Name(id="str"), one])):
            return f"object from text to {type_in_words(one, known)}"
    raise ValueError(f"no words for the type {ast.unparse(node)}")


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _meaning(field: Field, known: Mapping[str, Record]) -> str:
    absent = "" if field.default is None else f" May be missing, which means {_absent(field.default)}."
    return _for_json(field.words, known).replace("|", "\\|") + absent


def _absent(default: ast.expr) -> str:
    """What a field is where the file does not have it."""
    given = {keyword.arg: keyword.value for keyword in default.keywords} if isinstance(default, ast.Call) else {}
    words = ast.unparse(given.get("default") or given.get("default_factory") or default)
    if words in ("()", "tuple"):
        return "an empty list"
    return "empty text" if words == "''" else IN_JSON.get(words, f"`{words}`")


def _for_json(words: str, known: Mapping[str, Record]) -> str:
    """Words about Python as words about JSON, with links to the records that they name."""
    text = re.sub(rf"\b({'|'.join(IN_JSON)})\b", lambda m: IN_JSON[m[1]], words)
    text = re.sub(r"`(\w+)`", lambda m: _link(m[1]) if m[1] in known else m[0], text)
    # Outside of code, < would begin a tag.
    return "".join(
        piece if piece.startswith("`") else piece.replace("<", "&lt;") for piece in re.split("(`[^`]*`)", text)
    )
