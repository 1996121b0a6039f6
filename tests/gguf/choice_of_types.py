"""Rows of any length and the types that fit them, for properties."""

from __future__ import annotations

import math
from fractions import Fraction

from hypothesis import strategies as st

from qres import levels
from qres.errors import UsageError
from qres.gguf.format.tensor import Tensor

MAKEABLE = [traits.name for traits in levels.TYPE_TRAITS.values() if not traits.removed]


LENGTHS = st.builds(int.__mul__, st.integers(1, 80), st.sampled_from([1, 31, 32, 64, 128, 160, 256]))
"""Row lengths, most of which hold whole blocks of some type."""


def bits(name: str) -> Fraction:
    traits = levels.TYPE_TRAITS[name]
    return Fraction(8 * traits.block_bytes, traits.block_size)


def fitting(name: str, row: int) -> str | None:
    try:
        return levels.fitting_type(name, row)
    except UsageError:
        return None


def tensor(shape: tuple[int, ...], type: str = "F16", name: str = "blk.0.ffn_up.weight") -> Tensor:
    return Tensor(name, shape, type, levels.TYPE_TRAITS[type].id, math.prod(shape), None, 0)
