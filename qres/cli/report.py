"""The command that renders a result again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qres.cli.options import Format, folder, given, print_out


def report(
    result: Annotated[
        Path,
        typer.Argument(help="A result.json that qres scan wrote.", show_default=False, parser=given("RESULT")),
    ],
    format: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.html,
    out: Annotated[
        str | None,
        typer.Option("--out", help="File or folder to write to. Default: beside the result; json to standard output."),
    ] = None,
) -> None:
    """Render a result again; no model is needed."""
    from qres.cli import output
    from qres.files import protect
    from qres.records import as_json

    place = folder(out)
    loaded = as_json.load(result)
    if format is Format.json and place is None:
        print_out(as_json.to_json(loaded))
        return
    target = place if place and not place.is_dir() else None
    place = target.parent if target else place or result.parent
    outputs = (target or place / output.NAMES[format.value], *place.glob("charts/*.svg"))
    protect(outputs, (result,), output.ELSEWHERE)
    for path in output.reports(loaded, place, {format.value}, target):
        print_out(f"{path}\n")
