"""What a GGUF holds, over all its shards, without loading it: kind, shapes, types, sizes, and how two files differ.

Everything comes from the headers (`qres.gguf_header`); the only function that reads the weights is `content_digest`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qres import gguf_kind, levels
from qres.errors import InputError, UnsupportedError
from qres.gguf_header import Digest, Header, Tensor, Value, read_header, show

if TYPE_CHECKING:  # the records cost more time to import than this module: left until one is made
    from qres.records import Fallback, TypeShare

__all__ = [
    "Digest",
    "Inventory",
    "Tensor",
    "Value",
    "bytes_at",
    "content_digest",
    "fallbacks",
    "read",
    "require_language_model",
    "shape_difference",
    "tokenizer_difference",
]

_SHARD_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)  # llama_split_path
_SIXTEEN_BIT = frozenset({"F16", "BF16", "F32"})

_TOKENIZER_KEYS = (
    "model",
    "pre",
    "tokens",
    "merges",
    "scores",
    "token_type",
    # The padding id is left out: it never enters a chunk, and re-uploads change it.
    "bos_token_id",
    "eos_token_id",
    "eot_token_id",
    "unknown_token_id",
    "seperator_token_id",  # spelled so in the files
    "add_bos_token",
    "add_eos_token",
    "add_space_prefix",
)


@dataclass(frozen=True)
class Inventory:
    """One model file, or one whole set of shards."""

    path: Path
    """The file to give to llama.cpp: of a split set the first shard, whichever was asked for."""
    shards: tuple[Path, ...]
    """All files, in order; one entry for a file that is not split."""
    version: int
    kind: str
    """`model`, `diffusion`, or something `require_language_model` refuses: `mmproj`, `lora`, `imatrix`,
    `control_vector`, `vocab_only`, `empty`, `embedding_only`, `encoder_decoder`, `audio`, `draft`, `other`."""
    architecture: str
    """Empty when the file does not say."""
    name: str
    """`general.name`, else the file's stem."""
    file_type: str
    """Level that `general.file_type` claims; empty when it does not say. Claims only: see `types`."""
    n_layer: int
    """Blocks that run: block_count without the NextN (MTP) blocks, which llama.cpp skips. 0 when unknown, as below."""
    n_embd: int
    n_ctx_train: int
    n_vocab: int
    tensors: tuple[Tensor, ...]
    """In file order, shard by shard."""
    file_bytes: int
    metadata: Mapping[str, Value]
    """Of the first shard; arrays and very long strings as `Digest`."""

    @property
    def tensor_bytes(self) -> int:
        """Bytes of tensor data, without padding; tensors of unknown types count nothing."""
        return sum(tensor.n_bytes or 0 for tensor in self.tensors)

    @property
    def n_weights(self) -> int:
        """All weights."""
        return sum(tensor.n_weights for tensor in self.tensors)

    @property
    def bpw(self) -> float:
        """8 * bytes / weights over the tensors whose size is known; 0 when there are none."""
        weights = sum(tensor.n_weights for tensor in self.tensors if tensor.n_bytes is not None)
        return 8 * self.tensor_bytes / weights if weights else 0.0

    @property
    def types(self) -> tuple[TypeShare, ...]:
        """What each tensor type holds, most bytes first."""
        from qres.records import TypeShare

        names = dict.fromkeys(tensor.type for tensor in self.tensors)
        shares = []
        for name in names:
            those = [tensor for tensor in self.tensors if tensor.type == name]
            weights, n_bytes = sum(t.n_weights for t in those), sum(t.n_bytes or 0 for t in those)
            shares.append(TypeShare(name, len(those), weights, n_bytes))
        return tuple(sorted(shares, key=lambda share: (-share.bytes, -share.weights, share.type)))

    @property
    def tied_head(self) -> bool:
        """The head is token_embd: there is no output.weight."""
        return all(tensor.name != "output.weight" for tensor in self.tensors)

    @property
    def is_16bit(self) -> bool:
        """At least 95 % of the weights in matrices are F16, BF16 or F32."""
        matrices = [tensor for tensor in self.tensors if tensor.n_dims >= 2]
        full = sum(tensor.n_weights for tensor in matrices if tensor.type in _SIXTEEN_BIT)
        return bool(matrices) and full >= 0.95 * sum(tensor.n_weights for tensor in matrices)


