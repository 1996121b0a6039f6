"""Where the residual stream is in a recorded graph, and the units that it is made of."""

from __future__ import annotations

from dataclasses import dataclass

from qres.residual.branch import Branch


@dataclass(frozen=True)
class ResidualMap:
    """Where the stream is in one recorded graph."""

    embedding: int
    """Ordinal of stream point 0."""
    branches: tuple[Branch, ...]
    embedding_weights: tuple[str, ...]
    head_weights: tuple[str, ...]
    norm_placement: str
    checks: dict[int, tuple[str, str]]
    """Operation and name at each ordinal used, to be compared on every later decode (docs/facts.md, 3)."""


def is_tied(rmap: ResidualMap) -> bool:
    """The embedding's matrix is the head's, too."""
    return bool(set(rmap.embedding_weights) & set(rmap.head_weights))


def unit_weights(rmap: ResidualMap, index: int) -> tuple[str, ...]:
    """Tensors of unit 0 (embedding), 1..M (branches) or M + 1 (head)."""
    if index == 0:
        return rmap.embedding_weights
    return rmap.head_weights if index > len(rmap.branches) else rmap.branches[index - 1].weights


def unit_name(rmap: ResidualMap, index: int) -> str:
    """Name of unit 0 (embedding), 1..M (branches) or M + 1 (head)."""
    if index == 0:
        return "embedding"
    return "head" if index > len(rmap.branches) else rmap.branches[index - 1].unit
