"""Text or token ids in, chunks of token ids out. Knows no model: the tokenizer is passed in."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from qres.errors import InputError

MIN_TOKENS = 32
"""A text shorter than this has fewer than 16 scored positions: no figure from it would mean anything."""
MAX_TEXT_BYTES = 256 * 2**20

_ID_DIGITS = 10

Chunk = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """Where tokens come from: text for the model's tokenizer, or ids as they are."""

    name: str
    text: bytes | None = None
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Chunks:
    """Token ids in pieces that are decoded on their own."""

    chunks: tuple[Chunk, ...]
    unused: int
    """Tokens at the end that fill no chunk, or that the limit left out."""


def built_in(part: str) -> Source:
    """The text that comes with qres: `report` (figures come from it) or `rank` (it ranks units); they share nothing."""
    text = (resources.files("qres") / "data" / f"{part}.txt").read_bytes()
    return Source(f"built-in {part} text", text=text)


def read_text(path: Path) -> Source:
    """A UTF-8 text file, or standard input for `-`.

    Raises:
        InputError: unreadable, empty, too large, or not UTF-8 text.
    """
    if str(path) == "-" and sys.stdin is None:
        raise InputError("standard input is closed", "give a file to --text")
    name, data = (
        ("standard input", sys.stdin.buffer.read(MAX_TEXT_BYTES)) if str(path) == "-" else (str(path), _read(path))
    )
    data = data.removeprefix(b"\xef\xbb\xbf")
    if not data.strip():
        raise InputError(f"{name} is empty", "give a text of at least a few thousand words")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x})", "convert it to UTF-8"
        ) from error
    if "\0" in text:
        raise InputError(f"{name} holds NUL bytes at {text.index(chr(0))}", "give a text file, not a binary one")
    return Source(name, text=text.replace("\r\n", "\n").encode())


def read_ids(path: Path) -> Source:
    """A file of token ids separated by white space or commas.

    Raises:
        InputError: unreadable, empty, or something in it is not a whole number.
    """
    data = _read(path).removeprefix(b"\xef\xbb\xbf")
    words = [word for word in re.split(rb"[\s,]+", data) if word]
    bad = next((word for word in words if not word.isdigit() or len(word) > _ID_DIGITS), None)
    if not words:
        raise InputError(f"{path} holds no token ids", "give whole numbers separated by spaces")
    if bad is not None:
        raise InputError(f"{path}: {bad[:20].decode(errors='replace')!r} is not a token id", "use --text for text")
    return Source(str(path), ids=tuple(int(word) for word in words))


def _read(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise InputError(f"{path} is a folder", "give a file")
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise InputError(
                f"{path} is larger than {MAX_TEXT_BYTES // 2**20} MiB", "a few hundred kilobytes are plenty"
            )
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def tokens_of(source: Source, tokenize: Callable[[bytes], list[int]], n_vocab: int) -> list[int]:
    """All token ids of a source.

    Raises:
        InputError: fewer than MIN_TOKENS, or an id the model does not have.
    """
    ids = list(source.ids) if source.ids is not None else tokenize(source.text or b"")
    if len(ids) < MIN_TOKENS:
        raise InputError(
            f"{source.name} has {len(ids)} tokens, at least {MIN_TOKENS} are needed", "give a longer text with --text"
        )
    high = max(ids)
    if high >= n_vocab:
        raise InputError(f"{source.name}: token id {high} is outside the model's vocabulary of {n_vocab}")
    return ids


def chunk(ids: list[int], n_ctx: int, bos: int | None, limit: int | None) -> Chunks:
    """Cut token ids into chunks as llama-perplexity does: consecutive, full, BOS in the first place of each.

    A text shorter than one chunk becomes a single shorter one.

    Args:
        ids: Token ids of the whole text.
        n_ctx: Tokens per chunk.
        bos: Token that replaces the first of each chunk when the model adds one, else None.
        limit: At most this many chunks.
    """
    size = min(n_ctx, len(ids)) // 2 * 2  # even: the noise floor decodes a chunk in two equal halves
    starts = range(0, len(ids) - size + 1, size)[:limit]
    chunks = [ids[start : start + size] for start in starts]
    if bos is not None:
        chunks = [[bos, *piece[1:]] for piece in chunks]
    return Chunks(tuple(tuple(piece) for piece in chunks), len(ids) - len(chunks) * size)
