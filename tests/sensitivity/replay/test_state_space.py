"""The short convolution and the selective scan in torch, against ggml's own values."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from qres.sensitivity.replay.state_space import OPS
from tests.sensitivity.replay.ggml_op import Array, error, gradient_errors, run, tensors

_EXACT = 1e-12  # measured: 3e-14 at most; the order of sums differs


def _values(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def _scan(sequences: int, tokens: int, heads: int, dim: int, groups: int, n: int, *, by_state: bool) -> list[Array]:
    """Sources of a scan; there are more states than sequences, which begin with the last ones, backwards."""
    ids = np.arange(sequences, dtype=np.int32)[::-1] + 2
    return [
        _values(sequences + 2, heads, dim, n),
        _values(sequences, tokens, heads, dim, seed=1),
        _values(1, sequences, tokens, heads, seed=2) * 3,
        -np.exp(_values(heads, n if by_state else 1, seed=3)),
        _values(sequences, tokens, groups, n, seed=4),
        _values(sequences, tokens, groups, n, seed=5),
        ids,
    ]


_CASES = [
    pytest.param(_scan(1, 1, 5, 1, 1, 16, by_state=True), 1, id="mamba1-one-token"),
    pytest.param(_scan(1, 9, 24, 1, 1, 16, by_state=True), 1, id="mamba1"),
    pytest.param(_scan(2, 70, 4, 3, 2, 5, by_state=True), 1, id="mamba1-dims-groups-sequences"),
    pytest.param(_scan(1, 1, 3, 4, 1, 8, by_state=False), 1, id="mamba2-one-token"),
    pytest.param(_scan(1, 64, 4, 8, 1, 32, by_state=False), 1, id="mamba2-one-part"),
    pytest.param(_scan(1, 65, 4, 8, 4, 16, by_state=False), 1, id="mamba2-as-many-groups-as-heads"),
    pytest.param(_scan(2, 131, 6, 7, 3, 33, by_state=False), 1, id="mamba2-odd-groups-sequences"),
    pytest.param(_scan(2, 131, 6, 7, 3, 33, by_state=False), 4, id="mamba2-last-states"),
    pytest.param(_scan(1, 3, 2, 3, 1, 1, by_state=False), 3, id="mamba2-all-states"),
]


@pytest.mark.parametrize(("sources", "kept"), _CASES)
def test_scan_matches_ggml(sources: list[Array], kept: int) -> None:
    assert error(OPS, "ggml_ssm_scan", sources, kept) < _EXACT


@pytest.mark.parametrize(("sources", "kept"), _CASES)
def test_gradients_of_a_scan_match_differences_of_ggml(sources: list[Array], kept: int) -> None:
    found = gradient_errors(OPS, "ggml_ssm_scan", sources, kept, step=3e-3)
    assert len(found) == 6
    assert max(found) < 1e-2


@pytest.mark.parametrize("sharpness", [1e-3, 1.0, 100.0])
def test_decays_of_any_speed_are_exact(sharpness: float) -> None:
    """A state may fade within a token, or nearly never: neither cancels nor overflows in the quadratic form."""
    sources = _scan(1, 130, 4, 3, 2, 5, by_state=False)
    sources[3] = sources[3] * np.array([[sharpness], [1], [sharpness], [sharpness]], np.float32)
    assert error(OPS, "ggml_ssm_scan", sources, 1) < _EXACT
    node, _ = run("ggml_ssm_scan", sources, 1)
    given = [cast(Tensor, source) for source in tensors(sources)]
    leaves = [source.requires_grad_(True) for source in given[:6]]
    grads = torch.autograd.grad(OPS["SSM_SCAN"](node, *given).sum(), leaves)
    assert all(bool(grad.isfinite().all()) for grad in grads)


def test_states_from_before_the_first_token_are_zero() -> None:
    sources = _scan(1, 2, 2, 3, 1, 4, by_state=False)
    node, _ = run("ggml_ssm_scan", sources, 4)
    out = OPS["SSM_SCAN"](node, *tensors(sources)).reshape(-1)
    states = out[2 * 2 * 3 :].reshape(4, -1)
    assert bool((states[2:] == 0).all())
    assert bool((states[:2] != 0).any(dim=-1).all())


@pytest.mark.parametrize("by_state", [True, False])
def test_scan_passes_gradcheck(by_state: bool) -> None:
    sources = _scan(2, 4, 2, 2, 1, 3, by_state=by_state)
    node, _ = run("ggml_ssm_scan", sources, 1)
    *floats, ids = (cast(Tensor, source) for source in tensors(sources))
    leaves = tuple(value.double().requires_grad_(True) for value in floats)
    check = cast(Any, torch.autograd.gradcheck)
    assert check(lambda *values: OPS["SSM_SCAN"](node, *values, ids), leaves)


@pytest.mark.parametrize(
    ("sequences", "channels", "width", "tokens"), [(1, 6, 4, 1), (1, 33, 4, 20), (2, 5, 3, 7), (3, 1, 1, 2)]
)
def test_convolution_matches_ggml(sequences: int, channels: int, width: int, tokens: int) -> None:
    sources = [_values(sequences, channels, width - 1 + tokens), _values(channels, width)]
    assert error(OPS, "ggml_ssm_conv", sources) < _EXACT
    assert max(gradient_errors(OPS, "ggml_ssm_conv", sources)) < 1e-2
