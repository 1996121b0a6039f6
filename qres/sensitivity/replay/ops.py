"""ggml operations in torch, one function each: by what the operation does, not by which model uses it.

Tensors have ggml's logical layout with the dimensions reversed, [ne3, ne2, ne1, ne0], in float32 (int64 for indices);
a function returns the shape of its node. All are differentiable where ggml's are smooth. The semantics are those of
ggml-cpu/ops.cpp and unary-ops.cpp of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from qres.errors import UnsupportedError
from qres.native.graph import Node


class Op(Protocol):
    """An operation: its node, and a value for each source slot (None where an optional one is missing)."""

    def __call__(self, node: Node, /, *sources: Tensor | None) -> Tensor:
        """The node's value [ne3, ne2, ne1, ne0]."""


def shape_of(node: Node) -> tuple[int, int, int, int]:
    """[ne3, ne2, ne1, ne0]."""
    a, b, c, d = node.ne
    return d, c, b, a


def tiled(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`x` repeated as often as it fits into the shape, as ggml broadcasts: whole copies one after the other."""
    if tuple(x.shape) == shape:
        return x
    if all(a in (1, b) for a, b in zip(x.shape, shape, strict=True)):
        return x.expand(shape)
    return x.repeat([b // a for a, b in zip(x.shape, shape, strict=True)])


def seen(flat: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    """A view into flat values, with strides and offset in elements."""
    return flat.as_strided(shape, strides, flat.storage_offset() + offset)  # torch counts from the storage's start


def put(flat: Tensor, values: Tensor, strides: Sequence[int], offset: int) -> Tensor:
    """Flat values with others [any shape] written into the view that has their shape.

    Not torch's `as_strided_scatter`: in 2.13 its backward gives the base the gradient of what was overwritten.
    """
    places = torch.arange(flat.numel(), device=flat.device)
    at = seen(places, values.shape, strides, offset).reshape(-1)
    return flat.index_copy(0, at, values.reshape(-1))


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Op:
    def op(node: Node, /, *sources: Tensor | None) -> Tensor:
        a, b = need(sources, 2)
        return function(a, tiled(b, tuple(a.shape)))

    return op


def _elementwise(function: Callable[[Tensor], Tensor]) -> Op:
    def op(node: Node, /, *sources: Tensor | None) -> Tensor:
        return function(need(sources, 1)[0])

    return op


def need(sources: tuple[Tensor | None, ...], count: int) -> list[Tensor]:
    """The first `count` sources, all of which must be there."""
    found = [source for source in sources[:count] if source is not None]
    if len(found) != count:
        raise UnsupportedError(f"a graph node has {len(found)} sources instead of {count}")
    return found


# -- normalization


def _norm(node: Node, /, *sources: Tensor | None) -> Tensor:
    x = need(sources, 1)[0]
    centered = x - x.mean(dim=-1, keepdim=True)
    variance = centered.square().mean(dim=-1, keepdim=True)
    return centered * torch.rsqrt(variance + node.param_f32(0))


def _rms_norm(node: Node, /, *sources: Tensor | None) -> Tensor:
    x = need(sources, 1)[0]
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + node.param_f32(0))


def _l2_norm(node: Node, /, *sources: Tensor | None) -> Tensor:
    x = need(sources, 1)[0]
    return x / torch.clamp(x.square().sum(dim=-1, keepdim=True).sqrt(), min=node.param_f32(0))


def _group_norm(node: Node, /, *sources: Tensor | None) -> Tensor:
    x = need(sources, 1)[0]  # [n3, channels, n1, n0]
    size = -(-x.shape[1] // node.params[0])  # the last group may be smaller
    groups = [x[:, i : i + size] for i in range(0, x.shape[1], size)]
    return torch.cat([_standardized(group, node.param_f32(1)) for group in groups], dim=1)


def _standardized(part: Tensor, eps: float) -> Tensor:
    centered = part - part.mean(dim=(1, 2, 3), keepdim=True)
    return centered * torch.rsqrt(centered.square().mean(dim=(1, 2, 3), keepdim=True) + eps)


# -- elementwise


def _scale(node: Node, /, *sources: Tensor | None) -> Tensor:
    return need(sources, 1)[0] * node.param_f32(0) + node.param_f32(1)


def _clamp(node: Node, /, *sources: Tensor | None) -> Tensor:
    return need(sources, 1)[0].clamp(node.param_f32(0), node.param_f32(1))


def _xielu(node: Node, /, *sources: Tensor | None) -> Tensor:
    x = need(sources, 1)[0]
    alpha_n, alpha_p, beta, eps = (node.param_f32(i) for i in (1, 2, 3, 4))
    below = (torch.expm1(x.clamp(max=eps)) - x) * alpha_n + beta * x
    return torch.where(x > 0, alpha_p * x * x + beta * x, below)


def _softplus(x: Tensor) -> Tensor:
    return F.softplus(x, threshold=20.0)


def _hard_sigmoid(x: Tensor) -> Tensor:
    return ((x + 3) / 6).clamp(0, 1)


_UNARY: tuple[Callable[[Tensor], Tensor] | None, ...] = (  # in the order of `enum ggml_unary_op`
    torch.abs,
    torch.sign,
    torch.neg,
    lambda x: (x > 0).to(x.dtype),
    torch.tanh,
    F.elu,
    F.relu,
    torch.sigmoid,
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: x * torch.sigmoid(1.702 * x),
    F.silu,
    lambda x: x * _hard_sigmoid(x),
    _hard_sigmoid,
    torch.exp,
    torch.expm1,
    _softplus,
    F.gelu,
    None,  # xIELU has parameters
    torch.floor,
    torch.ceil,
    lambda x: torch.trunc(x + 0.5 * torch.sign(x)),  # halves away from 0; torch rounds them to even
    torch.trunc,
)
_XIELU = 17


def _unary(node: Node, /, *sources: Tensor | None) -> Tensor:
    kind = node.params[0]
    if kind == _XIELU:
        return _xielu(node, *sources)
    function = _UNARY[kind] if kind < len(_UNARY) else None
    if function is None:
        raise UnsupportedError(f"UNARY operation {kind}")
    return function(need(sources, 1)[0])


def _clamped_gate(node: Node, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    limit = node.param_f32(3)
    return gate.clamp(max=limit), up.clamp(-limit, limit)


def _swiglu_oai(node: Node, gate: Tensor, up: Tensor) -> Tensor:
    gate, up = _clamped_gate(node, gate, up)
    return gate * torch.sigmoid(node.param_f32(2) * gate) * (up + 1)


def _swiglu_clamp(node: Node, gate: Tensor, up: Tensor) -> Tensor:
    gate, up = _clamped_gate(node, gate, up)
    return F.silu(gate) * up


_GLU: tuple[Callable[[Node, Tensor, Tensor], Tensor], ...] = (  # in the order of `enum ggml_glu_op`
    lambda _, gate, up: F.relu(gate) * up,
    lambda _, gate, up: F.gelu(gate, approximate="tanh") * up,
    lambda _, gate, up: F.silu(gate) * up,
    _swiglu_oai,
    lambda _, gate, up: F.gelu(gate) * up,
    lambda _, gate, up: gate * torch.sigmoid(1.702 * gate) * up,
    _swiglu_clamp,
)


def _glu(node: Node, /, *sources: Tensor | None) -> Tensor:
    """The gate is the first source, or the first half of the only one; `params[1]` swaps the halves."""
    gate, up = sources[0], sources[1] if len(sources) > 1 else None
    assert gate is not None
    if up is None:
        half = gate.shape[-1] // 2
        gate, up = gate[..., :half], gate[..., half:]
        if node.params[1]:
            gate, up = up, gate
    if node.params[0] >= len(_GLU):
        raise UnsupportedError(f"GLU operation {node.params[0]}")
    return _GLU[node.params[0]](node, gate, up)


# -- moving values around


def _repeat(node: Node, /, *sources: Tensor | None) -> Tensor:
    return tiled(need(sources, 1)[0], shape_of(node))


def _concat(node: Node, /, *sources: Tensor | None) -> Tensor:
    return torch.cat(need(sources, 2), dim=3 - node.params[0])


def _get_rows(node: Node, /, *sources: Tensor | None) -> Tensor:
    """Rows of each matrix [n3, n2, rows, n0] by numbers [1, n3, n2, n]; a weight goes another way."""
    x, ids = need(sources, 2)
    n3, n2, _, width = x.shape
    index = ids.long().reshape(n3, n2, -1, 1).expand(n3, n2, ids.shape[-1], width)
    return x.gather(2, index)


def _set_rows(node: Node, /, *sources: Tensor | None) -> Tensor:
    """What the destination (source 2) is with rows (source 0) put at numbers (source 1 [1, m3, m2, n])."""
    values, ids, into = need(sources, 3)
    n3, n2, n, width = values.shape
    index = ids.long().reshape(ids.shape[1], ids.shape[2], n)
    index = tiled(index, (n3, n2, n)).unsqueeze(-1).expand(n3, n2, n, width)
    return into.scatter(2, index, values)


def _set(node: Node, /, *sources: Tensor | None) -> Tensor:
    """Source 0 with source 1 written into the view that the parameters describe (in bytes of float32)."""
    into, values = need(sources, 2)
    nb1, nb2, nb3, offset = (node.params[i] // 4 for i in range(4))
    return put(into.reshape(-1), values, (nb3, nb2, nb1, 1), offset).reshape(into.shape)


def _acc(node: Node, /, *sources: Tensor | None) -> Tensor:
    """As SET, but added."""
    into, values = need(sources, 2)
    nb1, nb2, nb3, offset = (node.params[i] // 4 for i in range(4))
    flat = into.reshape(-1)
    there = seen(flat, tuple(values.shape), (nb3, nb2, nb1, 1), offset)
    return put(flat, there + values, (nb3, nb2, nb1, 1), offset).reshape(into.shape)


def _add_id(node: Node, /, *sources: Tensor | None) -> Tensor:
    """[1, tokens, used, n0] plus rows of source 1 [1, 1, rows, n0] by the numbers in source 2 [1, 1, tokens, used]."""
    x, rows, ids = need(sources, 3)
    return x + rows.reshape(rows.shape[-2:])[ids.reshape(ids.shape[-2:]).long()].reshape(x.shape)


def _argsort(node: Node, /, *sources: Tensor | None) -> Tensor:
    return torch.argsort(need(sources, 1)[0], dim=-1, descending=node.params[0] == 1, stable=True)


def _top_k(node: Node, /, *sources: Tensor | None) -> Tensor:
    return need(sources, 1)[0].topk(node.ne[0], dim=-1).indices


def _fill(node: Node, /, *sources: Tensor | None) -> Tensor:
    return torch.full_like(need(sources, 1)[0], node.param_f32(0))


def _arange(node: Node, /, *sources: Tensor | None) -> Tensor:
    return torch.arange(*(node.param_f32(i) for i in range(3))).reshape(1, 1, 1, -1)


def _sum_all(x: Tensor) -> Tensor:
    return x.sum().reshape(1, 1, 1, 1)


def _triangle(node: Node, /, *sources: Tensor | None) -> Tensor:
    """TRI keeps one triangle of each matrix: upper with diagonal, upper, lower with diagonal, lower."""
    x = need(sources, 1)[0]
    kind = node.params[0]
    return (x.triu(), x.triu(1), x.tril(), x.tril(-1))[kind]


OPS: Mapping[str, Op] = {
    "ADD": _binary(torch.add),
    "ADD1": _binary(torch.add),
    "SUB": _binary(torch.sub),
    "MUL": _binary(torch.mul),
    "DIV": _binary(torch.div),
    "ADD_ID": _add_id,
    "ACC": _acc,
    "SET": _set,
    "NORM": _norm,
    "RMS_NORM": _rms_norm,
    "L2_NORM": _l2_norm,
    "GROUP_NORM": _group_norm,
    "SCALE": _scale,
    "CLAMP": _clamp,
    "SQR": _elementwise(torch.square),
    "SQRT": _elementwise(torch.sqrt),
    "LOG": _elementwise(torch.log),
    "SIN": _elementwise(torch.sin),
    "COS": _elementwise(torch.cos),
    "UNARY": _unary,
    "LEAKY_RELU": lambda node, /, *s: F.leaky_relu(need(s, 1)[0], node.param_f32(0)),
    "GLU": _glu,
    "SUM": _elementwise(_sum_all),
    "SUM_ROWS": _elementwise(lambda x: x.sum(dim=-1, keepdim=True)),
    "MEAN": _elementwise(lambda x: x.mean(dim=-1, keepdim=True)),
    "CUMSUM": _elementwise(lambda x: x.cumsum(dim=-1)),
    "TRI": _triangle,
    "REPEAT": _repeat,
    "CONCAT": _concat,
    "CONT": _elementwise(lambda x: x),
    "DUP": _elementwise(lambda x: x),
    "CPY": _elementwise(lambda x: x),
    "GET_ROWS": _get_rows,
    "SET_ROWS": _set_rows,
    "ARGSORT": _argsort,
    "TOP_K": _top_k,
    "FILL": _fill,
    "ARANGE": _arange,
}
