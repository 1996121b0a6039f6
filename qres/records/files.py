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
