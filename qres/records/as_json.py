"""A Result or a Recipe to JSON and back, strictly: a missing field or a wrong type is named by its path."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from qres.errors import InputError, reason_of
from qres.records.recipe import RECIPE_VERSION, Recipe
from qres.records.result import SCHEMA_VERSION, Result

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_GIVE = "give the result.json that `qres scan` wrote"
_GIVE_RECIPE = "give the recipe.json that `qres recipe` wrote"
_MAX_INTEGER = 2**63 - 1
"""What every reader of JSON takes for a whole number, and far more than anything that is counted here."""


def to_json(record: DataclassInstance) -> str:
    """A record (a `Result`, say) as indented JSON text; non-finite numbers become null."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2).decode() + "\n"


def from_json(text: str | bytes) -> Result:
    """The result that `to_json` wrote.

    Raises:
        InputError: not JSON, a field that is missing or of another type (its path is named), or another schema version.
    """
    return _decoded(text, Result, "schema_version", SCHEMA_VERSION, "result", _GIVE)


def recipe_from_json(text: str | bytes) -> Recipe:
    """The recipe that `to_json` wrote.

    Raises:
        InputError: as `from_json`.
    """
    return _decoded(text, Recipe, "recipe_version", RECIPE_VERSION, "recipe", _GIVE_RECIPE)


_Record = TypeVar("_Record", Result, Recipe)


def _decoded(text: str | bytes, kind: type[_Record], key: str, version: int, what: str, give: str) -> _Record:
    try:
        found = getattr(msgspec.json.decode(text, type=_Head), key)
        if found not in (msgspec.UNSET, version):
            raise InputError(
                f"this {what} has {key.replace('_', ' ')} {str(found)[:20]}, qres reads version {version}",
                f"{'update qres, or ' if isinstance(found, int) and found > version else ''}make it again: "
                f"{_command(text, what)}",
            )
        record = msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise InputError(f"not a qres {what}: {error}", give) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits
        raise InputError(f"not JSON: {error}", give) from error
    huge = next((path for path, number in _integers(record, "$") if abs(number) > _MAX_INTEGER), None)
    if huge is not None:
        raise InputError(f"not a qres {what}: the number at {huge} is impossible", give)
    return record


def _command(text: str | bytes, what: str) -> str:
    """What makes a file of another version again, with the model's path where the file has it in the usual place."""
    if what == "recipe":
        return "qres recipe RESULT"
    try:
        path = msgspec.json.decode(text, type=_About).reference.path
    except msgspec.ValidationError:
        return "qres scan MODEL"
    return f"qres scan {shlex.quote(path)}"


def _integers(value: object, path: str) -> Iterator[tuple[str, int]]:
    """Every whole number in a record, with its path."""
    if isinstance(value, int):
        yield path, value
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _integers(item, f"{path}[{i}]")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _integers(getattr(value, field.name), f"{path}.{field.name}")


def load(path: Path) -> Result:
    """Read a result.json.

    Raises:
        InputError: the file cannot be read, or is not a result.
    """
    return _loaded(path, from_json, _GIVE)


def load_recipe(path: Path) -> Recipe:
    """Read a recipe.json.

    Raises:
        InputError: the file cannot be read, or is not a recipe.
    """
    return _loaded(path, recipe_from_json, _GIVE_RECIPE)


def _loaded(path: Path, decode: Callable[[bytes], _Record], give: str) -> _Record:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason_of(error)}", give) from error
    try:
        return decode(data)
    except InputError as error:
        raise InputError(f"{path}: {error.message}", error.hint) from error


class _Head(msgspec.Struct):
    """Just enough to tell another version from a damaged file."""

    schema_version: int | msgspec.UnsetType = msgspec.UNSET
    recipe_version: int | msgspec.UnsetType = msgspec.UNSET


def reference_path(path: Path) -> str | None:
    """The file of the reference that a result.json is about; None when there is no result there."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_About).reference.path
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return None


class _AboutReference(msgspec.Struct):
    path: str


class _About(msgspec.Struct):
    """Just enough to tell which model a result is about."""

    reference: _AboutReference
