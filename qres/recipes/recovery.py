"""What 16 bit is worth: the cheapest ways to recover a share of a level's damage, all of them predicted alike."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise

from qres import levels
from qres.recipes.allocate import allocate
from qres.recipes.choices import Choices, TensorOptions, loss_of, size_of
from qres.recipes.keep_layers import layer_of
from qres.records.recipe import Recovery
from qres.records.result import Level

SHARES = (0.10, 0.25, 0.50)


def recoveries(choices: Choices) -> tuple[Recovery, ...]:
    """For each measured level and share, what recovering that much costs.

    Left out are levels without predictions, and files that are at 16 bit but for a few tensors.
    """
    rows = []
    for level in choices.quantized_levels:
        types = choices.level_types(level)
        if choices.loss(types):
            rows += [_recovery(choices, level, types, share) for share in SHARES]
    return tuple(rows)


def _recovery(choices: Choices, level: Level, types: Mapping[str, str], share: float) -> Recovery:
    chosen = [row for row in choices.rows if row.types]
    held = [_option(row, types[row.tensor.name]) for row in chosen]
    whole = sum(loss for _, loss in held)
    left = (1 - share) * whole
    layers, layers_bytes = _by_layers(chosen, held, left)
    raised = [
        [one, *((size, loss) for size, loss in zip(row.bytes, row.losses, strict=True) if size >= one[0])]
        for row, one in zip(chosen, held, strict=True)
    ]
    free = [[*zip(row.bytes, row.losses, strict=True), one] for row, one in zip(chosen, held, strict=True)]
    before = sum(size for size, _ in held)
    return Recovery(
        level=level.name,
        share=share,
        kld=left * choices.factor(left),
        layers=layers,
        layers_bytes=layers_bytes,
        raised_bytes=_cheapest(raised, left, before),
        free_bytes=_cheapest(free, left, before),
        ladder_bytes=_ladder(choices, types, left),
    )


def _option(row: TensorOptions, type_name: str) -> tuple[int, float]:
    return size_of(row, type_name), loss_of(row, type_name) or 0.0


def _by_layers(
    rows: list[TensorOptions], held: list[tuple[int, float]], left: float
) -> tuple[tuple[str, ...], int | None]:
    """Whole layers at 16 bit, the cheapest set of them."""
    added: dict[str, int] = defaultdict(int)
    damage: dict[str, float] = defaultdict(float)
    for row, (size, loss) in zip(rows, held, strict=True):
        added[layer_of(row)] += max(0, row.bytes[-1] - size)
        damage[layer_of(row)] += loss
    names = list(damage)
    found = allocate([[damage[name], 0.0] for name in names], [[0, added[name]] for name in names], left)
    if found is None:
        return (), None
    kept = {name for name, k in zip(names, found.choice, strict=True) if k}
    return tuple(sorted(kept, key=_place)), round(found.value)


def _place(layer: str) -> tuple[int, str]:
    """Layers by their number, then what is outside them."""
    number = layer.removeprefix("layer ")
    return (int(number), "") if number.isdigit() else (1 << 30, layer)


def _cheapest(options: list[list[tuple[int, float]]], left: float, before: int) -> int | None:
    """Bytes beside the level's of the smallest choice with no more than this damage."""
    losses = [[loss for _, loss in row] for row in options]
    found = allocate(losses, [[size for size, _ in row] for row in options], left)
    return None if found is None else round(found.value) - before


def _ladder(choices: Choices, types: Mapping[str, str], left: float) -> int | None:
    """Bytes beside the level's where the line through the level and better ones reaches this damage."""
    start = choices.bytes_of(types)
    points = [(start, choices.loss(types) or 0.0)]
    for name, better in choices.types_by_level.items():
        size, loss = choices.bytes_of(better), choices.loss(better)
        if name in levels.LADDER and size > points[-1][0] and loss and loss < points[-1][1]:
            points.append((size, loss))
    for (a, more), (b, less) in pairwise(points):
        if less <= left <= more:
            return round(a + (b - a) * math.log(more / left) / math.log(more / less)) - start
    return None
