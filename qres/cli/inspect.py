"""The command that says what a file is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qres.cli.options import THREADS, given, print_out


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
    from qres.cli.inspect_view import scan_magnitudes, show_inspection
    from qres.gguf import model_file
    from qres.gguf.inspection import inspect

    inventory = model_file.read(file, tolerant=True)
    inspection = inspect(inventory, scan_magnitudes(inventory, THREADS) if values else None)
    if as_json:
        from qres.records.as_json import to_json

        print_out(to_json(inspection))
    else:
        show_inspection(inspection)
