"""Where the next row of a damaged header starts: a bounded search for bytes that can hardly be anything else.

A row alone is not enough: a vocabulary is a list of lengths and words, and so looks like keys. Hence a row counts only
when another one, or the end of the table, follows it.
"""

from __future__ import annotations

import math
import re
import struct

from qres.gguf.format.cursor import Cursor
from qres.gguf.format.metadata import ARRAY, SCALARS, STRING, WIDTHS

MAX_SEARCH = 1 << 20
"""Bytes that are searched for the next row."""

_MARGIN = 1 << 17  # beyond them, so that the row found can be followed to its end
_MAX_NAME = 65535  # of keys and tensor names: the GGUF specification's limit
_MAX_ROW = 4 + 4 * 8 + 4 + 8  # of the tensor table, behind the name
_MAX_STEPS = 64  # strings of an array that are walked to its end
_NOT_WALKED = -1  # the end of an array that is not
_MAX_LENGTH = 2**36  # of one dimension
_MAX_TYPE = 256  # ggml has 43 types; some forks add theirs above 100
_MAX_DIMENSIONS = 4

# A u64 length of at most 65535, then the first character of a name; a lookahead, since candidates overlap.
_CANDIDATE = re.compile(rb"(?=(?:[^\0].|\0[^\0])\0{6}[!-~])", re.DOTALL)
_KEY = re.compile(rb"[A-Za-z0-9_.\-]+")  # what all keys are made of: asked of a row that is searched for
_NAME = re.compile(rb"[!-~]+")  # asked of one that follows


def next_row(cursor: Cursor, start: int, *, metadata: bool, tensors: int) -> int | None:
    """Search for the next row within the bound.

    Args:
        cursor: The file; it is left anywhere.
        start: The position to search from.
        metadata: A metadata row may still come.
        tensors: Rows of the tensor table that may still come.

    Returns:
        The row's position; None when there is none.
    """
    cursor.seek(start)
    window = _Window(cursor.peek(MAX_SEARCH + _MARGIN), cursor.left)
    for match in _CANDIDATE.finditer(window.data, 0, MAX_SEARCH):
        at = match.start()
        if tensors and window.tensor_row(at, is_last=tensors == 1):
            return start + at
        if metadata and window.metadata_row(at, _KEY, is_last=not tensors):
            return start + at
    return None


def at_metadata(cursor: Cursor, *, is_last: bool) -> bool:
    """A metadata row starts at the cursor; `is_last` when no other row needs to follow it."""
    return _Window(cursor.peek(_MARGIN), cursor.left).metadata_row(0, _NAME, is_last=is_last)


def at_tensor(cursor: Cursor) -> bool:
    """A row of the tensor table starts at the cursor."""
    length = min(int.from_bytes(cursor.peek(8), "little"), _MAX_NAME)  # asked often, so with no more than is needed
    return _Window(cursor.peek(8 + length + _MAX_ROW), cursor.left).tensor_end(0) is not None


class _Window:
    """Some bytes of a file, and how many the file has from their start on. Positions count from there."""

    def __init__(self, data: bytes, left: int) -> None:
        self.data = data
        self._left = left

    def metadata_row(self, at: int, characters: re.Pattern[bytes], *, is_last: bool) -> bool:
        """A metadata row and another row behind it; if it may be the last, padding or the end of the file will do."""
        head = self._metadata_head(at, characters)
        end = None if head is None else self._value_end(*head)
        if end is None or end > self._left:
            return False
        if end == _NOT_WALKED or self._is_beyond(end):
            return True
        if self._metadata_head(end, _NAME) is not None or self.tensor_end(end) is not None:
            return True
        return is_last and not self.data[end : end + 32].strip(b"\0")

    def tensor_row(self, at: int, *, is_last: bool) -> bool:
        """A row of the tensor table, and another one behind it unless it may be the last."""
        end = self.tensor_end(at)
        return end is not None and (is_last or self._is_beyond(end) or self.tensor_end(end) is not None)

    def tensor_end(self, at: int) -> int | None:
        """End of a whole row of the tensor table."""
        end = self._name_end(at, _NAME)
        n_dims = None if end is None else self._number("<I", end)
        if end is None or n_dims is None or not 1 <= n_dims <= _MAX_DIMENSIONS:
            return None
        row = struct.Struct(f"<{n_dims}QIQ")
        if end + 4 + row.size > len(self.data):
            return None
        *shape, type_id, _ = row.unpack_from(self.data, end + 4)
        sane = max(shape) <= _MAX_LENGTH and math.prod(shape) < 2**63 and type_id < _MAX_TYPE
        return end + 4 + row.size if sane else None

    def _metadata_head(self, at: int, characters: re.Pattern[bytes]) -> tuple[int, int] | None:
        """Key and value type: where the value starts, and its type."""
        end = self._name_end(at, characters)
        type_id = None if end is None else self._number("<I", end)
        return None if end is None or type_id not in WIDTHS else (end + 4, type_id)

    def _is_beyond(self, at: int) -> bool:
        """A row at that position would not be within these bytes, but may be within the file."""
        length = self._number("<Q", at)
        if length is None:
            return len(self.data) < self._left
        return 1 <= length <= _MAX_NAME and len(self.data) < min(at + 8 + length + _MAX_ROW, self._left)

    def _name_end(self, at: int, characters: re.Pattern[bytes]) -> int | None:
        length = self._number("<Q", at)
        if length is None or not 1 <= length <= _MAX_NAME:
            return None
        end = at + 8 + length
        match = characters.match(self.data, at + 8, end)
        return end if match and match.end() == end else None

    def _value_end(self, at: int, type_id: int) -> int | None:
        """End of a value, within these bytes or not."""
        if type_id in SCALARS:
            return at + WIDTHS[type_id]
        if type_id == STRING:
            length = self._number("<Q", at)
            return None if length is None else at + 8 + length
        inner, count = self._number("<I", at), self._number("<Q", at + 4)
        if inner not in WIDTHS or count is None:
            return None
        if inner in SCALARS:
            return at + 12 + count * WIDTHS[inner]
        if count > _MAX_STEPS or inner == ARRAY:
            return _NOT_WALKED if count * WIDTHS[inner] <= self._left else None
        end: int | None = at + 12
        for _ in range(count):
            end = None if end is None else self._value_end(end, STRING)
        return end

    def _number(self, code: str, at: int) -> int | None:
        if at + struct.calcsize(code) > len(self.data):
            return None
        number: int = struct.unpack_from(code, self.data, at)[0]
        return number
