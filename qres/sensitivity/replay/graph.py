"""llama.cpp's compute graph once more, in torch and with gradients.

Works from the recorded graph alone: every node by its operation and parameters, every view by its strides over the
memory it lies in, caches written and read as llama.cpp does. Nothing here knows an architecture. A replay proves itself
by llama.cpp's own logits before anything is made of its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from qres.errors import UnsupportedError
from qres.levels import TYPE_TRAITS, TYPES_BY_ID
from qres.native.graph import VIEWS, Graph, Node
from qres.sensitivity.replay import attention, delta_rule, ops, products, rare, state_space
from qres.sensitivity.replay.ops import Op, shape_of
from qres.sensitivity.replay.products import Context, Mixing, ProductTap, Site
from qres.sensitivity.replay.schedule import Piece, root_of, schedule
from qres.sensitivity.replay.value_paths import ValuePath, value_paths
from qres.sensitivity.replay.weights import Weights

_OPS: Mapping[str, Op] = {**ops.OPS, **attention.OPS, **state_space.OPS, **delta_rule.OPS, **rare.OPS}
_PRODUCTS = frozenset({"MUL_MAT", "MUL_MAT_ID", "GET_ROWS"})
_INTEGERS = {TYPE_TRAITS["I32"].id: torch.int32, TYPE_TRAITS["I64"].id: torch.int64}
_FLOATS = {
    TYPE_TRAITS["F32"].id: torch.float32,
    TYPE_TRAITS["F16"].id: torch.float16,
    TYPE_TRAITS["BF16"].id: torch.bfloat16,
}

State = dict[int, Tensor]
"""Flat values of the roots that were computed or written so far."""

Seeds = Callable[[State], list[State]]


@dataclass
class Run:
    """One chunk's way through the replay."""

    constants: State
    """Inputs as they were before the decode; those that were zero, as empty caches are, left out."""
    starts: list[State] = field(default_factory=list)
    """What was alive in front of each piece."""
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    """What the replay computed [tokens, n_vocab]; empty before it ran, and once only its distribution is needed."""


def unknown_operations(graph: Graph) -> tuple[str, ...]:
    """Operations of a graph that the replay does not have."""
    known = VIEWS | _PRODUCTS | set(_OPS)
    return tuple(sorted({graph.nodes[index].op for index in graph.executed} - known))


