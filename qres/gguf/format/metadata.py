"""Metadata values of a GGUF: scalars and strings as they are, arrays and very long strings as a digest.

A value is its bytes, little-endian; a string its length as u64 and its bytes; an array element type u32, count u64 and
the elements.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from qres.gguf.format.cursor import CorruptError, Cursor, Problem, corrupt

SCALARS = {
    0: ("uint8", "<B"),
    1: ("int8", "<b"),
    2: ("uint16", "<H"),
    3: ("int16", "<h"),
    4: ("uint32", "<I"),
    5: ("int32", "<i"),
    6: ("float32", "<f"),
    7: ("bool", "<?"),
    10: ("uint64", "<Q"),
    11: ("int64", "<q"),
    12: ("float64", "<d"),
}
"""Value type -> its name and `struct` code."""
STRING, ARRAY = 8, 9
WIDTHS = {type_id: struct.calcsize(code) for type_id, (_, code) in SCALARS.items()} | {STRING: 8, ARRAY: 12}
"""Value type -> the fewest bytes that a value takes."""

_NAMES = {type_id: name for type_id, (name, _) in SCALARS.items()} | {STRING: "string", ARRAY: "array"}
_CODES = dict(SCALARS.values())
_ELEMENT_WIDTHS = {_NAMES[type_id]: WIDTHS[type_id] for type_id in (*SCALARS, STRING)}
_MAX_NESTING = 4  # arrays of arrays are legal, though no known file has them
# Walking a false count must end soon, in a sparse file of any length too. The largest vocabularies have 2**18 tokens.
_MAX_SCALARS, _MAX_STRINGS, _MAX_ARRAYS = 2**28, 2**22, 2**16
_MAX_TEXT = 2**20  # a longer string is kept as a digest: some converters store a whole tokenizer.json
_PIECE = 1 << 20


@dataclass(frozen=True)
class Digest:
    """A metadata value too large to keep: an array, or a very long string."""

    length: int
    """Elements of the array, or bytes of the string."""
    element_type: str
    """`string`, `float32`, ..., `array` for nested arrays; `byte` for a long string."""
    sha256: str
    """Hash of the value's bytes in the file: equal digests mean equal values."""
    offset: int = field(default=0, compare=False)
    """Byte at which the first element begins, from the start of its file."""


@dataclass(frozen=True)
class Unreadable:
    """A metadata value that is there, but cannot be read: of an unknown type, or damaged."""

    type_id: int
    """The value type; of an array with elements of an unknown type, theirs."""


Value = str | int | float | bool | Digest | Unreadable
"""One metadata value as it is kept."""


def read_value(cursor: Cursor, type_id: int) -> Value | bytes:
    """The value of that type at the cursor; a string as its bytes.

    Raises:
        CorruptError: no such type, or a value that cannot be.
    """
    if type_id in SCALARS:
        value: Value = struct.unpack(SCALARS[type_id][1], cursor.take(WIDTHS[type_id]))[0]
        return value
    if type_id == STRING:
        length = cursor.number("<Q")
        if length > _MAX_TEXT:
            at = cursor.at
            return Digest(length, "byte", _hash(cursor, length, hashlib.sha256()), at)
        return cursor.take(length)
    if type_id == ARRAY:
        element_type, count = cursor.number("<I"), cursor.number("<Q")
        at = cursor.at
        return Digest(count, _name(cursor, element_type), _elements(cursor, element_type, count, hashlib.sha256()), at)
    raise UnknownTypeError(cursor, type_id)


class UnknownTypeError(CorruptError):
    """A value type that this version does not know, so the length of the value is unknown, too.

    Attributes:
        type_id: The value type.
    """

    def __init__(self, cursor: Cursor, type_id: int) -> None:
        what = f"damaged, or newer than this qres: {cursor.where} has the unknown value type {type_id}"
        super().__init__(Problem(what, "get the file again, convert it again, or update qres"))
        self.type_id = type_id


def array_elements(path: Path, array: Digest) -> Iterator[bytes]:
    """The elements of an array of scalars or strings in the file at `path`, one at a time and as their bytes.

    Of a string of more than a mebibyte only the start. Ends early where the file has become shorter.
    """
    width = _ELEMENT_WIDTHS[array.element_type]
    with path.open("rb", buffering=_PIECE) as file:
        file.seek(array.offset)
        for _ in range(array.length):
            head = file.read(width)
            if len(head) < width:
                return
            if array.element_type != "string":
                yield head
                continue
            length = int.from_bytes(head, "little")
            yield file.read(min(length, _PIECE))
            if length > _PIECE:
                file.seek(length - _PIECE, os.SEEK_CUR)


def element_text(element_type: str, element: bytes) -> str:
    """One element of `array_elements` as Python writes it; text that is not UTF-8 as bytes."""
    if element_type != "string":
        return repr(struct.unpack(_CODES[element_type], element)[0])
    try:
        return repr(element.decode())
    except UnicodeDecodeError:
        return repr(element)


def _name(cursor: Cursor, type_id: int) -> str:
    if type_id not in _NAMES:
        raise UnknownTypeError(cursor, type_id)
    return _NAMES[type_id]


def _elements(cursor: Cursor, type_id: int, count: int, digest: hashlib._Hash, depth: int = 1) -> str:
    """Digest of an array's elements, read in pieces."""
    cursor.check_count(count, WIDTHS[type_id], f"elements in {cursor.where}")
    limit = {STRING: _MAX_STRINGS, ARRAY: _MAX_ARRAYS}.get(type_id, _MAX_SCALARS)
    if count > limit or depth > _MAX_NESTING:
        raise corrupt(f"{cursor.where} is an array of {count} elements, nested {depth} deep")
    if type_id in SCALARS:
        return _hash(cursor, count * WIDTHS[type_id], digest)
    if type_id == STRING:
        return _hash_strings(cursor, count, digest)
    for _ in range(count):
        head = cursor.take(12)
        digest.update(head)
        inner, length = struct.unpack("<IQ", head)
        _name(cursor, inner)
        _elements(cursor, inner, length, digest, depth + 1)
    return digest.hexdigest()


def _hash(cursor: Cursor, n_bytes: int, digest: hashlib._Hash) -> str:
    cursor.check_count(n_bytes, 1, f"bytes in {cursor.where}")
    while n_bytes:
        piece = cursor.take(min(n_bytes, _PIECE))
        digest.update(piece)
        n_bytes -= len(piece)
    return digest.hexdigest()


def _hash_strings(cursor: Cursor, count: int, digest: hashlib._Hash) -> str:
    """The loop that takes the time (a vocabulary and its merges: some 400,000 strings), hence without `take`."""
    read, at, size, pieces, waiting = cursor.file.read, cursor.at, cursor.size, [], 0
    for _ in range(count):
        head = read(8)
        length = int.from_bytes(head, "little")
        if length > size - at - 8 or len(head) < 8:
            cursor.seek(at)
            raise cursor.cut_off(length)
        at += 8 + length
        pieces.append(head)
        waiting += length
        if waiting <= _PIECE:
            pieces.append(read(length))
        else:
            digest.update(b"".join(pieces))
            pieces.clear()
            waiting = 0
            cursor.at = at - length
            _hash(cursor, length, digest)
    digest.update(b"".join(pieces))
    cursor.at = at
    return digest.hexdigest()
