"""What a GGUF holds, over all its shards, without loading it: kind, shapes, types, sizes, and how two files differ.

Everything comes from the headers (`qres.gguf_header`); only `vector_difference`, `shared_tensors` and `content_digest`
read weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qres import gguf_kind, gguf_split, levels
from qres.errors import InputError, UnsupportedError
from qres.gguf_compare import (
    SharedTensors,
    content_digest,
    fingerprint,
    shape_difference,
    shared_tensors,
    tokenizer_difference,
    vector_difference,
)
from qres.gguf_cursor import Problem, show
from qres.gguf_inventory import SIXTEEN_BIT, Inventory
from qres.gguf_split import Shards
from qres.gguf_tensor import Tensor
from qres.gguf_values import Digest, Unreadable, Value

if TYPE_CHECKING:  # the records cost more time to import than this module: left until one is made
    from qres.records import Fallback

__all__ = [
    "Digest",
    "Inventory",
    "Problem",
    "SharedTensors",
    "Tensor",
    "Unreadable",
    "Value",
    "assemble",
    "bytes_at",
    "content_digest",
    "fallbacks",
    "fingerprint",
    "read",
    "require_language_model",
    "shape_difference",
    "shared_tensors",
    "tokenizer_difference",
    "vector_difference",
]


def read(path: Path, *, tolerant: bool = False) -> Inventory:
    """The inventory of a GGUF; of a split model any shard will do.

    Args:
        path: The file.
        tolerant: Return what can be read, with what is wrong in `Inventory.problems`, instead of refusing a damaged
            file or an incomplete set of shards.

    Raises:
        InputError: a file that is missing, unreadable or not GGUF; unless tolerant, also one that is damaged or cut
            off, or an incomplete set of shards.
        UnsupportedError: a GGUF version or byte order that llama.cpp does not read.
    """
    return assemble(path, gguf_split.read_shards(path, tolerant=tolerant))


def assemble(path: Path, shards: Shards) -> Inventory:
    """The inventory of the model whose files were read; `path` is the one that was asked for."""
    metadata, tensors = shards.headers[0].metadata, shards.tensors
    by_name = {tensor.name: tensor for tensor in tensors}
    architecture = _text(metadata, "general.architecture")
    tokens, embedding = metadata.get("tokenizer.ggml.tokens"), by_name.get("token_embd.weight")
    n_tokens = tokens.length if isinstance(tokens, Digest) else 0
    n_rows = embedding.shape[1] if embedding and len(embedding.shape) > 1 else 0
    ftype = metadata.get("general.file_type")
    blocks, skipped = (_number(metadata, f"{architecture}.{key}") for key in ("block_count", "nextn_predict_layers"))
    return Inventory(
        path=shards.paths[0],
        shards=shards.paths,
        version=shards.headers[0].version,
        kind=gguf_kind.kind_of(architecture, metadata, by_name),
        architecture=architecture,
        name=_text(metadata, "general.name") or (gguf_split.prefix_of(path) if shards.count > 1 else path.stem),
        file_type=levels.name_of_ftype(ftype) if type(ftype) is int else "",
        n_layer=max(blocks - skipped, 0),
        n_embd=_number(metadata, f"{architecture}.embedding_length"),
        n_ctx_train=_number(metadata, f"{architecture}.context_length"),
        n_vocab=n_tokens or _number(metadata, f"{architecture}.vocab_size") or n_rows,
        tensors=tensors,
        file_bytes=sum(header.file_bytes for header in shards.headers),
        metadata=metadata,
        problems=shards.problems,
    )


def _number(metadata: Mapping[str, Value], key: str) -> int:
    """A count from the metadata; 0 when it is missing or is not one."""
    value = metadata.get(key)
    return value if type(value) is int and value > 0 else 0


def _text(metadata: Mapping[str, Value], key: str) -> str:
    value = metadata.get(key)
    return value.strip() if isinstance(value, str) else ""


_UNIQUE_ORIGIN = {
    fallback: name for name, fallback in levels.FALLBACK.items() if list(levels.FALLBACK.values()).count(fallback) == 1
}
"""Fallback type -> the only type that has it: Q5_0 -> Q4_K, Q5_1 -> Q5_K, Q8_0 -> Q6_K."""


def fallbacks(inventory: Inventory) -> tuple[Fallback, ...]:
    """The tensors whose rows do not fit the level's 256-weight blocks, and what they became.

    Read back from the file: a tensor of a fallback type with rows that are no multiple of 256. One that was given such
    a type on purpose (`--tensor-type`) cannot be told apart. Counts the head too, which llama.cpp makes Q8_0 for the
    same reason without logging it. Where several types share a fallback, the wanted one is the level's base.
    """
    from qres.records import Fallback

    level = levels.LEVELS_BY_NAME.get(inventory.file_type)
    if level is None or level.base in SIXTEEN_BIT:
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


def _wanted(tensor: Tensor, level: levels.Level) -> str | None:
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


def bytes_at(tensor: Tensor, type_name: str) -> int:
    """Bytes of the tensor in that type, or in the one that llama.cpp falls back to.

    Raises:
        UsageError: no such type.
    """
    return levels.TYPE_TRAITS[levels.fitting_type(type_name, tensor.row)].bytes_of(tensor.n_weights)


def require_language_model(inventory: Inventory, role: str) -> None:
    """Refuse a file whose next-token output cannot be measured; the message calls it by its role (`reference`, ...).

    Raises:
        InputError: not a model: LoRA, mmproj, importance matrix, control vector, vocabulary, no architecture.
        UnsupportedError: a model of another sort (embedding-only, encoder-decoder, ...), or tensor types that llama.cpp
            does not know.
    """
    subject = f"the {role} model {show(inventory.path)}"
    refusal = gguf_kind.refusal(inventory.kind, subject)
    if refusal:
        raise refusal
    if not inventory.architecture:
        raise InputError(f"{subject} does not name its architecture", "convert the original model again")
    for tensor in inventory.tensors:
        traits = levels.TYPES_BY_ID.get(tensor.type_id)
        if traits is None or traits.removed:
            message = f"{subject} has tensors of type {tensor.type.removeprefix('type ')}, first {show(tensor.name)!r}"
            if traits is None:
                raise UnsupportedError(f"{message}, unknown to this qres", "update qres and llama-cpp-python")
            raise UnsupportedError(
                f"{message}, which llama.cpp no longer reads", "quantize it again, to Q4_0 or IQ4_NL"
            )
