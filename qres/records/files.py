"""What files hold, as records."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TypeShare:
    """How much of a file one tensor type holds."""

    type: str
    """ggml type name as in the file, e.g. `Q4_K`."""
    tensors: int
    weights: int
    bytes: int


@dataclass(frozen=True)
class Fallback:
    """A tensor that llama.cpp could not give the type that the level asks for."""

    tensor: str
    wanted: str
    type: str
    """What the file really holds."""
    reason: str


@dataclass(frozen=True)
class SharedTensors:
    """Matrices that two files hold byte for byte alike."""

    a: str
    b: str
    tensors: int
    of: int
    bytes: int


@dataclass(frozen=True)
class LevelFile:
    """A quantized file, from its header."""

    path: str
    file_type: str
    """What `general.file_type` claims."""
    bytes: int
    """Of all its shards."""
    bpw: float
    """8 * bytes of tensor data / weights, from the file."""
    nominal_bpw: float | None
    """What people expect of the level; None for one that llama-quantize does not know."""
    types: tuple[TypeShare, ...]
    fallback_tensors: tuple[Fallback, ...]
    tensor_types: tuple[str, ...]
    """Type of each of `Result.tensors` in this file; empty text where the file lacks it."""
