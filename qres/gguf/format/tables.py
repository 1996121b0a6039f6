"""The two tables of a GGUF header, read row by row: metadata and tensors.

What is wrong is noted, and the reading goes on: behind a damaged row with the next one that can be found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qres.gguf.format import resync
from qres.gguf.format.cursor import CorruptError, Cursor, Problem, corrupt
from qres.gguf.format.metadata import UnknownTypeError, Unreadable, Value, read_value
from qres.gguf.format.tensor import TableRow, Tensor, layout_problems
from qres.printable import show

_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_MAX_NAME = 65535  # of keys and tensor names: the GGUF specification's limit
_MAX_PROBLEMS = 100  # a table with more of them is none
_MAX_SEARCHES = 8  # for the next row; one may take half a second
_ALIGNMENT = 32  # of the data, unless general.alignment says otherwise


@dataclass(frozen=True)
class Tables:
    """What the two tables hold."""

    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]
    problems: tuple[Problem, ...]
    table_at: int
    """Byte at which the tensor table begins."""


def read_tables(cursor: Cursor, n_values: int, n_tensors: int, shard: int = 0) -> Tables:
    """Metadata, tensors, and what is wrong with them, from the tables that start at the cursor.

    Args:
        cursor: At the first metadata row.
        n_values: Metadata rows that the header claims.
        n_tensors: Tensors that the header claims.
        shard: Index of the file in its set, noted on the tensors.
    """
    tables = _Tables(cursor, n_values, n_tensors)
    tables.read_metadata()
    table_at = cursor.at
    tables.read_rows()
    alignment = tables.alignment()
    data = -(-cursor.at // alignment) * alignment
    tensors = tuple(row.tensor(data, shard) for row in tables.rows.values())
    tables.check_complete()
    problems = (*tables.problems, *layout_problems(tensors, cursor.size, data, alignment))
    return Tables(tables.metadata, tensors, problems, table_at)


class _Tables:
    """The tables on the way: what was read, where the reading is, and the problems met.

    Attributes:
        metadata: Key -> value.
        rows: Name -> row of the tensor table.
        problems: In the order they were met.
    """

    def __init__(self, cursor: Cursor, n_values: int, n_tensors: int) -> None:
        self.metadata: dict[str, Value] = {}
        self.rows: dict[str, TableRow] = {}
        self.problems: list[Problem] = []
        self._cursor = cursor
        self._claimed_values = n_values
        self._claimed_tensors = n_tensors
        # The smallest rows possible: an empty name or key, no dimension, a one-byte value.
        self._trust_values = self._is_possible_count(n_values, 13, "metadata values")
        self._trust_tensors = self._is_possible_count(n_tensors, 24, "tensors")
        self._n_values = self._n_tensors = 0  # rows read, repeated ones included
        self._last: tuple[int, str] | None = None  # position and key of the last metadata row
        self._searches = 0
        self._stopped = False

    def read_metadata(self) -> None:
        cursor = self._cursor
        while self._metadata_follows():
            index = self._n_values + 1
            cursor.where = f"metadata value {index} of {self._claimed_values}"
            row_at = value_at = cursor.at
            key = type_id = None
            try:
                key = self._name()
                if not key or key in self.metadata:
                    twice = f"metadata key {show(key)!r} appears twice"
                    self._note(corrupt(twice if key else f"{cursor.where} has no key").problem)
                cursor.where = f"metadata value {show(key)!r}"
                type_id = cursor.number("<I")
                value_at = cursor.at
                value = read_value(cursor, type_id)
                if isinstance(value, bytes):
                    value = self._decoded(value)
            except CorruptError as error:
                value = Unreadable(error.type_id if isinstance(error, UnknownTypeError) else type_id or 0)
                is_last = self._trust_values and index == self._claimed_values
                if self._recover(error, (value_at, cursor.at), metadata=not is_last, tensors=self._claimed_tensors):
                    return
            if key is not None and type_id is not None:
                self._n_values += 1
                self._last = None if key in self.metadata else (row_at, key)
                self.metadata.setdefault(key, value)

    def read_rows(self) -> None:
        cursor = self._cursor
        self._trust_tensors = self._trust_tensors and self._n_values == self._claimed_values
        while self._tensor_follows():
            index = self._n_tensors + 1
            cursor.where = f"tensor {index} of {self._claimed_tensors}"
            start = cursor.at
            try:
                row = self._row()
            except CorruptError as error:
                self._recover(error, (start + 1,), metadata=False, tensors=self._claimed_tensors - index)
                if self._stopped:
                    cursor.seek(start)  # the table ends here at the earliest
                continue
            self._n_tensors += 1
            self._last = None
            self.rows.setdefault(row.name, row)

    def _metadata_follows(self) -> bool:
        if self._stopped:
            return False
        if self._trust_values and self._n_values < self._claimed_values:
            return True
        if self._claimed_tensors and resync.at_tensor(self._cursor):
            return False
        return resync.at_metadata(self._cursor, is_last=not self._claimed_tensors)

    def _tensor_follows(self) -> bool:
        if self._stopped or self._n_tensors >= self._claimed_tensors:
            return False
        return self._trust_tensors or resync.at_tensor(self._cursor)

    def _row(self) -> TableRow:
        cursor = self._cursor
        name = self._name()
        if not name:
            raise corrupt(f"{cursor.where} has no name")
        if name in self.rows:
            self._note(corrupt(f"tensor {show(name)!r} appears twice").problem)
        cursor.where = f"tensor {show(name)!r}"
        n_dims = cursor.number("<I")
        if n_dims > _MAX_DIMENSIONS:
            raise corrupt(f"{cursor.where} has {n_dims} dimensions, at most {_MAX_DIMENSIONS} are possible")
        shape = tuple(cursor.number("<Q") for _ in range(n_dims))
        row = TableRow(name, shape, type_id=cursor.number("<I"), offset=cursor.number("<Q"))
        if not row.is_possible:
            self._note(corrupt(f"{cursor.where} has the impossible shape {list(shape)}").problem)
        return row

    def alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is int and alignment > 0 and not alignment & (alignment - 1):
            return alignment
        what = "a power of two" if type(alignment) is int else "a number"
        self._note(corrupt(f"general.alignment is {show(repr(alignment))}, not {what}").problem)
        return _ALIGNMENT

    def check_complete(self) -> None:
        """Note when other numbers of rows were found than claimed."""
        if (self._n_values, self._n_tensors) != (self._claimed_values, self._claimed_tensors):
            claim = f"it claims {self._claimed_values} metadata values and {self._claimed_tensors} tensors"
            found = f"{self._n_values} and {self._n_tensors} were found"
            self._note(Problem(f"damaged or truncated: {claim}, {found}"))

    def _is_possible_count(self, count: int, width: int, what: str) -> bool:
        try:
            self._cursor.check_count(count, width, what)
        except CorruptError as error:
            self.problems.append(error.problem)
            return False
        return True

    def _name(self) -> str:
        length = self._cursor.number("<Q")
        if length > _MAX_NAME:
            raise corrupt(f"{self._cursor.where} has a name of {length} bytes")
        return self._decoded(self._cursor.take(length))

    def _decoded(self, text: bytes) -> str:
        try:
            return text.decode()
        except UnicodeDecodeError:
            what = f"damaged: {self._cursor.where} holds text that is not UTF-8"
            self._note(Problem(what, "convert it again if the text matters; nothing else depends on it", fatal=False))
            return text.decode("utf-8", "replace")

    def _note(self, problem: Problem) -> None:
        self.problems.append(problem)
        self._stopped = self._stopped or len(self.problems) >= _MAX_PROBLEMS

    def _recover(self, error: CorruptError, starts: Sequence[int], *, metadata: bool, tensors: int) -> bool:
        """Note what is broken and go to the next row that can be found from one of the positions on.

        Returns:
            Whether the row before was a tensor, read as metadata on the word of a count: it comes next.
        """
        self._note(error.problem)
        self._trust_values = self._trust_tensors = False
        if self._last and self._claimed_tensors:
            at, key = self._last
            self._cursor.seek(at)
            if resync.at_tensor(self._cursor):
                del self.metadata[key]
                self._n_values -= 1
                self._last = None
                return True
        for start in dict.fromkeys(starts):
            self._searches += 1
            next_row = resync.next_row(self._cursor, start, metadata=metadata, tensors=tensors)
            if next_row is not None:
                self._cursor.seek(next_row)
                return False
            if self._searches >= _MAX_SEARCHES:
                break
        self._stopped = True
        return False
