"""Attention in torch as ggml computes it: rotary positions in all modes, masked softmax, flash attention.

Layout, types and sources of the semantics: as in `qres.sensitivity.replay.ops`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from qres.errors import UnsupportedError
from qres.native.graph import Node
from qres.sensitivity.replay.ops import Op, need

_NORMAL, _NEOX, _MROPE, _VISION, _IMROPE = 0, 2, 8, 24, 40  # GGML_ROPE_TYPE_*


def _yarn_range(node: Node) -> tuple[float, float]:
    """First and last pair that YaRN blends (`ggml_rope_yarn_corr_dims`)."""
    n_dims, n_ctx, base = node.params[1], node.params[4], node.param_f32(5)

    def pair(turns: float) -> float:
        return n_dims * math.log(n_ctx / (turns * 2 * math.pi)) / (2 * math.log(base))

    fast, slow = node.param_f32(9), node.param_f32(10)
    return max(0.0, math.floor(pair(fast))), min(n_dims - 1.0, math.ceil(pair(slow)))


def _sections(node: Node, count: int) -> tuple[list[int], list[int]]:
    """For multi-section positions: which of the four each pair takes, and which power of theta it has."""
    mode, sizes = node.params[2], node.params[11:15]
    total = sum(sizes)
    starts = [0, sizes[0], sizes[0] + sizes[1], sizes[0] + sizes[1] + sizes[2]]
    which, power = [], []
    counters = [0, 0, 0, 0]
    for i in range(count):
        sector = i % total
        if mode == _VISION and sector in starts:  # there each section counts for itself
            counters[starts.index(sector)] = 0
        if mode == _IMROPE:
            turn = sector % 3
            chosen = turn if sector < 3 * sizes[turn] else 3
        else:
            chosen = max(k for k in range(4) if sector >= starts[k])
        which.append(chosen)
        power.append(counters[chosen])
        counters = [c + 1 for c in counters]
    return which, power


def _angles(node: Node, positions: Tensor, tokens: int, count: int) -> Tensor:
    """Position times theta^power of each pair, float32 [tokens, count]; theta is multiplied up as ggml does."""
    scale = torch.tensor(node.param_f32(5), dtype=torch.float32) ** (-2.0 / node.params[1])
    powers = torch.cumprod(torch.cat([torch.ones(1), scale.expand(count - 1)]), 0).to(positions.device)
    at = positions.reshape(-1).to(torch.float32)
    if not node.params[2] & _MROPE:
        return at[:tokens, None] * powers
    which, power = _sections(node, count)
    return torch.stack([at[w * tokens : (w + 1) * tokens] * powers[p] for w, p in zip(which, power, strict=True)], 1)


def _rotation(node: Node, positions: Tensor, factors: Tensor | None, tokens: int, count: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine [tokens, count] of each pair, with YaRN's blend and magnitude."""
    theta = _angles(node, positions, tokens, count)
    if factors is not None:
        theta = theta / factors.reshape(-1)[:count]
    scale, blend, magnitude = node.param_f32(6), node.param_f32(7), node.param_f32(8)
    angle = theta * scale
    if blend:
        low, high = _yarn_range(node)
        pairs = torch.arange(count, device=theta.device, dtype=torch.float32)
        ramp = (1 - ((pairs - low) / max(0.001, high - low)).clamp(0, 1)) * blend
        angle = angle * (1 - ramp) + theta * ramp
        magnitude *= 1 + 0.1 * math.log(1 / scale)
    return angle.cos() * magnitude, angle.sin() * magnitude


def _rope(node: Node, /, *sources: Tensor | None) -> Tensor:
    """Rotate pairs of channels: x [n3, tokens, heads, n0], positions [tokens] or four times that, factors [n0 / 2]."""
    x, positions = need(sources, 2)
    factors = sources[2] if len(sources) > 2 else None
    n_dims, mode, offset = node.params[1], node.params[2], node.params[15]
    if mode not in (_NORMAL, _NEOX, _MROPE, _VISION, _IMROPE):
        raise UnsupportedError(f"ROPE mode {mode}")
    count = n_dims if mode == _VISION else n_dims // 2
    cos, sin = _rotation(node, positions, factors, x.shape[1], count)
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    if node.op == "ROPE_BACK":
        sin = -sin
    turned = x[..., offset : offset + 2 * count]
    if mode == _NORMAL:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    else:
        a, b = turned[..., :count], turned[..., count:]
        out = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
    return torch.cat([x[..., :offset], out, x[..., offset + 2 * count :]], dim=-1)


