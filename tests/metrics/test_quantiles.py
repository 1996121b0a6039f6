"""Quantiles of a histogram against numpy's, and its merging."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qres.arrays import Doubles
from qres.metrics.quantiles import RESOLUTION, Quantiles
from tests.metrics.comparing import TOLERANCE
from tests.search import searched

# ---------------------------------------------------------------- quantiles


def quantiles(values: Doubles | list[float]) -> Quantiles:
    found = Quantiles()
    found.update(np.asarray(values, dtype=np.float64))
    return found


@pytest.mark.parametrize("zeros", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("n", [2, 7, 1000, 30_000])
def test_quantiles_are_those_of_numpy(zeros: float, n: int) -> None:
    rng = np.random.default_rng(n)
    values = rng.lognormal(-3, 3, n) * (rng.random(n) >= zeros)
    found = quantiles(values)
    for q in (0.0, 0.01, 0.25, 0.5, 0.9, 0.95, 0.99, 0.999):
        assert found.quantile(q) == pytest.approx(np.quantile(values, q), rel=TOLERANCE, abs=1e-12)
    assert found.quantile(1.0) == values.max()


def test_quantiles_of_one_value_of_zeros_and_of_nothing() -> None:
    assert quantiles([0.7]).quantile(0.5) == pytest.approx(0.7, rel=TOLERANCE)
    assert quantiles([0.7]).quantile(1.0) == 0.7
    assert [quantiles([0.0, 0.0, 1e-13]).quantile(q) for q in (0.0, 0.5, 0.99)] == [0.0, 0.0, 0.0]
    assert quantiles([]).quantile(0.5) is None
    assert Quantiles().quantile(1.0) is None


def test_quantiles_leave_out_non_finite_values() -> None:
    found = quantiles([np.nan, 1.0, np.inf, 3.0, -np.inf])
    assert found.counts.sum() == 2
    assert found.quantile(0.5) == pytest.approx(2.0, rel=TOLERANCE)
    assert found.quantile(1.0) == 3.0


def test_quantiles_keep_values_beyond_their_range() -> None:
    found = quantiles([1e-300, 1e200])
    assert found.counts.sum() == 2
    assert found.quantile(0.0) == 0.0
    assert found.quantile(1.0) == 1e200


def test_quantiles_hold_to_both_ends_of_their_range() -> None:
    for value in (1.0001e-12, 9.999e11):
        assert quantiles([value, 1e200]).quantile(0.0) == pytest.approx(value, rel=TOLERANCE)


@pytest.mark.parametrize("value", [1e-9 * 1.37**i for i in range(0, 130, 5)])
def test_no_quantile_is_above_the_largest_value(value: float) -> None:
    found = quantiles([value, value]).quantile(0.5)
    assert found is not None
    assert found <= value  # the middle of its bin may be above it


def test_quantiles_keep_rows_apart() -> None:
    found = Quantiles(3)
    found.update(np.array([[1.0, 1.0], [5.0, 7.0], [np.nan, np.nan]]))
    assert found.quantile(0.5, 0) == pytest.approx(1.0, rel=TOLERANCE)
    assert found.quantile(0.5, 1) == pytest.approx(6.0, rel=TOLERANCE)
    assert found.quantile(0.5, 2) is None
    assert found.max.tolist() == [1.0, 7.0, 0.0]


values_lists = st.lists(st.floats(0, 1e9), max_size=40)


@settings(deadline=None, max_examples=50)
@given(values_lists, values_lists)
def test_quantiles_merge_is_update_of_everything(a: list[float], b: list[float]) -> None:
    merged, every = quantiles(a), quantiles(a + b)
    merged.merge(quantiles(b))
    assert (merged.counts == every.counts).all()
    assert merged.max == every.max


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=40), st.floats(0, 1))
def test_quantiles_of_any_values(values: list[float], q: float) -> None:
    found = quantiles(values).quantile(q)
    assert found is not None
    # The rank q (n - 1) may round to the integer on either side.
    around = [float(np.quantile(values, min(max(q + step, 0.0), 1.0))) for step in (-1e-12, 1e-12)]
    assert around[0] * (1 - TOLERANCE) <= found <= around[1] * (1 + TOLERANCE) + 1e-6 * (around[1] - around[0])


def test_histogram_counts_add_up() -> None:
    rng = np.random.default_rng(0)
    values = rng.lognormal(-6, 2, 5000) * (rng.random(5000) > 0.05)
    found = quantiles(values).coarse()
    assert sum(found.counts) == 5000
    assert len(found.edges) == len(found.counts) + 1
    assert list(found.edges) == sorted(found.edges)
    assert found.counts[0] > 0
    assert found.counts[-1] > 0
    assert found.edges[1] / found.edges[0] == pytest.approx(10 ** (1 / 8), rel=1e-3)
    # Up to the width of a fine bin, they are numpy's counts.
    expected, _ = np.histogram(values[values > 0], found.edges)
    assert np.abs(np.array(found.counts[1:]) - expected[1:]).max() < 40
    assert quantiles([]).coarse().edges == ()
    assert quantiles([0.0, 0.0]).coarse().counts == (2,)


# ---------------------------------------------------------------- quantiles and their histogram

MAGNITUDES = st.one_of(st.just(0.0), st.floats(-12, 12).map(lambda x: min(max(10.0**x, 1e-12), 1e12)), st.floats(0, 9))
SHARES = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.05, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0]))


@searched
@given(st.lists(st.lists(MAGNITUDES, max_size=12), min_size=1, max_size=3), SHARES, st.data())
def test_quantiles_of_any_pieces_are_those_of_numpy(rows: list[list[float]], q: float, data: st.DataObject) -> None:
    found = Quantiles(len(rows))
    width = max(len(row) for row in rows)
    table = np.array([row + [np.nan] * (width - len(row)) for row in rows]).reshape(len(rows), width)
    cuts = sorted(data.draw(st.lists(st.integers(0, width), max_size=3)))
    for start, end in zip([0, *cuts], [*cuts, width], strict=True):
        found.update(table[:, start:end])
    for i, row in enumerate(rows):
        estimate = found.quantile(q, i)
        if not row:
            assert estimate is None
            continue
        assert estimate == pytest.approx(np.quantile(row, q), rel=RESOLUTION, abs=1e-12)
        assert found.quantile(1.0, i) == max(row)
        higher = found.quantile((q + 1) / 2, i)
        assert estimate is not None
        assert higher is not None
        assert estimate <= higher * (1 + RESOLUTION)  # the maximum alone is exact


@searched
@given(st.lists(MAGNITUDES, min_size=1, max_size=40), st.sampled_from([1, 3, 8]))
def test_histogram_holds_every_value_in_its_place(values: list[float], per_decade: int) -> None:
    found = Quantiles()
    found.update(np.array(values))
    histogram = found.coarse(per_decade)
    edges, counts = histogram.edges, histogram.counts
    assert sum(counts) == len(values)
    assert len(edges) == len(counts) + 1
    assert all(a < b for a, b in itertools.pairwise(edges))
    assert counts[0] > 0
    assert counts[-1] > 0
    assert [b / a for a, b in itertools.pairwise(edges)] == pytest.approx(
        [10 ** (1 / per_decade)] * len(counts), rel=1e-3
    )
    # Edges have four digits, and a value stands for its fine bin.
    above = [value for value in values if value >= 1e-12]
    assert not above or edges[0] * 0.997 <= min(above) <= edges[1] * 1.003  # zeros are in the lowest bin, not below it
    for k, edge in enumerate(edges):
        below = sum(counts[:k])
        if k:
            assert sum(value < edge * 0.997 for value in values) <= below
        assert below <= sum(value < edge * 1.003 for value in values)
