"""Recurrent attention in torch: against ggml, and against its definition, token by token in float64."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from qres.native.graph import Node
from qres.sensitivity.replay import delta_rule
from tests.sensitivity.replay import ggml_op

Sources = list[Tensor]


def node(op: str, *params: int) -> Node:
    return Node(0, 0, op, op, (1, 1, 1, 1), 0, (), params=params)


def word(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(*shape: int, seed: int = 0) -> Tensor:
    return torch.nn.functional.normalize(normal(*shape, seed=seed), dim=-1)


def error(found: Tensor, expected: Tensor) -> float:
    """Normalised mean squared error."""
    return ((found.double() - expected).square().sum() / expected.square().sum()).item()


# -- the definitions, one token and one head at a time


def gated_delta_net(sources: Sources, kept: int) -> Tensor:
    """As ggml.h describes it: S[i][j] is kept as state[j][i], heads of q and k are repeated as a whole."""
    q, k, v, g, beta, state = sources
    n_seqs, n_tokens, heads, width = v.shape
    out = torch.zeros_like(v)
    states = torch.zeros(kept, n_seqs, heads, width, width, dtype=v.dtype)
    for s in range(n_seqs):
        for h in range(heads):
            m = state[s, h].T.clone()
            for t in range(n_tokens):
                key = k[s * k.shape[0] // n_seqs, t, h % k.shape[2]]
                query = q[s * q.shape[0] // n_seqs, t, h % q.shape[2]]
                m = m * g[s, t, h].exp().reshape(-1, 1)
                m = m + torch.outer(key, beta[s, t, h] * (v[s, t, h] - key @ m))
                out[s, t, h] = query @ m / width**0.5
                if n_tokens - 1 - t < kept:
                    states[n_tokens - 1 - t, s, h] = m.T
    return torch.cat([out.flatten(), states.flatten()])


def by_token(
    state: Tensor, n_tokens: int, heads: int, step: Callable[[int, int, Tensor], tuple[Tensor, Tensor]]
) -> Tensor:
    """Outputs [tokens, heads, d] of `step(token, head, S) -> (out, S)`, then states [sequences, heads, d, d], flat."""
    n_seqs = state.shape[2]
    width = round((state.shape[3] / heads) ** 0.5)
    now = list(state.reshape(n_seqs * heads, width, width))
    out = torch.zeros(n_tokens, heads, width, dtype=state.dtype)
    for t in range(n_tokens):
        for h in range(heads):
            at = t * n_seqs // n_tokens * heads + h
            out[t, h], now[at] = step(t, h, now[at])
    return torch.cat([out.flatten(), torch.stack(now).flatten()])


def wkv6(sources: Sources) -> Tensor:
    k, v, r, first, decay, state = sources
    k, v, r, decay = k[0], v[0], r[0], decay[0]

    def step(t: int, h: int, s: Tensor) -> tuple[Tensor, Tensor]:
        kv = torch.outer(k[t, h], v[t, h])
        return r[t, h] @ (first[0, 0, h][:, None] * kv + s), decay[t, h][:, None] * s + kv

    return by_token(state, len(k), k.shape[1], step)


def gated_linear(sources: Sources, scale: float) -> Tensor:
    k, v, q, gate, state = sources
    k, v, q, gate = k[0], v[0], q[0], gate[0]

    def step(t: int, h: int, s: Tensor) -> tuple[Tensor, Tensor]:
        s = gate[t, h][:, None] * s + torch.outer(k[t, h], v[t, h])
        return scale * q[t, h] @ s, s

    return by_token(state, len(k), k.shape[1], step)


def wkv7(sources: Sources) -> Tensor:
    r, w, k, v, a, b, state = sources
    r, w, k, v, a, b = r[0], w[0], k[0], v[0], a[0], b[0]

    def step(t: int, h: int, s: Tensor) -> tuple[Tensor, Tensor]:
        s = s * w[t, h] + torch.outer(v[t, h], k[t, h]) + torch.outer(s @ a[t, h], b[t, h])
        return s @ r[t, h], s

    return by_token(state, len(k), k.shape[1], step)


# -- their inputs


def delta_sources(n_seqs: int, n_tokens: int, heads: int, fewer: int, width: int, *, shared: bool) -> Sources:
    return [
        unit(n_seqs, n_tokens, fewer, width, seed=1),
        unit(n_seqs, n_tokens, fewer, width, seed=2),
        normal(n_seqs, n_tokens, heads, width, seed=3),
        -normal(n_seqs, n_tokens, heads, 1 if shared else width, seed=4).abs() * 3,
        torch.sigmoid(normal(n_seqs, n_tokens, heads, 1, seed=5)),
        normal(n_seqs, heads, width, width, seed=6),
    ]


def linear_sources(n_seqs: int, n_tokens: int, heads: int, width: int) -> dict[str, Sources]:
    shape = (1, n_seqs * n_tokens, heads, width)
    k, v, q = (normal(*shape, seed=i) for i in (1, 2, 3))
    decay = torch.sigmoid(3 * normal(*shape, seed=4))
    state = normal(1, 1, n_seqs, heads * width * width, seed=5)
    key = unit(*shape, seed=6)
    return {
        "RWKV_WKV6": [k, v, q, normal(1, 1, heads, width, seed=7), decay, state],
        "GATED_LINEAR_ATTN": [k, v, q, decay, state],
        "RWKV_WKV7": [q, decay, k, v, -key, key * torch.sigmoid(normal(*shape, seed=8)), state],
    }


LINEAR: dict[str, tuple[Node, Callable[[Sources], Tensor]]] = {
    "RWKV_WKV6": (node("RWKV_WKV6"), wkv6),
    "GATED_LINEAR_ATTN": (node("GATED_LINEAR_ATTN", word(0.375)), lambda sources: gated_linear(sources, 0.375)),
    "RWKV_WKV7": (node("RWKV_WKV7"), wkv7),
}

SHAPES = [(1, 1, 2, 8), (1, 16, 1, 8), (2, 37, 3, 8), (1, 70, 2, 16)]
"""Sequences, tokens of each, heads, channels: less than a block of tokens, just one, and several."""


# -- ggml's own values and slopes

GGML: dict[str, tuple[str, tuple[float, ...]]] = {
    "RWKV_WKV6": ("ggml_rwkv_wkv6", ()),
    "GATED_LINEAR_ATTN": ("ggml_gated_linear_attn", (0.375,)),
    "RWKV_WKV7": ("ggml_rwkv_wkv7", ()),
}


def arrays(sources: Sources) -> list[ggml_op.Array]:
    return [x.numpy().astype(np.float32) for x in sources]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("n_seqs", "n_tokens", "heads", "fewer", "width", "kept"),
    [(1, 1, 2, 2, 16, 1), (2, 33, 4, 2, 16, 1), (2, 70, 6, 3, 64, 1), (1, 100, 3, 1, 32, 3), (2, 3, 2, 2, 16, 3)],
)
def test_gated_delta_net_is_ggmls(
    n_seqs: int, n_tokens: int, heads: int, fewer: int, width: int, kept: int, shared: bool
) -> None:
    sources = arrays(delta_sources(n_seqs, n_tokens, heads, fewer, width, shared=shared))
    assert ggml_op.error(delta_rule.OPS, "ggml_gated_delta_net", sources, kept) < 1e-12


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("n_seqs", [1, 2])
def test_gradient_of_gated_delta_net_is_ggmls(n_seqs: int, shared: bool) -> None:
    """In small steps: a gate is in an exponent, and at steps of 1e-2 the difference itself is off by 1e-2."""
    sources = arrays(delta_sources(n_seqs, 33, 4, 2, 16, shared=shared))
    assert max(ggml_op.gradient_errors(delta_rule.OPS, "ggml_gated_delta_net", sources, 1, step=1e-3)) < 1e-2


@pytest.mark.parametrize("op", GGML)
@pytest.mark.parametrize(("n_seqs", "n_tokens", "heads"), [(1, 1, 2), (1, 40, 3), (2, 33, 2)])
def test_linear_attention_is_ggmls(op: str, n_seqs: int, n_tokens: int, heads: int) -> None:
    """With 64 channels: ggml's own RWKV_WKV7 reads past the end of narrower heads."""
    function, extra = GGML[op]
    sources = arrays(linear_sources(n_seqs, n_tokens, heads, 64)[op])
    assert ggml_op.error(delta_rule.OPS, function, sources, *extra) < 1e-12