def read(path: Path) -> Inventory:
    """The inventory of a GGUF; of a split model any shard will do.

    Raises:
        InputError: a file that is missing, unreadable, damaged, cut off or not GGUF, or an incomplete set of shards.
        UnsupportedError: a GGUF version or byte order that llama.cpp does not read.
    """
    header = read_header(path)
    count = _number(header.metadata, "split.count")
    paths = _shard_paths(path, header, count) if count > 1 else (path,)
    headers = _read_shards(paths, count) if count > 1 else [header]
    metadata = headers[0].metadata
    tensors = tuple(tensor for shard in headers for tensor in shard.tensors)
    by_name = {tensor.name: tensor for tensor in tensors}
    architecture = _text(metadata, "general.architecture")
    tokens, embedding = metadata.get("tokenizer.ggml.tokens"), by_name.get("token_embd.weight")
    n_tokens = tokens.length if isinstance(tokens, Digest) else 0
    n_rows = embedding.shape[1] if embedding and len(embedding.shape) > 1 else 0
    ftype = metadata.get("general.file_type")
    split = _SHARD_NAME.fullmatch(path.name) if count > 1 else None
    blocks, skipped = (_number(metadata, f"{architecture}.{key}") for key in ("block_count", "nextn_predict_layers"))
    return Inventory(
        path=paths[0],
        shards=paths,
        version=headers[0].version,
        kind=gguf_kind.kind_of(architecture, metadata, by_name),
        architecture=architecture,
        name=_text(metadata, "general.name") or (split["prefix"] if split else path.stem),
        file_type=levels.name_of_ftype(ftype) if type(ftype) is int else "",
        n_layer=max(blocks - skipped, 0),
        n_embd=_number(metadata, f"{architecture}.embedding_length"),
        n_ctx_train=_number(metadata, f"{architecture}.context_length"),
        n_vocab=n_tokens or _number(metadata, f"{architecture}.vocab_size") or n_rows,
        tensors=tensors,
        file_bytes=sum(shard.file_bytes for shard in headers),
        metadata=metadata,
    )


def _number(metadata: Mapping[str, Value], key: str) -> int:
    """A count from the metadata; 0 when it is missing or is not one."""
    value = metadata.get(key)
    return value if type(value) is int and value > 0 else 0


def _text(metadata: Mapping[str, Value], key: str) -> str:
    value = metadata.get(key)
    return value.strip() if isinstance(value, str) else ""


