"""What a GGUF holds, over all its shards, without loading it: kind, shapes, types, sizes, and how two files differ.

Everything comes from the headers (`qres.gguf.format`); only `vector_difference`, `shared_tensors` and `content_digest`
read weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from qres import levels
from qres.errors import InputError, UnsupportedError
from qres.gguf import kind
from qres.gguf.format.metadata import Digest, Value
from qres.gguf.format.shards import Shards, prefix_of, read_shards
from qres.gguf.format.tensor import Tensor
from qres.gguf.inventory import Inventory
from qres.printable import show


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
    return assemble(path, read_shards(path, tolerant=tolerant))


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
        kind=kind.kind_of(architecture, metadata, by_name),
        architecture=architecture,
        name=_text(metadata, "general.name") or (prefix_of(path) if shards.count > 1 else path.stem),
        file_type=levels.name_of_ftype(ftype) if type(ftype) is int else "",
        n_layer=max(blocks - skipped, 0),
        n_embd=_number(metadata, f"{architecture}.embedding_length"),
        n_ctx_train=_number(metadata, f"{architecture}.context_length"),
        n_vocab=n_tokens or _number(metadata, f"{architecture}.vocab_size") or n_rows,
        tensors=tensors,
        file_bytes=sum(header.file_bytes for header in shards.headers),
        metadata=metadata,
        problems=shards.problems,
        n_block=blocks,
    )


def _number(metadata: Mapping[str, Value], key: str) -> int:
    """A count from the metadata; 0 when it is missing or is not one."""
    value = metadata.get(key)
    return value if type(value) is int and value > 0 else 0


def _text(metadata: Mapping[str, Value], key: str) -> str:
    value = metadata.get(key)
    return value.strip() if isinstance(value, str) else ""


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
    refusal = kind.refusal(inventory.kind, subject)
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
    _require_loadable(inventory, subject)


_AGAIN = "get the file again, or convert the original model again"
_TOWERS = re.compile(r"(v|mm|a|mm_a|resampler|adapter)\.")
"""First part of the names of tensors that belong into an mmproj file: vision, audio, and what leads from them."""


_MAX_LAYERS = 512
"""LLAMA_MAX_LAYERS."""


def _require_loadable(inventory: Inventory, subject: str) -> None:
    """What llama.cpp refuses, or aborts on, as far as names, types and counts tell (docs/facts.md, 39)."""
    for problem in inventory.problems:
        if problem.unloadable:
            raise InputError(f"{subject} is {problem.message}", problem.hint)
    blocks = inventory.metadata.get(f"{inventory.architecture}.block_count")
    if type(blocks) is int and not 0 < blocks <= _MAX_LAYERS:
        raise InputError(f"{subject} says it has {blocks} blocks, possible are 1 to {_MAX_LAYERS}", _AGAIN)
    tower = [tensor.name for tensor in inventory.tensors if _TOWERS.match(tensor.name)]
    if tower:
        raise InputError(
            f"{subject} holds {len(tower)} tensors of a vision or audio tower beside the language model, first "
            f"{show(tower[0])!r}: llama.cpp cannot load them from one file",
            "convert the original model again without --mmproj, and the tower apart with --mmproj",
        )
    norms = [one for one in inventory.tensors if one.n_dims == 1 and one.name.endswith("norm.weight")]
    odd = next((one for one in norms if one.type != "F32"), None)
    if odd is not None:
        raise InputError(
            f"{subject} has the norm {show(odd.name)!r} as {odd.type}: llama.cpp computes norms with F32 only",
            "convert the original model again: converters write norms as F32",
        )
