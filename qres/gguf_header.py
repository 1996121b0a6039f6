"""The bytes of one GGUF file's header -> metadata and tensor table, checked against the file's size. Reads no weights.

An own reader because gguf-py gives up on a whole file for one unknown type id. Layout (ggml/include/gguf.h), all
numbers little-endian, a string being its length as u64 and its bytes:

    magic "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata: key string | value type u32 | value, an array being element type u32 | count u64 | elements
    tensors:  name string | dimension count u32 | dimensions u64 each | ggml type u32 | offset u64
    padding to general.alignment | data; a tensor's offset counts from here

Nothing is allocated on the word of a length field: every count is first compared with the bytes that are left.
"""

from __future__ import annotations

import hashlib
import math
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from qres import gguf_kind, levels
from qres.errors import InputError, UnsupportedError

_DOWNLOAD_AGAIN = "the download or copy did not finish or is damaged: fetch it again and compare its size or checksum"

_SCALARS = {
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
_STRING, _ARRAY = 8, 9

_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_MAX_WEIGHTS = 2**63 - 1  # llama.cpp counts weights in an int64
_MAX_NESTING = 4  # arrays of arrays are legal, though no known file has them
_MAX_ELEMENTS = 2**25  # of one array; the largest vocabularies have 2**18 tokens, and walking a false count must end
_MAX_KEY = 65535  # the GGUF specification's limit, used for tensor names too
_MAX_TEXT = 2**20  # a longer string is kept as a digest: some converters store a whole tokenizer.json


@dataclass(frozen=True)
class Digest:
    """A metadata value too large to keep: an array, or a very long string."""

    length: int
    """Elements of the array, or bytes of the string."""
    element_type: str
    """`string`, `float32`, ..., `array` for nested arrays; `byte` for a long string."""
    sha256: str
    """Of the value's bytes in the file: equal digests mean equal values."""


Value = str | int | float | bool | Digest
"""One metadata value as it is kept."""


@dataclass(frozen=True)
class Tensor:
    """One row of the tensor table."""

    name: str
    shape: tuple[int, ...]
    """`ne` in ggml order: the row length first."""
    type: str
    """ggml type name, or `type N` for one that this version does not know."""
    type_id: int
    n_weights: int
    n_bytes: int | None
    """None for a type of unknown layout."""
    offset: int
    """Of the first byte, from the start of its file."""
    shard: int = 0
    """Index of its file in `Inventory.shards`."""

    @property
    def row(self) -> int:
        """Weights per row: what a block must divide."""
        return self.shape[0] if self.shape else 1

    @property
    def n_dims(self) -> int:
        """Dimensions without trailing ones, as ggml_n_dims: a vector stored as [n, 1] has one."""
        return max((i + 1 for i, length in enumerate(self.shape) if length > 1), default=1)


@dataclass(frozen=True)
class Header:
    """What one file says about itself."""

    version: int
    metadata: Mapping[str, Value]
    """In the order of the file."""
    tensors: tuple[Tensor, ...]
    file_bytes: int


def read_header(path: Path, shard: int = 0) -> Header:
    """Read the header of one file; `shard` is noted on its tensors.

    Raises:
        InputError: the file is missing, unreadable, not GGUF, damaged or cut off; the message says which.
        UnsupportedError: a GGUF of another version or byte order.
    """
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            inside = next((p.name for p in sorted(path.glob("*.gguf"))), "")
            raise InputError(
                f"{show(path)} is a directory", f"give a .gguf file{f', such as {inside}' if inside else ''}"
            )
        if not stat.S_ISREG(status.st_mode):
            raise InputError(
                f"{show(path)} is not a regular file", "llama.cpp maps the model: it must be a file on disk"
            )
        if status.st_size == 0:
            raise InputError(f"{show(path)} is empty (0 bytes)", _DOWNLOAD_AGAIN)
        with path.open("rb", buffering=1 << 20) as file:
            return _Reader(path, file, status.st_size, shard).header()
    except FileNotFoundError as error:
        raise InputError(f"{show(path)} does not exist", "check the path") from error
    except PermissionError as error:
        raise InputError(f"no permission to read {show(path)}", "check its owner and mode") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise InputError(f"cannot read {show(path)}: {getattr(error, 'strerror', None) or error}") from error


def show(text: object) -> str:
    """Text fit for one line of a message: no control characters, and not longer than 120 unless it is a path."""
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))
    return line if len(line) <= 120 or isinstance(text, Path) else f"{line[:60]}...{line[-50:]}"


