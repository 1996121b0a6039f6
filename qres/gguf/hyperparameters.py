"""What two files say about how they are computed: the `<architecture>.*` keys that a graph may depend on, compared.

Whether a difference changes what is computed is decided by the recorded graphs (`qres.measure.same_function`); the keys
say what to mend.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from qres.gguf.format.metadata import Digest, Unreadable, Value
from qres.gguf.inventory import Inventory
from qres.printable import show

_BOOKKEEPING = frozenset({"block_count", "nextn_predict_layers", "vocab_size"})
"""Compared as what they stand for: blocks that run, and rows of the embedding."""
_TOLERANCE = 1e-6
"""Relative difference of two floats that is rounding: converters write them at 32 and 64 bits."""


@dataclass(frozen=True)
class Difference:
    """One key that two files do not agree on."""

    key: str
    """The reference's name of it."""
    reference: str
    """Its value there, or what llama.cpp takes where it is not set."""
    other: str

    def __str__(self) -> str:
        """In words, after the name of the other file."""
        return f"{self.key} is {self.reference} in the reference, {self.other} in the file"


def differences(reference: Inventory, other: Inventory) -> tuple[Difference, ...]:
    """The keys of the architecture whose values are not the same, llama.cpp's defaults taken where they are known."""
    ours, theirs = _keys(reference), _keys(other)
    found = []
    for key in dict.fromkeys((*ours, *theirs)):
        if key in _BOOKKEEPING:
            continue
        pair = [one.get(key, _default(key, one)) for one in (ours, theirs)]
        if not _same(*pair):
            said = [_said(key, one, value) for one, value in zip((ours, theirs), pair, strict=True)]
            found.append(Difference(show(f"{reference.architecture}.{key}"), *said))
    return tuple(found)


def _keys(inventory: Inventory) -> dict[str, Value]:
    """The architecture's own keys, without its name."""
    begin = f"{inventory.architecture}."
    return {key.removeprefix(begin): value for key, value in inventory.metadata.items() if key.startswith(begin)}


def default(key: str, inventory: Inventory) -> Value | None:
    """What llama.cpp takes for one of the architecture's keys, without its name, when a file does not set it."""
    return _default(key, _keys(inventory))


def _default(key: str, keys: Mapping[str, Value]) -> Value | None:
    """What llama.cpp takes for a key that is not set, where every architecture has the same default (facts.md, 37)."""
    heads, width = keys.get("attention.head_count"), keys.get("embedding_length")
    known: dict[str, Value | None] = {
        "rope.freq_base": 10000.0,
        "rope.scaling.factor": 1.0,
        "attention.causal": True,
        "attention.head_count_kv": heads,
        "rope.scaling.original_context_length": keys.get("context_length"),
    }
    if type(heads) is int and type(width) is int and heads > 0:
        size = width // heads
        known |= dict.fromkeys(("attention.key_length", "attention.value_length"), size)
        known["rope.dimension_count"] = keys.get("attention.key_length", size)
    return known.get(key)


def _same(a: Value | None, b: Value | None) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=_TOLERANCE) or (math.isnan(a) and math.isnan(b))
    return a == b


def _said(key: str, keys: Mapping[str, Value], value: Value | None) -> str:
    if key in keys:
        return _shown(value)
    return "not set" if value is None else f"not set (llama.cpp then takes {_shown(value)})"


def _shown(value: Value | None) -> str:
    if isinstance(value, Digest):
        return f"a list of {value.length}, not the same one"
    if isinstance(value, Unreadable):
        return "unreadable"
    return f"{value:.7g}" if isinstance(value, float) else show(repr(value))
