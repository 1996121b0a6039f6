"""Whether two models compute the same function of their weights: their recorded graphs, node by node.

A graph has everything that llama.cpp made of a file's hyperparameters: operations with their parameters (rope base,
norm epsilon, scales, soft caps), shapes (experts used), and inputs (masks of sliding windows, positions, scales of
attention). Types of weights are what a level is about and are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from qres.native.ggml import TYPE_F32
from qres.native.graph import VIEWS, Graph, Node

ROPE_FACTORS = "rope_f"
"""Begin of the names of rope factors: tensors of the file, compared as inputs, since they are not quantized."""
_LAYOUT = VIEWS | {"MUL_MAT", "MUL_MAT_ID", "CONT", "CPY", "DUP", "SET_ROWS", "CONCAT", "GLU", "MUL", "ADD"}
"""What differs where the same weights lie in other tensors."""
_ROPE_EXT_FACTOR, _ROPE_YARN_ONLY = 7, (4, 9, 10)
"""Words of ROPE's parameters (ggml_rope_impl): n_ctx_orig, beta_fast and beta_slow count where ext_factor is not 0."""
_TOLERANCE = 1e-3
"""Relative difference of rope factors and float inputs that is rounding: each converter computes them."""


def difference(reference: Graph, level: Graph, weights: frozenset[str], *, other_layout: bool) -> str:
    """Where a level's graph parts from the reference's, in words; empty when both compute the same.

    Args:
        reference: Recorded with its inputs.
        level: The same of the level, on the same tokens.
        weights: Names of the tensors in both files.
        other_layout: The level holds the same weights in other tensors: operations that lay out are then left aside.
    """
    factors = [{node.name for node in one.nodes if node.name.startswith(ROPE_FACTORS)} for one in (reference, level)]
    for name in sorted(factors[0] ^ factors[1]):
        return f"{'the reference' if name in factors[0] else 'the file'} alone reads {name}"
    if other_layout:
        return _first(_with_parameters(reference), _with_parameters(level), weights) or _inputs(reference, level)
    return _first(list(reference.nodes), list(level.nodes), weights) or _inputs(reference, level)


def _with_parameters(graph: Graph) -> list[Node]:
    """The computed nodes that a hyperparameter can show in."""
    return [graph.nodes[index] for index in graph.executed if graph.nodes[index].op not in _LAYOUT]


def _first(ours: list[Node], theirs: list[Node], weights: frozenset[str]) -> str:
    same_places = len(ours) == len(theirs) and all(node.index == i for i, node in enumerate(ours))
    for one, other in zip(ours, theirs, strict=False):
        found = _part(one, other, weights, same_places=same_places)
        if found:
            return found
    if len(ours) != len(theirs):
        return f"it has {len(theirs)} nodes where the reference has {len(ours)}"
    return ""


def _part(one: Node, other: Node, weights: frozenset[str], *, same_places: bool) -> str:
    """Where one node parts from the reference's; what it reads only where the nodes have the same places."""
    weight = one.is_leaf and one.name in weights
    if (one.op, one.is_leaf) != (other.op, other.is_leaf):
        return f"it computes {_named(other)} where the reference computes {_named(one)}"
    if weight and other.name != one.name and same_places:
        return f"it reads {other.name} where the reference reads {one.name}"
    if not weight and one.ne != other.ne:
        return f"{_named(one)} has another shape, {list(other.ne)} for {list(one.ne)}"
    if not one.is_leaf and one.op not in VIEWS and _parameters(one) != _parameters(other):
        return f"{_named(one)} has other parameters"
    return f"{_named(one)} reads something else" if same_places and one.slots != other.slots else ""


def _parameters(node: Node) -> tuple[int, ...]:
    """What the operation depends on: of a rotation without YaRN not the context that it was trained for."""
    if node.op != "ROPE" or node.param_f32(_ROPE_EXT_FACTOR) != 0:
        return node.params
    return tuple(word for i, word in enumerate(node.params) if i not in _ROPE_YARN_ONLY)


def _named(node: Node) -> str:
    return f"{node.op} ({node.name})" if node.name else node.op


def _inputs(reference: Graph, level: Graph) -> str:
    """Inputs by name, and rope factors; what other leaves hold is nobody's, caches among them."""
    theirs = dict(_by_name(level))
    for name, (node, data) in _by_name(reference):
        found = theirs.get(name)
        if found is None or len(found[1]) != len(data):
            continue
        if data != found[1] and not (node.type == TYPE_F32 and _close(data, found[1])):
            return f"{name} holds other values"
    return ""


def _by_name(graph: Graph) -> Iterator[tuple[str, tuple[Node, bytes]]]:
    seen: dict[str, int] = {}
    for index, data in sorted(graph.inputs.items()):
        node = graph.nodes[index]
        if not node.is_input and not node.name.startswith(ROPE_FACTORS):
            continue
        seen[node.name] = seen.get(node.name, 0) + 1
        yield f"{node.name}" if seen[node.name] == 1 else f"{node.name} ({seen[node.name]})", (node, data)


def _close(a: bytes, b: bytes) -> bool:
    one, other = (np.frombuffer(data, "<f4") for data in (a, b))
    return bool(np.allclose(one, other, rtol=_TOLERANCE, atol=0, equal_nan=True))
