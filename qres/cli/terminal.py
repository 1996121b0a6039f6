"""Progress and the answer on the terminal. Talk goes to standard error, the answer to standard output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from qres.cli.options import discard_output
from qres.printable import plain, plain_line, plain_record
from qres.records.result import Result
from qres.report.tables import levels, recipes


class _RateColumn(ProgressColumn):
    """Steps per second, or seconds per step where that reads better."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        return Text(f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each")


class RichListener:
    """A progress bar with rate and time left on standard error; silent when that is not a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("{task.fields[title]:<22}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            _RateColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            TextColumn("{task.fields[doing]}", style="dim", markup=False),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,  # what stays on the screen is the answer
        )
        self._task = self._progress.add_task("", total=None, title="", doing="", visible=False)

    def __enter__(self) -> RichListener:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stage(self, title: str) -> None:
        """Begin a part of the work with steps of its own; the bar starts again at 0."""
        self._progress.remove_task(self._task)
        self._task = self._progress.add_task("", total=None, title=plain(title), doing="")

    def step(self, done: int, total: int, doing: str = "") -> None:
        """Progress within the stage."""
        self._progress.update(self._task, completed=done, total=total, doing=plain(doing))

    def working(self, model: str) -> None:
        """Nothing to draw: the steps say what they do."""

    def note(self, text: str) -> None:
        """Something the user may want to know now."""
        self._console.print(Text(plain_line(text), style="dim"), soft_wrap=True)

    def warn(self, text: str) -> None:
        """Something the user must mind."""
        self._console.print(Text(plain_line(text), style="yellow"), soft_wrap=True)


class _PatientConsole(Console):
    """A reader of standard output that has gone (`qres scan ... | head -3`) is no error: the reports are written."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard_output()


def answer_console() -> Console:
    """Standard output, as wide as the terminal, or of fixed width where there is none."""
    console = _PatientConsole(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


def show_answer(result: Result, paths: Sequence[Path]) -> None:
    """The three lines that answer, then the table of levels."""
    console = answer_console()
    result = plain_record(result)
    first, rest = ((), result.warnings) if result.reference.is_original else (result.warnings[:1], result.warnings[1:])
    for warning in first:
        console.print(Text(warning, style="yellow"))
    console.print(Text(result.verdict.headline, style="bold"))
    console.print(Text(result.verdict.keep))
    console.print(Text(plain(f"Report: {paths[0]} (also {', '.join(path.name for path in paths[1:])})")))
    console.print()
    console.print(_levels(result))
    mix = recipes.short(result) if result.verdict.level else ""  # no advice is none of mixes, either
    if mix:
        console.print(Text(mix))
    for warning in rest:
        console.print(Text(f"Note: {warning}", style="yellow"))


_FILE_WIDTH = 200
"""Columns where there is no terminal to fit."""
_SHOWN = ("level", "MiB", "bits/weight", "KLD mean ± SE", "same top", "PPL change")
"""Columns of the levels table that fit a terminal of 80 characters; the report has them all."""


def _levels(result: Result) -> Table:
    table = levels.levels(result)
    shown = [i for i, column in enumerate(table.columns) if column.title in _SHOWN]
    right = [n for n, i in enumerate(shown) if table.columns[i].align == "right"]
    return text_table([table.columns[i].title for i in shown], ([row[i] for i in shown] for row in table.rows), right)


def text_table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = (), wrapped: Sequence[int] = ()
) -> Table:
    """A table; the columns `right` are set right, the columns `wrapped` give way where the terminal is narrow."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for index, title in enumerate(titles):
        side: Literal["left", "right"] = "right" if index in right else "left"
        table.add_column(Text(title), justify=side, no_wrap=index not in wrapped)
    for row in rows:
        table.add_row(*map(Text, row))
    return table
