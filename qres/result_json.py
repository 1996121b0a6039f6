"""A Result to JSON and back, strictly: a missing field or a wrong type is named by its path."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from qres.errors import InputError
from qres.records import SCHEMA_VERSION, Result

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_GIVE = "give the result.json that `qres scan` wrote"
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
    try:
        head = msgspec.json.decode(text, type=_Head)
        if head.schema_version != SCHEMA_VERSION:
            raise InputError(
                f"this result has schema version {str(head.schema_version)[:20]}, qres reads version {SCHEMA_VERSION}",
                "scan again, or use the qres version that wrote it",
            )
        result = msgspec.json.decode(text, type=Result)
    except msgspec.ValidationError as error:
        raise InputError(f"not a qres result: {error}", _GIVE) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits
        raise InputError(f"not JSON: {error}", _GIVE) from error
    huge = next((path for path, number in _integers(result, "$") if abs(number) > _MAX_INTEGER), None)
    if huge is not None:
        raise InputError(f"not a qres result: the number at {huge} is impossible", _GIVE)
    return result


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
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}", _GIVE) from error
    try:
        return from_json(data)
    except InputError as error:
        raise InputError(f"{path}: {error.message}", error.hint) from error


class _Head(msgspec.Struct):
    """Just enough to tell another version from a damaged file."""

    schema_version: int


def reference_path(path: Path) -> str | None:
    """The file of the reference that a result.json is about; None when there is no result there."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_About).reference.path
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return None


class _Model(msgspec.Struct):
    path: str


class _About(msgspec.Struct):
    """Just enough to tell which model a result is about."""

    reference: _Model
