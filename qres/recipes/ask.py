"""A recipe as it is asked for: by a budget, by layers at 16 bit, or by what somebody else's file has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qres import levels
from qres.cpus import CPUS
from qres.errors import UsageError
from qres.events import Listener
from qres.gguf import imatrix, model_file
from qres.gguf.imatrix_names import fitted
from qres.quantize.original import Original, original
from qres.recipes import budget, given, keep_layers, plan
from qres.recipes.build import require_imatrix, require_model
from qres.recipes.choices import Choices
from qres.recipes.given import Deviation
from qres.recipes.refine import RefineOptions, refine
from qres.recipes.wishes import Wishes, parse_pin
from qres.records.recipe import Recipe
from qres.records.result import Result


@dataclass(frozen=True)
class RecipeOptions:
    """What `qres recipe` is asked for: exactly one of `budget`, `keep_16bit` and `from_file`.

    Raises:
        UsageError: none of the three, or several; or a refinement of types that somebody else chose.
    """

    budget: str | None = None
    """`same-as:Q4_K_M`, `4.9bpw`, `+0.10bpw`, `1.2GiB` or `kld:0.01`."""
    keep_16bit: int | None = None
    """So many of the level's costliest layers at 16 bit."""
    from_file: Path | None = None
    """A GGUF, a --tensor-type-file or a --custom-q."""
    level: str | None = None
    """That `+0.10bpw`, `keep_16bit` and `from_file` start from; None for the smallest measured."""
    pins: tuple[str, ...] = ()
    """Each `REGEX=TYPE`: a type for all tensors of such names."""
    purpose: str = "any"
    """`any`, `arm`, `cpu` or `gpu`: types that are fast there are preferred at equal damage."""
    refine: RefineOptions | None = None
    """Then exchange types between tensors while measuring says that it pays."""
    model: Path | None = None
    """For refining; None for where it was scanned."""
    imatrix: Path | None = None
    """For refining, the importance matrix that the model was scanned with."""

    def __post_init__(self) -> None:
        if sum(one is not None for one in (self.budget, self.keep_16bit, self.from_file)) != 1:
            raise UsageError("give one of --budget, --keep-16bit and --from", "such as --budget same-as:Q4_K_M")
        if self.refine and self.from_file is not None:
            raise UsageError("--refine and --from exclude each other", "give a --budget")


@dataclass(frozen=True)
class Answer:
    """A recipe, and how given types deviate from a level."""

    recipe: Recipe
    deviations: Sequence[Deviation] = ()
    """Only of `from_file`."""


def ask(result: Result, options: RecipeOptions, listener: Listener) -> Answer:
    """The recipe that was asked for.

    Raises:
        UsageError: a budget that nothing meets, a pin without tensors, an unknown level or type.
        InputError: a file that cannot be used, or no text left for refining.
        UnsupportedError: no recipe can be made from this result.
        NativeError: llama.cpp failed while refining.
    """
    choices = Choices(result)
    wishes = Wishes(
        purpose=options.purpose,
        pins=tuple(parse_pin(one) for one in options.pins),
        level=levels.parse(options.level).name if options.level else None,
    )
    if options.from_file is not None:
        return Answer(*given.read(choices, options.from_file, wishes))
    if options.keep_16bit is not None:
        found = keep_layers.keep_16bit(choices, options.keep_16bit, wishes)
    else:
        found = plan.make(choices, budget.parse(options.budget or ""), wishes)
    if options.refine:
        path = options.model or Path(result.reference.path)
        model = original_of(found, path, options.imatrix, options.refine.threads)
        found = refine(choices, found, wishes, model, options.refine, listener)
    return Answer(found)


def original_of(recipe: Recipe, model: Path, matrix: Path | None, threads: int = CPUS) -> Original:
    """The model and the importance matrix of a recipe, both checked to be the recipe's.

    Args:
        recipe: What files are made from.
        model: The 16-bit model.
        matrix: The importance matrix that it was scanned with; None for none.
        threads: For llama.cpp, at most the CPUs there are.

    Raises:
        InputError: a file that cannot be used, or that is of another model.
        UsageError: an importance matrix too many, or one that is missing.
    """
    reference = model_file.read(model)
    require_model(recipe, reference)
    found = None if matrix is None else fitted(imatrix.read(matrix), reference)
    require_imatrix(recipe, found)
    if found is not None:
        found.check(reference)
    return original(reference, found, min(threads, CPUS))
