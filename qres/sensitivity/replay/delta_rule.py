"""Recurrent attention in torch: a state matrix per head that decays, is corrected and is written to, token by token.

All four operations are one recurrence over tokens t, with a state S [keys, values] per head:

    S_t = diag(w_t) S_{t-1} + b_t (a_t' S_{t-1}) + k_t v_t'

The gated delta rule (Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464) has b_t = beta_t k_t and a_t = -w_t k_t; RWKV-6
and gated linear attention have neither a nor b. It is computed exactly in blocks of tokens, as in "Parallelizing linear
transformers with the delta rule over sequence length" (arXiv 2406.06484): within a block as products of matrices, and
only from block to block in turn. Decays are multiplied, never divided or taken from differences of logarithms, so that
no decay is too strong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from qres.native.graph import Node
from qres.sensitivity.replay.ops import Op, need, tiled

_BLOCK = 16
"""Tokens of a block where each channel decays by itself: decays of all pairs take block * d per token."""

_BLOCK_SHARED = 32
"""Tokens of a block where a head has one decay."""


class Steps(NamedTuple):
    """What each token does to the state; tensors are [sequences, heads, tokens, width]."""

    decay: Tensor
    """w: [.., d] by channel, or [.., 1]."""
    keys: Tensor
    """The key k of each step [.., d]."""
    values: Tensor
    """The value v of each step [.., dv]."""
    probes: Tensor | None = None
    """a [.., d]: what is read of the state in front of the token; None without a correction."""
    corrections: Tensor | None = None
    """b [.., d]: where it is added."""


def recurrence(steps: Steps, queries: Tensor, state: Tensor, bonus: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Read q_t' S_t at every token, exactly, block by block.

    Args:
        steps: Of all tokens.
        queries: q [sequences, heads, tokens, d].
        state: S in front of the first token [sequences, heads, d, dv].
        bonus: u [heads, 1, d]: read q_t' (S_{t-1} + diag(u) k_t v_t') instead.

    Returns:
        What was read [sequences, heads, tokens, dv], and S behind the last token.
    """
    n_tokens = queries.shape[2]
    block = min(_BLOCK_SHARED if steps.decay.shape[-1] == 1 else _BLOCK, n_tokens)
    w, k, v = _blocks(steps.decay, block, 1.0), _blocks(steps.keys, block), _blocks(steps.values, block)
    q = _blocks(queries, block)
    early = bonus is not None
    a, b = steps.probes, steps.corrections
    pairs = [_Pair(q, k, early)]
    if a is not None and b is not None:
        a, b = _blocks(a, block), _blocks(b, block)
        pairs += [_Pair(q, b, early), _Pair(a, k, early=True), _Pair(a, b, early=True)]
    decays, scores = _decayed_scores(w, pairs)
    before = torch.cat([torch.ones_like(decays.before[..., :1, :]), decays.before[..., :-1, :]], dim=-2)
    reading = q * (before if early else decays.before)
    read = scores[0] @ v
    if bonus is not None:
        read = read + (q * bonus.unsqueeze(1) * k).sum(dim=-1, keepdim=True) * v
    moved = (k * decays.after).transpose(-1, -2) @ v
    whole = decays.before[..., -1, :].unsqueeze(-1)  # [.., d, 1] or [.., 1, 1]
    carry: Tensor | None = None
    if a is not None and b is not None:
        # u = a' S_{t-1} of a block solves (1 - ab) u = (a * before) S_0 + ak v, with ab strictly lower triangular
        triangle = torch.eye(block, dtype=v.dtype, device=v.device) - scores[3]
        right = torch.cat([a * before, scores[2] @ v], dim=-1)
        solved = torch.linalg.solve_triangular(triangle, right, upper=False, unitriangular=True)
        from_state, own = solved.split([a.shape[-1], v.shape[-1]], dim=-1)
        into = (b * decays.after).transpose(-1, -2)
        reading, read = reading + scores[1] @ from_state, read + scores[1] @ own
        carry, moved = into @ from_state, moved + into @ own
    states = []
    carries = [None] * w.shape[2] if carry is None else carry.unbind(2)  # a slice's gradient is as large as the whole
    for kept, new, carried in zip(whole.unbind(2), moved.unbind(2), carries, strict=True):
        states.append(state)
        grown = torch.addcmul(new, state, kept)
        state = grown if carried is None else grown + carried @ state
    read = read + reading @ torch.stack(states, dim=2)
    return read.flatten(2, 3)[:, :, :n_tokens], state


