"""How given types differ from a level of llama.cpp, and whether each difference was worth its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qres.allocate import allocate
from qres.choices import Choices, loss_of, size_of


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
        level: A key of `choices.stock`.
    """
    stock = choices.stock[level]
    raw = choices.loss(types)
    factor = choices.factor(raw) if raw else 1.0
    rows = [row for row in choices.rows if row.types]
    held = sum(size_of(row, types[row.tensor.name]) for row in rows)
    best = allocate([row.bytes for row in rows], [row.losses for row in rows], held)
    price = best.price * factor if best else 0.0
    found = []
    for row in choices.rows:
        name = row.tensor.name
        if types[name] == stock[name]:
            continue
        added = size_of(row, types[name]) - size_of(row, stock[name])
        own, usual = loss_of(row, types[name]), loss_of(row, stock[name])
        change = None if own is None or usual is None or not row.types else (own - usual) * factor
        is_worth = None if change is None else -change >= added * price
        found.append(Deviation(name, stock[name], types[name], added, change, added * price, is_worth))
    return sorted(found, key=lambda row: -abs(row.bytes_added))
