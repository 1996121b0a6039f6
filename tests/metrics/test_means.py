"""Chunk means, standard errors and rank correlation against scipy, rational numbers and a simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from qres.metrics import means
from qres.metrics.means import ChunkMean, clustered_se, spearman
from tests.metrics.comparing import direct_se
from tests.search import searched

# ---------------------------------------------------------------- output statistics


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9), min_size=2, max_size=8), st.integers(0, 8))
def test_chunk_mean_merge_is_update_of_everything(chunks: list[list[float]], cut: int) -> None:
    every, first, rest = ChunkMean(), ChunkMean(), ChunkMean()
    for i, chunk in enumerate(chunks):
        every.update(np.array(chunk))
        (first if i < cut else rest).update(np.array(chunk))
    first.merge(rest)
    assert (first.mean, first.se) == (every.mean, every.se)
    assert every.mean == pytest.approx(np.mean([x for chunk in chunks for x in chunk]), abs=1e-6)


def test_chunk_without_tokens_does_not_count() -> None:
    found, every = ChunkMean(), ChunkMean()
    for chunk in ([], [1.0, 2.0], [], [6.0]):
        found.update(np.array(chunk))
        if chunk:
            every.update(np.array(chunk))
    assert (found.sums, found.counts) == ([0.0, 3.0, 0.0, 6.0], [0, 2, 0, 1])  # in step with the other units' chunks
    assert (every.sums, every.counts) == ([3.0, 6.0], [2, 1])
    assert (found.mean, found.se) == (3.0, every.se)
    only = ChunkMean()
    only.update(np.array([]))
    assert (only.mean, only.se) == (None, None)


# ---------------------------------------------------------------- standard errors and ranks


def test_clustered_se_is_the_direct_formula() -> None:
    rng = np.random.default_rng(0)
    counts = [5, 100, 255, 255, 17]
    sums = [float(rng.normal(0.1, 0.05) * k) for k in counts]
    assert clustered_se(sums, counts) == pytest.approx(direct_se(sums, counts), rel=1e-12)


def test_clustered_se_of_equal_chunks_is_that_of_their_means() -> None:
    means = np.array([0.1, 0.4, 0.2, 0.25])
    found = clustered_se([float(m) * 255 for m in means], [255] * 4)
    assert found == pytest.approx(stats.sem(means))


def test_clustered_se_needs_two_chunks() -> None:
    assert clustered_se([], []) is None
    assert clustered_se([3.0], [9]) is None
    assert clustered_se([0.0, 0.0], [0, 0]) is None
    assert ChunkMean().mean is None
    assert ChunkMean().se is None


def test_clustered_se_is_right_where_tokens_are_correlated() -> None:
    # All 64 tokens of a chunk have one value, so 20 chunks are 20 observations, not 1280.
    rng = np.random.default_rng(0)
    means, clustered, independent = [], [], []
    for _ in range(600):
        values = np.repeat(rng.normal(size=(20, 1)), 64, axis=1)
        found = ChunkMean()
        for chunk in values:
            found.update(chunk)
        assert found.mean is not None
        assert found.se is not None
        means.append(found.mean)
        clustered.append(found.se)
        independent.append(values.std(ddof=1) / math.sqrt(values.size))
    truth = np.std(means)
    assert np.mean(clustered) == pytest.approx(truth, rel=0.1)
    assert truth / np.mean(independent) > 5  # what the clustering is for


def test_clustered_se_is_right_where_chunks_differ_in_length() -> None:
    rng = np.random.default_rng(1)
    counts = [20, 40, 60, 80] * 10
    means, errors = [], []
    for _ in range(600):
        sums = [float(n * x) for n, x in zip(counts, rng.normal(1.0, 0.5, len(counts)), strict=True)]
        means.append(sum(sums) / sum(counts))
        errors.append(clustered_se(sums, counts) or 0.0)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.1)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=4, max_size=30))
def test_spearman_is_that_of_scipy(pairs: list[tuple[int, int]]) -> None:
    x, y = ([float(p[i]) for p in pairs] for i in (0, 1))  # small integers: many ties
    found = spearman(x, y)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)


def test_spearman_needs_four_pairs() -> None:
    assert spearman([1, 2, 3], [1, 2, 3]) is None
    assert spearman([1, 2, 3, 9], [-1, -2, -3, -4]) == pytest.approx(-1.0)


# ---------------------------------------------------------------- standard errors

CHUNK = st.tuples(st.floats(-1e4, 1e4).map(lambda x: 0.0 if abs(x) < 1e-6 else x), st.integers(1, 300))
CHUNKS = st.lists(CHUNK, min_size=2, max_size=8)


def exact_se(chunks: Sequence[tuple[float, int]]) -> float:
    """The ratio estimator in rational numbers; the root is the only rounding."""
    sums, counts = ([Fraction(chunk[i]) for chunk in chunks] for i in (0, 1))
    n = sum(counts)
    mean = sum(sums) / n
    square = sum((s - mean * c) ** 2 for s, c in zip(sums, counts, strict=True)) / n**2
    return math.sqrt(Fraction(len(chunks), len(chunks) - 1) * square)


def se(chunks: Sequence[tuple[float, float]]) -> float:
    found = means.clustered_se([s for s, _ in chunks], [c for _, c in chunks])
    assert found is not None
    return found


def rounding(chunks: Sequence[tuple[float, float]]) -> float:
    """What float64 can lose, as deviations are differences of sums; a quarter of it was the worst."""
    return 1e-15 * sum(abs(s) for s, _ in chunks) / sum(c for _, c in chunks)


@searched
@given(CHUNKS)
def test_clustered_se_is_that_of_rational_numbers(chunks: list[tuple[float, int]]) -> None:
    assert se(chunks) == pytest.approx(exact_se(chunks), rel=1e-13, abs=rounding(chunks))


@searched
@given(CHUNKS, st.floats(-50, 50), st.integers(1, 9), st.randoms(use_true_random=False))
def test_clustered_se_follows_its_units(
    chunks: list[tuple[float, int]], offset: float, times: int, random: Random
) -> None:
    found, slack = se(chunks), rounding(chunks)
    # In other units of the value it is the same error in these units; powers of two leave every rounding as it was.
    assert se([(-4 * s, c) for s, c in chunks]) == 4 * found
    assert se([(times * s, c) for s, c in chunks]) == pytest.approx(times * found, rel=1e-13, abs=times * slack)
    # Tokens that repeat what their chunk already said are no news; independent tokens would give less.
    assert se([(times * s, times * c) for s, c in chunks]) == pytest.approx(found, rel=1e-13, abs=slack)
    # A constant on every token moves the mean alone.
    moved = [(s + offset * c, c) for s, c in chunks]
    assert se(moved) == pytest.approx(found, rel=1e-13, abs=slack + rounding(moved))
    shuffled = [*chunks, (0.0, 0)]  # a chunk without tokens is no chunk, wherever it stands
    random.shuffle(shuffled)
    assert se(shuffled) == pytest.approx(found, rel=1e-13, abs=slack)
    # Every chunk twice: C / (C - 1) becomes 2C / (2C - 1), the squares double, and the tokens' square is fourfold.
    twice = math.sqrt((len(chunks) - 1) / (2 * len(chunks) - 1))
    assert se(chunks * 2) == pytest.approx(twice * found, rel=1e-13, abs=slack)


# ---------------------------------------------------------------- rank correlation


@searched
@given(st.lists(st.tuples(st.integers(-4, 4), st.floats(-1e6, 1e6)), min_size=4, max_size=20), st.data())
def test_spearman_is_scipys_and_sees_ranks_only(points: list[tuple[int, float]], data: st.DataObject) -> None:
    x, y = [float(point[0]) for point in points], [point[1] for point in points]
    found = means.spearman(x, y)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert found is None
        return
    assert found == pytest.approx(stats.spearmanr(x, y).statistic, rel=0, abs=1e-14)
    assert found is not None
    assert abs(found) <= 1 + 1e-14
    assert means.spearman(y, x) == found
    levels_of_y = sorted(set(y))
    size = len(levels_of_y)
    rising = sorted(data.draw(st.lists(st.floats(-1e300, 1e300), min_size=size, max_size=size, unique=True)))
    image = dict(zip(levels_of_y, rising, strict=True))
    assert means.spearman(x, [image[value] for value in y]) == found  # any rising map keeps the ranks
    assert means.spearman(x, [-value for value in y]) == pytest.approx(-found, rel=0, abs=1e-14)