@pytest.mark.parametrize("op", GGML)
@pytest.mark.parametrize("n_seqs", [1, 2])
def test_gradient_of_linear_attention_is_ggmls(op: str, n_seqs: int) -> None:
    function, extra = GGML[op]
    sources = arrays(linear_sources(n_seqs, 20, 2, 64)[op])
    assert max(ggml_op.gradient_errors(delta_rule.OPS, function, sources, *extra)) < 1e-2


# -- the definition's values


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("n_seqs", "n_tokens", "heads", "width"), SHAPES)
def test_gated_delta_net(n_seqs: int, n_tokens: int, heads: int, width: int, shared: bool) -> None:
    sources = delta_sources(n_seqs, n_tokens, heads, heads, width, shared=shared)
    found = delta_rule.OPS["GATED_DELTA_NET"](node("GATED_DELTA_NET", 1), *(x.float() for x in sources))
    assert found.shape == (1, 1, n_seqs * (n_tokens + width), heads * width)
    assert error(found.flatten(), gated_delta_net(sources, 1)) < 1e-12


@pytest.mark.parametrize("shared", [True, False])
def test_heads_of_queries_and_keys_repeat_as_a_whole(shared: bool) -> None:
    sources = delta_sources(2, 20, 6, 2, 8, shared=shared)
    sources[0] = sources[0][:1]  # and one sequence of queries for both
    found = delta_rule.OPS["GATED_DELTA_NET"](node("GATED_DELTA_NET", 1), *sources)
    assert error(found.flatten(), gated_delta_net(sources, 1)) < 1e-24


