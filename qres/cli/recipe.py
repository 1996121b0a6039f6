"""The commands about recipes: make one, build it, verify it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qres.cli.options import THREADS, CacheOption, GpuOption, ThreadsOption, folder, given, path_option
from qres.errors import InputError, UsageError

if TYPE_CHECKING:
    from qres.gguf.imatrix import Imatrix
    from qres.levels import LevelSpec
    from qres.quantize.original import Original
    from qres.recipes.choices import Choices
    from qres.recipes.given import Deviation
    from qres.recipes.refine import RefineOptions
    from qres.recipes.wishes import Wishes
    from qres.records.recipe import Recipe
    from qres.text.source import Source


class Purpose(str, Enum):
    """Which types count as fast."""

    any = "any"
    arm = "arm"
    cpu = "cpu"
    gpu = "gpu"


ModelArgument = Annotated[
    Path, typer.Argument(help="The 16-bit model that was scanned.", show_default=False, parser=given("MODEL"))
]
RecipeImatrixOption = Annotated[
    Path | None, path_option("--imatrix", "The importance matrix that the model was scanned with.")
]
RecipeTextOption = Annotated[
    Path | None,
    path_option("--text", "UTF-8 text to measure on. Default: what is left of the built-in text."),
]


RecipeTokensOption = Annotated[
    Path | None, path_option("--tokens", "Token ids to measure on instead of text, separated by white space.")
]


def recipe(
    result: Annotated[
        Path, typer.Argument(help="A result.json that qres scan wrote.", show_default=False, parser=given("RESULT"))
    ],
    budget: Annotated[
        str | None, typer.Option("--budget", help="same-as:Q4_K_M, 4.9bpw, +0.10bpw, 1.2GiB or kld:0.01.")
    ] = None,
    keep_16bit: Annotated[
        int | None,
        typer.Option("--keep-16bit", help="Instead: the level plus so many of its costliest layers at 16 bit."),
    ] = None,
    from_file: Annotated[
        Path | None,
        path_option("--from", "Instead: what a GGUF, a --tensor-type-file or a --custom-q has that the level has not."),
    ] = None,
    level: Annotated[
        str | None,
        typer.Option(
            "--level", help="Level that +0.10bpw, --keep-16bit and --from start from. Default: the smallest measured."
        ),
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option("--pin", help="REGEX=TYPE: a type for all tensors of such names; may be repeated."),
    ] = None,
    purpose: Annotated[
        Purpose, typer.Option("--for", help="Prefer types that are fast there at equal damage.")
    ] = Purpose.any,
    refine: Annotated[
        bool, typer.Option("--refine", help="Then exchange types between tensors while measuring says that it pays.")
    ] = False,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Exchanges that --refine tries at most.")] = 40,
    model: Annotated[
        Path | None, path_option("--model", "For --refine, the model. Default: where it was scanned.")
    ] = None,
    imatrix: RecipeImatrixOption = None,
    text: RecipeTextOption = None,
    tokens: RecipeTokensOption = None,
    chunks: Annotated[int, typer.Option("--chunks", min=1, help="Chunks that --refine measures on.")] = 4,
    threads: ThreadsOption = THREADS,
    out: Annotated[
        str | None, typer.Option("--out", help="Folder for the recipe. Default: recipes/<budget> beside the result.")
    ] = None,
) -> None:
    """Choose a type for every tensor: the best file within a budget, from what a scan predicted."""
    from qres import levels
    from qres.cli import recipe_view
    from qres.recipes import files
    from qres.recipes.choices import Choices
    from qres.recipes.refine import RefineOptions
    from qres.recipes.wishes import Wishes, parse_pin
    from qres.records import as_json

    if sum(one is not None for one in (budget, keep_16bit, from_file)) != 1:
        raise UsageError("give one of --budget, --keep-16bit and --from", "such as --budget same-as:Q4_K_M")
    place = folder(out)
    loaded = as_json.load(result)
    choices = Choices(loaded)
    wishes = Wishes(
        purpose=purpose.value,
        pins=tuple(parse_pin(one) for one in pin or ()),
        level=levels.parse(level).name if level else None,
    )
    found, deviations = _recipe(choices, wishes, budget, keep_16bit, from_file)
    if refine:
        if from_file is not None:
            raise UsageError("--refine and --from exclude each other", "give a --budget")
        options = RefineOptions(_sources(text, tokens, ("rank", "report")), chunks, trials, min(threads, THREADS))
        found = _refined(choices, found, wishes, model or Path(loaded.reference.path), imatrix, options)
    place = place or files.default_folder(result, found)
    paths = files.save(found, place, loaded.reference.path)
    recipe_view.show_recipe(found, deviations, paths, files.commands(found, place, loaded.reference.path))


def build(
    model: ModelArgument,
    recipe: Annotated[
        Path, typer.Argument(help="A recipe.json that qres recipe wrote.", show_default=False, parser=given("RECIPE"))
    ],
    out: Annotated[Path, typer.Option("-o", "--out", parser=given("-o"), metavar="PATH", help="The file to make.")],
    imatrix: RecipeImatrixOption = None,
    threads: ThreadsOption = THREADS,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Make the file of a recipe, and check the type of every tensor in it."""
    from dataclasses import replace

    from qres.cli import recipe_view
    from qres.cli.terminal import RichListener
    from qres.recipes import files
    from qres.recipes.build import build

    plan = files.load(recipe)
    original = _model(model, plan, imatrix, threads)
    with RichListener() as listener:
        if out.exists() and recipe.samefile(out):
            raise InputError(f"{out} is the recipe and would be overwritten", "choose another place with -o")
        built = build(original, plan, out, listener, force=force)
        files.update(replace(plan, built=built), recipe)
    recipe_view.show_built(plan, built)


