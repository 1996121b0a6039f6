"""The recipes of a scan: for the usual budgets, predicted, and where it was asked for built and verified."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from qres.errors import QresError, UnsupportedError, UsageError
from qres.events import Listener
from qres.gguf import model_file
from qres.gguf.format.shards import prefix_of
from qres.gguf.inventory import Inventory
from qres.quantize.original import Original
from qres.recipes import budget, build, files, recovery, verify
from qres.recipes.choices import Choices
from qres.recipes.plan import make
from qres.recipes.verify import VerifyOptions
from qres.recipes.wishes import Wishes
from qres.records.recipe import Mix, Recipe
from qres.records.result import Result, Skipped

_MIXES = 24
"""Steps between the smallest and the largest of the mixes that are drawn."""
MORE_BPW = ("+0.10bpw", "+0.25bpw")
"""Budgets beside the sizes of the measured levels: beyond the smallest of them."""
_NO_SIZE = "no file was measured that is quantized as a whole, whose size they could have"
VERIFY_CHUNKS = 8
"""Chunks that recipes are verified on; they take no part in the scan."""


@dataclass(frozen=True)
class Building:
    """Where recipes are built, and from what."""

    original: Original
    folder: Path
    options: VerifyOptions


def planned(result: Result) -> Result:
    """The result with what 16 bit is worth and with recipes for the usual budgets, all of it predicted.

    Where there can be none, the reason is among what was skipped, unless the result says it elsewhere.
    """
    if not result.prediction.used or not result.ladder:
        return result
    try:
        choices = Choices(result)
    except (UnsupportedError, UsageError) as error:
        return replace(result, skipped=(*result.skipped, Skipped("recipes", error.message)))
    found, budgets = [], _budgets(choices)
    if not budgets:
        return replace(result, skipped=(*result.skipped, Skipped("recipes", _NO_SIZE)))
    for text in budgets:
        try:
            found.append(make(choices, budget.parse(text), Wishes()))
        except UsageError:  # a level smaller than any mix of what was predicted
            continue
    return replace(
        result,
        mixes=_mixes(choices),
        stock=choices.stock,
        recoveries=recovery.recoveries(choices),
        recipes=tuple(found),
    )


def _mixes(choices: Choices) -> tuple[Mix, ...]:
    """The best recipes from the size of the smallest usual level to that of the largest."""
    rows = choices.stock
    low, high = (8 * row.bytes / choices.n_weights for row in (rows[0], rows[-1]))
    found = []
    for i in range(_MIXES + 1):
        bpw = low + (high - low) * i / _MIXES
        with suppress(UsageError):  # pieces of the model that cannot become smaller
            recipe = make(choices, budget.parse(f"{bpw:.6f}bpw"), Wishes())
            if recipe.predicted:
                found.append(Mix(recipe.bytes, recipe.predicted.kld))
    return tuple(found)


def _budgets(choices: Choices) -> list[str]:
    known = choices.result.ladder
    levels = choices.quantized_levels
    names = [level.name for level in levels if any(rung.level == level.name for rung in known)]
    return [*(f"same-as:{name}" for name in names), *(MORE_BPW if levels else ())]


def built(result: Result, building: Building, listener: Listener) -> Result:
    """The result with its recipes built into the folder and verified beside their levels.

    What fails does not take the result along: the scan is done.
    """
    made: list[tuple[Recipe, Inventory]] = []
    skipped: list[Skipped] = []
    for recipe in result.recipes:
        try:
            made.append(_built(recipe, building, listener))
        except QresError as error:
            skipped.append(Skipped(f"recipe {recipe.budget}", str(error)))
            listener.warn(f"The recipe {recipe.budget} could not be built: {error}")
    found: Sequence[Recipe] = [recipe for recipe, _ in made]
    if made:
        try:
            rows = verify.verify(building.original, made, None, building.options, listener)
            found = [replace(recipe, verification=row) for (recipe, _), row in zip(made, rows, strict=True)]
        except QresError as error:
            skipped.append(Skipped("verification of recipes", str(error)))
            listener.warn(f"The recipes could not be verified: {error}")
    for recipe in found:
        files.save(recipe, _folder(recipe, building), str(building.original.reference.path))
    known = {recipe.budget: recipe for recipe in found}
    recipes = tuple(known.get(recipe.budget, recipe) for recipe in result.recipes)
    return replace(result, recipes=recipes, skipped=(*result.skipped, *skipped))


def _built(recipe: Recipe, building: Building, listener: Listener) -> tuple[Recipe, Inventory]:
    target = _target(_folder(recipe, building), building.original.reference.path)
    one = build.build(
        building.original, recipe, target, listener, force=True
    )  # of an earlier scan into the same folder
    return replace(recipe, built=one), model_file.read(target)


def written(folder: Path, reference: Path, levels: Sequence[str]) -> list[Path]:
    """Every file that `built` may write into the folder of a scan, before it is known which recipes there are.

    Args:
        folder: The scan's.
        reference: The model's file.
        levels: Names of the levels that are measured.
    """
    words = (*(f"same-as:{name}" for name in levels), *MORE_BPW)
    folders = [files.usual_folder(folder / "result.json", word) for word in words]
    return [path for one in folders for path in (*files.written(one), _target(one, reference))]


def _target(folder: Path, reference: Path) -> Path:
    return folder / f"{prefix_of(reference)}-{folder.name}.gguf"


def _folder(recipe: Recipe, building: Building) -> Path:
    return files.default_folder(building.folder / "result.json", recipe)
