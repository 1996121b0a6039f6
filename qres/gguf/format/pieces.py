"""Files that `split` or an uploader cut into pieces, byte by byte: they have to be joined before anything reads them.

A piece is known by its name, since only the first one starts like a GGUF.
"""

from __future__ import annotations

import re
import shlex
import string
from dataclasses import dataclass
from pathlib import Path

from qres.gguf.format.cursor import Problem
from qres.printable import show

# .gguf.part1of2 .gguf.part-aa .gguf-split-a .gguf.partaa | .gguf.1of2 .gguf.001 .gguf.aa .ggufaa
# But not .gguf.1, a second download, nor .gguf.part and .gguf.partial, unfinished ones.
_PIECE = re.compile(
    r"(?P<whole>.+\.gguf)"
    r"(?P<mark>[._-]?(?:part|split)(?:[._-](?=\d|[a-z]{1,2}$)|(?=\d|[a-z]{2}$))"
    r"|[._-]?(?=\d{1,5}[._-]?of|\d{2,5}$|a[a-z]{1,2}$))"
    r"(?P<piece>\d{1,5}|[a-z]{1,3})(?P<end>[._-]?of[._-]?(?P<count>\d{1,5}))?",
    re.DOTALL | re.IGNORECASE | re.ASCII,
)
_MAX_NAMES = 10  # in one list of a message
_MAX_ARGUMENTS = 700  # of the command: `split` makes up to 676 pieces


@dataclass(frozen=True)
class _Set:
    """The pieces of one file that are there."""

    whole: str
    mark: str
    end: str
    count: int | None
    """As the names tell it."""
    found: dict[int, str]
    """Index, as counted by the names (a is 0) -> how the name writes it."""

    @property
    def indices(self) -> range:
        """Indices of all pieces known to exist, found or not."""
        first = min(*self.found, 0 if self._is_lettered else 1)
        return range(first, max(max(self.found) + 1, first + (self.count or 0)))

    @property
    def _is_lettered(self) -> bool:
        return next(iter(self.found.values())).isalpha()

    def name(self, index: int) -> str:
        """The name of a piece, whether it is there or not."""
        text = self.found.get(index)
        if text is None:
            sample = next(iter(self.found.values()))
            if self._is_lettered:
                text = ""
                for _ in sample:
                    index, letter = divmod(index, 26)
                    text = string.ascii_lowercase[letter] + text
            else:
                is_padded = any(known.startswith("0") for known in self.found.values())
                text = str(index).zfill(len(sample) if is_padded else 1)
        return f"{self.whole}{self.mark}{text}{self.end}"


def piece_problem(path: Path) -> Problem | None:
    """What to do about a file whose name says that it is one piece of a cut file; None for any other name."""
    match = _PIECE.fullmatch(path.name)
    if match is None:
        return None
    pieces = _pieces(path, match)
    there = [pieces.name(i) for i in pieces.indices if i in pieces.found]
    missing = [pieces.name(i) for i in pieces.indices if i not in pieces.found]
    cut = f"cut into {pieces.count} pieces" if pieces.count else "a file that was cut"
    what = f"one piece of {show(pieces.whole)}, {cut}; found: {_list(there)}"
    if missing:
        what += f"; missing: {_list(missing)}"
    names = " ".join(shlex.quote(pieces.name(i)) for i in pieces.indices[:_MAX_ARGUMENTS])
    more = " ..." if len(pieces.indices) > _MAX_ARGUMENTS else ""
    command = f"cat {names}{more} > {shlex.quote(pieces.whole)}"
    hint = f"get the missing pieces, then join them: {command}" if missing else f"join them: {command}"
    if path.with_name(pieces.whole).exists():
        hint = f"{pieces.whole} lies beside it: give that file"
    return Problem(what, "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in hint))


def _list(names: list[str]) -> str:
    return ", ".join(map(show, names[:_MAX_NAMES])) + (", ..." if len(names) > _MAX_NAMES else "")


def _pieces(path: Path, match: re.Match[str]) -> _Set:
    """The pieces in the folder of `path` that are named as it is."""
    try:
        names = sorted(p.name for p in path.parent.iterdir())
    except OSError:  # a folder may be searchable without being readable
        names = []
    found = {}
    for name in (*names, path.name):
        other = _PIECE.fullmatch(name)
        if other and _style(other) == _style(match):
            found[_index(other["piece"])] = other["piece"]
    count = int(match["count"]) if match["count"] else None
    return _Set(match["whole"], match["mark"], match["end"] or "", count, dict(sorted(found.items())))


def _style(match: re.Match[str]) -> tuple[object, ...]:
    """What the names of all pieces of one file have in common."""
    piece = match["piece"]
    return match["whole"], match["mark"], match["end"], len(piece) if piece.isalpha() else 0


def _index(piece: str) -> int:
    if piece.isdigit():
        return int(piece)
    index = 0
    for letter in piece.lower():
        index = 26 * index + string.ascii_lowercase.index(letter)
    return index
