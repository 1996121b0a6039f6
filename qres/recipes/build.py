"""A recipe to a file: checked against the model before, and tensor by tensor against the plan after."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from qres import levels
from qres.errors import InputError, NativeError, UsageError, reason_of
from qres.events import Listener
from qres.files import protect, remove_leftovers
from qres.gguf import difference, model_file
from qres.gguf.imatrix import Imatrix
from qres.gguf.inventory import Inventory
from qres.printable import show
from qres.quantize import ladder
from qres.quantize.make import make_file
from qres.quantize.original import Original
from qres.records.recipe import Built, Recipe

_AGAIN = "make the recipe again with qres recipe; nothing was left"
_ELSEWHERE = "choose another place with -o"


def require_model(recipe: Recipe, reference: Inventory) -> None:
    """Refuse a model that the recipe is not for: by names, by shapes, and by its first weights.

    Raises:
        InputError: it is another one; the first difference is named.
    """
    hint = f"the recipe is for {show(recipe.model)}: give that model, or make a recipe from a scan of this one"
    name = show(reference.path.name)
    planned = {tensor.name: tensor.shape for tensor in recipe.tensors}
    held = {tensor.name: tensor.shape for tensor in reference.tensors}
    missing = next((one for one in planned if one not in held), None)
    if missing is not None:
        raise InputError(f"{name} has no tensor {show(missing)}, which the recipe names", hint)
    extra = next((one for one in held if one not in planned), None)
    if extra is not None:
        raise InputError(f"{name} has a tensor {show(extra)}, which the recipe does not name", hint)
    odd = next((one for one in planned if planned[one] != held[one]), None)
    if odd is not None:
        shapes = f"{list(held[odd])} in {name}, {list(planned[odd])} in the recipe"
        raise InputError(f"{show(odd)} has the shape {shapes}", hint)
    if difference.fingerprint(reference) != recipe.fingerprint:
        raise InputError(f"{name} has other weights than the model that the recipe was made for", hint)


def require_imatrix(recipe: Recipe, imatrix: Imatrix | None) -> None:
    """Refuse to build without the importance matrix that the predictions were made with, or with another one.

    Raises:
        UsageError: it was not given, or one was given although there was none.
        InputError: it is another one.
    """
    if recipe.imatrix_digest and imatrix is None:
        raise UsageError(
            f"the recipe was made for the importance matrix {show(recipe.imatrix)}", "give it with --imatrix"
        )
    if imatrix is None:
        return
    if not recipe.imatrix_digest:
        raise UsageError("the recipe was made without an importance matrix", "scan with --imatrix and make it again")
    if imatrix.digest != recipe.imatrix_digest:
        raise InputError(
            f"{show(imatrix.path.name)} is not the importance matrix that the recipe was made for",
            f"that was {show(recipe.imatrix)}",
        )


def build(original: Original, recipe: Recipe, target: Path, listener: Listener, *, force: bool = False) -> Built:
    """Make the file.

    Args:
        original: The 16-bit model, which the recipe is for (`require_model`), and its importance matrix, which is the
            recipe's (`require_imatrix`).
        recipe: What to make.
        target: The file.
        listener: Hears of progress.
        force: Replace a file that is there.

    Raises:
        InputError: a target that exists or cannot be written, or no room.
        NativeError: llama.cpp would not make, or did not make, what was planned.
    """
    matrix = original.imatrix.path if original.imatrix else None
    protect([target], (*original.reference.shards, matrix), _ELSEWHERE)
    _require_writable(target, force)
    types = recipe.quantized
    ftype = levels.LEVELS_BY_NAME[recipe.base].ftype
    listener.stage("dry run")
    (planned,) = ladder.planned_types(original, [ftype], types)
    _compare(recipe, planned, "llama.cpp would make")
    listener.stage(f"building {target.name}")
    found: list[Inventory] = []

    def check(partial: Path) -> None:
        made = model_file.read(partial)
        found.append(made)
        _compare(recipe, {tensor.name: tensor.type for tensor in made.tensors}, "llama.cpp made")
        if made.tensor_bytes != recipe.bytes:
            raise NativeError(
                f"the file holds {made.tensor_bytes} bytes of tensors, planned were {recipe.bytes}", _AGAIN
            )

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent, re.escape(target.name), dead_only=True)
        make_file(
            *(original, target.name, ftype, target, listener),
            check=check,
            types=types,
            needed=recipe.bytes,
            instead="-o",
        )
    except OSError as error:
        raise InputError(f"cannot write {target}: {reason_of(error)}", _ELSEWHERE) from error
    return Built(str(target), found[0].file_bytes, found[0].tensor_bytes, len(found[0].tensors))


def _require_writable(target: Path, force: bool) -> None:
    if not target.exists():
        return
    if not target.is_file():
        raise InputError(f"{target} exists and is not a file", _ELSEWHERE)
    if not force:
        raise InputError(f"{target} exists", "give --force to replace it, or choose another place with -o")


def _compare(recipe: Recipe, held: dict[str, str], what: str) -> None:
    """Every tensor of the planned type, and none beside them.

    Raises:
        NativeError: one is not; the first is named.
    """
    wrong = [tensor for tensor in recipe.tensors if held.get(tensor.name) != tensor.type]
    if wrong:
        first = wrong[0]
        more = f"; {len(wrong) - 1} more differ" if len(wrong) > 1 else ""
        raise NativeError(
            f"{what} {show(first.name)} {held.get(first.name) or 'not at all'} where {first.type} is planned{more}",
            _AGAIN,
        )
    extra: Sequence[str] = sorted(set(held) - {tensor.name for tensor in recipe.tensors})
    if extra:
        raise NativeError(f"{what} a tensor that is not planned: {show(extra[0])}", _AGAIN)