class _Decays(NamedTuple):
    """Products of decays within each block [.., block, d or 1]."""

    before: Tensor
    """From the state in front of the block to behind each token."""
    after: Tensor
    """From behind each token to behind the block."""


class _Pair(NamedTuple):
    """Which scores to compute: left_t' diag(decays between) right_j."""

    left: Tensor
    """The later token of each score, a row per token [.., block, d]."""
    right: Tensor
    """The earlier token of each score, a row per token [.., block, d]."""
    early: bool
    """The left ones see the state in front of their token, not behind it."""


def _decayed_scores(w: Tensor, pairs: list[_Pair]) -> tuple[_Decays, list[Tensor]]:
    """Scores of the tokens of each block among each other, with the decays between them.

    Args:
        w: Decays [sequences, heads, blocks, block, d or 1].
        pairs: What to compute.

    Returns:
        The block's decays, and for each pair [.., block, block], lower triangular (strictly where it is early).
    """
    block = w.shape[-2]
    shared = w.shape[-1] == 1
    rows: list[list[Tensor]] = [[] for _ in pairs]
    between = torch.ones_like(w[..., :0, :])  # from behind each token so far to behind the current one
    seen, before = torch.ones_like(w[..., :1, :]), []
    table = []
    for t in range(block):
        for pair, row in zip(pairs, rows, strict=True):
            if pair.early and not shared:
                row.append(_scored(pair, between, t))
        table.append(F.pad(between, (0, 0, 0, block - t)))
        now = w[..., t : t + 1, :]
        between = torch.cat([between * now, torch.ones_like(now)], dim=-2)
        seen = seen * now
        before.append(seen)
        for pair, row in zip(pairs, rows, strict=True):
            if not pair.early and not shared:
                row.append(_scored(pair, between, t))
    decays = _Decays(torch.cat(before, dim=-2), between)
    if not shared:
        return decays, [torch.stack(row, dim=-2) for row in rows]
    early = torch.cat(table, dim=-1).transpose(-1, -2)  # [.., t, j] = decays behind j and in front of t
    late = early * w + torch.eye(block, dtype=w.dtype, device=w.device)
    return decays, [(p.left @ p.right.transpose(-1, -2)) * (early if p.early else late) for p in pairs]


def _scored(pair: _Pair, between: Tensor, t: int) -> Tensor:
    """Token t's scores [.., block] with the tokens that `between` [.., so many, d] has decays for."""
    count = between.shape[-2]
    left = pair.left[..., t : t + 1, :] * between
    scores = (left * pair.right[..., :count, :]).sum(dim=-1)
    return F.pad(scores, (0, pair.right.shape[-2] - count))


def _blocks(x: Tensor, block: int, fill: float = 0.0) -> Tensor:
    """[.., tokens, width] cut into blocks [.., blocks, block, width], the last one filled up."""
    missing = -x.shape[-2] % block
    return F.pad(x, (0, 0, 0, missing), value=fill).reshape(*x.shape[:-2], -1, block, x.shape[-1])


# -- the operations


def _packed(out: Tensor, *states: Tensor) -> Tensor:
    """The result: outputs [sequences, heads, tokens, dv], then states, as rows of heads * dv."""
    width = out.shape[1] * out.shape[3]
    parts = [out.transpose(1, 2).reshape(-1, width), *(state.reshape(-1, width) for state in states)]
    return torch.cat(parts).reshape(1, 1, -1, width)


def _by_head(x: Tensor) -> Tensor:
    """[sequences, tokens, heads, width] as [sequences, heads, tokens, width]."""
    return x.transpose(1, 2)


