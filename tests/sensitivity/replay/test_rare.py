"""Rare operations in torch: against ggml, and against their definitions, element by element in float64."""

from __future__ import annotations

import itertools
import struct

import numpy as np
import pytest
import torch
from torch import Tensor

from qres.errors import UnsupportedError
from qres.native.graph import Node
from qres.sensitivity.replay.rare import OPS
from tests.sensitivity.replay import ggml_op

_FLT_MAX = torch.finfo(torch.float32).max


def node(op: str, ne: tuple[int, int, int, int], *params: int) -> Node:
    return Node(0, 0, op, op, ne, 0, (), params=params)


def word(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def error(found: Tensor, expected: Tensor) -> float:
    """Normalised mean squared error."""
    assert found.shape == expected.shape
    return ((found.double() - expected).square().sum() / expected.square().sum()).item()


def gradients_hold(this: Node, *sources: Tensor) -> bool:
    leaves = [x.clone().requires_grad_() for x in sources]
    return bool(torch.autograd.gradcheck(lambda *x: OPS[this.op](this, *x), leaves))


# -- lightning indexer


def indexer_sources(
    n3: int, masks: int, heads: int = 3, tokens: int = 4, keys: int = 7, width: int = 5
) -> list[Tensor]:
    return [
        normal(n3, tokens, heads, width, seed=1),
        normal(n3, keys, 1, width, seed=2),
        normal(n3, 1, tokens, heads, seed=3),
        normal(masks, 1, tokens, keys, seed=4),
    ]


@pytest.mark.parametrize(("n3", "masks"), [(1, 1), (2, 2), (4, 2)])
def test_indexer(n3: int, masks: int) -> None:
    q, k, weights, mask = sources = indexer_sources(n3, masks)
    expected = torch.zeros(n3, 1, 4, 7, dtype=torch.float64)
    for s, t, key in itertools.product(range(n3), range(4), range(7)):
        dots = [max(0.0, float(q[s, t, h] @ k[s, key, 0])) for h in range(3)]
        expected[s, 0, t, key] = mask[s % masks, 0, t, key] + sum(
            d * float(weights[s, 0, t, h]) for h, d in enumerate(dots)
        )
    this = node("LIGHTNING_INDEXER", (7, 4, 1, n3))
    assert error(OPS["LIGHTNING_INDEXER"](this, *(x.float() for x in sources)), expected) < 1e-12
    assert gradients_hold(this, *sources)


def test_a_masked_key_scores_minus_infinity() -> None:
    sources = indexer_sources(1, 1)
    sources[3][0, 0, :, 3] = -torch.inf
    found = OPS["LIGHTNING_INDEXER"](node("LIGHTNING_INDEXER", (7, 4, 1, 1)), *sources)
    assert bool((found[..., 3] == -torch.inf).all())
    assert bool(found[..., :3].isfinite().all())


# -- hyper-connections


@pytest.mark.parametrize("gated", [False, True])
def test_streams_are_summed(gated: bool) -> None:
    tokens, streams, width = 3, 4, 5
    x = normal(1, tokens, streams, width)
    weights = normal(1, tokens, streams, width, seed=1) if gated else normal(1, 1, tokens, streams, seed=1)
    expected = torch.zeros(1, 1, tokens, width, dtype=torch.float64)
    for t, h, i in itertools.product(range(tokens), range(streams), range(width)):
        w = torch.sigmoid(weights[0, t, h, i]) if gated else weights[0, 0, t, h]
        expected[0, 0, t, i] += 0.375 * x[0, t, h, i] * w
    this = node("DSV4_HC_PRE", (width, tokens, 1, 1), word(0.375), int(gated))
    assert error(OPS["DSV4_HC_PRE"](this, x.float(), weights.float()), expected) < 1e-12
    assert gradients_hold(this, x, weights)


@pytest.mark.parametrize("mixed", [False, True])
def test_streams_are_written(mixed: bool) -> None:
    tokens, streams, width = 3, 4, 5
    x, residual = normal(1, 1, tokens, width, seed=1), normal(1, tokens, streams, width, seed=2)
    post, comb = normal(1, 1, tokens, streams, seed=3), normal(1, tokens, streams, streams, seed=4)
    expected = torch.zeros_like(residual)
    for t, to in itertools.product(range(tokens), range(streams)):
        kept = sum(comb[0, t, f, to] * residual[0, t, f] for f in range(streams)) if mixed else residual[0, t, to]
        expected[0, t, to] = x[0, 0, t] * post[0, 0, t, to] + kept
    sources = [x, residual, post, *([comb] if mixed else [])]
    this = node("DSV4_HC_POST", (width, streams, tokens, 1))
    assert error(OPS["DSV4_HC_POST"](this, *(s.float() for s in sources)), expected) < 1e-12
    assert gradients_hold(this, *sources)


@pytest.mark.parametrize(("rounds", "eps"), [(1, 1e-2), (5, 1e-6)])
def test_streams_are_mixed(rounds: int, eps: float) -> None:
    tokens, n = 3, 4
    mixes, scale, base = normal(1, 1, tokens, 24, seed=1), normal(1, 1, 1, 3, seed=2), normal(1, 1, 1, 24, seed=3)
    expected = torch.zeros(1, tokens, n, n, dtype=torch.float64)
    for t in range(tokens):
        rows = [
            [float((mixes[0, 0, t, i] * scale[..., 2] + base[0, 0, 0, i]).exp()) for i in range(8 + 4 * f, 12 + 4 * f)]
            for f in range(n)
        ]
        rows = [[value / sum(row) + eps for value in row] for row in rows]
        for turn in range(2 * rounds - 1):  # over `from` first, then over `to` and `from` again
            if turn % 2:
                rows = [[value / (sum(row) + eps) for value in row] for row in rows]
            else:
                sums = [sum(row[to] for row in rows) + eps for to in range(n)]
                rows = [[value / total for value, total in zip(row, sums, strict=True)] for row in rows]
        expected[0, t] = torch.tensor(rows)
    this = node("DSV4_HC_COMB", (n, n, tokens, 1), word(eps), rounds)
    assert error(OPS["DSV4_HC_COMB"](this, mixes.float(), scale.float(), base.float()), expected) < 1e-12
    assert gradients_hold(this, mixes, scale, base)


# -- pooling


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize(
    ("k0", "k1", "s0", "s1", "p0", "p1"),
    [(2, 2, 2, 2, 0, 0), (3, 2, 1, 2, 1, 0), (3, 3, 2, 1, 2, 2), (2, 3, 3, 2, 0, 1), (1, 1, 2, 2, 1, 1)],
)
def test_pooling(kind: int, k0: int, k1: int, s0: int, s1: int, p0: int, p1: int) -> None:
    x = normal(2, 3, 7, 9)
    width, height = (9 + 2 * p0 - k0) // s0 + 1, (7 + 2 * p1 - k1) // s1 + 1
    expected = torch.zeros(2, 3, height, width, dtype=torch.float64)
    for oy, ox in itertools.product(range(height), range(width)):
        ys = [y for y in range(oy * s1 - p1, oy * s1 - p1 + k1) if 0 <= y < 7]
        xs = [i for i in range(ox * s0 - p0, ox * s0 - p0 + k0) if 0 <= i < 9]
        inside = x[:, :, ys][..., xs].flatten(2)
        if kind == 1:
            expected[:, :, oy, ox] = inside.sum(dim=-1) / (k0 * k1)
        else:
            expected[:, :, oy, ox] = inside.amax(dim=-1) if inside.numel() else -_FLT_MAX
    this = node("POOL_2D", (width, height, 3, 2), kind, k0, k1, s0, s1, p0, p1)
    found = OPS["POOL_2D"](this, x)
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, rtol=1e-14, atol=1e-14)
    if float(expected.abs().max()) < _FLT_MAX:
        assert gradients_hold(this, x)