class Replay:
    """A recorded graph that runs in torch."""

    def __init__(self, graph: Graph, weights: Weights, n_vocab: int, n_tokens: int, pieces: int) -> None:
        """Prepare a graph.

        Args:
            graph: Recorded with its inputs.
            weights: Of the model.
            n_vocab: Width of the logits.
            n_tokens: Tokens of the chunk.
            pieces: Into how many pieces to cut it for backward; the number of layers is a good one.

        Raises:
            UnsupportedError: it holds an operation that the replay does not know, or no logits.
        """
        unknown = unknown_operations(graph)
        if unknown:
            raise UnsupportedError(f"the replay does not know ggml's {', '.join(unknown)}")
        self.graph = graph
        self.n_vocab = n_vocab
        self.result = _logits(graph, n_vocab, n_tokens)
        plan = schedule(graph, self.result, pieces)
        self.pieces: Sequence[Piece] = plan.pieces
        self._last_read = plan.last_read
        self._values = value_paths(graph, lambda node: node.is_leaf and node.name in weights)
        device = weights.device
        self._context = Context(weights, torch.float32, torch.zeros((), device=device, requires_grad=True))

    @property
    def head(self) -> int | None:
        """The node that multiplies with the output matrix where that gives the logits at once; else None."""
        node = self.graph.nodes[self.result]
        return self.result if node.op == "MUL_MAT" else None

    @property
    def device(self) -> torch.device:
        """The device that weights and activations lie on."""
        return self._context.weights.device

    def products_in(self, dtype: torch.dtype) -> None:
        """From here on, multiply with weights in this type: float32, or bfloat16 for speed."""
        self._context.dtype = dtype

    # -- forward and backward

    @torch.no_grad()
    def forward(self, inputs: Mapping[int, bytes]) -> Run:
        """Run one chunk, keeping only what is alive between the pieces.

        Args:
            inputs: Of this chunk, recorded in a graph of the same shape.

        Raises:
            UnsupportedError: an operation in a form that the replay does not know.
        """
        run = Run(
            {
                index: self._constant(self.graph.nodes[index], data)
                for index, data in inputs.items()
                if np.frombuffer(data, np.uint8).any()
            }
        )
        state: State = {}
        for piece in self.pieces:
            run.starts.append({root: state[root] for root in piece.alive})
            self._compute(piece, state, run.constants)
        run.logits = state[self.result].reshape(-1, self.n_vocab)
        return run

    def backward(self, run: Run, piece: int, seeds: Seeds, tap: ProductTap) -> list[State]:
        """Run one piece again, with gradients, and take them back through it.

        Args:
            run: Of the chunk.
            piece: Which piece; from the last to the first.
            seeds: Given what is alive behind the piece, for each label draw the gradients of these roots.
            tap: Hears of the products: of what enters them once, of gradients in the order of the draws.

        Returns:
            For each draw, the gradients of the roots alive in front of the piece.
        """
        start = {root: _leaf(value) for root, value in run.starts[piece].items()}
        state = dict(start)
        behind = self.pieces[piece + 1].alive if piece + 1 < len(self.pieces) else (self.result,)
        self._context.tap = tap
        try:
            with torch.enable_grad():
                self._compute(self.pieces[piece], state, run.constants)
            draws = seeds({root: state[root].detach() for root in behind})
            return [self._gradients(start, state, one, last=one is draws[-1]) for one in draws]
        finally:
            self._context.tap = None

    def _gradients(self, start: State, state: State, grads: State, *, last: bool) -> State:
        outputs = {root: state[root] for root in grads if state[root].requires_grad}
        wanted = {root: value for root, value in start.items() if value.requires_grad}
        if not outputs:
            return {}
        found = torch.autograd.grad(
            list(outputs.values()),
            [*wanted.values(), self._context.anchor],
            [grads[root] for root in outputs],
            retain_graph=not last,
            allow_unused=True,
        )
        return {root: g for root, g in zip(wanted, found, strict=False) if g is not None}

    # -- nodes

    def _compute(self, piece: Piece, state: State, constants: State) -> None:
        for index in piece.nodes:
            node = self.graph.nodes[index]
            self._store(node, self._value(node, state, constants), state, constants)
            for source in node.sources:
                root = root_of(self.graph.nodes[source])
                if self._last_read[root] == index:
                    state.pop(root, None)

    def _value(self, node: Node, state: State, constants: State) -> Tensor:
        if node.op in _PRODUCTS:
            found = self._product(node, state, constants)
            if found is not None:
                return found
        sources = [None if i is None else self._load(i, state, constants) for i in node.slots]
        if self._context.tap is not None and node.index in self._values:
            return self._tapped_attention(node, sources, constants, self._context.tap)
        return _OPS[node.op](node, *sources)

    def _tapped_attention(self, node: Node, sources: list[Tensor | None], constants: State, tap: ProductTap) -> Tensor:
        """An attention whose values come from a matrix: the tap hears of its averages, too."""
        path = self._values[node.index]
        site = Site(self.graph.nodes[self.graph.nodes[path.site].sources[0]].name, path.site)
        weights, values = attention.attention_weights(node, *sources), sources[2]
        assert values is not None
        out = attention.averaged(weights, values)
        if out.requires_grad:
            tap.averages(site, Mixing(weights.detach(), lambda y: self._carried(path, y, constants)))
            out.register_hook(lambda g: tap.averaged(site, g))  # type: ignore[no-untyped-call]
        return out

    def _carried(self, path: ValuePath, y: Tensor, constants: State) -> Tensor:
        """Output of a matrix [tokens, rows], or its error, where the attention reads it: [n3, heads, keys, dv]."""
        state: State = {path.site: y.reshape(-1)}
        for index in path.steps:
            node = self.graph.nodes[index]
            root = node.view_root
            if root is not None and root not in state:
                # What the cache held before has no error.
                state[root] = torch.zeros(self.graph.nodes[root].size, device=self.device)
            moved = [source for source in node.sources if root_of(self.graph.nodes[source]) in state]
            value = (
                self._load(moved[0], state, constants)  # a bias has no error
                if node.op == "ADD"
                else self._value(node, state, constants)
            )
            self._store(node, value, state, constants, exact=True)
        return self._load(path.value, state, constants)

    def _product(self, node: Node, state: State, constants: State) -> Tensor | None:
        """A product with a weight of the file, or with another tensor; None for rows picked from something else."""
        first = self.graph.nodes[node.sources[0]]
        site = Site(first.name, node.index, picks_rows=node.op == "GET_ROWS")
        is_weight = first.is_leaf and first.view_root is None and first.name in self._context.weights
        rest = [self._load(i, state, constants) for i in node.sources[1:]]
        if node.op == "GET_ROWS":
            if not is_weight:
                return None
            return products.picked(self._context, site, rest[0].reshape(-1).long())
        if node.op == "MUL_MAT_ID":
            if not is_weight:
                raise UnsupportedError("MUL_MAT_ID with experts that are no weights")
            return products.mul_mat_id(self._context, site, rest[0], rest[1])
        if is_weight:
            return products.mul_mat(self._context, site, rest[0])
        return _mul_mat(self._load(first.index, state, constants), _rounded(rest[0], first.type))

    def _load(self, index: int, state: State, constants: State) -> Tensor:
        """A node's value in its logical shape [ne3, ne2, ne1, ne0]."""
        node = self.graph.nodes[index]
        flat = self._flat(root_of(node), state, constants)
        traits = TYPES_BY_ID[node.type]
        shape = shape_of(node)
        nb = [traits.block_bytes]
        for n in node.ne[:3]:
            nb.append(nb[-1] * n)
        whole = node.view_offset == 0 and flat.numel() == node.size
        in_order = all(n == 1 or a == b for n, a, b in zip(node.ne, node.nb, nb, strict=True))
        if whole and (in_order or traits.block_size > 1):
            return flat.view(shape)
        if traits.block_size > 1:
            raise UnsupportedError(f"a view of {traits.name} weights ({node.name})")
        strides = [b // traits.block_bytes for b in reversed(node.nb)]
        return ops.seen(flat, shape, strides, node.view_offset // traits.block_bytes)

    def _flat(self, root: int, state: State, constants: State) -> Tensor:
        """All values in a root's memory."""
        found = state.get(root, constants.get(root))
        if found is not None:
            return found
        if root in self.graph.inputs:
            kind = torch.int64 if self.graph.nodes[root].type in _INTEGERS else torch.float32
            return torch.zeros(self.graph.nodes[root].size, dtype=kind, device=self.device)
        name = self.graph.nodes[root].name
        if name not in self._context.weights:
            raise UnsupportedError(f"the graph reads {name}, which is neither an input nor a weight of the file")
        return self._context.weights.whole(name)

    def _store(self, node: Node, value: Tensor, state: State, constants: State, *, exact: bool = False) -> None:
        """Put a node's value where it belongs: memory of its own, or a view into another's; rounded unless `exact`."""
        value = (value if exact else _rounded(value, node.type)).to(self.device)
        if node.view_root is None:
            state[node.index] = value.reshape(-1)
            return
        flat = self._flat(node.view_root, state, constants)
        if value.numel() == flat.numel():
            state[node.view_root] = value.reshape(-1)
            return
        size = TYPES_BY_ID[node.type].block_bytes
        strides = [b // size for b in reversed(node.nb)]
        state[node.view_root] = ops.put(flat, value.reshape(shape_of(node)), strides, node.view_offset // size)

    def _constant(self, node: Node, data: bytes) -> Tensor:
        kind = _INTEGERS.get(node.type) or _FLOATS.get(node.type)
        if kind is None:
            raise UnsupportedError(f"an input or cache of type {TYPES_BY_ID[node.type].name} ({node.name})")
        raw = torch.frombuffer(bytearray(data), dtype=kind)
        return raw.to(self.device).to(torch.int64 if node.type in _INTEGERS else torch.float32)


def _logits(graph: Graph, n_vocab: int, n_tokens: int) -> int:
    """The last node of the logits' shape."""
    for index in reversed(graph.executed):
        node = graph.nodes[index]
        if node.ne[0] == n_vocab and node.size == n_vocab * n_tokens and node.op not in VIEWS:
            return index
    raise UnsupportedError("the graph has no logits for every token")


def _leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_(value.is_floating_point())


def _rounded(value: Tensor, type_id: int) -> Tensor:
    """A value as memory of this type keeps it; the gradient passes unchanged."""
    if type_id in _INTEGERS:
        return value.to(torch.int64)  # as C casts: towards zero
    if not value.is_floating_point():
        value = value.to(torch.float32)
    kind = _FLOATS.get(type_id)
    if kind is None or kind is torch.float32:
        return value
    return value.to(kind).to(torch.float32)


def _mul_mat(a: Tensor, b: Tensor) -> Tensor:
    """The product of two activations: a [m3, m2, rows, k] shared by groups of b [n3, n2, n, k]."""
    if a.shape[1] != b.shape[1]:
        a = a.repeat_interleave(b.shape[1] // a.shape[1], dim=1)
    if a.shape[0] != b.shape[0]:
        a = a.repeat_interleave(b.shape[0] // a.shape[0], dim=0)
    return b @ a.transpose(-1, -2)