@pytest.mark.parametrize("n_tokens", [2, 3, 40])
def test_earlier_states_are_kept_too(n_tokens: int) -> None:
    sources = delta_sources(2, n_tokens, 2, 2, 8, shared=True)
    found = delta_rule.OPS["GATED_DELTA_NET"](node("GATED_DELTA_NET", 3), *sources)
    assert error(found.flatten(), gated_delta_net(sources, 3)) < 1e-24


@pytest.mark.parametrize("op", LINEAR)
@pytest.mark.parametrize(("n_seqs", "n_tokens", "heads", "width"), SHAPES)
def test_linear_attention(op: str, n_seqs: int, n_tokens: int, heads: int, width: int) -> None:
    sources = linear_sources(n_seqs, n_tokens, heads, width)[op]
    this, definition = LINEAR[op]
    found = delta_rule.OPS[op](this, *(x.float() for x in sources))
    assert found.shape == (1, 1, n_seqs * (n_tokens + width), heads * width)
    assert error(found.flatten(), definition(sources)) < 1e-12


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("gate", [-1e4, -80.0, 0.0, 0.5])
def test_no_gate_is_too_strong(gate: float, shared: bool) -> None:
    """exp(-80 * tokens) leaves float32, and decays above 1 are as good as others."""
    sources = delta_sources(1, 40, 2, 2, 8, shared=shared)
    sources[3][:, ::2] = gate
    leaves = [x.float().requires_grad_() for x in sources]
    found = delta_rule.OPS["GATED_DELTA_NET"](node("GATED_DELTA_NET", 1), *leaves)
    assert error(found.detach().flatten(), gated_delta_net(sources, 1)) < 1e-11
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(found.sum(), leaves))


def test_a_decay_of_zero_forgets() -> None:
    for op, sources in linear_sources(1, 20, 2, 8).items():
        this, definition = LINEAR[op]
        decay = sources[{"RWKV_WKV6": 4, "GATED_LINEAR_ATTN": 3, "RWKV_WKV7": 1}[op]]
        decay[:, 7:12] = 0
        leaves = [x.clone().requires_grad_() for x in sources]
        found = delta_rule.OPS[op](this, *leaves)
        grads = torch.autograd.grad(found.square().sum(), leaves)
        expected = torch.autograd.grad(definition(leaves).square().sum(), leaves)
        assert all(error(g, e) < 1e-24 for g, e in zip(grads, expected, strict=True))


# -- gradients in float64


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule, "_BLOCK", 3)
    monkeypatch.setattr(delta_rule, "_BLOCK_SHARED", 2)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kept", [1, 2])
def test_gradient_of_gated_delta_net(shared: bool, kept: int) -> None:
    sources = [x.requires_grad_() for x in delta_sources(2, 5, 2, 1, 3, shared=shared)]
    this = node("GATED_DELTA_NET", kept)
    assert torch.autograd.gradcheck(lambda *x: delta_rule.OPS["GATED_DELTA_NET"](this, *x), sources)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("op", LINEAR)
def test_gradient_of_linear_attention(op: str) -> None:
    sources = [x.requires_grad_() for x in linear_sources(2, 5, 2, 3)[op]]
    assert torch.autograd.gradcheck(lambda *x: delta_rule.OPS[op](LINEAR[op][0], *x), sources)


@pytest.mark.parametrize("shared", [True, False])
def test_gradient_across_blocks(shared: bool) -> None:
    """Of blocks as they are, in float32, against autograd through the definition."""
    sources = [x.requires_grad_() for x in delta_sources(1, 70, 2, 1, 8, shared=shared)]
    leaves = [x.detach().float().requires_grad_() for x in sources]
    found = delta_rule.OPS["GATED_DELTA_NET"](node("GATED_DELTA_NET", 1), *leaves).flatten()
    weights = normal(found.numel(), seed=9)
    grads = torch.autograd.grad(found, leaves, weights.float())
    expected = torch.autograd.grad(gated_delta_net(sources, 1), sources, weights)
    assert max(error(g, e) for g, e in zip(grads, expected, strict=True)) < 1e-11
