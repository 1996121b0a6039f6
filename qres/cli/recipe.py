"""The commands about recipes: make one, build it, verify it."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qres.cli.options import CacheOption, GpuOption, SpecialOption, ThreadsOption, folder, given, path_option
from qres.cpus import CPUS

if TYPE_CHECKING:
    from qres.levels import LevelSpec
    from qres.text.source import Source

_COPY = "what is found is kept in the recipe: give it as that alone"


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
    special: SpecialOption = False,
    chunks: Annotated[int, typer.Option("--chunks", min=1, help="Chunks that --refine measures on.")] = 4,
    threads: ThreadsOption = CPUS,
    out: Annotated[
        str | None, typer.Option("--out", help="Folder for the recipe. Default: recipes/<budget> beside the result.")
    ] = None,
) -> None:
    """Choose a type for every tensor: the best file within a budget, from what a scan predicted."""
    from qres.cli import recipe_view
    from qres.cli.terminal import RichListener
    from qres.recipes import files
    from qres.recipes.ask import RecipeOptions, ask
    from qres.recipes.refine import RefineOptions
    from qres.records import as_json

    sources = _sources(text, tokens, special)
    options = RecipeOptions(
        budget=budget,
        keep_16bit=keep_16bit,
        from_file=from_file,
        level=level,
        pins=tuple(pin or ()),
        purpose=purpose.value,
        refine=RefineOptions(**sources, chunks=chunks, trials=trials, threads=min(threads, CPUS)) if refine else None,
        model=model,
        imatrix=imatrix,
    )
    place = folder(out)
    loaded = as_json.load(result)
    inputs = (result, from_file, model or Path(loaded.reference.path), text, tokens, imatrix)
    if place:
        files.protect_inputs(place, inputs)
    with RichListener() as listener:
        answer = ask(loaded, options, listener)
    place = place or files.default_folder(result, answer.recipe)
    paths = files.save(answer.recipe, place, loaded.reference.path, inputs)
    commands = files.commands(answer.recipe, place, loaded.reference.path)
    recipe_view.show_recipe(answer.recipe, answer.deviations, paths, commands)


def build(
    model: ModelArgument,
    recipe: Annotated[
        Path, typer.Argument(help="A recipe.json that qres recipe wrote.", show_default=False, parser=given("RECIPE"))
    ],
    out: Annotated[Path, typer.Option("-o", "--out", parser=given("-o"), metavar="PATH", help="The file to make.")],
    imatrix: RecipeImatrixOption = None,
    threads: ThreadsOption = CPUS,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Make the file of a recipe, and check the type of every tensor in it."""
    from qres import api
    from qres.cli import recipe_view
    from qres.cli.terminal import RichListener
    from qres.files import protect
    from qres.recipes import files

    protect([out], (model, recipe, imatrix), "choose another place with -o")
    protect([recipe], (model, imatrix), _COPY)
    plan = files.load(recipe)
    with RichListener() as listener:
        built = api.build(model, plan, out, imatrix=imatrix, threads=threads, force=force, listener=listener)
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
    special: SpecialOption = False,
    chunks: Annotated[int, typer.Option("--chunks", min=1, help="Chunks to measure on.")] = 8,
    level_names: Annotated[
        str | None,
        typer.Option(
            "--levels", help="Levels to compare with; none for none. Default: of equal size, and the next one up."
        ),
    ] = None,
    imatrix: RecipeImatrixOption = None,
    threads: ThreadsOption = CPUS,
    n_gpu_layers: GpuOption = 0,
    cache: CacheOption = None,
) -> None:
    """Measure a built recipe against its prediction and against levels, on text that did not choose it."""
    from qres import api
    from qres.cli import recipe_view
    from qres.cli.terminal import RichListener
    from qres.files import protect
    from qres.quantize.cache import default_folder
    from qres.recipes import files

    protect([recipe], (model, built, text, tokens, imatrix), _COPY)
    plan = files.load(recipe)
    options = api.VerifyOptions(
        **_sources(text, tokens, special),
        chunks=chunks,
        threads=min(threads, CPUS),
        n_gpu_layers=n_gpu_layers,
        cache=cache or default_folder(),
    )
    wanted = _levels(level_names, with_imatrix=imatrix is not None)
    with RichListener() as listener:
        found = api.verify(model, built, plan, options, levels=wanted, imatrix=imatrix, listener=listener)
        files.update(replace(plan, verification=found), recipe)
    recipe_view.show_verification(plan, found, recipe)


def _sources(text: Path | None, tokens: Path | None, special: bool) -> dict[str, tuple[Source, ...]]:
    """The text that was given; nothing where none was, so that the options' own default counts."""
    from qres.text import source

    own = source.own(text, tokens, special=special)
    return {"sources": (own,)} if own else {}


def _levels(names: str | None, *, with_imatrix: bool) -> tuple[LevelSpec, ...] | None:
    from qres.pipeline.candidates import levels_to_make

    if names is None:
        return None
    if names.strip().lower() == "none":
        return ()
    return levels_to_make(names.split(","), with_imatrix=with_imatrix)
