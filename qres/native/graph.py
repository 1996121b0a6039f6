"""The compute graph of one decode, as llama.cpp offers it to the eval callback.

With `ask=True` the scheduler shows every node once, in execution order, with its operation, shape and sources. That is
the whole graph, weights included (leaves whose operation is NONE). Nothing here knows an architecture.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from qres.native import ggml

_INPUT = 1  # GGML_TENSOR_FLAG_INPUT
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
    slots: tuple[int | None, ...] = ()
    """Sources by position, None for an optional one that is not given."""
    nb: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Stride of each dimension in bytes."""
    params: tuple[int, ...] = ()
    """`op_params`: 16 words whose meaning is the operation's; see `param_f32`."""
    view_root: int | None = None
    """Index of the tensor whose memory this one lies in; None where it has its own."""
    view_offset: int = 0
    """Where in it, in bytes."""
    is_input: bool = False
    """A leaf that llama.cpp fills for every decode: tokens, positions, masks. Other leaves can hold anything."""

    def param_f32(self, i: int) -> float:
        """Word i of the parameters as the 32-bit float that it holds."""
        return float(struct.unpack("<f", struct.pack("<i", self.params[i]))[0])

    @property
    def is_leaf(self) -> bool:
        """True for weights, inputs and caches."""
        return self.ordinal == LEAF

    @property
    def size(self) -> int:
        """Number of elements: the product of the shape."""
        return self.ne[0] * self.ne[1] * self.ne[2] * self.ne[3]


@dataclass(frozen=True)
class Graph:
    """All nodes of one decode; a node's sources have smaller indices."""

    nodes: tuple[Node, ...]
    executed: tuple[int, ...]
    """Indices of the computed nodes in execution order: `nodes[executed[k]].ordinal == k`."""
    inputs: Mapping[int, bytes] = field(default_factory=dict)
    """What leaves that are no weights (tokens, positions, masks, caches) held before anything was computed, if that was
    recorded."""

    def root(self, index: int) -> Node:
        """The tensor whose memory a view looks at; any other tensor itself."""
        node = self.nodes[index]
        while node.op in VIEWS and node.sources:
            node = self.nodes[node.sources[0]]
        return node


class Recorder:
    """Builds a Graph from the addresses that the eval callback offers."""

    def __init__(self, weights: frozenset[str] | None = None) -> None:
        """Begin a graph.

        Args:
            weights: Names of the tensors in the model file: the values of all other leaves are read, too. None reads
                none.
        """
        self._weights = weights
        self._inputs: dict[int, bytes] = {}
        self._nodes: list[Node] = []
        self._index: dict[int, int] = {}  # address -> index; addresses are unique within one graph
        self._by_name: dict[str, int] = {}
        self._executed: list[int] = []

    def add(self, address: int) -> None:
        """Append the node that is about to be computed, and any leaves it reads."""
        tensor = ggml.at(address)
        slots = [self._source(source) if source else None for source in tensor.src]
        while slots and slots[-1] is None:
            slots.pop()
        self._append(address, tensor, len(self._executed), tuple(slots))
        self._executed.append(self._index[address])

    def graph(self) -> Graph:
        """What has been recorded."""
        return Graph(tuple(self._nodes), tuple(self._executed), self._inputs)

    def _source(self, address: int) -> int:
        """Index of a source, following the scheduler's copies between backends back to what was copied."""
        if address not in self._index:
            tensor = ggml.at(address)
            copy = _BACKEND_COPY.match(tensor.name.decode(errors="replace"))
            if copy and copy["name"] in self._by_name:
                return self._by_name[copy["name"]]
            self._append(address, tensor, LEAF, ())
        return self._index[address]

    def _append(self, address: int, tensor: ggml.CTensor, ordinal: int, slots: tuple[int | None, ...]) -> None:
        root = self._source(tensor.view_src) if tensor.view_src else None
        name = tensor.name.decode(errors="replace")
        copy = _BACKEND_COPY.match(name) if ordinal == LEAF else None
        ne, nb = tensor.ne, tensor.nb
        node = Node(
            index=len(self._nodes),
            ordinal=ordinal,
            op=ggml.op_name(tensor.op),
            name=copy["name"] if copy else name,
            ne=(ne[0], ne[1], ne[2], ne[3]),
            type=tensor.type,
            sources=tuple(index for index in slots if index is not None),
            slots=slots,
            nb=(nb[0], nb[1], nb[2], nb[3]),
            params=tuple(tensor.op_params),
            view_root=root,
            view_offset=tensor.view_offs,
            is_input=bool(tensor.flags & _INPUT),
        )
        self._nodes.append(node)
        self._index[address] = node.index
        self._by_name[node.name] = node.index
        if self._weights is not None and node.is_leaf and root is None and node.name not in self._weights:
            self._inputs[node.index] = ggml.read_bytes(address)  # its memory is used for others later in the decode