def _gated_delta_net(node: Node, /, *sources: Tensor | None) -> Tensor:
    """q, k [s, tokens, some heads, d], v [s, tokens, heads, d], g [.., d or 1], beta [.., 1], state [s, heads, dv, d].

    Decays by exp(g), then writes k (beta (v - k' S))', then reads q' S / sqrt(d); heads of q and k are repeated as a
    whole, their sequences one by one. The state is kept `params[0]` times, the last first (`ggml_gated_delta_net` in
    ggml.c and its kernel in ops.cpp); what is older than the first token is zero here and undefined there.
    """
    q, k, v, g, beta, state = need(sources, 6)
    n_seqs, n_tokens, heads, width = v.shape
    q, k = (_by_head(_for_all(x, n_seqs, heads)) for x in (q, k))
    v, w, beta = _by_head(v), _by_head(g).exp(), _by_head(beta)
    steps = w, k, beta * v, -w * k, beta * k
    q, current = q * width**-0.5, state.reshape(n_seqs, heads, width, width).transpose(-1, -2)
    kept = min(node.params[0], n_tokens)
    parts: list[Tensor] = []
    states: list[Tensor] = []
    ends = [n_tokens - i for i in reversed(range(kept))]
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        part = Steps(*(x[:, :, begin:end] for x in steps))
        read, current = recurrence(part, q[:, :, begin:end], current)
        parts.append(read)
        states.insert(0, current.transpose(-1, -2))
    states += [torch.zeros_like(states[0])] * (node.params[0] - kept)
    return _packed(torch.cat(parts, dim=2), *states)


def _for_all(x: Tensor, n_seqs: int, heads: int) -> Tensor:
    """[some sequences, tokens, some heads, d] for all sequences and heads."""
    x = x.repeat_interleave(n_seqs // x.shape[0], dim=0)
    return tiled(x, (n_seqs, x.shape[1], heads, x.shape[3]))


def _by_sequence(x: Tensor, n_seqs: int) -> Tensor:
    """[1, sequences * tokens, heads, d] as [sequences, heads, tokens, d]."""
    _, n, heads, width = x.shape
    return _by_head(x.reshape(n_seqs, n // n_seqs, heads, width))


def _square(state: Tensor, heads: int, width: int) -> Tensor:
    """A flat state [1, 1, sequences, heads * d * d] as [sequences, heads, d, d]."""
    return state.reshape(state.shape[2], heads, width, width)


def _rwkv_wkv6(_: Node, /, *sources: Tensor | None) -> Tensor:
    """k, v, r [1, tokens, heads, d], first [1, 1, heads, d], decay as k, state [1, 1, sequences, heads * d * d].

    Reads r' (S + diag(first) k v') in front of the write (`ggml_rwkv_wkv6`; "Eagle and Finch", arXiv 2404.05892).
    """
    k, v, r, first, decay, state = need(sources, 6)
    n_seqs, heads, width = state.shape[2], k.shape[2], k.shape[3]
    k, v, r, decay = (_by_sequence(x, n_seqs) for x in (k, v, r, decay))
    out, state = recurrence(Steps(decay, k, v), r, _square(state, heads, width), first.reshape(heads, 1, width))
    return _packed(out, state)


def _gated_linear_attn(node: Node, /, *sources: Tensor | None) -> Tensor:
    """k, v, q, gate [1, tokens, heads, d], state [1, 1, sequences, heads * d * d].

    The gate is the decay itself; reads q' S behind the write, times `params[0]` (`ggml_gated_linear_attn`; Yang et al.
    2023, arXiv 2312.06635).
    """
    k, v, q, gate, state = need(sources, 5)
    n_seqs, heads, width = state.shape[2], k.shape[2], k.shape[3]
    k, v, q, gate = (_by_sequence(x, n_seqs) for x in (k, v, q, gate))
    out, state = recurrence(Steps(gate, k, v), q * node.param_f32(0), _square(state, heads, width))
    return _packed(out, state)


def _rwkv_wkv7(_: Node, /, *sources: Tensor | None) -> Tensor:
    """r, w, k, v, a, b [1, tokens, heads, d], state [1, 1, sequences, heads * dv * d].

    Reads S r behind the write of S = S diag(w) + (S a) b' + v k' (`ggml_rwkv_wkv7`; "RWKV-7 Goose", arXiv 2503.14456).
    """
    r, w, k, v, a, b, state = need(sources, 7)
    n_seqs, heads, width = state.shape[2], k.shape[2], k.shape[3]
    r, w, k, v, a, b = (_by_sequence(x, n_seqs) for x in (r, w, k, v, a, b))
    out, state = recurrence(Steps(w, k, v, a, b), r, _square(state, heads, width).transpose(-1, -2))
    return _packed(out, state.transpose(-1, -2))


OPS: Mapping[str, Op] = {
    "GATED_DELTA_NET": _gated_delta_net,
    "GATED_LINEAR_ATTN": _gated_linear_attn,
    "RWKV_WKV6": _rwkv_wkv6,
    "RWKV_WKV7": _rwkv_wkv7,
}
