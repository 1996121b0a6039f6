"""What a file says about itself against what it holds: its level, its name, the counts in its metadata."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

from qres import levels
from qres.gguf.format.metadata import Digest
from qres.gguf.format.tensor import Tensor
from qres.gguf.inventory import SIXTEEN_BIT, Inventory
from qres.gguf.names import block_number
from qres.printable import show
from qres.records.files import main_types

_NAMES = sorted(levels.LEVELS_BY_NAME.keys() | levels.TYPE_TRAITS.keys(), key=len, reverse=True)
_LEVEL_WORD = re.compile(
    rf"(?<![^\W_])(?:{'|'.join(name.replace('_', '[-_]') for name in _NAMES)})(?![^\W_])", re.IGNORECASE
)
"""A level or type as a word of its own, with anything but letters and digits around it: `model-Q4_K_M.gguf`."""

_FAR_OFF = 1 / 3
"""Share of the nominal bits per weight that a file may be off by. A recipe's base type alone is up to 22 % below its
nominal figure (IQ1_S)."""


def disagreements(inventory: Inventory) -> tuple[str, ...]:
    """Where the level that the file claims, its contents and its names do not agree, one line each."""
    level = level_disagreement(inventory)
    names = [("the file's name", inventory.path.name), ("general.name", inventory.metadata.get("general.name"))]
    found = [_name_disagreement(where, name, inventory) for where, name in names if isinstance(name, str)]
    return tuple(line for line in (level, *found) if line)


def level_disagreement(inventory: Inventory) -> str:
    """Why the contents cannot be the level that `general.file_type` claims; empty when they can, or none is claimed.

    They can when most weights in the matrices of the blocks are of the level's base type, or of what llama.cpp takes
    where the rows do not hold whole blocks of it, and the bits per weight are not far off.
    """
    level = levels.LEVELS_BY_NAME.get(inventory.file_type)
    matrices = block_matrices(inventory)
    if level is None or not matrices or inventory.released_in:
        return ""
    if not _is_mostly(level, matrices):
        held = main_type(inventory)
        share = sum(tensor.n_weights for tensor in matrices if tensor.type == held) / _weights(matrices)
        contents = f"{100 * share:.0f} % of the weights in the matrices of the blocks are {held}"
        return f"general.file_type says {level.name}, but {contents}"
    # Fallbacks explain any size, so only rows that every type fits are compared.
    whole = [tensor for tensor in matrices if tensor.row % 256 == 0 and tensor.n_bytes is not None]
    bpw = 8 * sum(tensor.n_bytes or 0 for tensor in whole) / _weights(whole) if whole else level.nominal_bpw
    if abs(bpw / level.nominal_bpw - 1) > _FAR_OFF:
        figures = f"{level.nominal_bpw:.2f} bits per weight), but the matrices of the blocks have {bpw:.2f}"
        return f"general.file_type says {level.name} (nominally {figures}"
    return ""


def quantized_as(inventory: Inventory) -> str:
    """What a quantized file is called in messages: the level it claims, or what it holds where it claims 16 bit."""
    is_claimed = inventory.file_type and inventory.file_type not in SIXTEEN_BIT
    return inventory.file_type if is_claimed else main_types(inventory.types)


def block_matrices(inventory: Inventory) -> list[Tensor]:
    """The matrices of the blocks, which a recipe's base type is meant for; not the embedding and the head."""
    return [t for t in inventory.tensors if t.n_dims >= 2 and t.n_weights and block_number(t.name) is not None]


def main_type(inventory: Inventory) -> str:
    """The type of most weights in the matrices of the blocks, else in all tensors; empty without weights."""
    weights: Counter[str] = Counter()
    for tensor in block_matrices(inventory) or inventory.tensors:
        weights[tensor.type] += tensor.n_weights
    return max(weights, key=weights.__getitem__, default="")


def _is_mostly(level: levels.LevelSpec, matrices: list[Tensor]) -> bool:
    """No type holds more weights than the base type with its fallbacks."""
    weights: Counter[str] = Counter()
    for tensor in matrices:
        fits = tensor.row % levels.TYPE_TRAITS[level.base].block_size == 0
        wanted = (level.base,) if fits else (levels.FALLBACK.get(level.base), "F16")
        weights[level.base if tensor.type in wanted else tensor.type] += tensor.n_weights
    return weights[level.base] == max(weights.values())


def _weights(tensors: list[Tensor]) -> int:
    return sum(tensor.n_weights for tensor in tensors)


def _name_disagreement(where: str, name: str, inventory: Inventory) -> str:
    """The longest level name in `name`, when it is not what the file claims or, without a claim, mostly holds."""
    words = [word.upper().replace("-", "_") for word in _LEVEL_WORD.findall(name)]
    if not words or not inventory.tensors:
        return ""
    word, claimed, held = max(words, key=len), inventory.file_type, main_type(inventory)
    if claimed:  # `Q4_K` is short for any of `Q4_K_S`, `Q4_K_M`
        agrees, says = claimed == word or claimed.startswith(f"{word}_"), f"general.file_type says {claimed}"
    else:
        level = levels.LEVELS_BY_NAME.get(word)
        agrees = _is_mostly(level, block_matrices(inventory) or list(inventory.tensors)) if level else held == word
        says = "general.file_type is not set"
    return "" if agrees else f"{where} says {word}, {says}, the weights are mostly {held}"


def odd_values(inventory: Inventory) -> tuple[str, ...]:
    """Metadata that does not fit the tensors or itself, one line each."""
    return tuple(_odd_values(inventory))


def _odd_values(inventory: Inventory) -> Iterator[str]:
    metadata, architecture = inventory.metadata, inventory.architecture
    for key, value in metadata.items():
        if isinstance(value, float) and math.isnan(value):
            yield f"{show(key)} is NaN"
    if inventory.file_type.startswith("ftype "):
        yield f"general.file_type is {inventory.file_type.removeprefix('ftype ')}, unknown to this qres"
    embedding = next((t for t in inventory.tensors if t.name == "token_embd.weight" and t.n_dims == 2), None)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if embedding and inventory.n_embd and embedding.row != inventory.n_embd:
        yield f"embedding_length is {inventory.n_embd}, the rows of token_embd.weight have {embedding.row} weights"
    if embedding and isinstance(tokens, Digest) and tokens.length != embedding.shape[1]:
        yield f"the tokenizer has {tokens.length} tokens, token_embd.weight has {embedding.shape[1]} rows"
    for name in ("bos", "eos"):
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token, int) and inventory.n_vocab and not 0 <= token < inventory.n_vocab:
            yield f"the {name.upper()} token is {token}, the vocabulary has {inventory.n_vocab} tokens"
    blocks = metadata.get(f"{architecture}.block_count")
    numbers = [number for t in inventory.tensors if (number := block_number(t.name)) is not None]
    if inventory.kind in ("model", "diffusion") and isinstance(blocks, int) and max(numbers, default=-1) + 1 != blocks:
        yield f"block_count is {blocks}, the tensors are of {max(numbers, default=-1) + 1} blocks"
    empty = [tensor.name for tensor in inventory.tensors if not tensor.n_weights]
    if empty:
        yield f"{len(empty)} tensors have no weights, first {show(empty[0])}"
