"""When each value of a recorded graph is needed, and where to cut the graph into pieces that share little.

Backward computes a piece again from what was alive at its start, so that only one piece's activations exist at a time:
checkpointing for any graph, without knowing what a layer is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from qres.native.graph import VIEWS, Graph, Node

_SLACK = 1.5
"""A cut may keep this many times the least that any cut must keep."""


@dataclass(frozen=True)
class Piece:
    """A run of computed nodes."""

    nodes: tuple[int, ...]
    """Indices of the nodes that compute something, in execution order; views are left out."""
    alive: tuple[int, ...]
    """Roots that were computed or written before this piece and are read in it or behind it."""


@dataclass(frozen=True)
class Schedule:
    """The pieces of a graph."""

    pieces: tuple[Piece, ...]
    last_read: dict[int, int]
    """Root -> the last node that reads it."""


def root_of(node: Node) -> int:
    """Index of the tensor that owns a node's memory."""
    return node.index if node.view_root is None else node.view_root


def schedule(graph: Graph, result: int, count: int) -> Schedule:
    """Cut a graph into about `count` pieces of equal work where few values are alive.

    Args:
        graph: As recorded.
        result: Index of the node that is wanted at the end.
        count: How many pieces; fewer where the graph has no narrow places.
    """
    steps = [index for index in graph.executed if graph.nodes[index].op not in VIEWS]
    steps = steps[: steps.index(result) + 1]
    written, last_read = _spans(graph, steps, result)
    alive = _alive(graph, steps, written, last_read)
    sizes = [sum(graph.nodes[root].size for root in roots) for roots in alive]
    cuts = _cuts([graph.nodes[index].size for index in steps], sizes, count)
    bounds = [0, *cuts, len(steps)]
    pieces = [Piece(tuple(steps[a:b]), alive[a - 1] if a else ()) for a, b in pairwise(bounds)]
    return Schedule(tuple(pieces), last_read)


def _spans(graph: Graph, steps: Sequence[int], result: int) -> tuple[dict[int, int], dict[int, int]]:
    """By root: the position of its first write, and the index of the node that reads it last."""
    written: dict[int, int] = {}
    last_read: dict[int, int] = {}
    for position, index in enumerate(steps):
        node = graph.nodes[index]
        for source in node.sources:
            last_read[root_of(graph.nodes[source])] = index
        written.setdefault(root_of(node), position)
    last_read[root_of(graph.nodes[result])] = len(graph.nodes)
    return written, last_read


def _alive(
    graph: Graph, steps: Sequence[int], written: dict[int, int], last_read: dict[int, int]
) -> list[tuple[int, ...]]:
    """Roots alive behind each position."""
    position = {index: i for i, index in enumerate(steps)}
    end = {root: position.get(index, len(steps)) for root, index in last_read.items()}
    alive: set[int] = set()
    born: dict[int, list[int]] = {}
    dying: dict[int, list[int]] = {}
    for root, start in written.items():
        if end.get(root, -1) > start:
            born.setdefault(start, []).append(root)
            dying.setdefault(end[root], []).append(root)
    rows = []
    for i in range(len(steps)):
        alive.update(born.get(i, ()))
        alive.difference_update(dying.get(i, ()))
        rows.append(tuple(sorted(alive)))
    return rows


def _cuts(work: Sequence[int], sizes: Sequence[int], count: int) -> list[int]:
    """Positions in front of which to cut."""
    middle = [size for size in sizes[len(sizes) // 8 : -len(sizes) // 8 or None] if size]
    limit = _SLACK * min(middle, default=0)
    share = sum(work) / max(count, 1)
    cuts, done = [], 0
    for i in range(len(work) - 1):
        done += work[i]
        if done >= share and sizes[i] <= limit:
            cuts.append(i + 1)
            done = 0
    return cuts
