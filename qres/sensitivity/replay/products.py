"""Products with weights that stay in the file: exact values, gradients for the activations, none for the weights.

Backward tells a tap what went into each product and what gradient came back: all that a prediction needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from qres.errors import UnsupportedError
from qres.sensitivity.replay.weights import Weights, blocks


@dataclass(frozen=True)
class Site:
    """One use of one matrix in the graph."""

    tensor: str
    node: int
    """Index of the graph node that uses it."""
    matrix: int = 0
    """Which matrix of the tensor: an expert, say."""
    picks_rows: bool = False
    """Its rows are picked by number (an embedding) instead of multiplied with."""


class ProductTap(Protocol):
    """Hears of products while a piece runs with gradients."""

    def enters(self, site: Site, x: Tensor) -> None:
        """`x` [n, weights per row] is about to be multiplied with a matrix."""

    def product(self, site: Site, x: Tensor, g: Tensor) -> None:
        """`g` [n, rows of the matrix] came back to a product with `x` [n, weights per row].

        For picked rows `x` holds their numbers [n] and `g` is [n, weights per row].
        """

    def averages(self, site: Site, mixing: Mixing) -> None:
        """An attention averages what a matrix makes, by `mixing`."""

    def averaged(self, site: Site, g: Tensor) -> None:
        """`g` [n3, tokens, heads, dv] came back to these averages; in each draw before `product` of the same site."""


@dataclass(frozen=True)
class Mixing:
    """What becomes of the output of a matrix that makes the values of an attention."""

    weights: Tensor
    """The attention's weights [n3, heads, tokens, keys]."""
    carry: Callable[[Tensor], Tensor]
    """Linear: output of the matrix [tokens, rows] -> values [n3, heads, keys, dv]."""


@dataclass
class Context:
    """What the products of one replay share."""

    weights: Weights
    dtype: torch.dtype
    """Type of the products: float32, or bfloat16 for speed; sums and everything else are float32."""
    anchor: Tensor
    """A scalar that requires a gradient: makes autograd follow products whose own input needs none."""
    tap: ProductTap | None = None


def _rounded_input(context: Context, site: Site, x: Tensor) -> Tensor:
    """The input as llama.cpp's CPU back end gives it to the product: in the weights' own 16-bit type."""
    kind = {"F16": torch.float16, "BF16": torch.bfloat16}.get(context.weights.type(site.tensor))
    return x.to(kind).to(torch.float32) if kind else x


def not_zero(g: Tensor) -> Tensor:
    """Rows of g [n, columns] that hold anything but zeros [n]; a few rows at a time, for logits are large."""
    return torch.cat([(g[i : i + 32] != 0).any(dim=1) for i in range(0, len(g), 32)])


class _Product(torch.autograd.Function):
    """y = x W^T for one matrix of the file."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _anchor: Tensor, context: Context, site: Site) -> Tensor:  # noqa: ANN401
        ctx.context, ctx.site = context, site
        ctx.save_for_backward(x)
        _, height, row = context.weights.shape(site.tensor)
        if context.tap is not None:
            context.tap.enters(site, x)
        exact = _rounded_input(context, site, x).to(context.dtype)
        y = torch.empty(len(x), height, dtype=torch.float32, device=x.device)
        for start, stop in blocks(height, row):
            w = context.weights.rows(site.tensor, start, stop, site.matrix).to(context.dtype)
            y[:, start:stop] = exact @ w.T
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        context, site, (x,), g = ctx.context, ctx.site, ctx.saved_tensors, grads[0]
        used = torch.nonzero(not_zero(g)).flatten()
        part = g if len(used) == len(g) else g[used]  # behind the last layer most rows of a chunk are zero
        if context.tap is not None:
            context.tap.product(site, x, g)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        _, height, row = context.weights.shape(site.tensor)
        gx = torch.zeros(len(used), row, dtype=torch.float32, device=x.device)
        low = part.to(context.dtype)
        for start, stop in blocks(height, row):
            w = context.weights.rows(site.tensor, start, stop, site.matrix).to(context.dtype)
            gx += low[:, start:stop] @ w
        return (gx if len(used) == len(g) else torch.zeros_like(x).index_copy(0, used, gx)), None, None, None


class _Rows(torch.autograd.Function):
    """The rows of a matrix with given numbers."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, _anchor: Tensor, context: Context, site: Site) -> Tensor:  # noqa: ANN401
        ctx.context, ctx.site = context, site
        ctx.save_for_backward(ids)
        return context.weights.picked(site.tensor, ids)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        if ctx.context.tap is not None:
            ctx.context.tap.product(ctx.site, ctx.saved_tensors[0], grads[0])
        return None, None, None, None


_product: Callable[..., Tensor] = _Product.apply
_rows: Callable[..., Tensor] = _Rows.apply


def product(context: Context, site: Site, x: Tensor) -> Tensor:
    """`x` [n, weights per row] times one matrix, transposed: [n, rows]."""
    return _product(x, context.anchor, context, site)


def picked(context: Context, site: Site, ids: Tensor) -> Tensor:
    """Rows of a matrix by number: `ids` [n] -> [n, weights per row]."""
    return _rows(ids, context.anchor, context, site)


def mul_mat(context: Context, site: Site, x: Tensor) -> Tensor:
    """MUL_MAT with a weight.

    Args:
        context: The replay's.
        site: The weight.
        x: [n3, n2, n, weights per row]; a weight of several matrices is shared by groups of n2 and n3.

    Returns:
        [n3, n2, n, rows].
    """
    matrices, height, _ = context.weights.shape(site.tensor)
    n3, n2, n, row = x.shape
    if matrices == 1:
        return product(context, site, x.reshape(-1, row)).reshape(n3, n2, n, height)
    if n2 % matrices:
        raise UnsupportedError(f"{site.tensor}: {matrices} matrices for {n2} x {n3} inputs")
    groups = x.reshape(n3, matrices, -1, row).unbind(1)  # ggml shares a matrix among neighbours
    parts = [
        product(context, Site(site.tensor, site.node, i), group.reshape(-1, row)).reshape(n3, -1, n, height)
        for i, group in enumerate(groups)
    ]
    return torch.cat(parts, dim=1)


def mul_mat_id(context: Context, site: Site, x: Tensor, ids: Tensor) -> Tensor:
    """MUL_MAT_ID: each token with the matrices of its experts.

    Args:
        context: The replay's.
        site: The weight, one matrix per expert.
        x: [1, tokens, 1 or used, weights per row].
        ids: Numbers of the experts [1, 1, tokens, used].

    Returns:
        [1, tokens, used, rows].
    """
    matrices, height, row = context.weights.shape(site.tensor)
    chosen = ids.reshape(ids.shape[-2], ids.shape[-1]).long()
    tokens, used = chosen.shape
    inputs = x.reshape(tokens, -1, row).expand(tokens, used, row).reshape(-1, row)
    flat = chosen.reshape(-1)
    order, parts = [], []
    for expert in range(matrices):
        at = torch.nonzero(flat == expert).flatten()
        if len(at):
            order.append(at)
            parts.append(product(context, Site(site.tensor, site.node, expert), inputs[at]))
    y = torch.cat(parts)
    back = torch.empty_like(flat)
    back[torch.cat(order)] = torch.arange(len(flat), device=flat.device)
    return y[back].reshape(1, tokens, used, height)
