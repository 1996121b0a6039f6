"""Where tokens come from: the built-in text, a file, or standard input."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from qres.errors import InputError, UsageError, reason_of

MAX_TEXT_BYTES = 256 * 2**20

_ID_DIGITS = 10
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Source:
    """Where tokens come from: text for the model's tokenizer, or ids as they are."""

    name: str
    text: bytes | None = None
    ids: tuple[int, ...] | None = None
    special: bool = False
    """Special tokens that stand in the text are parsed, as in a chat, not read as characters."""


def built_in(part: str) -> Source:
    """The text that comes with qres: `report` (figures come from it) or `rank` (it ranks units); they share nothing."""
    text = (resources.files("qres") / "data" / f"{part}.txt").read_bytes()
    return Source(f"built-in {part} text", text=text)


def own(text: Path | None, tokens: Path | None, *, special: bool = False) -> Source | None:
    """What a user gave to measure on; None for nothing.

    Args:
        text: A file of text.
        tokens: A file of ids.
        special: Parse special tokens that stand in the text.

    Raises:
        UsageError: both of them, or special tokens without a text.
        InputError: a file that cannot be used.
    """
    if text and tokens:
        raise UsageError("--text and --tokens exclude each other", "give one of them")
    if special and not text:
        instead = "token ids are taken as they are" if tokens else "the built-in text has no special tokens"
        raise UsageError(f"--special is about a text of yours: {instead}", "give one with --text, or leave it out")
    if tokens:
        return read_ids(tokens)
    return replace(read_text(text), special=special) if text else None


def read_text(path: Path) -> Source:
    """A UTF-8 text file, or standard input for `-`.

    Raises:
        InputError: unreadable, empty, too large, or not UTF-8 text.
    """
    name, raw = _read(path)
    data = raw.removeprefix(_BOM)
    if not data.strip():
        raise InputError(f"{name} is empty", "give a text of at least a few thousand words")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text (byte {error.start + len(raw) - len(data)} is 0x{data[error.start]:02x})",
            "convert it to UTF-8",
        ) from error
    if "\0" in text:
        raise InputError(f"{name} holds NUL bytes at {raw.index(0)}", "give a text file, not a binary one")
    return Source(name, text=text.replace("\r\n", "\n").encode())


def read_ids(path: Path) -> Source:
    """A file of token ids separated by white space or commas, or standard input for `-`.

    Raises:
        InputError: unreadable, empty, or something in it is not a whole number.
    """
    name, data = _read(path)
    data = data.removeprefix(_BOM)
    words = [word for word in re.split(rb"[\s,]+", data) if word]
    bad = next((word for word in words if not word.isdigit() or len(word) > _ID_DIGITS), None)
    if not words:
        raise InputError(f"{name} holds no token ids", "give whole numbers separated by spaces")
    if bad is not None:
        raise InputError(
            f"{name}: {bad[:20].decode(errors='replace')!r} is not a token id",
            "give whole numbers separated by spaces, or use --text for text",
        )
    return Source(name, ids=tuple(int(word) for word in words))


def _read(path: Path) -> tuple[str, bytes]:
    """What to call the source, and its bytes."""
    name = "standard input" if str(path) == "-" else str(path)
    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1) if sys.stdin else b""
        else:
            if path.is_dir():
                raise InputError(f"{path} is a folder", "give a file")
            with path.open("rb") as file:
                data = file.read(MAX_TEXT_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise InputError(f"cannot read {name}: {reason_of(error)}", "check the path and its owner and mode") from error
    if len(data) > MAX_TEXT_BYTES:
        raise InputError(f"{name} is larger than {MAX_TEXT_BYTES // 2**20} MiB", "a few hundred kilobytes are plenty")
    return name, data
