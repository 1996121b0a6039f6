"""Finds the residual stream in a compute graph: its points, the branch each residual add adds, the weights behind it.

Works by structure alone (docs/facts.md, 2): llama.cpp's node names repeat, lie and are absent. The one thing names are
used for is the block number and kind of a branch, taken from the *weights* behind it, whose GGUF names are a standard.

The idea. A tensor lies on the identity path when it can be followed back to the token embedding through nothing but
residual adds, copies, row selections and scalings. A branch cannot: a weight matmul is in the way. So walking the graph
in execution order, an ADD with one operand on the path and the other off it, with block weights behind, is a residual
add. The stream of the model is the longest such path that ends at the logits. False friends (token shift, expert sums,
positional embeddings) either have no block weights behind them or are not on the path that the logits read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from qres.errors import UnsupportedError
from qres.gguf.names import BLOCK
from qres.native.graph import VIEWS, Graph, Node
from qres.residual.branch import Branch, family, kind_of, name_units, norm_placement
from qres.residual.map import ResidualMap

_COPIES = VIEWS | {"CONT", "CPY", "DUP"}
_NORMS = frozenset({"NORM", "RMS_NORM", "L2_NORM", "GROUP_NORM"})
_WRITES = frozenset({"SET_ROWS", "CPY", "SET"})


@dataclass(frozen=True)
class _Step:
    """How a tensor on the identity path is reached: from `source`, over `adds` residual adds."""

    source: int | None
    adds: int
    branch: int | None = None


def trace(graph: Graph, weights: frozenset[str], n_embd: int, n_vocab: int, n_tokens: int) -> ResidualMap:
    """The residual map of a graph that decodes n_tokens.

    Args:
        graph: As recorded.
        weights: Names of the tensors in the model file.
        n_embd: Width of the stream.
        n_vocab: Width of the logits.
        n_tokens: Rows of the stream.

    Raises:
        UnsupportedError: no residual add leads to the logits (several parallel streams, or no stream at all).
    """
    shape = (n_embd, n_tokens)
    # A stream that is normed in place (post-norm, as in BERT) needs norms on the path; anywhere else they only add
    # false friends.
    maps = [_Tracer(graph, weights, shape, through_norms).build(n_vocab) for through_norms in (False, True)]
    best = max(maps, key=lambda found: len(found.branches) if found else 0)
    if best is None or not best.branches:
        raise UnsupportedError(
            "no plain residual stream leads to the logits", "the architecture mixes several streams or has none"
        )
    return best


class _Tracer:
    """One attempt at finding the stream, with or without norms on the identity path."""

    def __init__(self, graph: Graph, weights: frozenset[str], shape: tuple[int, int], through_norms: bool) -> None:
        self.nodes = graph.nodes
        self.graph = graph
        self.weights = weights
        self.n_embd, self.n_tokens = shape
        self.through_norms = through_norms
        self.path: dict[int, _Step] = {}
        self.writers: dict[int, list[int]] = {}
        for index in graph.executed:
            node = self.nodes[index]
            if node.op in _WRITES:
                self.writers.setdefault(self.graph.root(node.sources[-1]).index, []).append(index)
            step = self._step(node)
            if step is not None:
                self.path[index] = step

    # -- which tensors are on the identity path

    def _is_stream_shaped(self, node: Node) -> bool:
        return node.ne[0] == self.n_embd and node.size == self.n_embd * self.n_tokens

    def _is_weight(self, index: int) -> bool:
        node = self.graph.root(index)
        return node.is_leaf and node.name in self.weights

    def _step(self, node: Node) -> _Step | None:
        """How this node continues the path, or None when it is off it."""
        if not self._is_stream_shaped(node) or not node.sources:
            return None
        first = node.sources[0]
        if node.op == "GET_ROWS" and self._is_weight(first):
            return _Step(None, 0)  # a token (or position) embedding
        if node.op == "ADD" and self._is_stream_shaped(self.nodes[node.sources[1]]):
            return self._add_step(node)
        before = self.path.get(first)
        if before is None and node.op in {"MUL", "ADD"}:  # scale or bias written as weight * stream
            first = node.sources[1]
            before = self.path.get(first)
        if before is None or not self._passes(node, first, before):
            return None
        return _Step(first, before.adds)

    def _passes(self, node: Node, stream: int, before: _Step) -> bool:
        """Does this operation hand the stream on as the stream?"""
        if node.op in _COPIES or node.op in {"SCALE", "GET_ROWS"}:
            return True
        start = before.adds == 0  # the embedding may be normed before the stream starts, but not by a block's own norm
        if node.op in _NORMS:
            return start or self.through_norms
        if node.op in {"MUL", "ADD"}:
            other = next((source for source in node.sources if source != stream), stream)
            single = self.nodes[other].size == 1  # a learned scalar for the whole layer, as in Gemma 4
            embedding_norm = start and not BLOCK.match(self.graph.root(other).name)
            return self._is_weight(other) and (self.through_norms or embedding_norm or single)
        return False

    def _add_step(self, node: Node) -> _Step | None:
        """An ADD of two stream-shaped tensors: a residual add, an embedding sum, or neither."""
        a, b = node.sources[0], node.sources[1]
        on = [index for index in (a, b) if index in self.path]
        if not on:
            return None
        stream = max(on, key=lambda index: self.path[index].adds)
        other = b if stream == a else a
        adds = self.path[stream].adds
        if any(BLOCK.match(name) for name in self._behind(other).weights):
            return _Step(stream, adds + 1, branch=other)
        return _Step(stream, adds)

    # -- what is behind a branch

    def _behind(self, start: int) -> _Behind:
        """Weights and stream tensors reached backwards from a branch, stopping at the stream."""
        found = _Behind(set(), set(), set(), False)
        queue, seen = [start], {start}
        while queue:
            index = queue.pop()
            node = self.nodes[index]
            if index in self.path and index != start:
                found.reads.add(index)
                found.norm_before |= node.op in _NORMS
                continue
            if node.is_leaf:
                if node.name in self.weights:
                    found.weights.add(node.name)
                else:
                    found.caches.update(self.writers.get(index, ()))
                continue
            if node.op in _NORMS and self._on_path(node.sources[0]):
                found.norm_before = True
            new = [source for source in node.sources if source not in seen]
            seen.update(new)
            queue.extend(new)
        return found

    def _on_path(self, index: int) -> bool:
        while index not in self.path and self.nodes[index].op in _COPIES and self.nodes[index].sources:
            index = self.nodes[index].sources[0]
        return index in self.path

    # -- from the path to the map

    def build(self, n_vocab: int) -> ResidualMap | None:
        """The map of the path that the logits read, or None when there is none."""
        head = self._head(n_vocab)
        if head is None:
            return None
        last = max(head.reads, key=lambda index: (self.path[index].adds, index))
        adds = list(self._chain(last))[::-1]
        if not adds:
            return None
        start = self._embedding(adds[0])
        branches = self._branches(adds)
        embedding = self._behind_embedding(start)
        ordinals = {self.nodes[start].ordinal} | {
            o for b in branches for o in (b.node, b.add, b.stream_in) if o is not None
        }
        return ResidualMap(
            embedding=self.nodes[start].ordinal,
            branches=branches,
            embedding_weights=embedding,
            head_weights=tuple(sorted(head.weights)),
            norm_placement=norm_placement(branches, self.through_norms),
            checks={o: (self._at(o).op, self._at(o).name) for o in sorted(ordinals)},
        )

    def _head(self, n_vocab: int) -> _Behind | None:
        """What is behind the logits: the last tensor of their shape that reads the stream through no block weight."""
        for index in reversed(self.graph.executed):
            node = self.nodes[index]
            if node.ne[0] == n_vocab and node.size == n_vocab * self.n_tokens:
                found = self._behind(index)
                if found.reads and not any(map(BLOCK.match, found.weights)):
                    return found
        return None

    def _at(self, ordinal: int) -> Node:
        return self.nodes[self.graph.executed[ordinal]]

    def _chain(self, index: int) -> Iterator[int]:
        """Residual adds from a path tensor back to the embedding."""
        current: int | None = index
        while current is not None:
            step = self.path[current]
            if step.branch is not None:
                yield current
            current = step.source

    def _embedding(self, first_add: int) -> int:
        """The tensor that every reader of stream point 0 derives from: the last computed before the first add."""
        index = self.path[first_add].source
        assert index is not None
        while True:
            node, source = self.nodes[index], self.path[index].source
            if source is None or not (node.op in _COPIES or node.op == "GET_ROWS"):
                return index
            index = source

    def _behind_embedding(self, start: int) -> tuple[str, ...]:
        names: set[str] = set()
        queue = [start]
        while queue:
            node = self.nodes[queue.pop()]
            if node.is_leaf and node.name in self.weights:
                names.add(node.name)
            queue.extend(node.sources)
        return tuple(sorted(names))

    def _branches(self, adds: list[int]) -> tuple[Branch, ...]:
        point_of: dict[int, int] = {}  # residual add -> its stream point
        branches: list[Branch] = []
        for add in adds:
            step = self.path[add]
            assert step.source is not None
            assert step.branch is not None
            stream_in = self._stream_in(step.source)
            parts = self._parts(step.branch)
            for operand in parts:
                branches.append(
                    replace(
                        self._branch(operand, point_of),
                        index=len(branches) + 1,
                        add=self.nodes[add].ordinal,
                        stream_in=stream_in if operand == parts[0] else None,
                        closes=operand == parts[-1],
                    )
                )
            point_of[add] = len(branches)
        return name_units(branches)

    def _stream_in(self, operand: int) -> int | None:
        """Ordinal of the add's stream operand where more than copying lies between it and the point before."""
        index: int | None = operand
        while index is not None and self.path[index].branch is None:
            node, source = self.nodes[index], self.path[index].source
            if source is not None and self.path[operand].adds > 0 and node.op not in _COPIES and node.op != "GET_ROWS":
                return self.nodes[operand].ordinal
            index = source
        return None

    def _parts(self, operand: int) -> tuple[int, ...]:
        """A sum of branches of different kinds (attention + ffn, attention + ssm) taken apart; else itself."""
        node = self.nodes[operand]
        while node.op in {"RESHAPE", "VIEW"}:
            node = self.nodes[node.sources[0]]
        if node.op != "ADD":
            return (operand,)
        a, b = node.sources[0], node.sources[1]
        if not all(self._is_stream_shaped(self.nodes[x]) and not self.nodes[x].is_leaf for x in (a, b)):
            return (operand,)
        kinds = [self._kind(x) for x in (a, b)]
        if "other" in kinds or family(kinds[0]) == family(kinds[1]):
            return (operand,)
        pair = self._parts(a) + self._parts(b)
        return tuple(sorted(pair, key=lambda x: family(self._kind(x)) == "ffn"))

    def _kind(self, operand: int) -> str:
        return kind_of(self._own_weights(self._behind(operand))[1])

    def _own_weights(self, found: _Behind) -> tuple[int | None, tuple[str, ...]]:
        """Layer of a branch and the weights behind it, those reached only through the layer's own cache included."""
        layers = Counter(int(m[1]) for m in map(BLOCK.match, found.weights) if m)
        layer = layers.most_common(1)[0][0] if layers else None
        names = set(found.weights)
        for writer in found.caches:  # keys and values of another layer's cache (shared KV) belong to that layer
            for name in self._behind(writer).weights:
                match = BLOCK.match(name)
                if match and int(match[1]) == layer:
                    names.add(name)
        return layer, tuple(sorted(names))

    def _branch(self, operand: int, point_of: dict[int, int]) -> Branch:
        found = self._behind(operand)
        layer, names = self._own_weights(found)
        reads = [self._point(index, point_of) for index in found.reads]
        return Branch(
            index=0,
            unit="",
            layer=layer,
            kind=kind_of(names),
            label=self.nodes[operand].name,
            weights=names,
            reads=max(reads, default=max(point_of.values(), default=0)),
            node=self.nodes[operand].ordinal,
            add=0,
            stream_in=None,
            closes=False,
            norm_before=found.norm_before,
            norm_after=self._ends_in_norm(operand),
        )

    def _point(self, index: int, point_of: dict[int, int]) -> int:
        """Stream point that a path tensor carries."""
        current: int | None = index
        while current is not None:
            if current in point_of:
                return point_of[current]
            current = self.path[current].source
        return 0

    def _ends_in_norm(self, operand: int) -> bool:
        node = self.nodes[operand]
        while node.op not in _NORMS:
            elementwise = node.op in {"MUL", "ADD"} and any(self._is_weight(s) for s in node.sources[1:])
            if not node.sources or not (node.op in _COPIES or node.op in {"SCALE", "GET_ROWS"} or elementwise):
                return False
            node = self.nodes[node.sources[0]]
        return True


@dataclass
class _Behind:
    """What a backward walk from a tensor found before it reached the stream."""

    weights: set[str]
    reads: set[int]
    caches: set[int]
    norm_before: bool
