"""What files hold, as records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TypeShare:
    """How much of a file one tensor type holds."""

    type: str
    """ggml's name of the type as it is in the file, such as `Q4_K`."""
    tensors: int
    """Tensors of this type."""
    weights: int
    """Weights in them."""
    bytes: int
    """Bytes of their data."""


def main_types(types: Sequence[TypeShare]) -> str:
    """The types that hold at least a twentieth of the bytes, those below 16 bit first: `Q8_0 and F16`."""
    total = sum(share.bytes for share in types)
    large = [share.type for share in types if share.bytes >= total / 20]
    return " and ".join(sorted(large, key=lambda name: name in ("F32", "F16", "BF16")))


@dataclass(frozen=True)
class Fallback:
    """A tensor that llama.cpp could not give the type that the level asks for.

    Read back from the file: a tensor that was given such a type on purpose looks the same.
    """

    tensor: str
    """Name of the tensor."""
    wanted: str
    """Type that the level asks for."""
    type: str
    """Type that the file really holds."""
    reason: str
    """Why the wanted type did not fit."""


@dataclass(frozen=True)
class SharedTensors:
    """Matrices that two levels hold byte for byte alike."""

    a: str
    """Name of one level."""
    b: str
    """Name of the other."""
    tensors: int
    """Identical matrices."""
    of: int
    """Matrices in each file."""
    bytes: int
    """Bytes of the identical ones."""


@dataclass(frozen=True)
class NotExecuted:
    """A block that llama.cpp never runs: a NextN block, for multi-token prediction."""

    block: int
    """Its number."""
    tensors: int
    """Tensors in it."""
    bytes: int
    """Bytes of their data."""


@dataclass(frozen=True)
class LevelFile:
    """A quantized file, from its header."""

    path: str
    """Path of the file; of a split one, of its first shard."""
    file_type: str
    """What `general.file_type` claims; empty when the file does not say."""
    bytes: int
    """Size of the file, all its shards together."""
    bpw: float
    """8 * bytes of tensor data / weights, counted in the file."""
    nominal_bpw: float | None
    """What people expect of the level (Llama-3.1-8B's figure); None for an unknown level and for a
    publisher's mix."""
    types: tuple[TypeShare, ...]
    """What each tensor type holds."""
    fallback_tensors: tuple[Fallback, ...]
    """Tensors that could not get the type that the level asks for."""
    tensor_types: tuple[str, ...]
    """Type of each of `Result.tensors` in this file; empty text where the file lacks it."""
    not_executed: tuple[NotExecuted, ...] = ()
    """Blocks that never run: nothing that is measured depends on them."""
