"""Types that someone else chose, of a GGUF or of rules, as a recipe; and what each deviation from a level was worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qres import levels
from qres.errors import InputError, reason_of
from qres.gguf import model_file
from qres.printable import show
from qres.recipes import dialects
from qres.recipes.allocate import allocate
from qres.recipes.choices import Choices, loss_of, size_of
from qres.recipes.plan import base_level, of_types
from qres.recipes.wishes import Wishes
from qres.records.recipe import Recipe


@dataclass(frozen=True)
class Deviation:
    """One tensor that has another type than the level gives it."""

    tensor: str
    stock: str
    type: str
    bytes_added: int
    """Negative where it is smaller than stock."""
    kld_change: float | None
    """Predicted and calibrated; None where a type has no prediction. Negative where it is better than stock."""
    price: float
    """KLD that so many bytes are worth in the best recipe of the file's size; what was saved may cost as much."""
    is_worth: bool | None
    """A raised tensor saves more than the price, a lowered one costs less; None without predictions."""


def deviations(choices: Choices, types: Mapping[str, str], level: str) -> list[Deviation]:
    """All tensors that deviate, most bytes first.

    Args:
        choices: Of the model.
        types: Of the file.
        level: A key of `choices.types_by_level`.
    """
    stock_types = choices.types_by_level[level]
    raw = choices.loss(types)
    factor = choices.factor(raw) if raw else 1.0
    rows = [row for row in choices.rows if row.types]
    held = sum(size_of(row, types[row.tensor.name]) for row in rows)
    best = allocate([row.bytes for row in rows], [row.losses for row in rows], held)
    price = best.price * factor if best else 0.0
    found = []
    for row in choices.rows:
        name = row.tensor.name
        if types[name] == stock_types[name]:
            continue
        added = size_of(row, types[name]) - size_of(row, stock_types[name])
        own, usual = loss_of(row, types[name]), loss_of(row, stock_types[name])
        change = None if own is None or usual is None or not row.types else (own - usual) * factor
        is_worth = None if change is None else -change >= added * price
        found.append(Deviation(name, stock_types[name], types[name], added, change, added * price, is_worth))
    return sorted(found, key=lambda row: -abs(row.bytes_added))


_MAX_RULES_BYTES = 16 * 2**20


def read(choices: Choices, path: Path, wishes: Wishes) -> tuple[Recipe, list[Deviation]]:
    """The types in a file, and how they deviate from a level.

    Args:
        choices: Of the model.
        path: A GGUF, a --tensor-type-file, or what --custom-q is given.
        wishes: The level to compare with; where none is named, a GGUF's own or else the smallest measured.

    Raises:
        InputError: a file of another model, or one that is neither GGUF nor rules.
        UsageError: an unknown level.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(4)
            data = begin if begin == b"GGUF" else begin + file.read(_MAX_RULES_BYTES)
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason_of(error)}", "give a GGUF, or rules for a quantizer") from error
    types, level = _of_gguf(choices, path, wishes) if begin == b"GGUF" else _of_rules(choices, path, data, wishes)
    recipe = of_types(choices, types, f"types of {path.name}", level, wishes)
    return recipe, deviations(choices, types, level)


def _of_gguf(choices: Choices, path: Path, wishes: Wishes) -> tuple[dict[str, str], str]:
    inventory = model_file.read(path)
    held = {tensor.name: tensor for tensor in inventory.tensors}
    for name, row in choices.by_name.items():
        if name not in held or held[name].shape != row.tensor.shape:
            raise InputError(
                f"{show(path.name)} is not the model that was scanned: {show(name)} is missing or has another shape",
                f"give a quantized file of {show(choices.result.reference.name)}",
            )
    types = {name: held[name].type if row.quantizable else row.tensor.type for name, row in choices.by_name.items()}
    odd = next((name for name, kind in types.items() if kind not in levels.TYPE_TRAITS), None)
    if odd is not None:
        raise InputError(
            f"{show(path.name)}: {show(odd)} is {types[odd]}, which this qres does not know", "update qres"
        )
    own = inventory.file_type if inventory.file_type in choices.types_by_level else None
    return types, own if own and wishes.level is None else base_level(choices, wishes)


def _of_rules(choices: Choices, path: Path, data: bytes, wishes: Wishes) -> tuple[dict[str, str], str]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if len(data) > _MAX_RULES_BYTES or "\0" in text:
        raise InputError(f"{show(path.name)} is neither a GGUF nor a text of rules", "give one of these")
    try:
        rules = dialects.parse(text)
    except InputError as error:
        raise InputError(f"{show(path.name)}: {error.message}", error.hint) from error
    level = base_level(choices, wishes)
    types = dict(choices.types_by_level[level])
    for name, kind in dialects.apply(rules, types).items():
        row = choices.by_name[name]
        if row.quantizable:
            types[name] = levels.fitting_type(kind, row.tensor.shape[0])
    return types, level
