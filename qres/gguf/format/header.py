"""The bytes of one GGUF file's header -> metadata and tensor table, checked against the file's size. Reads no weights.

An own reader because gguf-py gives up on a whole file for one unknown type id. Layout (ggml/include/gguf.h), all
numbers little-endian, a string being its length as u64 and its bytes:

    magic "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata: key string | value type u32 | value (`metadata`)
    tensors:  name string | dimension count u32 | dimensions u64 each | ggml type u32 | offset u64 (`tables`)
    padding to general.alignment | data; a tensor's offset counts from here

A strict reading is a tolerant one, after which the first problem is raised.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from qres.errors import InputError, UnsupportedError, reason_of
from qres.gguf.format import foreign
from qres.gguf.format.cursor import DOWNLOAD_AGAIN, CorruptError, Cursor, Problem
from qres.gguf.format.metadata import Value
from qres.gguf.format.tables import read_tables
from qres.gguf.format.tensor import Tensor
from qres.printable import show


class ForeignFormatError(InputError):
    """A file that is no GGUF at all."""


@dataclass(frozen=True)
class Header:
    """What one file says about itself."""

    version: int
    metadata: Mapping[str, Value]
    """In the order of the file."""
    tensors: tuple[Tensor, ...]
    file_bytes: int
    problems: tuple[Problem, ...] = ()
    """In the order they were met."""
    table_at: int = 0
    """Byte at which the tensor table begins, behind the metadata."""


def read_header(path: Path, shard: int = 0, *, tolerant: bool = False) -> Header:
    """Read the header of one file; `shard` is noted on its tensors.

    Args:
        path: The file.
        shard: Index of the file in its set.
        tolerant: Return what can be read and note what is wrong, instead of refusing a damaged file.

    Raises:
        InputError: the file is missing, unreadable or not GGUF; unless tolerant, also damaged or cut off. The message
            says which.
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
            raise InputError(f"{show(path)} is empty (0 bytes)", DOWNLOAD_AGAIN)
        with path.open("rb", buffering=1 << 20) as file:
            header = parse(file, status.st_size, path, shard)
    except FileNotFoundError as error:
        hint = "download it first" if re.match(r"https?:/", str(path)) else "check the path"
        raise InputError(f"{show(path)} does not exist", hint) from error
    except PermissionError as error:
        raise InputError(f"no permission to read {show(path)}", "check its owner and mode") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise InputError(f"cannot read {show(path)}: {reason_of(error)}", "check the path") from error
    if not tolerant:
        raise_first(header.problems, path)
    return header


def raise_first(problems: Sequence[Problem], path: Path) -> None:
    """Raise the first problem for which a strict reading refuses the file at that path, if there is one."""
    for problem in problems:
        if problem.fatal:
            raise problem.exception(path)


def parse(file: BinaryIO, size: int, path: Path, shard: int = 0) -> Header:
    """Read the header from an open file of `size` bytes, as far as it can be read; `path` is only for messages.

    Raises:
        InputError: not GGUF, or cut off before the first row.
        UnsupportedError: a GGUF of another version or byte order.
    """
    cursor = Cursor(file, size)
    head = cursor.peek(512)
    if not head.startswith(b"GGUF"):
        what, hint = foreign.foreign_format(head, size)
        raise ForeignFormatError(f"{show(path)} is {what}", hint)
    try:
        cursor.take(4)
        version = cursor.number("<I")
        _check_version(version, path)
        n_tensors, n_values = cursor.number("<Q"), cursor.number("<Q")
    except CorruptError as cut_off:
        raise cut_off.problem.exception(path) from None
    found = read_tables(cursor, n_values, n_tensors, shard)
    return Header(version, found.metadata, found.tensors, size, found.problems, found.table_at)


def _check_version(version: int, path: Path) -> None:
    if version in (2, 3):
        return
    if version and version & 0xFFFF == 0:
        message = f"{show(path)} is a big-endian GGUF (version field {version})"
        raise UnsupportedError(
            message, "convert it for this machine with gguf-convert-endian, or get the little-endian file"
        )
    hint = (
        "convert the original model again" if version < 2 else "update qres and llama-cpp-python, or convert it again"
    )
    raise UnsupportedError(f"{show(path)} has GGUF version {version}; llama.cpp reads versions 2 and 3", hint)
