"""A position in the bytes of one file that never leaves them, and what is wrong with the bytes it finds.

Nothing is allocated on the word of a length field: every length is first compared with the bytes that are left.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from qres.errors import InputError, QresError
from qres.printable import show

DOWNLOAD_AGAIN = "the download or copy did not finish or is damaged: fetch it again and compare its size or checksum"


@dataclass(frozen=True)
class Problem:
    """Something wrong with a file that does not keep the rest of it from being read."""

    message: str
    """Completes "the file is ..."; one line."""
    hint: str = DOWNLOAD_AGAIN
    error: type[QresError] = InputError
    """What a strict reading raises."""
    fatal: bool = True
    """A strict reading refuses the file. False for an oddity that llama.cpp takes, too, or for `unloadable`."""
    unloadable: bool = False
    """The file is whole and can be read, but llama.cpp refuses to load it."""

    def exception(self, path: Path) -> QresError:
        """The error for a file at that path."""
        return self.error(f"{show(path)} is {self.message}", self.hint)


class CorruptError(Exception):
    """Ends the reading of one row; never leaves the reader.

    Attributes:
        problem: What is wrong with the row.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def corrupt(what: str) -> CorruptError:
    """For bytes that contradict themselves."""
    return CorruptError(Problem(f"damaged: {what}"))


class Cursor:
    """A position in one open file.

    Attributes:
        file: The file; whoever reads from it directly moves `at` along.
        size: Its bytes.
        at: The position.
        where: What is being read, as the messages call it.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        self.size = size
        self.at = 0
        self.where = "the header"

    @property
    def left(self) -> int:
        """Bytes up to the end of the file."""
        return max(self.size - self.at, 0)

    def seek(self, at: int) -> None:
        """Go to a position within the file."""
        self.file.seek(at)
        self.at = at

    def peek(self, n_bytes: int) -> bytes:
        """The next bytes, fewer at the end of the file, without moving."""
        data = self.file.read(min(n_bytes, self.left))
        self.file.seek(self.at)
        return data

    def take(self, n_bytes: int) -> bytes:
        """The next bytes.

        Raises:
            CorruptError: that many are not left.
        """
        if n_bytes > self.left:
            raise self.cut_off(n_bytes)
        data = self.file.read(n_bytes)
        self.at += len(data)
        if len(data) < n_bytes:  # it became shorter while we read
            raise self.cut_off(n_bytes - len(data))
        return data

    def number(self, code: str) -> int:
        """One integer of that `struct` code."""
        number: int = struct.unpack(code, self.take(struct.calcsize(code)))[0]
        return number

    def check_count(self, count: int, width: int, what: str) -> None:
        """Compare a count of things of at least `width` bytes with the bytes that are left.

        Raises:
            CorruptError: they cannot be there.
        """
        if count > self.left // width:
            claim = f"it claims {count} {what}, {self.left} bytes are left"
            raise CorruptError(Problem(f"damaged or truncated: {claim}"))

    def cut_off(self, n_bytes: int) -> CorruptError:
        """For a read past the end of the file."""
        need = f"{self.where} needs {n_bytes} bytes, {self.left} of {self.size} are left"
        return CorruptError(Problem(f"damaged or truncated: {need}"))
