"""One decode with every node looked at: how large the values get, and where they stop being finite.

CPU and GPU back ends turn the input of a matmul with F16 weights into F16 first, so what counts for "does 16-bit float
hold it" is the input of each weight's matmul, not only the stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qres.arrays import Floats
from qres.gguf.names import block_number
from qres.native import ggml
from qres.native.graph import VIEWS, Graph, Node, Recorder
from qres.native.session import Session
from qres.records.stream import NonFinite
from qres.residual.map import ResidualMap
from qres.text.chunks import Chunk

_MATMULS = frozenset({"MUL_MAT", "MUL_MAT_ID"})
_INFINITE = np.uint32(0x7F800000)
_SIGN = np.uint32(0x7FFFFFFF)


@dataclass(frozen=True)
class Survey:
    """What one decode showed."""

    inputs: Mapping[str, float]
    """Weight -> largest finite magnitude that it is multiplied with."""
    non_finite: NonFinite | None
    """None when everything is finite."""


class _SurveyTap:
    """Reads every computed F32 node and keeps two numbers of it."""

    def __init__(self, n_tokens: int) -> None:
        self.recorder = Recorder()
        self.absmax: list[float | None] = []
        """By ordinal; None for nodes that hold no numbers of their own."""
        self.bad: tuple[int, int | None] | None = None
        """Ordinal and first token of the first node that is not finite."""
        self._n_tokens = n_tokens
        self._memory: Floats | None = None

    def ask(self, address: int) -> bool:
        tensor = ggml.at(address)
        self.recorder.add(address)
        self.absmax.append(None)
        return ggml.op_name(tensor.op) not in VIEWS and ggml.is_plain(address)

    def see(self, address: int) -> None:
        self._memory = values = ggml.read(address, self._memory)
        ordinal = len(self.absmax) - 1
        top = _magnitudes(values).max(initial=0)
        if top < _INFINITE:
            self.absmax[ordinal] = float(np.uint32(top).view(np.float32))
            return
        finite = np.isfinite(values)
        self.absmax[ordinal] = float(np.abs(values, where=finite, out=np.zeros_like(values)).max(initial=0.0))
        tensor = ggml.at(address)
        # Minus infinity is how masks and routers rule something out; from a matmul it is an overflow.
        bad = ~finite if ggml.op_name(tensor.op) in _MATMULS else np.isnan(values) | (values == np.inf)
        if self.bad is None and bad.any():
            self.bad = (ordinal, self._token(bad, tuple(tensor.ne)))

    def _token(self, bad: npt.NDArray[np.bool_], ne: Sequence[int]) -> int | None:
        """First token with a bad value: the last dimension of token length is the tokens'."""
        axis = next((axis for axis in (3, 2, 1) if ne[axis] == self._n_tokens), None)
        if axis is None:
            return None
        by_axis = bad.reshape(ne[3], ne[2], ne[1], ne[0]).any(axis=tuple(i for i in range(4) if i != 3 - axis))
        return int(np.flatnonzero(by_axis)[0])


def _magnitudes(values: Floats) -> npt.NDArray[np.uint32]:
    """Bits without the sign: they order like the magnitudes, and anything from _INFINITE up is not finite."""
    bits: npt.NDArray[np.uint32] = values.view(np.uint32)
    return np.asarray(bits & _SIGN, dtype=np.uint32)


def survey(
    session: Session, rmap: ResidualMap | None, chunk: Chunk, weights: frozenset[str], model: str, where: str
) -> Survey:
    """Decode a chunk and look at every node.

    Args:
        session: The model.
        rmap: Its map, to name the branch; None when there is none.
        chunk: What to decode.
        weights: Names of the tensors in its file.
        model: What to call the model in the record.
        where: What to call the chunk.

    Raises:
        NativeError: the decode failed.
    """
    tap = _SurveyTap(len(chunk))
    session.run(chunk, tap)
    graph = tap.recorder.graph()
    executed = [graph.nodes[index] for index in graph.executed]
    inputs: dict[str, float] = {}
    for node in executed:
        absmax = _input_absmax(graph, node, tap.absmax)
        weight = _weight(graph, node, weights)
        if weight and absmax is not None:
            inputs[weight] = max(absmax, inputs.get(weight, 0.0))
    if tap.bad is None:
        return Survey(inputs, None)
    ordinal, token = tap.bad
    node = executed[ordinal]
    unit = _unit(rmap, ordinal)
    found = NonFinite(
        model=model,
        unit=unit,
        layer=None if unit == "head" else _layer(graph, executed[: ordinal + 1], weights),
        operation=node.op,
        label=node.name,
        tensor=_weight(graph, node, weights),
        token=token,
        where=where,
        input_absmax=_input_absmax(graph, node, tap.absmax),
    )
    return Survey(inputs, found)


def _leaves(graph: Graph, node: Node) -> Iterator[str]:
    for source in map(graph.root, node.sources):
        if source.is_leaf:
            yield source.name


def _weight(graph: Graph, node: Node, weights: frozenset[str]) -> str:
    """The tensor of the file that a node reads directly; empty when there is none."""
    return next((name for name in _leaves(graph, node) if name in weights), "")


def _input_absmax(graph: Graph, node: Node, absmax: Sequence[float | None]) -> float | None:
    """Largest magnitude of what a matmul multiplies its weight with."""
    if node.op not in _MATMULS:
        return None
    source = graph.root(node.sources[1])
    return None if source.is_leaf else absmax[source.ordinal]


def _layer(graph: Graph, executed: Sequence[Node], weights: frozenset[str]) -> int | None:
    """The block of the last weight used."""
    for node in reversed(executed):
        number = block_number(_weight(graph, node, weights))
        if number is not None:
            return number
    return None


def _unit(rmap: ResidualMap | None, ordinal: int) -> str:
    """The unit whose computation a node belongs to: the first branch that ends at or after it."""
    if rmap is None:
        return ""
    if ordinal <= rmap.embedding:
        return rmap.units[0].name
    ends = (branch.index for branch in rmap.branches if ordinal <= max(branch.node, branch.add))
    return rmap.units[min(ends, default=rmap.head.index)].name
