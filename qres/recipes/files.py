"""Recipes on disk: recipe.json and the same for other quantizers, in a folder of the recipe's own."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from pathvalidate import sanitize_filename

from qres import levels
from qres.errors import InputError
from qres.files import protect, write_text
from qres.gguf.format.shards import prefix_of
from qres.printable import show
from qres.recipes import dialects
from qres.records import as_json
from qres.records.recipe import Recipe

RECIPE_NAME, RULES_NAME, CUSTOM_Q_NAME, COMMAND_NAME = "recipe.json", "tensor-types.txt", "custom-q.txt", "commands.txt"
_INSTEAD = "choose another folder with --out"


def default_folder(result: Path, recipe: Recipe) -> Path:
    """Beside the result, by the budget and the purpose."""
    return usual_folder(result, recipe.budget if recipe.purpose == "any" else f"{recipe.budget} {recipe.purpose}")


def usual_folder(result: Path, words: str) -> Path:
    """Beside the result, for a recipe that these words tell from others."""
    name = sanitize_filename(re.sub(r"[\s:]+", "-", words.strip())) or "recipe"
    return result.parent / "recipes" / name


def load(path: Path) -> Recipe:
    """Read a recipe.json whose types exist and fit.

    Raises:
        InputError: it cannot be read, is no recipe, or plans what cannot be.
    """
    recipe = as_json.load_recipe(path)
    if recipe.base not in levels.LEVELS_BY_NAME or levels.LEVELS_BY_NAME[recipe.base].base in ("F32", "F16", "BF16"):
        raise InputError(f"{path}: {show(recipe.base)!r} is no level that llama.cpp makes", "make the recipe again")
    for tensor in recipe.tensors:
        traits = levels.TYPE_TRAITS.get(tensor.type)
        odd = traits is None or traits.removed or (tensor.quantizable and tensor.type not in levels.MAKEABLE)
        if odd or traits is None or not tensor.shape or tensor.shape[0] % traits.block_size:
            shape = list(tensor.shape)
            raise InputError(
                f"{path}: {show(tensor.name)} {shape} cannot be {show(tensor.type)}", "make the recipe again"
            )
    return recipe


def written(folder: Path) -> tuple[Path, ...]:
    """The files that `save` writes."""
    return tuple(folder / name for name in (RECIPE_NAME, RULES_NAME, CUSTOM_Q_NAME, COMMAND_NAME))


def protect_inputs(folder: Path, inputs: Iterable[Path | None]) -> None:
    """Refuse a folder where `save` would write over what a recipe is made from.

    Raises:
        InputError: a file of it is an input.
    """
    protect(written(folder), inputs, _INSTEAD)


def save(recipe: Recipe, folder: Path, model: str, inputs: Iterable[Path | None] = ()) -> tuple[Path, ...]:
    """Write recipe.json, tensor-types.txt, custom-q.txt and commands.txt.

    What was measured of the same types in the same place is kept.

    Args:
        recipe: What to write.
        folder: Where to; made if it is not there.
        model: Path of the reference, for the commands.
        inputs: What must not be written over.

    Returns:
        The files.

    Raises:
        InputError: a file cannot be written, is an input, or there is something else by its name.
    """
    protect_inputs(folder, inputs)
    types = list(recipe.quantized.items())
    texts = {
        RECIPE_NAME: as_json.to_json(_with_known(recipe, folder / RECIPE_NAME)),
        RULES_NAME: dialects.tensor_type_file(types),
        CUSTOM_Q_NAME: f"{dialects.custom_q(types)}\n",
        COMMAND_NAME: "".join(f"{line}\n" for line in commands(recipe, folder, model)),
    }
    for name, text in texts.items():
        write_text(folder / name, text, _INSTEAD)
    return tuple(folder / name for name in texts)


def update(recipe: Recipe, path: Path) -> None:
    """Replace a recipe.json.

    Raises:
        InputError: it cannot be written.
    """
    write_text(path, as_json.to_json(recipe), _INSTEAD)


def commands(recipe: Recipe, folder: Path, model: str) -> list[str]:
    """How to make the file: with qres, with llama-quantize and with ik_llama.cpp."""
    types = list(recipe.quantized.items())
    matrix = ["--imatrix", recipe.imatrix] if recipe.imatrix else []
    out = f"{prefix_of(Path(model))}-{folder.name}.gguf"
    ends = [model, out, recipe.base]
    rules, custom = str(folder / RULES_NAME), folder / CUSTOM_Q_NAME
    ik = shlex.join(["llama-quantize", *matrix, *dialects.flags(types), "--custom-q"])
    return [
        shlex.join(["qres", "build", model, str(folder / RECIPE_NAME), *matrix, "-o", out]),
        shlex.join(["llama-quantize", *matrix, *dialects.flags(types), "--tensor-type-file", rules, *ends]),
        f'{ik} "$(cat {shlex.quote(str(custom))})" {shlex.join(ends)}',
    ]


def _with_known(recipe: Recipe, path: Path) -> Recipe:
    """The recipe with what was built and measured of it before."""
    if not path.is_file() or recipe.verification:
        return recipe
    try:
        known = as_json.load_recipe(path)
    except InputError:
        return recipe
    if _what(known) != _what(recipe):
        return recipe
    return replace(recipe, built=known.built, verification=known.verification)


def _what(recipe: Recipe) -> tuple[object, ...]:
    """What decides which file comes out."""
    types = tuple((tensor.name, tensor.type) for tensor in recipe.tensors)
    return recipe.fingerprint, recipe.imatrix_digest, types