def verify(
    model: ModelArgument,
    built: Annotated[
        Path, typer.Argument(help="The file that qres build made.", show_default=False, parser=given("BUILT"))
    ],
    recipe: Annotated[
        Path,
        typer.Argument(
            help="Its recipe.json; what is measured is kept in it.", show_default=False, parser=given("RECIPE")
        ),
    ],
    text: RecipeTextOption = None,
    tokens: RecipeTokensOption = None,
    chunks: Annotated[int, typer.Option("--chunks", min=1, help="Chunks to measure on.")] = 8,
    level_names: Annotated[
        str | None,
        typer.Option(
            "--levels", help="Levels to compare with; none for none. Default: of equal size, and the next one up."
        ),
    ] = None,
    imatrix: RecipeImatrixOption = None,
    threads: ThreadsOption = THREADS,
    n_gpu_layers: GpuOption = 0,
    cache: CacheOption = None,
) -> None:
    """Measure a built recipe against its prediction and against levels, on text that did not choose it."""
    from dataclasses import replace

    from qres.cli import recipe_view
    from qres.cli.terminal import RichListener
    from qres.gguf import model_file
    from qres.quantize.cache import default_folder
    from qres.recipes import files
    from qres.recipes.verify import VerifyOptions, require_built, verify

    plan = files.load(recipe)
    original = _model(model, plan, imatrix, threads)
    made = model_file.read(built)
    require_built(plan, original.reference, made)
    options = VerifyOptions(
        sources=_sources(text, tokens),
        chunks=chunks,
        threads=min(threads, THREADS),
        n_gpu_layers=n_gpu_layers,
        cache=cache or default_folder(),
    )
    with RichListener() as listener:
        wanted = _levels(level_names, original.imatrix)
        (found,) = verify(original, [(plan, made)], wanted, options, listener)
        files.update(replace(plan, verification=found), recipe)
    recipe_view.show_verification(plan, found, recipe)


def _recipe(
    choices: Choices, wishes: Wishes, budget: str | None, keep_16bit: int | None, from_file: Path | None
) -> tuple[Recipe, Sequence[Deviation]]:
    from qres.recipes import given, keep_layers
    from qres.recipes.budget import parse
    from qres.recipes.plan import make

    if budget is not None:
        return make(choices, parse(budget), wishes), ()
    if keep_16bit is not None:
        return keep_layers.keep_16bit(choices, keep_16bit, wishes), ()
    assert from_file is not None
    return given.read(choices, from_file, wishes)


def _refined(
    choices: Choices, found: Recipe, wishes: Wishes, path: Path, imatrix: Path | None, options: RefineOptions
) -> Recipe:
    from qres.cli.terminal import RichListener
    from qres.recipes.refine import refine

    original = _model(path, found, imatrix, options.threads)
    with RichListener() as listener:
        return refine(choices, found, wishes, original, options, listener)


def _model(path: Path, recipe: Recipe, imatrix: Path | None, threads: int) -> Original:
    """The model and the importance matrix, both checked to be the recipe's."""
    from qres.gguf import model_file
    from qres.gguf.imatrix import read
    from qres.quantize.original import original
    from qres.recipes.build import require_imatrix, require_model

    reference = model_file.read(path)
    require_model(recipe, reference)
    matrix = None if imatrix is None else read(imatrix)
    require_imatrix(recipe, matrix)
    if matrix is not None:
        matrix.check(reference)
    return original(reference, matrix, min(threads, THREADS))


def _sources(
    text: Path | None, tokens: Path | None, built_in: Sequence[str] = ("report", "rank")
) -> tuple[Source, ...]:
    from qres.text import source

    if text and tokens:
        raise UsageError("--text and --tokens exclude each other", "give one of them")
    if tokens:
        return (source.read_ids(tokens),)
    return (source.read_text(text),) if text else tuple(source.built_in(part) for part in built_in)


def _levels(names: str | None, matrix: Imatrix | None) -> tuple[LevelSpec, ...] | None:
    from qres.pipeline.candidates import levels_to_make

    if names is None:
        return None
    if names.strip().lower() == "none":
        return ()
    return levels_to_make(names.split(","), with_imatrix=matrix is not None)
