"""A level with its costliest layers at 16 bit, as a recipe."""

from __future__ import annotations

from qres.errors import UsageError
from qres.gguf.names import block_number
from qres.recipes.choices import Choices, TensorOptions, loss_of
from qres.recipes.plan import base_level, of_types, open_choices
from qres.recipes.wishes import Wishes
from qres.records.recipe import Recipe


def keep_16bit(choices: Choices, count: int, wishes: Wishes) -> Recipe:
    """A level with its costliest layers at 16 bit: those whose tensors are predicted to do the most damage in it.

    Args:
        choices: Of the model.
        count: Layers; the embedding and the head count as one each.
        wishes: The level, and pins.

    Raises:
        UsageError: the level's types have no predictions, or it has fewer layers.
    """
    start = base_level(choices, wishes)
    plan = open_choices(choices, wishes, start)
    types = choices.types_by_level[start] | plan.fixed
    damage: dict[str, float] = {}
    for row in plan.rows:
        loss = loss_of(row, types[row.tensor.name])
        if loss is None:
            raise UsageError(f"{start} gives {row.tensor.name} a type without a prediction", "take another --level")
        damage[layer_of(row)] = damage.get(layer_of(row), 0.0) + loss
    order = sorted((layer for layer in damage if damage[layer] > 0), key=lambda layer: -damage[layer])
    if not 0 < count <= len(order):
        raise UsageError(
            f"--keep-16bit {count}: {start} has {len(order)} layers below 16 bit", "give a number of these"
        )
    kept = set(order[:count])
    types |= {row.tensor.name: row.tensor.type_16bit for row in plan.rows if layer_of(row) in kept}
    plan.notes.append(f"At 16 bit: {', '.join(order[:count])}.")
    return of_types(choices, types, f"{start} with {count} at 16 bit", start, wishes, plan)


def layer_of(row: TensorOptions) -> str:
    """`layer 3`, or the name of a tensor outside the layers."""
    block = block_number(row.tensor.name)
    return row.tensor.name.removesuffix(".weight") if block is None else f"layer {block}"
