"""Texts without control characters, fit to be shown: names come out of files that anybody may have made."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, TypeVar
from unicodedata import category

_T = TypeVar("_T")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def plain(text: str) -> str:
    r"""The text with everything that steers a terminal or is no character replaced; spaces and new lines stay.

    >>> plain("a\x1b[31m") == "a\N{REPLACEMENT CHARACTER}[31m"
    True
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" or category(c) == "Zs" else _REPLACEMENT for c in text)


def plain_line(text: str) -> str:
    """The same on one line: names may hold new lines, too."""
    return plain(text).replace("\n", " ")


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop, where these would not change a name or a command in it."""
    first, last = text.split(maxsplit=1)[0], text.rsplit(maxsplit=1)[-1]
    if first.rstrip(",:").isalpha() and first not in ("llama.cpp", "qres"):
        text = text[0].upper() + text[1:]
    return text if re.search(r"\w[./]\w", last) and ">" in text else f"{text}."


def counted(n: int, noun: str) -> str:
    """A number with its noun, in the plural unless it is one.

    >>> counted(1, "token"), counted(2048, "chunk")
    ('1 token', '2,048 chunks')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def plain_record(record: _T) -> _T:
    """A frozen record, and all records in it, with plain texts."""
    cleaned: _T = _clean(record)
    return cleaned


def _clean(value: Any) -> Any:  # noqa: ANN401 - as heterogeneous as the records
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, tuple):
        cleaned = tuple(_clean(item) for item in value)
        return cleaned if any(new is not old for new, old in zip(cleaned, value, strict=True)) else value
    if isinstance(value, (int, float, type(None))):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _clean(getattr(value, f.name)) for f in dataclasses.fields(value)}
        changed = {name: new for name, new in fields.items() if new is not getattr(value, name)}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def show(text: object) -> str:
    """Text fit for one line of a message: no control characters, and not longer than 120 unless it is a path."""
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))
    return line if len(line) <= 120 or isinstance(text, Path) else f"{line[:60]}...{line[-50:]}"
