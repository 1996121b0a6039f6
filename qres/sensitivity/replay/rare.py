"""Operations that few architectures have: streams of hyper-connections, an indexer of keys, pooling of images."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from qres.errors import UnsupportedError
from qres.native.graph import Node
from qres.sensitivity.replay.ops import Op, need, shape_of, tiled

_POOL_MAX, _POOL_AVG = 0, 1  # enum ggml_op_pool


def _lightning_indexer(node: Node, /, *sources: Tensor | None) -> Tensor:
    """Scores of keys, to pick some of them: sum over heads of weight * relu(q . k), plus a mask.

    q [s, tokens, heads, d], k [s, keys, 1, d], weights [s, 1, tokens, heads], mask [some s, 1, tokens, keys] gives
    [s, 1, tokens, keys] (`ggml_lightning_indexer`; DeepSeek-V3.2). Masks are repeated as a whole.
    """
    q, k, weights, mask = need(sources, 4)
    scores = F.relu(q.transpose(1, 2) @ k.permute(0, 2, 3, 1))  # [s, heads, tokens, keys]
    weighted = (scores * weights.permute(0, 3, 2, 1)).sum(dim=1, keepdim=True)
    return weighted + tiled(mask, shape_of(node))


def _hc_pre(node: Node, /, *sources: Tensor | None) -> Tensor:
    """A layer's input from the streams x [1, tokens, streams, n]: their weighted sum [1, 1, tokens, n].

    Weights are [1, 1, tokens, streams], or with `params[1]` gates as x, through a sigmoid (`ggml_dsv4_hc_pre` and
    `ggml_dsv4_hc_pre_gated`). `params[0]` scales the sum.
    """
    x, weights = need(sources, 2)
    factors = torch.sigmoid(weights) if node.params[1] else weights.reshape(*x.shape[:3], 1)
    return ((x * factors).sum(dim=2) * node.param_f32(0)).reshape(shape_of(node))


def _hc_post(_: Node, /, *sources: Tensor | None) -> Tensor:
    """The streams behind a layer: its output x [1, 1, tokens, n] into each of them, and the streams mixed.

    residual [1, tokens, streams, n], post [1, 1, tokens, streams] and comb [1, tokens, from, to] (not given: each
    stream stays) give [1, tokens, streams, n] (`ggml_dsv4_hc_post`; hyper-connections, arXiv 2512.24880).
    """
    x, residual, post = need(sources, 3)
    comb = sources[3] if len(sources) > 3 else None
    mixed = residual if comb is None else comb.transpose(-1, -2) @ residual
    return post.transpose(0, 1).reshape(*residual.shape[:3], 1) * x.reshape(1, -1, 1, x.shape[-1]) + mixed


def _hc_comb(node: Node, /, *sources: Tensor | None) -> Tensor:
    """Nearly doubly stochastic mixing of streams [1, tokens, from, to], by Sinkhorn's iteration.

    mixes [1, 1, tokens, (2 + streams) * streams], whose last streams^2 are used, times the third scale, plus base; a
    softmax over `to`, then sums over `from` and `to` brought to 1 in turn. `params` are eps and the number of rounds
    (`ggml_dsv4_hc_comb`; arXiv 2512.24880).
    """
    mixes, scale, base = need(sources, 3)
    streams, rounds, eps = node.ne[0], node.params[1], node.param_f32(0)
    logits = mixes[0, 0, :, 2 * streams :] * scale[0, 0, 0, 2] + base[0, 0, 0, 2 * streams :]
    comb = torch.softmax(logits.reshape(shape_of(node)), dim=-1) + eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    for _ in range(1, rounds):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    return comb


def _pool_2d(node: Node, /, *sources: Tensor | None) -> Tensor:
    """Maximum or mean of windows of each image [n3, n2, height, width]; the mean counts what lies outside as zeros."""
    x = need(sources, 1)[0]
    kind, k0, k1, s0, s1, p0, p1 = node.params[:7]
    if kind not in (_POOL_MAX, _POOL_AVG):
        raise UnsupportedError(f"POOL_2D operation {kind}")
    outside = -torch.finfo(torch.float32).max if kind == _POOL_MAX else 0.0
    padded = F.pad(x, (p0, p0, p1, p1), value=outside)
    if kind == _POOL_MAX:
        return F.max_pool2d(padded, (k1, k0), (s1, s0))
    return F.avg_pool2d(padded, (k1, k0), (s1, s0))


OPS: Mapping[str, Op] = {
    "DSV4_HC_COMB": _hc_comb,
    "DSV4_HC_POST": _hc_post,
    "DSV4_HC_PRE": _hc_pre,
    "LIGHTNING_INDEXER": _lightning_indexer,
    "POOL_2D": _pool_2d,
}
