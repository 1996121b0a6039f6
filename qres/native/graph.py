"""The compute graph of one decode, as llama.cpp offers it to the eval callback.

With `ask=True` the scheduler shows every node once, in execution order, with its operation, shape and sources. That is
the whole graph, weights included (leaves whose operation is NONE). Nothing here knows an architecture.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from qres.native import ggml

LEAF = -1
"""Ordinal of a tensor that is not computed: a weight, an input or a cache."""

VIEWS = frozenset({"RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"})
"""Operations that compute nothing: their result looks at the memory of their source."""

_BACKEND_COPY = re.compile(r"^[^#]+#(?P<name>.+)#\d+$")
"""ggml_backend_sched names a tensor that it copies to another backend `<backend>#<name>#<copy>`."""


@dataclass(frozen=True)
class Node:
    """One tensor of the graph."""

    index: int
    """Position in `Graph.nodes`; sources always come before."""
    ordinal: int
    """Position in execution order, or LEAF."""
    op: str
    name: str
    """llama.cpp's label. Never a key: names repeat, lie and are absent (docs/facts.md, 2)."""
    ne: tuple[int, int, int, int]
    type: int
    sources: tuple[int, ...]

    @property
    def is_leaf(self) -> bool:
        """True for weights, inputs and caches."""
        return self.ordinal == LEAF

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.ne[0] * self.ne[1] * self.ne[2] * self.ne[3]


@dataclass(frozen=True)
class Graph:
    """All nodes of one decode; a node's sources have smaller indices."""

    nodes: tuple[Node, ...]
    executed: tuple[int, ...]
    """Indices of the computed nodes in execution order: `nodes[executed[k]].ordinal == k`."""

    def root(self, index: int) -> Node:
        """The tensor whose memory a view looks at; any other tensor itself."""
        node = self.nodes[index]
        while node.op in VIEWS and node.sources:
            node = self.nodes[node.sources[0]]
        return node


class Recorder:
    """Builds a Graph from the addresses that the eval callback offers."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._index: dict[int, int] = {}  # address -> index; addresses are unique within one graph
        self._by_name: dict[str, int] = {}
        self._executed: list[int] = []

    def add(self, address: int) -> None:
        """Append the node that is about to be computed, and any leaves it reads."""
        tensor = ggml.at(address)
        sources = tuple(self._source(source) for source in tensor.src if source)
        self._append(address, tensor, len(self._executed), sources)
        self._executed.append(self._index[address])

    def graph(self) -> Graph:
        """What has been recorded."""
        return Graph(tuple(self._nodes), tuple(self._executed))

    def _source(self, address: int) -> int:
        """Index of a source, following the scheduler's copies between backends back to what was copied."""
        if address not in self._index:
            tensor = ggml.at(address)
            copy = _BACKEND_COPY.match(tensor.name.decode(errors="replace"))
            if copy and copy["name"] in self._by_name:
                return self._by_name[copy["name"]]
            self._append(address, tensor, LEAF, ())
        return self._index[address]

    def _append(self, address: int, tensor: ggml.CTensor, ordinal: int, sources: tuple[int, ...]) -> None:
        name = tensor.name.decode(errors="replace")
        copy = _BACKEND_COPY.match(name) if ordinal == LEAF else None
        ne = tensor.ne
        node = Node(
            index=len(self._nodes),
            ordinal=ordinal,
            op=ggml.op_name(tensor.op),
            name=copy["name"] if copy else name,
            ne=(ne[0], ne[1], ne[2], ne[3]),
            type=tensor.type,
            sources=sources,
        )
        self._nodes.append(node)
        self._index[address] = node.index
        self._by_name[node.name] = node.index
