"""The command line: every command in one place."""

from __future__ import annotations

from typing import Annotated

import typer

from qres.cli.inspect import inspect
from qres.cli.options import print_out
from qres.cli.recipe import build, recipe, verify
from qres.cli.report import report
from qres.cli.scan import demo, scan

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 2 usage, 3 bad input, 4 unsupported model, 5 llama.cpp failed, 130 interrupted.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from qres.version import __version__

        print_out(f"qres {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Measure, layer by layer, what quantization does to a GGUF model, and say which level to ship."""


for command in (scan, demo, report, inspect, recipe, build, verify):
    app.command()(command)