class _Reader:
    """A cursor over one open file that never reads past its end."""

    def __init__(self, path: Path, file: BinaryIO, size: int, shard: int) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._shard = shard
        self._at = 0
        self._where = "the header"

    def header(self) -> Header:
        self._check_magic()
        version = self._version()
        n_tensors, n_values = self._number("<Q"), self._number("<Q")
        # The smallest rows possible: an empty name or key, no dimension, a one-byte value.
        self._check_count(n_values, 13, "metadata values")
        self._check_count(n_tensors, 24, "tensors")
        metadata: dict[str, Value] = {}
        for index in range(n_values):
            self._where = f"metadata value {index + 1} of {n_values}"
            key = self._text(_MAX_KEY)
            if not key or key in metadata:
                raise self._damaged(f"metadata key {show(key)!r} appears twice" if key else f"{self._where} has no key")
            self._where = f"metadata value {show(key)!r}"
            metadata[key] = self._value(self._number("<I"))
        rows = self._rows(n_tensors)
        return Header(version, metadata, self._tensors(rows, self._alignment(metadata)), self._size)

    def _check_magic(self) -> None:
        head = self._file.read(512)
        self._file.seek(0)
        if head.startswith(b"GGUF"):
            self._at = len(self._take(4))
            return
        what, hint = gguf_kind.foreign_format(head, self._size)
        raise InputError(f"{show(self._path)} is {what}", hint)

    def _version(self) -> int:
        version = self._number("<I")
        if version in (2, 3):
            return version
        if version and version & 0xFFFF == 0:
            message = f"{show(self._path)} is a big-endian GGUF (version field {version})"
            raise UnsupportedError(
                message, "convert it for this machine with gguf-convert-endian, or get the little-endian file"
            )
        hint = (
            "convert the original model again"
            if version < 2
            else "update qres and llama-cpp-python, or convert it again"
        )
        raise UnsupportedError(f"{show(self._path)} has GGUF version {version}; llama.cpp reads versions 2 and 3", hint)

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {show(alignment)}, not a power of two")
        return alignment

    def _rows(self, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
        """Name -> shape, type id, offset within the data."""
        rows: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for index in range(count):
            self._where = f"tensor {index + 1} of {count}"
            name = self._text(_MAX_KEY)
            if name in rows:
                raise self._damaged(f"tensor {show(name)!r} appears twice")
            self._where = f"tensor {show(name)!r}"
            n_dims = self._number("<I")
            if n_dims > _MAX_DIMENSIONS:
                raise self._damaged(f"{self._where} has {n_dims} dimensions, at most {_MAX_DIMENSIONS} are possible")
            shape = tuple(self._number("<Q") for _ in range(n_dims))
            # Zeros left out: [0, 2**62, 2**62] holds nothing, yet overflows llama.cpp's product all the same.
            if math.prod(length or 1 for length in shape) > _MAX_WEIGHTS:
                raise self._damaged(f"{self._where} has the impossible shape {list(shape)}")
            rows[name] = (shape, self._number("<I"), self._number("<Q"))
        return rows

    def _tensors(self, rows: Mapping[str, tuple[tuple[int, ...], int, int]], alignment: int) -> tuple[Tensor, ...]:
        """The rows with their sizes, each checked to lie inside the file."""
        data = -(-self._at // alignment) * alignment
        tensors = []
        for name, (shape, type_id, offset) in rows.items():
            traits = levels.TYPES_BY_ID.get(type_id)
            n_weights = math.prod(shape)
            n_bytes = None
            if traits:
                row = shape[0] if shape else 1
                if row % traits.block_size:
                    what = f"rows of {row}, not a multiple of {traits.name}'s block of {traits.block_size}"
                    raise self._damaged(f"tensor {show(name)!r} has {what}")
                n_bytes = n_weights // traits.block_size * traits.block_bytes
            end = data + offset + (n_bytes or 0)
            if end > self._size:
                what = f"tensor {show(name)!r} ends at byte {end}, the file has {self._size}"
                raise InputError(f"{show(self._path)} is truncated: {what}", _DOWNLOAD_AGAIN)
            tensors.append(
                Tensor(name, shape, levels.type_name(type_id), type_id, n_weights, n_bytes, data + offset, self._shard)
            )
        return tuple(tensors)

    def _value(self, type_id: int) -> Value:
        if type_id in _SCALARS:
            code = _SCALARS[type_id][1]
            value: Value = struct.unpack(code, self._take(struct.calcsize(code)))[0]
            return value
        if type_id == _STRING:
            length = self._number("<Q")
            if length > _MAX_TEXT:
                return Digest(length, "byte", self._hash(length, hashlib.sha256()))
            return self._take(length).decode("utf-8", "replace")
        if type_id == _ARRAY:
            return self._array()
        raise self._unknown_type(type_id)

    def _array(self) -> Digest:
        element_type, count = self._number("<I"), self._number("<Q")
        if element_type in _SCALARS:
            name = _SCALARS[element_type][0]
        elif element_type in (_STRING, _ARRAY):
            name = "string" if element_type == _STRING else "array"
        else:
            raise self._unknown_type(element_type)
        return Digest(count, name, self._elements(element_type, count, hashlib.sha256(), 1))

    def _elements(self, type_id: int, count: int, digest: hashlib._Hash, depth: int) -> str:
        """Digest of an array's elements, read in pieces."""
        width = struct.calcsize(_SCALARS[type_id][1]) if type_id in _SCALARS else 8 if type_id == _STRING else 12
        self._check_count(count, width, f"elements in {self._where}")
        if count > _MAX_ELEMENTS or depth > _MAX_NESTING:
            raise self._damaged(f"{self._where} is an array of {count} elements, nested {depth} deep")
        if type_id in _SCALARS:
            return self._hash(count * width, digest)
        if type_id == _STRING:
            return self._hash_strings(count, digest)
        for _ in range(count):
            head = self._take(12)
            digest.update(head)
            inner, length = struct.unpack("<IQ", head)
            if inner not in _SCALARS and inner not in (_STRING, _ARRAY):
                raise self._unknown_type(inner)
            self._elements(inner, length, digest, depth + 1)
        return digest.hexdigest()

    def _hash(self, n_bytes: int, digest: hashlib._Hash) -> str:
        self._check_count(n_bytes, 1, f"bytes in {self._where}")
        while n_bytes:
            piece = self._take(min(n_bytes, 1 << 20))
            digest.update(piece)
            n_bytes -= len(piece)
        return digest.hexdigest()

    def _hash_strings(self, count: int, digest: hashlib._Hash) -> str:
        """The loop that takes the time (a vocabulary and its merges: some 400,000 strings), hence without `_take`."""
        read, at, size, pieces = self._file.read, self._at, self._size, []
        for _ in range(count):
            head = read(8)
            length = int.from_bytes(head, "little")
            at += 8 + length
            if at > size or len(head) < 8:
                raise self._cut_off(length)
            pieces.append(head)
            pieces.append(read(length))
            if len(pieces) > 8192:
                digest.update(b"".join(pieces))
                pieces.clear()
        digest.update(b"".join(pieces))
        self._at = at
        return digest.hexdigest()

    def _text(self, limit: int) -> str:
        length = self._number("<Q")
        if length > limit:
            raise self._damaged(f"{self._where} has a name of {length} bytes")
        return self._take(length).decode("utf-8", "replace")

    def _number(self, code: str) -> int:
        number: int = struct.unpack(code, self._take(struct.calcsize(code)))[0]
        return number

    def _take(self, n_bytes: int) -> bytes:
        if n_bytes > self._size - self._at:
            raise self._cut_off(n_bytes)
        data = self._file.read(n_bytes)
        self._at += n_bytes
        if len(data) < n_bytes:  # it became shorter while we read
            raise self._cut_off(n_bytes)
        return data

    def _check_count(self, count: int, width: int, what: str) -> None:
        if count > (self._size - self._at) // width:
            left = self._size - self._at
            message = f"{show(self._path)} is damaged or truncated: it claims {count} {what}, {left} bytes are left"
            raise InputError(message, _DOWNLOAD_AGAIN)

    def _cut_off(self, n_bytes: int) -> InputError:
        where = f"{self._where} needs {n_bytes} bytes, {max(self._size - self._at, 0)} of {self._size} are left"
        return InputError(f"{show(self._path)} is damaged or truncated: {where}", _DOWNLOAD_AGAIN)

    def _damaged(self, what: str) -> InputError:
        return InputError(f"{show(self._path)} is damaged: {what}", _DOWNLOAD_AGAIN)

    def _unknown_type(self, type_id: int) -> InputError:
        message = (
            f"{show(self._path)}: {self._where} has the unknown value type {type_id}, so what follows cannot be found"
        )
        return InputError(message, "the file is damaged, or newer than this qres")