def _shard_paths(path: Path, header: Header, count: int) -> tuple[Path, ...]:
    """All files of the set that `path` belongs to, by llama.cpp's naming."""
    number = _number(header.metadata, "split.no") + 1
    match = _SHARD_NAME.fullmatch(path.name)
    if not match or (int(match["number"]), int(match["count"])) != (number, count):
        message = f"{show(path)} is part {number} of a model split into {count} files, but its name does not say so"
        name = f"NAME-{number:05d}-of-{count:05d}.gguf"
        raise InputError(message, f"llama.cpp finds the parts by name: call it {name}, beside the others")
    paths = tuple(path.with_name(f"{match['prefix']}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count))
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        message = f"{len(missing)} of the {count} parts of {show(path)} are missing, first {show(missing[0])}"
        raise InputError(message, "put all parts into one folder")
    return paths


def _read_shards(paths: Sequence[Path], count: int) -> list[Header]:
    """The headers of a whole set, checked to belong together."""
    headers = [read_header(path, index) for index, path in enumerate(paths)]
    home: dict[str, Path] = {}
    for index, (path, header) in enumerate(zip(paths, headers, strict=True)):
        number, total = _number(header.metadata, "split.no") + 1, _number(header.metadata, "split.count")
        if (number, total) != (index + 1, count):
            message = f"{show(path)} says it is part {number} of {total}, not part {index + 1} of {count}"
            raise InputError(message, "the parts come from different sets, or were renamed: get them again")
        for tensor in header.tensors:
            if tensor.name in home:
                message = f"tensor {show(tensor.name)!r} is in {show(home[tensor.name])} and in {show(path)}"
                raise InputError(message, "the parts come from different sets: get them again")
            home[tensor.name] = path
    claimed = headers[0].metadata.get("split.tensors.count")
    if type(claimed) is int and claimed != len(home):
        message = f"{show(paths[0])} and its other parts hold {len(home)} tensors, split.tensors.count says {claimed}"
        raise InputError(message, "the parts come from different sets: get them again")
    return headers


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
    if level is None or level.base in _SIXTEEN_BIT:
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
    traits = levels.TYPE_TRAITS[levels.fitting_type(type_name, tensor.row)]
    return tensor.n_weights // traits.block_size * traits.block_bytes


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


def tokenizer_difference(reference: Inventory, quantized: Inventory) -> str | None:
    """The first difference that would make the same text other token ids, in words; None when there is none."""
    for key in _TOKENIZER_KEYS:
        full = f"tokenizer.ggml.{key}"
        ours, theirs = reference.metadata.get(full), quantized.metadata.get(full)
        if ours == theirs:
            continue
        if isinstance(ours, Digest) and isinstance(theirs, Digest):
            if ours.length == theirs.length:
                return f"{full} has {ours.length} entries in both files, but not the same ones"
            return f"{full} has {ours.length} entries in the reference, {theirs.length} in the quantized file"
        return f"{full} is {_said(ours)} in the reference, {_said(theirs)} in the quantized file"
    if reference.n_vocab != quantized.n_vocab:
        return (
            f"the vocabulary has {reference.n_vocab} tokens in the reference, {quantized.n_vocab} in the quantized file"
        )
    return None


def _said(value: Value | None) -> str:
    if value is None:
        return "not set"
    return f"a list of {value.length}" if isinstance(value, Digest) else show(repr(value))


def shape_difference(reference: Inventory, quantized: Inventory) -> str | None:
    """The first difference in architecture, tensors or shapes, in words; None when the files are the same model.

    A quantized file with a head of its own where the reference's is tied to token_embd is legal.
    """
    if reference.architecture != quantized.architecture:
        ours, theirs = show(repr(reference.architecture)), show(repr(quantized.architecture))
        return f"the architecture is {ours} in the reference, {theirs} in the quantized file"
    ours_by_name = {tensor.name: tensor.shape for tensor in reference.tensors}
    theirs_by_name = {tensor.name: tensor.shape for tensor in quantized.tensors}
    for name, shape in ours_by_name.items():
        if name not in theirs_by_name:
            return f"tensor {show(name)!r} is missing in the quantized file"
        if shape != theirs_by_name[name]:
            pair = f"{list(shape)} in the reference, {list(theirs_by_name[name])} in the quantized file"
            return f"tensor {show(name)!r} has the shape {pair}"
    extra = next((name for name in theirs_by_name if name not in ours_by_name and name != "output.weight"), None)
    return None if extra is None else f"tensor {show(extra)!r} is missing in the reference"


def content_digest(paths: Path | Sequence[Path], progress: Callable[[int, int], None] | None = None) -> str:
    """SHA-256 over the bytes of all the files in order, read in pieces; `progress` is told (bytes done, bytes in all).

    Raises:
        InputError: a file cannot be read.
    """
    files = (paths,) if isinstance(paths, Path) else tuple(paths)
    digest, done = hashlib.sha256(), 0
    try:
        total = sum(path.stat().st_size for path in files)
        for path in files:
            with path.open("rb", buffering=0) as file:
                while piece := file.read(1 << 22):
                    digest.update(piece)
                    done += len(piece)
                    if progress:
                        progress(done, total)
    except OSError as error:
        raise InputError(f"cannot read {show(error.filename or files)}: {error.strerror or error}") from error
    return digest.hexdigest()