def test_another_pooling_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="POOL_2D operation 2"):
        OPS["POOL_2D"](node("POOL_2D", (1, 1, 1, 1), 2, 1, 1, 1, 1, 0, 0), normal(1, 1, 1, 1))


# -- ggml's own values and slopes


def arrays(*sources: Tensor) -> list[ggml_op.Array]:
    return [x.numpy().astype(np.float32) for x in sources]


POOLS = [(2, 2, 2, 2, 0.0, 0.0), (3, 2, 1, 2, 1.0, 0.0), (3, 3, 2, 1, 2.0, 2.0), (1, 1, 2, 2, 2.0, 3.0)]

STREAMS = arrays(normal(1, 9, 4, 24, seed=1))
HYPER: dict[str, tuple[str, list[ggml_op.Array], tuple[float, ...]]] = {
    "sum": ("ggml_dsv4_hc_pre", [*STREAMS, *arrays(normal(1, 1, 9, 4))], ()),
    "gated sum": ("ggml_dsv4_hc_pre_gated", [*STREAMS, *arrays(normal(1, 9, 4, 24))], (0.375,)),
    "write": (
        "ggml_dsv4_hc_post",
        arrays(
            normal(1, 1, 9, 24), normal(1, 9, 4, 24, seed=1), normal(1, 1, 9, 4, seed=2), normal(1, 9, 4, 4, seed=3)
        ),
        (),
    ),
    "mix once": (
        "ggml_dsv4_hc_comb",
        arrays(normal(1, 1, 9, 24), normal(1, 1, 1, 3, seed=1), normal(1, 1, 1, 24, seed=2)),
        (1e-2, 1),
    ),
    "mix": (
        "ggml_dsv4_hc_comb",
        arrays(normal(1, 1, 9, 24), normal(1, 1, 1, 3, seed=1), normal(1, 1, 1, 24, seed=2)),
        (1e-6, 5),
    ),
}