def _slopes(heads: int, max_bias: float, device: torch.device) -> Tensor:
    """ALiBi's slope of each head [heads, 1, 1]; 1 without it."""
    if max_bias <= 0:
        return torch.ones(1, 1, 1, device=device)
    power = 1 << math.floor(math.log2(heads))
    m0, m1 = 2.0 ** (-max_bias / power), 2.0 ** (-max_bias / 2 / power)
    values = [m0 ** (h + 1) if h < power else m1 ** (2 * (h - power) + 1) for h in range(heads)]
    return torch.tensor(values, dtype=torch.float32, device=device).reshape(heads, 1, 1)


def _weighted(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of the last dimension of [n3, heads, n, keys], with a sink per head that takes part and is dropped."""
    if sinks is None:
        return scores.softmax(dim=-1)
    n3, heads, n, _ = scores.shape
    sink = sinks.reshape(1, heads, 1, 1).expand(n3, heads, n, 1)
    return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]


def _masked(scores: Tensor, mask: Tensor | None, max_bias: float) -> Tensor:
    """Scores [n3, heads, n, keys] plus the mask [m3, m2, >= n, keys], times each head's slope."""
    if mask is None:
        return scores
    n3, heads, n, _ = scores.shape
    rows = mask[:, :, :n]
    if max_bias > 0:  # 0 * -inf would be NaN, and a slope is never 0
        rows = rows.repeat(1, heads // rows.shape[1], 1, 1) * _slopes(heads, max_bias, scores.device)
    elif rows.shape[1] not in (1, heads):
        rows = rows.repeat(1, heads // rows.shape[1], 1, 1)
    if rows.shape[0] not in (1, n3):
        rows = rows.repeat(n3 // rows.shape[0], 1, 1, 1)
    return scores + rows


def _soft_max(node: Node, /, *sources: Tensor | None) -> Tensor:
    x = need(sources, 1)[0]
    mask, sinks = (sources[i] if len(sources) > i else None for i in (1, 2))
    return _weighted(_masked(x * node.param_f32(0), mask, node.param_f32(1)), sinks)


def _per_query(x: Tensor, heads: int, n3: int) -> Tensor:
    """Keys or values [m3, fewer heads, n, width], each repeated for its group of query heads and sequences."""
    if x.shape[1] != heads:
        x = x.repeat_interleave(heads // x.shape[1], dim=1)
    return x if x.shape[0] == n3 else x.repeat_interleave(n3 // x.shape[0], dim=0)


def attention_weights(node: Node, *sources: Tensor | None) -> Tensor:
    """How much each query of a FLASH_ATTN_EXT node takes of each value.

    Args:
        node: The node.
        sources: Queries [n3, heads, tokens, d], keys [n3, fewer heads, keys, d], values, mask and sinks.

    Returns:
        [n3, heads, tokens, keys].
    """
    q, k = need(sources, 2)
    mask, sinks = (sources[i] if len(sources) > i else None for i in (3, 4))
    scale, max_bias, cap = (node.param_f32(i) for i in range(3))
    k = _per_query(k, q.shape[1], q.shape[0])
    scores = (q @ k.transpose(-1, -2)) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    return _weighted(_masked(scores, mask, max_bias), sinks)


def averaged(weights: Tensor, values: Tensor) -> Tensor:
    """Values [n3, fewer heads, keys, dv] averaged with attention weights [n3, heads, tokens, keys].

    Returns:
        [n3, tokens, heads, dv], as FLASH_ATTN_EXT lays it out.
    """
    n3, heads = weights.shape[:2]
    return (weights @ _per_query(values, heads, n3)).transpose(1, 2)


def _flash_attention(node: Node, /, *sources: Tensor | None) -> Tensor:
    return averaged(attention_weights(node, *sources), need(sources, 3)[2])


OPS: Mapping[str, Op] = {
    "ROPE": _rope,
    "ROPE_BACK": _rope,
    "SOFT_MAX": _soft_max,
    "FLASH_ATTN_EXT": _flash_attention,
}
