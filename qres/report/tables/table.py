"""What a table is to every renderer: strings to show, and numbers to sort by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from qres.report.formatting import NA


@dataclass(frozen=True)
class Column:
    """A column: `text` and `code` (names of the file) are set left, numbers are set right.

    `predicted` holds numbers that nobody measured: they carry the sign of `formatting.predicted`, and the page sets
    them apart.
    """

    title: str
    kind: Literal["text", "code", "number", "predicted"] = "number"

    @property
    def is_number(self) -> bool:
        """Whether it is sorted by number, values that do not exist last."""
        return self.kind in ("number", "predicted")

    @property
    def align(self) -> Literal["left", "right"]:
        """The side that the column is set to."""
        return "right" if self.is_number else "left"


@dataclass(frozen=True)
class Cell:
    """One value: how it reads and, for numbers, what it is sorted by (None: no value, sorted last)."""

    text: str
    key: float | None = None


@dataclass(frozen=True)
class Table:
    """A table ready to be placed; `rows` are plain strings, `keys` has the same shape."""

    name: str
    """Unique in a report, usable as an HTML id."""
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    keys: tuple[tuple[float | None, ...], ...]
    note: str = ""
    marked: tuple[int, ...] = ()
    """Rows that the report recommends."""
    folded: bool = False
    """Long and for looking things up: shown closed where the medium can."""
    page_only: bool = False
    """Too long for Markdown; the numbers are in result.json, too."""


def text(value: str | None) -> Cell:
    """A cell of words."""
    return Cell(NA if value is None else value)


def number(value: float | None, shown: str) -> Cell:
    """A cell that shows `shown` and sorts by `value`."""
    return Cell(shown, value)


def table(
    name: str,
    title: str,
    columns: Sequence[Column],
    rows: Iterable[Sequence[Cell]],
    *,
    note: str = "",
    marked: Iterable[int] = (),
    folded: bool = False,
    page_only: bool = False,
) -> Table:
    """A table from rows of cells."""
    cells = [tuple(row) for row in rows]
    return Table(
        name=name,
        title=title,
        columns=tuple(columns),
        rows=tuple(tuple(cell.text for cell in row) for row in cells),
        keys=tuple(tuple(cell.key for cell in row) for row in cells),
        note=note,
        marked=tuple(marked),
        folded=folded,
        page_only=page_only,
    )
