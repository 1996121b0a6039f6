"""Tensors that llama.cpp could not give the type that their level asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qres import levels
from qres.gguf.claims import publishers_mix
from qres.gguf.format.tensor import Tensor
from qres.gguf.inventory import SIXTEEN_BIT, Inventory

if TYPE_CHECKING:
    from qres.records.files import Fallback


_UNIQUE_ORIGIN = {
    fallback: name for name, fallback in levels.FALLBACK.items() if list(levels.FALLBACK.values()).count(fallback) == 1
}
"""Fallback type -> the only type that has it: Q5_0 -> Q4_K, Q5_1 -> Q5_K, Q8_0 -> Q6_K."""


def fallbacks(inventory: Inventory) -> tuple[Fallback, ...]:
    """The tensors whose rows do not fit the level's 256-weight blocks, and what they became.

    Read back from the file: a tensor of a fallback type with rows that are no multiple of 256. One that was given such
    a type on purpose (`--tensor-type`) cannot be told apart. Counts the head too, which llama.cpp makes Q8_0 for the
    same reason without logging it. Where several types share a fallback, the wanted one is the level's base.
    None are known of a publisher's mix: what was wanted there is in no file.
    """
    from qres.records.files import Fallback

    level = levels.LEVELS_BY_NAME.get(inventory.file_type)
    if level is None or level.base in SIXTEEN_BIT or publishers_mix(inventory):
        return ()
    found = []
    for tensor in inventory.tensors:
        if tensor.n_dims < 2 or tensor.row % 256 == 0 or tensor.type == level.base:
            continue
        wanted = _wanted(tensor, level)
        if wanted:
            reason = f"row of {tensor.row} is not a multiple of 256"
            found.append(Fallback(tensor.name, wanted, tensor.type, reason))
    return tuple(found)


def _wanted(tensor: Tensor, level: levels.LevelSpec) -> str | None:
    """The type that the level asked for where `tensor.type` is its fallback."""
    if levels.TYPE_TRAITS[level.base].block_size != 256:
        # Q4_0 to Q5_1: llama.cpp takes a 256-block type for the head only, and mixes in other 32-block types by choice.
        return "Q6_K" if tensor.type == "Q8_0" and level.base != "MXFP4" else None
    if tensor.type == "Q4_0" and level.base == "Q2_K":
        return "Q2_K or Q3_K"  # the recipe mixes both, and both fall back to Q4_0
    if levels.FALLBACK.get(level.base) == tensor.type:
        return level.base
    if tensor.type == "Q4_0" and level.base.startswith("IQ"):
        return "Q2_K"  # of the types that fall back to Q4_0, the one that IQ levels mix in
    if tensor.type == "F16" and tensor.row % 32 and tensor.row > 32 and tensor.name.endswith(".weight"):
        return level.base  # shorter rows (conv1d kernels, altup) are never quantized
    return _UNIQUE_ORIGIN.get(tensor.type)
