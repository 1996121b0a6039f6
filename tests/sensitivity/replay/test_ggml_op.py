"""The harness itself: strides and types reach ggml, and a wrong operation does not pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from qres.native.graph import Node
from qres.sensitivity.replay.ops import OPS, Op
from tests.sensitivity.replay.ggml_op import (
    Array,
    Quantized,
    Source,
    Viewed,
    error,
    gradient_errors,
    normalised_error,
    run,
    tensors,
)


def values(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def wrong(op: str, function: Op) -> dict[str, Op]:
    return {**OPS, op: function}


VIEWS = {
    "whole": values(2, 3, 5, 7),
    "heads and tokens swapped": values(2, 3, 5, 7).transpose(0, 2, 1, 3),
    "turned": values(5, 7).T,
    "part of each row": values(3, 5, 20)[..., 4:11],
    "one of the heads": values(3, 5, 4, 7)[:, :, 1:2],
    "every other row": values(3, 10, 7)[:, ::2],
    "in halves": values(3, 5, 20).astype(np.float16)[..., 4:11],
}


@pytest.mark.parametrize("array", VIEWS.values(), ids=VIEWS)
def test_a_view_is_read_by_its_strides(array: Array) -> None:
    node, value = run("ggml_cont", [Viewed(array)])
    assert node.op == "CONT"
    assert np.array_equal(value.reshape(array.shape), array)
    assert node.ne == ((1,) * (4 - array.ndim) + array.shape)[::-1]


@pytest.mark.parametrize("array", VIEWS.values(), ids=VIEWS)
def test_a_view_keeps_its_strides_in_torch(array: Array) -> None:
    (found,) = tensors([Viewed(array)])
    assert found is not None
    assert found.dim() == 4
    assert np.array_equal(found.numpy().reshape(array.shape), array)
    strides = dict(zip(array.shape, array.strides, strict=True))
    seen = dict(zip(found.shape, found.stride(), strict=True))
    assert all(seen[n] * array.itemsize == stride for n, stride in strides.items() if n > 1)


def test_a_view_is_not_what_lies_in_order() -> None:
    """What is cut away is in the tensor's memory: ggml's own strides show it."""
    array = values(3, 5, 20)[..., 4:11]
    node, _ = run("ggml_view_1d", [Viewed(array)], 20, 0)
    assert node.op == "VIEW"
    assert np.array_equal(run("ggml_view_1d", [Viewed(array)], 20, 0)[1].ravel()[:7], array[0, 0])
    assert not np.array_equal(run("ggml_view_1d", [Viewed(array)], 20, 0)[1].ravel()[7:14], array[0, 1])
    assert np.array_equal(run("ggml_view_1d", [array], 20, 0)[1].ravel()[7:14], array[0, 1])


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "BF16"])
def test_a_quantized_source(kind: str) -> None:
    weights, x = values(6, 256), values(4, 256, seed=1)
    _, found = run("ggml_mul_mat", [Quantized(weights, kind), x])
    (stored,) = tensors([Quantized(weights, kind)])
    assert stored is not None
    exact = x @ stored.numpy()[0, 0].T
    assert normalised_error(exact, found[0, 0]) < 1e-4  # ggml rounds x to 8 or 16 bits for the product
    if kind != "Q8_0":  # as near as the rounding of x itself
        assert (
            normalised_error(exact, found[0, 0]) < normalised_error(x @ weights.T, found[0, 0]) / 10 or kind == "BF16"
        )
    assert not np.array_equal(stored.numpy()[0, 0], weights)


def test_a_quantized_source_of_get_rows_is_exact() -> None:
    table, ids = Quantized(values(6, 64), "Q4_0"), np.array([3, 0, 3], np.int32)
    assert error(OPS, "ggml_get_rows", [table, ids]) == 0.0


# -- a wrong operation fails


def _wrong_value(_: Node, /, *sources: Tensor | None) -> Tensor:
    assert sources[0] is not None
    return torch.sqrt(sources[0]) * 1.001


def _wrong_gradient(_: Node, /, *sources: Tensor | None) -> Tensor:
    """The right value; half of the gradient is lost."""
    assert sources[0] is not None
    x = sources[0]
    half = x / 2 + x.detach() / 2
    return torch.sqrt(half)


PLACES: dict[str, Source] = {
    "in order": np.abs(values(3, 5, 7)),
    "viewed": Viewed(np.abs(values(3, 5, 20))[..., 4:11]),
}


@pytest.mark.parametrize("source", PLACES.values(), ids=PLACES)
def test_a_wrong_value_is_seen(source: Source) -> None:
    assert error(OPS, "ggml_sqrt", [source]) < 1e-12
    assert error(wrong("SQRT", _wrong_value), "ggml_sqrt", [source]) > 1e-7


@pytest.mark.parametrize("source", PLACES.values(), ids=PLACES)
def test_a_wrong_gradient_is_seen(source: Source) -> None:
    assert max(gradient_errors(OPS, "ggml_sqrt", [source], step=1e-3)) < 1e-2
    assert max(gradient_errors(wrong("SQRT", _wrong_gradient), "ggml_sqrt", [source], step=1e-3)) > 0.1


def test_another_shape_is_no_small_error() -> None:
    with pytest.raises(AssertionError, match="instead of"):
        normalised_error(values(2, 3), values(3, 2))