@pytest.mark.parametrize("case", HYPER)
def test_hyper_connections_are_ggmls(case: str) -> None:
    function, sources, extra = HYPER[case]
    assert ggml_op.error(OPS, function, sources, *extra) < 1e-12
    assert max(ggml_op.gradient_errors(OPS, function, sources, *extra)) < 1e-2


def test_streams_that_stay_are_ggmls() -> None:
    sources = [*HYPER["write"][1][:3], None]
    assert ggml_op.error(OPS, "ggml_dsv4_hc_post", sources) < 1e-12


@pytest.mark.parametrize("halved", [False, True], ids=["keys in float32", "in float16"])
@pytest.mark.parametrize(("n3", "masks"), [(1, 1), (2, 2), (4, 2)])
def test_indexer_is_ggmls(n3: int, masks: int, halved: bool) -> None:
    q, k, weights, mask = arrays(*indexer_sources(n3, masks, heads=6, tokens=5, keys=40, width=32))
    sources = [q, k.astype(np.float16) if halved else k, weights, mask.astype(np.float16)]
    assert ggml_op.error(OPS, "ggml_lightning_indexer", sources) < 1e-12
    assert max(ggml_op.gradient_errors(OPS, "ggml_lightning_indexer", sources, step=1e-3)) < 1e-2


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("window", POOLS)
def test_pooling_is_ggmls(kind: int, window: tuple[float, ...]) -> None:
    sources = arrays(normal(2, 3, 9, 11))
    assert ggml_op.error(OPS, "ggml_pool_2d", sources, kind, *window) < 1e-12
    if window != POOLS[-1]:  # there the largest float32 swallows all differences
        assert ggml_op.gradient_errors(OPS, "ggml_pool_2d", sources, kind, *window, step=1e-4)[0] < 1e-2
