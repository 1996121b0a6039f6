"""What files hold, as records."""

from __future__ import annotations

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
