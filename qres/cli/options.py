"""The options that several commands have, and how words become paths."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from qres.errors import UsageError


class Format(str, Enum):
    """What a report is written as."""

    html = "html"
    md = "md"
    json = "json"


class Dtype(str, Enum):
    """What the prediction multiplies in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Units(str, Enum):
    """Which units are patched."""

    ranked = "ranked"
    all = "all"


def given(what: str) -> Callable[[str], Path]:
    """A parser of paths that refuses what is none: a variable that is not set leaves an empty word."""

    def parse(word: str) -> Path:
        if not word.strip() or "\0" in word:
            problem = "holds a null byte" if word.strip() else "is empty"
            raise UsageError(f"the name given as {what} {problem}", "is a variable not set?")
        return Path(word)

    return parse


def path_option(name: str, help_text: str) -> Any:  # noqa: ANN401 - as typer.Option
    """An option that takes a path."""
    return typer.Option(name, parser=given(name), metavar="PATH", help=help_text)


LevelsOption = Annotated[
    list[str] | None,
    typer.Option("--levels", help="Levels to make and measure, separated by commas. Default: Q4_K_M,Q5_K_M."),
]
TextOption = Annotated[
    Path | None,
    path_option("--text", "UTF-8 text to measure on; - reads standard input. Default: built-in."),
]
TokensOption = Annotated[
    Path | None,
    path_option("--tokens", "Token ids to measure on instead of text, separated by white space; - as for --text."),
]
SpecialOption = Annotated[
    bool,
    typer.Option(
        "--special", help="Parse special tokens in --text (<|im_start|> and the like), as a chat program does."
    ),
]
CtxOption = Annotated[int, typer.Option("--n-ctx", help="Tokens per chunk.")]
ChunksOption = Annotated[
    int | None,
    typer.Option("--chunks", min=1, help="Chunks to report on. Default: 8 of the built-in text, else at most 64."),
]
RankOption = Annotated[int, typer.Option("--rank-chunks", min=1, help="Chunks of other text that rank the units.")]
UnitsOption = Annotated[
    Units,
    typer.Option("--units", help="ranked: patch the units predicted to be the worst, and 8 at random; all: every one."),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with a scan that was cut off; the other arguments must be the same.")
]
OutOption = Annotated[str | None, typer.Option("--out", help="Folder for the reports. Default: reports/<model>.")]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, help="CPU threads, at most the CPUs there are.")]
DrawsOption = Annotated[
    int,
    typer.Option("--draws", min=1, max=4, help="Label draws per chunk for the prediction: more are steadier, slower."),
]
DeviceOption = Annotated[
    str, typer.Option("--device", help="Where torch predicts: cpu, or cuda with a torch that has it.")
]
DtypeOption = Annotated[
    Dtype, typer.Option("--dtype", help="What the prediction multiplies in; auto: bfloat16 where the CPU has it.")
]
ImatrixOption = Annotated[
    Path | None,
    path_option(
        "--imatrix", "Importance matrix of the model, from llama-imatrix (GGUF or .dat): levels are made with it."
    ),
]
MakeImatrixOption = Annotated[
    Path | None,
    path_option("--make-imatrix", "Also write an importance matrix of the model to this .gguf."),
]
RecipeOption = Annotated[
    bool,
    typer.Option("--recipe", help="Also build the best mixes for the usual budgets, and measure them on other text."),
]
GpuOption = Annotated[int, typer.Option("--n-gpu-layers", min=0, help="Layers to put on the GPU.")]
CacheOption = Annotated[
    Path | None,
    path_option("--cache", "Folder for the levels made and the demo model. Default: QRES_CACHE, or the user cache."),
]


def folder(out: str | None) -> Path | None:
    """What --out names; an empty word or `-` is a slip, not the current folder or one called `-`."""
    if out is not None and out.strip() in ("", "-"):
        raise UsageError(f"--out {out!r} is not a folder for reports", "name one, such as --out reports/mine")
    return None if out is None else Path(out)


def print_out(text: str) -> None:
    """To standard output; a reader that has gone (`qres report ... | head`) is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()


def discard_output() -> None:
    """Send what is still to come on standard output nowhere: its reader has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
