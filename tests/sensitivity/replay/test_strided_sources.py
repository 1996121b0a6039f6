"""Recurrent and rare operations on sources as they lie in a graph: parts of one projection, heads and tokens swapped.

The sources of each case share memory with much that is not theirs; that ggml and torch read the same is the test.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from qres.sensitivity.replay import delta_rule, rare, state_space
from qres.sensitivity.replay.ops import Op
from tests.sensitivity.replay.ggml_op import Array, Source, Viewed, error, gradient_errors

_OPS: Mapping[str, Op] = {**state_space.OPS, **delta_rule.OPS, **rare.OPS}

_EXACT = 1e-12  # measured: 2e-14 at most; the order of sums differs


def values(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def cut(whole: Array, begin: int, heads: int, width: int) -> Viewed:
    """`heads` of `width` from columns of a projection [sequences, tokens, columns], where they lie."""
    sequences, tokens, _ = whole.shape
    part = whole[..., begin : begin + heads * width].reshape(sequences, tokens, heads, width)
    assert np.shares_memory(part, whole)
    return Viewed(part)


def normalized(whole: Array, begin: int, heads: int, width: int) -> None:
    """Make keys of length 1, in place: longer ones let a delta rule grow without bounds."""
    part = cut(whole, begin, heads, width).array
    part /= np.linalg.norm(part, axis=-1, keepdims=True)


def scan(sequences: int, tokens: int, heads: int, dim: int, groups: int, n: int, *, by_state: bool) -> list[Source]:
    """x, B and C are parts of what the convolution gave (Mamba 2)."""
    whole = values(sequences, tokens, heads * dim + 2 * groups * n)
    return [
        values(sequences, heads, dim, n, seed=1),
        cut(whole, 0, heads, dim),
        values(1, sequences, tokens, heads, seed=2),
        -np.exp(values(heads, n if by_state else 1, seed=3)),
        cut(whole, heads * dim, groups, n),
        cut(whole, heads * dim + groups * n, groups, n),
        np.arange(sequences, dtype=np.int32),
    ]


def delta(sequences: int, tokens: int, heads: int, fewer: int, width: int, *, shared: bool) -> list[Source]:
    """q, k and v are parts of what the convolution gave (Qwen3-Next)."""
    whole = values(sequences, tokens, (2 * fewer + heads) * width)
    normalized(whole, 0, fewer, width)
    normalized(whole, fewer * width, fewer, width)
    return [
        cut(whole, 0, fewer, width),
        cut(whole, fewer * width, fewer, width),
        cut(whole, 2 * fewer * width, heads, width),
        -np.abs(values(sequences, tokens, heads, 1 if shared else width, seed=1)),
        1 / (1 + np.exp(values(sequences, tokens, heads, 1, seed=2))),
        values(sequences, heads, width, width, seed=3),
    ]


def swapped_delta() -> list[Source]:
    """q, k and v [.., heads, tokens, width] in memory."""
    sources = delta(2, 21, 4, 2, 16, shared=True)
    for i in range(3):
        array = np.ascontiguousarray(sources[i].array.transpose(0, 2, 1, 3))  # type: ignore[union-attr]
        sources[i] = Viewed(array.transpose(0, 2, 1, 3))
    return sources


def fewer_sequences() -> list[Source]:
    """Two sequences of q and k for four of v: the first two share the first."""
    sources = delta(4, 21, 4, 2, 16, shared=True)
    keys = delta(2, 21, 4, 2, 16, shared=True)
    return [*keys[:2], *sources[2:]]


def indexer(tokens: int = 5, heads: int = 6, keys: int = 40, width: int = 32) -> list[Source]:
    """Queries without their rotated part, keys from a cache of wider rows."""
    return [
        Viewed(values(2, tokens, heads, width + 8)[..., 8:]),
        Viewed(values(2, keys, 1, width + 16, seed=1).astype(np.float16)[..., :width]),
        Viewed(values(2, 1, tokens, heads + 3, seed=2)[..., 3:]),
        Viewed(values(2, 1, tokens, keys + 24, seed=3).astype(np.float16)[..., :keys]),
    ]


def mixes(tokens: int = 9, streams: int = 4, width: int = 24) -> dict[str, Source]:
    """Of hyper-connections: two weights of each token from one projection, streams with a gap behind each token."""
    whole = values(1, 1, tokens, (2 + streams) * streams + 5)
    return {
        "x": Viewed(values(1, 1, tokens, width + 8, seed=1)[..., 8:]),
        "streams": Viewed(values(1, tokens, streams + 2, width, seed=2)[:, :, :streams]),
        "pre": Viewed(whole[..., :streams]),
        "post": Viewed(whole[..., streams : 2 * streams]),
        "mixes": Viewed(whole[..., 5:]),
        "comb": Viewed(values(1, tokens, streams, streams, seed=3).swapaxes(2, 3)),
        "gates": Viewed(values(1, streams, tokens, width, seed=4).swapaxes(1, 2)),
    }


_MIX = mixes()
_SCALE, _BASE = values(3, seed=5), values(24, seed=6)

CASES: dict[str, tuple[str, list[Source], tuple[Any, ...]]] = {
    "scan by state": ("ggml_ssm_scan", scan(2, 37, 6, 1, 1, 16, by_state=True), (1,)),
    "scan by head": ("ggml_ssm_scan", scan(2, 70, 6, 5, 3, 16, by_state=False), (1,)),
    "scan by head, states kept": ("ggml_ssm_scan", scan(2, 9, 4, 3, 2, 8, by_state=False), (3,)),
    "convolution": ("ggml_ssm_conv", [Viewed(values(2, 8, 23)[:, :6]), values(6, 4)], ()),
    "delta rule": ("ggml_gated_delta_net", delta(2, 40, 4, 2, 16, shared=True), (1,)),
    "delta rule by channel": ("ggml_gated_delta_net", delta(2, 40, 4, 2, 16, shared=False), (1,)),
    "delta rule, heads and tokens swapped": ("ggml_gated_delta_net", swapped_delta(), (2,)),
    "delta rule, fewer sequences of keys": ("ggml_gated_delta_net", fewer_sequences(), (1,)),
    "indexer": ("ggml_lightning_indexer", indexer(), ()),
    "streams summed": ("ggml_dsv4_hc_pre", [_MIX["streams"], _MIX["pre"]], ()),
    "streams summed, gated": ("ggml_dsv4_hc_pre_gated", [_MIX["streams"], _MIX["gates"]], (0.375,)),
    "streams written": ("ggml_dsv4_hc_post", [_MIX["x"], _MIX["streams"], _MIX["post"], _MIX["comb"]], ()),
    "streams mixed": ("ggml_dsv4_hc_comb", [_MIX["mixes"], _SCALE, _BASE], (1e-6, 5)),
    "pooled": ("ggml_pool_2d", [Viewed(values(2, 3, 8, 16)[..., 3:14])], (1, 3, 2, 2, 1, 1.0, 1.0)),
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_ggmls(case: str) -> None:
    function, sources, extra = CASES[case]
    assert error(_OPS, function, sources, *extra) < _EXACT


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_ggmls(case: str) -> None:
    function, sources, extra = CASES[case]
    found = gradient_errors(_OPS, function, sources, *extra, step=1e-3)
    assert len(found) > 0
    assert max(found) < 1e-2
