"""Which matrices make the values that an attention averages.

The error of a value is nearly the same at every position, because the inputs of a layer have a large common part.
Attention averages values, so such errors add up instead of cancelling: their effect is seen where the averages come
out, not where the values go in (docs/sensitivity.md has the measurement).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qres.native.graph import Graph, Node
from qres.sensitivity.replay.schedule import root_of

_MOVES = frozenset({"CONT", "CPY", "DUP"})
_WRITES = frozenset({"SET_ROWS", "CPY"})


@dataclass(frozen=True)
class ValuePath:
    """From a product with a weight to the values of an attention, by nothing but moves and a bias."""

    site: int
    """Index of the graph node of the product."""
    attention: int
    """Index of the graph node of the attention (FLASH_ATTN_EXT)."""
    steps: tuple[int, ...]
    """Nodes between them in execution order, views left out."""
    value: int
    """The attention's source: its third."""


def value_paths(graph: Graph, is_weight: Callable[[Node], bool]) -> dict[int, ValuePath]:
    """The path of each attention that has one, by the attention's node.

    Args:
        graph: As recorded.
        is_weight: Whether a node is a tensor of the file.
    """
    found = (_path(graph, index, is_weight) for index in graph.executed if graph.nodes[index].op == "FLASH_ATTN_EXT")
    return {path.attention: path for path in found if path is not None}


def _path(graph: Graph, attention: int, is_weight: Callable[[Node], bool]) -> ValuePath | None:
    value = graph.nodes[attention].slots[2]
    assert value is not None
    steps: list[int] = []
    index: int | None = value
    while index is not None:
        root = graph.nodes[root_of(graph.nodes[index])]
        if root.op == "MUL_MAT" and is_weight(graph.nodes[root.sources[0]]):
            return ValuePath(root.index, attention, tuple(reversed(steps)), value)
        step = _writer(graph, root.index, attention) if root.is_leaf else root.index
        if step is None:
            return None
        steps.append(step)
        index = _before(graph, graph.nodes[step], is_weight)
    return None


def _writer(graph: Graph, root: int, before: int) -> int | None:
    """The last node that writes into a cache in front of another node."""
    writers = [
        i for i in graph.executed if i < before and graph.nodes[i].op in _WRITES and root_of(graph.nodes[i]) == root
    ]
    return writers[-1] if writers else None


def _before(graph: Graph, node: Node, is_weight: Callable[[Node], bool]) -> int | None:
    """What a step moves; None where it does more than that."""
    if node.op in _MOVES | _WRITES:
        return node.sources[0]
    if node.op == "ADD":
        a, b = node.sources[:2]
        if is_weight(graph.nodes[b]):
            return a
        return b if is_weight(graph.nodes[a]) else None
    return None
