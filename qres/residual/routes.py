"""Which experts tokens are sent to: where a graph multiplies with the matrices of chosen experts, found by structure.

`MUL_MAT_ID` takes a tensor with a matrix per expert, inputs, and the numbers of the experts that each token is sent to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qres.gguf.names import block_number
from qres.native import ggml
from qres.native.graph import Graph

Counts = npt.NDArray[np.int64]
_IDS = 2  # place of the numbers among the sources of MUL_MAT_ID


@dataclass(frozen=True)
class Route:
    """One layer's choice of experts."""

    layer: int
    experts: int
    weights: tuple[str, ...]
    """Tensors with a matrix per expert that the choice is about."""
    ordinal: int
    """The first multiplication with chosen experts: just behind it, the choice is still in memory."""
    check: tuple[str, str]
    """Operation and name there, to be compared on every later decode."""


def routes(graph: Graph, weights: frozenset[str]) -> tuple[Route, ...]:
    """The choices of experts in a recorded graph, one per layer, in its order.

    Args:
        graph: As recorded.
        weights: Names of the tensors in the model file.
    """
    found: dict[int, Route] = {}
    for ordinal, index in enumerate(graph.executed):
        node = graph.nodes[index]
        if node.op != "MUL_MAT_ID" or node.slots[0] is None:
            continue
        matrix = graph.root(node.slots[0])
        layer = block_number(matrix.name) if matrix.name in weights else None
        if layer is None:
            continue
        known = found.get(layer)
        if known is None:
            found[layer] = Route(layer, matrix.ne[2], (matrix.name,), ordinal, (node.op, node.name))
        elif matrix.ne[2] == known.experts and matrix.name not in known.weights:
            names = (*known.weights, matrix.name)
            found[layer] = Route(layer, known.experts, names, known.ordinal, known.check)
    return tuple(found.values())


def counters(
    found: tuple[Route, ...], counts: Mapping[int, Counts]
) -> dict[int, tuple[tuple[str, str], Callable[[int], None]]]:
    """Handlers by ordinal, with what is there, for `capture`: each adds how often every expert of its layer is chosen.

    Args:
        found: Of the model.
        counts: Layer -> [experts], added to.
    """

    def counter(route: Route) -> Callable[[int], None]:
        def count(address: int) -> None:
            ids = ggml.read_integers(ggml.at(address).src[_IDS])
            counts[route.layer][:] += np.bincount(ids.ravel(), minlength=route.experts)

        return count

    return {route.ordinal: (route.check, counter(route)) for route in found}
