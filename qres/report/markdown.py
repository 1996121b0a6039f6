"""The report as GitHub-flavoured Markdown and the SVG images that it refers to."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

from qres.printable import plain_record
from qres.records.result import Result
from qres.report.charts import scan, themes
from qres.report.sections import Figure, Item, figures, sections
from qres.report.tables import levels
from qres.report.tables.table import Table
from qres.report.words import DEFINITIONS


@dataclass(frozen=True)
class Markdown:
    """The text of report.md, and its images by their path beside it."""

    text: str
    images: dict[str, str]


def render_markdown(result: Result) -> Markdown:
    """The whole report as Markdown: the verdict first."""
    result = plain_record(result)
    parts = sections(result)
    blocks = [f"# {escape(result.reference.name)}: what quantization does to it", *_verdict(result)]
    for part in parts:
        blocks += [f"## {escape(part.title)}", *(_item(item) for item in part.items if not _left_out(item))]
    blocks += ["## Definitions", "\n".join(f"- **{escape(word)}**: {escape(text)}" for word, text in DEFINITIONS)]
    images = {}
    for figure in figures(parts):
        if figure.spec is not None:
            images[_path(figure)] = scan.to_svg(figure.spec, themes.light())
            images[_path(figure, "-dark")] = scan.to_svg(figure.spec, themes.dark())
    return Markdown("\n\n".join(blocks) + "\n", images)


def escape(text: str) -> str:
    r"""Text that Markdown shows as it is, on one line; underscores inside words need no escape.

    >>> escape("a|b <i> Q4_K_M")
    'a\\|b &lt;i&gt; Q4_K_M'
    """
    line = " ".join(text.split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = re.sub(r"([\\`*\[\]|~$])", r"\\\1", line)
    line = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", line)
    return re.sub(r"^(\d*)([#+-](?=[ #-]|$)|[.)](?= ))", r"\1\\\2", line)  # would start a heading or a list


def code(text: str) -> str:
    r"""Text in a code span, also within a table cell.

    >>> code("a`b|c")
    '``a`b\\|c``'
    """
    line = " ".join(text.split()).replace("|", "\\|")
    fence = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 1)
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{space}{line}{space}{fence}"


def _verdict(result: Result) -> list[str]:
    verdict = result.verdict
    lines = [f"**{escape(verdict.headline)}**", escape(verdict.keep), escape(verdict.details)]
    blocks = [line for line in lines if line not in {"", "****"}]
    numbers = levels.key_numbers(result)
    if numbers:
        blocks.append(
            "\n".join(f"- **{escape(key.value)}** {escape(key.label)} ({escape(key.note)})" for key in numbers)
        )
    if result.warnings:
        blocks.append("\n".join(f"> ⚠ {escape(warning)}  " for warning in result.warnings))
    return blocks


def _left_out(item: Item) -> bool:
    return isinstance(item, Table) and item.page_only


def _item(item: Item) -> str:
    if isinstance(item, str):
        return escape(item)
    return _table(item) if isinstance(item, Table) else _figure(item)


def _figure(figure: Figure) -> str:
    words = figure.words
    if figure.spec is None:
        return f"### {words.title}\n\n{escape(words.missing)}"
    picture = (
        "<picture>\n"
        f'  <source media="(prefers-color-scheme: dark)" srcset="{_path(figure, "-dark")}">\n'
        f'  <img alt="{html.escape(words.title)}" src="{_path(figure)}">\n'
        "</picture>"
    )
    reading = f"*How to read it:* {escape(words.reading)}"
    return f"### {words.title}\n\n{picture}\n\n{reading}\n\n*When it misleads:* {escape(words.misleads)}"


def _table(table: Table) -> str:
    rule = "|".join("---:" if column.align == "right" else ":---" for column in table.columns)
    lines = ["| " + " | ".join(escape(column.title) for column in table.columns) + " |", f"|{rule}|"]
    for index, row in enumerate(table.rows):
        cells = [
            code(cell) if column.kind == "code" else escape(cell)
            for cell, column in zip(row, table.columns, strict=True)
        ]
        if index in table.marked:
            cells[0] = f"**{cells[0]}**"
        lines.append("| " + " | ".join(cells) + " |")
    body = "\n".join(lines)
    note = f"\n\n{escape(table.note)}" if table.note else ""
    if table.folded:
        summary = f"{html.escape(' '.join(table.title.split()))} ({len(table.rows)} rows)"
        return f"<details>\n<summary>{summary}</summary>\n\n{body}{note}\n\n</details>"
    return f"### {escape(table.title)}\n\n{body}{note}"


def _path(figure: Figure, suffix: str = "") -> str:
    return f"charts/{figure.name}{suffix}.svg"
