"""Where the residual stream is in a recorded graph, and the units that it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from qres.residual.branch import Branch


@dataclass(frozen=True)
class MapUnit:
    """What is quantized alone to see what it does: the embedding, a branch, or the head."""

    index: int
    """Place in `ResidualMap.units`; of the embedding and the branches also the stream point after it."""
    name: str
    """`embedding`, `head`, or the branch's `<layer>.<kind>`."""
    kind: str
    """`embedding`, `branch` or `head`."""
    layer: int | None
    branch: str
    """Kind of the branch, such as `ffn`; `embedding` and `head` for themselves."""
    label: str
    """llama.cpp's name of the tensor, for people; empty for the head."""
    weights: tuple[str, ...]
    """Tensors of the file behind it."""

    @property
    def is_head(self) -> bool:
        """It comes after the last stream point: its error is never in the stream."""
        return self.kind == "head"


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

    @property
    def n_points(self) -> int:
        """Stream points: one after the embedding and one after each branch."""
        return len(self.branches) + 1

    @cached_property
    def units(self) -> tuple[MapUnit, ...]:
        """The embedding, the branches in order, the head."""
        start, label = self.embedding_weights, self.checks[self.embedding][1]
        return (
            MapUnit(0, "embedding", "embedding", None, "embedding", label, start),
            *(MapUnit(b.index, b.unit, "branch", b.layer, b.kind, b.label, b.weights) for b in self.branches),
            MapUnit(self.n_points, "head", "head", None, "head", "", self.head_weights),
        )

    @property
    def in_stream(self) -> tuple[MapUnit, ...]:
        """All units but the head: those that a stream point follows."""
        return self.units[:-1]

    @property
    def head(self) -> MapUnit:
        """The last unit."""
        return self.units[-1]

    @property
    def is_tied(self) -> bool:
        """The embedding's matrix is the head's, too."""
        return bool(set(self.embedding_weights) & set(self.head_weights))
