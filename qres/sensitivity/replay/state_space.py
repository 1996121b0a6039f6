"""State-space models in torch as ggml computes them: the short convolution, and the selective scan of Mamba 1 and 2.

Layout, types and sources of the semantics: as in `qres.sensitivity.replay.ops`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from qres.native.graph import Node
from qres.sensitivity.replay.ops import Op, need

_CHUNK = 64
"""Tokens that a scan takes at once."""
_GONE = -60.0
"""Logarithm of a decay that leaves 1e-26 of a state: far below the 6e-8 to which float32 rounds what is added to it."""


def _ssm_conv(_: Node, /, *sources: Tensor | None) -> Tensor:
    """Each channel's last values weighted by its kernel (`ggml_compute_forward_ssm_conv_f32`).

    Args:
        _: The node.
        sources: Values [1, sequences, channels, width - 1 + tokens] and kernels [1, 1, channels, width].

    Returns:
        [1, sequences, tokens, channels].
    """
    x, kernels = need(sources, 2)
    width = kernels.shape[-1]
    tokens = x.shape[-1] - width + 1
    terms = [x[..., i : i + tokens] * kernels[..., i, None] for i in range(width)]
    return torch.stack(terms).sum(0).transpose(-1, -2)


def _ssm_scan(node: Node, /, *sources: Tensor | None) -> Tensor:
    """Selective scan: h = exp(softplus(dt) A) h + softplus(dt) x B, y = h C (`ggml_compute_forward_ssm_scan_f32`).

    Args:
        node: The node; its first parameter is how many of the last states it keeps.
        sources: States [any, heads, dim, n], x [sequences, tokens, heads, dim], dt [1, sequences, tokens, heads],
            A [1, 1, heads, n] (Mamba 1) or [1, 1, heads, 1] (Mamba 2), B and C [sequences, tokens, groups, n], and the
            state that each sequence begins with [1, 1, 1, sequences].

    Returns:
        [1, 1, 1, size]: y [sequences, tokens, heads, dim], then the last states [kept, sequences, heads, dim, n], the
        latest first. Where there are fewer tokens than states to keep, ggml leaves the rest undefined; here it is 0.
    """
    states, x, dt, a, b, c, ids = need(sources, 7)
    kept, tokens = node.params[0], x.shape[1]
    step = F.softplus(dt[0], threshold=20.0).unsqueeze(-1)  # [sequences, tokens, heads, 1]
    moved, log_decay = x * step, step * a[0, 0]
    scan = _scan_by_state if a.shape[-1] > 1 else _scan_by_head
    found, last = [], [states.index_select(0, ids.reshape(-1))]
    sizes = _parts(tokens, kept)
    for part in zip(*(value.split_with_sizes(sizes, dim=1) for value in (moved, log_decay, b, c)), strict=True):
        y, state = scan(last[-1], *part)
        found.append(y)
        last.append(state)
    snapshots = last[:0:-1][:kept]
    snapshots += [torch.zeros_like(last[0])] * (kept - len(snapshots))
    return torch.cat([piece.reshape(-1) for piece in (torch.cat(found, dim=1), *snapshots)]).reshape(1, 1, 1, -1)


def _parts(tokens: int, kept: int) -> list[int]:
    """How many tokens to take at once, so that each of the last `kept` tokens ends a part."""
    rest = max(1, tokens - kept + 1)
    sizes = [min(_CHUNK, rest - begin) for begin in range(0, rest, _CHUNK)]
    return sizes + [1] * (tokens - rest)


def _decay(log: Tensor) -> Tensor:
    """exp, but 0 where nothing of a float32 is left: arithmetic with denormal numbers takes many times as long."""
    return torch.where(log > _GONE, log, -torch.inf).exp()


def _per_head(x: Tensor, heads: int) -> Tensor:
    """[sequences, tokens, groups, n] repeated for the heads of each group."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def _scan_by_state(state: Tensor, x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Mamba 1, where each state decays by itself: token by token.

    Args:
        state: [sequences, heads, dim, n].
        x: Inputs times their steps [sequences, tokens, heads, dim].
        log_decay: [sequences, tokens, heads, n].
        b: [sequences, tokens, groups, n].
        c: As `b`.

    Returns:
        y, shaped as `x`, and the state after the last token.
    """
    sequences, tokens, heads, dim = x.shape
    grouped = (sequences, tokens, b.shape[2], heads // b.shape[2] * dim)  # the channels that share b and c
    news = x.reshape(*grouped, 1) @ b.unsqueeze(3)
    passed = []
    for decay, new in zip(_decay(log_decay).unsqueeze(3).unbind(1), news.unbind(1), strict=True):
        state = torch.addcmul(new.view_as(state), state, decay)
        passed.append(state)
    y = torch.stack(passed, dim=1).reshape(*grouped, -1) @ c.unsqueeze(-1)
    return y.reshape(x.shape), state


def _scan_by_head(state: Tensor, x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Mamba 2, where a head's states decay together: all tokens at once, as attention with decaying weights.

    The decay between two tokens is the exponential of a sum over exactly the tokens between them (a difference of sums
    from the start would cancel). This is the quadratic form of Dao & Gu 2024 (arXiv 2405.21060, section 6).

    Args:
        state: [sequences, heads, dim, n].
        x: Inputs times their steps [sequences, tokens, heads, dim].
        log_decay: [sequences, tokens, heads, 1].
        b: [sequences, tokens, groups, n].
        c: As `b`.

    Returns:
        y, shaped as `x`, and the state after the last token.
    """
    tokens, heads, groups = x.shape[1], x.shape[2], b.shape[2]
    logs = log_decay.squeeze(-1).transpose(1, 2)  # [sequences, heads, tokens]
    after = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril(-1)  # [later, earlier]
    between = torch.where(after, logs.unsqueeze(-1), 0).cumsum(dim=-2)
    decay = _decay(between).tril()  # [sequences, heads, later, earlier]
    scores = torch.einsum("sign,sjgn->sgij", c, b).repeat_interleave(heads // groups, dim=1)
    whole = _decay(logs.cumsum(dim=-1))  # decay from the start [sequences, heads, tokens]
    y = torch.einsum("shij,sjhd->sihd", scores * decay, x)
    y = y + torch.einsum("sihn,shdn->sihd", _per_head(c, heads), state) * whole.transpose(1, 2).unsqueeze(-1)
    weighted = x * decay[:, :, -1].transpose(1, 2).unsqueeze(-1)
    new = torch.einsum("sjhd,sjhn->shdn", weighted, _per_head(b, heads))
    return y, state * whole[:, :, -1, None, None] + new


OPS: Mapping[str, Op] = {"SSM_CONV": _ssm_conv, "SSM_SCAN": _ssm_scan}
