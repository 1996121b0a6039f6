"""Rows to blocks and back through ggml; no model is loaded."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from qres import levels
from qres.errors import NativeError
from qres.levels import TYPE_TRAITS
from qres.native import blocks

N_ROWS, WIDTH = 7, 512
NEED_IMPORTANCE = {"IQ1_S", "IQ2_XXS", "IQ2_XS"}


def weights(n_rows: int = N_ROWS, width: int = WIDTH, scale: float = 0.05) -> blocks.Floats:
    random = np.random.default_rng(n_rows * width)
    return (random.standard_t(5, (n_rows, width)) * scale).astype(np.float32)


def importance(width: int = WIDTH) -> blocks.Floats:
    return np.random.default_rng(width).gamma(0.5, 2.0, width).astype(np.float32)


def needed(type_name: str) -> blocks.Floats | None:
    return importance() if type_name in NEED_IMPORTANCE else None


def enum(type_name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[type_name]


def test_types_are_those_of_the_table() -> None:
    known = {name: traits for name, traits in TYPE_TRAITS.items() if not traits.removed}
    assert {name: (kind.id, kind.block_size, kind.block_bytes) for name, kind in blocks._TYPES.items()} == {
        name: (traits.id, traits.block_size, traits.block_bytes) for name, traits in known.items()
    }
    assert set(blocks.MAKEABLE) == levels.MAKEABLE


@pytest.mark.parametrize("type_name", blocks.MAKEABLE)
def test_round_trip_is_quantize_and_dequantize(type_name: str) -> None:
    values = weights()
    raw = blocks.quantize(values, type_name, 1, needed(type_name))
    traits = TYPE_TRAITS[type_name]
    assert raw.shape == (N_ROWS, WIDTH // traits.block_size * traits.block_bytes)
    back = blocks.dequantize(raw, type_name, WIDTH, 1)
    assert np.array_equal(blocks.round_trip(values, type_name, 2, needed(type_name)), back)
    error = np.linalg.norm(back - values) / np.linalg.norm(values)
    assert error < {"F32": 1e-9, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 1e-2}.get(type_name, 0.9)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32", "MXFP4"])
def test_bytes_are_those_of_gguf_py(type_name: str) -> None:
    values = weights()
    theirs = gguf.quantize(values, enum(type_name))
    assert np.array_equal(blocks.quantize(values, type_name, 1), theirs.view(np.uint8).reshape(N_ROWS, -1))


@pytest.mark.parametrize("type_name", [name for name in blocks.MAKEABLE if name not in ("Q1_0", "Q2_0", "NVFP4")])
def test_decoding_is_that_of_gguf_py(type_name: str) -> None:
    raw = blocks.quantize(weights(), type_name, 1, needed(type_name))
    ours = blocks.dequantize(raw, type_name, WIDTH, 1)
    theirs = gguf.dequantize(raw, enum(type_name)).reshape(ours.shape)
    np.testing.assert_array_max_ulp(ours, theirs, 1)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_K", "IQ4_NL"])
def test_importance_lowers_the_error_where_it_is(type_name: str) -> None:
    values, squares = weights(64), importance()
    plain, weighted = (blocks.round_trip(values, type_name, 1, one) for one in (None, squares))

    def error(back: blocks.Floats) -> float:
        return float((squares * (back - values) ** 2).sum())

    assert error(weighted) < error(plain)


def test_threads_and_pieces_change_nothing() -> None:
    values = weights(301, 1024)
    one = blocks.round_trip(values, "Q4_K", 1)
    assert np.array_equal(blocks.round_trip(values, "Q4_K", 3), one)
    assert np.array_equal(blocks.round_trip(values[150:151], "Q4_K", 1), one[150:151])
    raw = blocks.quantize(values, "Q4_K", 3)
    assert np.array_equal(blocks.dequantize(raw, "Q4_K", 1024, 3), one)


def test_rows_may_lie_apart_and_have_other_floats() -> None:
    values = weights(20)
    raw = blocks.quantize(values, "Q6_K", 1)
    wide = np.full((20, raw.shape[1] + 3), 255, np.uint8)
    wide[:, : raw.shape[1]] = raw
    expected = blocks.dequantize(raw, "Q6_K", WIDTH, 1)
    assert np.array_equal(blocks.dequantize(wide[:, : raw.shape[1]], "Q6_K", WIDTH, 2), expected)
    assert np.array_equal(blocks.dequantize(raw[::3], "Q6_K", WIDTH, 1), expected[::3])
    half = values.astype(np.float16)
    assert np.array_equal(blocks.quantize(half, "Q6_K", 1), blocks.quantize(half.astype(np.float32), "Q6_K", 1))
    assert np.array_equal(
        blocks.quantize(values[:, ::-1], "Q6_K", 1), blocks.quantize(values[:, ::-1].copy(), "Q6_K", 1)
    )


def test_result_may_go_into_an_array_that_is_there() -> None:
    values = weights()
    expected, out = blocks.round_trip(values, "Q8_0", 1), np.empty_like(values)
    assert blocks.round_trip(values, "Q8_0", 1, out=out) is out
    assert np.array_equal(out, expected)
    assert blocks.round_trip(values, "Q8_0", 1, out=values) is values
    assert np.array_equal(values, expected)
    with pytest.raises(NativeError, match=r"is not a contiguous float32 array of shape \(7, 512\)"):
        blocks.round_trip(values, "Q8_0", 1, out=np.empty((7, 511), np.float32))


def test_no_rows_are_no_rows() -> None:
    assert blocks.round_trip(np.empty((0, 256), np.float32), "Q4_K", 2).shape == (0, 256)


@pytest.mark.parametrize("type_name", blocks.MAKEABLE)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(type_name: str, bad: float) -> None:
    """Of these, ggml aborts on IQ types and makes numbers of others."""
    values = weights()
    values[3, 77] = bad
    with pytest.raises(NativeError, match=f"not finite: {type_name} cannot be made"):
        blocks.round_trip(values, type_name, 2, needed(type_name))


@pytest.mark.parametrize("type_name", ["F16", "Q4_0", "Q4_K", *sorted(blocks._ABORTING)])
def test_values_out_of_range_are_refused(type_name: str) -> None:
    with pytest.raises(NativeError, match="out of the range"):
        blocks.round_trip(weights(scale=1e30), type_name, 2, needed(type_name))


@pytest.mark.parametrize("type_name", sorted(blocks._ABORTING))
def test_large_values_within_the_range_do_not_abort(type_name: str) -> None:
    values = weights()
    values *= np.float32(blocks._MAX_WEIGHT / np.abs(values).max())
    largest = float(np.abs(values).max())
    squares = importance()
    squares *= np.float32(0.99 * blocks._MAX_IMPORTANCE / largest**2) / squares.max()
    assert np.isfinite(blocks.round_trip(values, type_name, 1, squares)).all()
    with pytest.raises(NativeError, match="out of the range"):
        blocks.round_trip(values, type_name, 1, squares * 2)


@pytest.mark.parametrize("type_name", sorted(NEED_IMPORTANCE))
def test_types_that_need_importance_say_so(type_name: str) -> None:
    with pytest.raises(NativeError, match=f"{type_name} needs an importance matrix"):
        blocks.quantize(weights(), type_name, 1)


def test_other_mistakes_are_refused() -> None:
    values = weights()
    with pytest.raises(NativeError, match="rows of 480 weights do not hold whole Q4_K blocks of 256"):
        blocks.quantize(values[:, :480], "Q4_K", 1)
    for name in ("Q8_1", "Q8_K", "I32", "Q4_2", "Q5_X", "q4_K"):
        with pytest.raises(NativeError, match=f"makes no tensors of type {name}"):
            blocks.quantize(values, name, 1)
    with pytest.raises(NativeError, match="does not decode I8"):
        blocks.dequantize(np.zeros((1, 32), np.uint8), "I8", 32, 1)
    with pytest.raises(NativeError, match=r"uint8 \(1, 33\) is not 34 bytes for each row of 32 Q8_0"):
        blocks.dequantize(np.zeros((1, 33), np.uint8), "Q8_0", 32, 1)
    with pytest.raises(NativeError, match="are not rows of weights"):
        blocks.quantize(values[0], "Q8_0", 1)
    with pytest.raises(NativeError, match=r"importance of \(511,\) for rows of 512"):
        blocks.quantize(values, "Q4_K", 1, importance(511))
    for bad in (-1.0, np.nan, np.inf):
        with pytest.raises(NativeError, match="importance holds values that are negative or not finite"):
            blocks.quantize(values, "Q4_K", 1, np.full(WIDTH, bad, np.float32))
