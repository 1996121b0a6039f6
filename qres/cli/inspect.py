"""The command that says what a file is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qres.cli.options import given, print_out
from qres.cpus import CPUS


def inspect(
    file: Annotated[
        Path,
        typer.Argument(help="A GGUF file (any shard of a split one).", show_default=False, parser=given("FILE")),
    ],
    values: Annotated[
        bool, typer.Option("--values", help="Read all tensor data, too: NaN, infinities, what does not fit F16.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a GGUF is, what it can be used for and where its bits go; the model is not loaded."""
    from qres.cli.inspect_view import show_inspection
    from qres.cli.terminal import RichListener
    from qres.gguf.inspection import inspect_file

    with RichListener() as listener:
        inspection = inspect_file(file, values=values, threads=CPUS, listener=listener)
    if as_json:
        from qres.records.as_json import to_json

        print_out(to_json(inspection))
    else:
        show_inspection(inspection)
