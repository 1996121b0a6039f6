"""Properties that hold for any input: the statistics, the choice of types, the keep list, and texts cut into chunks.

Every search is derandomized: a run finds the same everywhere, and what it finds is shrunk to a small input.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import string
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quant_shape_to_byte_shape
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import special, stats

from qres import levels
from qres.advice.keep import NOISE_FACTOR, NextLevel, UnitDamage, keep_list
from qres.arrays import Doubles, Floats
from qres.errors import InputError, UsageError
from qres.gguf import fallbacks, model_file
from qres.gguf.format.tensor import Tensor
from qres.gguf.inventory import Inventory
from qres.metrics import means, output
from qres.metrics.output import OutputStats, Scored, TokenScores
from qres.metrics.quantiles import RESOLUTION, Quantiles
from qres.records.output import Output
from qres.records.units import Keep
from qres.text import chunks as chunks_module
from qres.text import source
from qres.text.source import Source

searched = settings(deadline=None, max_examples=100, derandomize=True)

UNIT = 2.0**-24
"""Largest relative error of one float32 rounding."""


# ---------------------------------------------------------------- logits and their exact comparison


@dataclasses.dataclass(frozen=True)
class Pair:
    """Logits of two models at the scored positions of one chunk [n, n_vocab], and the tokens that follow there [n]."""

    reference: Floats
    level: Floats
    targets: list[int]

    def scored(self) -> Scored:
        return output.score_reference(self._whole(self.reference), [0] * (len(self.targets) + 1) + self.targets)

    def compare(self) -> TokenScores:
        return output.score(self.scored(), self._whole(self.level))

    def only(self, mask: npt.NDArray[np.bool_]) -> Pair:
        """Some of the positions."""
        targets = [token for token, kept in zip(self.targets, mask, strict=True) if kept]
        return Pair(self.reference[mask], self.level[mask], targets)

    @staticmethod
    def _whole(rows: Floats) -> Floats:
        """The logits of the whole chunk; the positions that are not scored hold NaN, which would show if one leaked."""
        n, n_vocab = rows.shape
        whole = np.full((2 * n + 1, n_vocab), np.nan, dtype=np.float32)
        whole[n : 2 * n] = rows
        return whole


# Values that meet again make ties; at -88 and -104 exp leaves the normal and the subnormal float32 numbers.
_LANDMARKS = st.sampled_from([0.0, -0.0, 1.0, 5.0, -5.0, 17.0, 88.0, -88.0, -104.0, 1e4, -1e4])
FINITE = st.one_of(_LANDMARKS, st.floats(-8, 8, width=32), st.floats(-1e4, 1e4, width=32))
RULING_OUT = st.one_of(FINITE, FINITE, FINITE, st.just(-np.inf))
ANY = st.one_of(RULING_OUT, RULING_OUT, st.sampled_from([np.nan, np.inf]))
GRID = st.integers(-(2**14), 2**14).map(lambda i: i / 16)
"""Multiples of 1/16 below 2^10: float32 holds any sum of two exactly."""


@st.composite
def pairs(draw: st.DrawFn, elements: st.SearchStrategy[float], near: bool = True) -> Pair:
    """Two models over a tiny vocabulary; where `near`, the second is often a small change of the first."""
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    rows = hnp.arrays(np.float32, shape, elements=elements)
    reference = draw(rows)
    if near and draw(st.booleans()):
        change = draw(hnp.arrays(np.float32, shape, elements=st.sampled_from([0.0, 2**-12, -(2**-12), 0.25, -3.0])))
        level = reference + change
    else:
        level = draw(rows)
    targets = draw(st.lists(st.integers(0, shape[1] - 1), min_size=shape[0], max_size=shape[0]))
    return Pair(reference, level, targets)


@dataclasses.dataclass(frozen=True)
class Exact:
    """What `score` estimates, in float64 from log-probabilities, and the size of what it has to round; arrays [n]."""

    kld: Doubles
    weight: Doubles
    """sum_v p_v |z^P_v - z^Q_v|: float32 rounds each of these differences."""
    lse: Doubles
    """log sum exp of the reference's logits: float32 rounds it before the probabilities are taken."""
    nll: Doubles
    nll_reference: Doubles


def exact(pair: Pair) -> Exact:
    a, b = pair.reference.astype(np.float64), pair.level.astype(np.float64)
    log_p, log_q = special.log_softmax(a, axis=1), special.log_softmax(b, axis=1)
    p, q = np.exp(log_p), np.exp(log_q)
    p[p < 1e-44] = 0.0  # also 0 in float32: such a token may be ruled out by the level
    with np.errstate(invalid="ignore"):  # infinity - infinity, in branches that are not taken
        # rel_entr is infinite where q underflows though its logarithm does not.
        terms = np.where(q > 0, special.rel_entr(p, q), np.where(p > 0, p * (log_p - log_q), 0.0))
        weight = np.where(p > 0, p * np.abs(a - b), 0.0).sum(axis=1)
    at = np.arange(len(a)), pair.targets
    return Exact(terms.sum(axis=1), weight, special.logsumexp(a, axis=1), -log_q[at], -log_p[at])


def is_defined(pair: Pair) -> npt.NDArray[np.bool_]:
    """Positions whose comparison is finite [n]: both distributions exist, give the next token a chance, and the level
    rules out nothing that has a probability in the reference."""
    a, b = pair.reference.astype(np.float64), pair.level.astype(np.float64)
    exists = np.ones(len(a), dtype=np.bool_)
    for rows in (a, b):
        exists &= ~np.isnan(rows).any(axis=1) & (rows < np.inf).all(axis=1) & (rows > -np.inf).any(axis=1)
        exists &= rows[np.arange(len(rows)), pair.targets] > -np.inf
    for i in np.flatnonzero(exists):
        p = np.exp(special.log_softmax(a[i]))
        assume(not ((p > 1e-46) & (p < 1e-44)).any())  # 0 in float32 or not: a matter of rounding
        exists[i] = not ((p > 1e-45) & (b[i] == -np.inf)).any()
    return exists


# ---------------------------------------------------------------- one chunk


@searched
@given(pairs(RULING_OUT))
def test_comparison_of_any_logits_is_that_of_scipy(pair: Pair) -> None:
    kept = is_defined(pair)
    found = pair.compare()
    assert found.nonfinite == (~kept).sum()
    truth = exact(pair.only(kept))
    # Of 50 000 random pairs, the worst took 1.9 times this bound.
    bound = UNIT * (1 + (1 + np.abs(truth.lse)) * truth.kld + truth.weight)
    assert found.kld.shape == truth.kld.shape
    assert (np.abs(found.kld - truth.kld) <= 4 * bound).all()
    assert (found.kld >= 0).all()
    # Of the likelihoods, only the sum of exponentials is float32: 1.6 at most.
    assert (np.abs(found.nll - truth.nll) <= 4 * UNIT).all()
    assert (np.abs(found.nll_reference - truth.nll_reference) <= 4 * UNIT).all()


@searched
@given(pairs(RULING_OUT, near=False))
def test_equal_logits_are_no_damage_at_all(pair: Pair) -> None:
    same = dataclasses.replace(pair, level=pair.reference.copy())
    found = same.compare()
    assert found.nonfinite == (~is_defined(same)).sum()
    assert (found.kld == 0).all()
    assert (found.nll == found.nll_reference).all()
    assert found.same_top.all()


@searched
@given(pairs(st.one_of(GRID, GRID, GRID, st.just(-np.inf))), st.data())
def test_shift_of_the_levels_logits_changes_nothing(pair: Pair, data: st.DataObject) -> None:
    shift = data.draw(hnp.arrays(np.float32, (len(pair.targets), 1), elements=GRID))
    before, after = pair.compare(), dataclasses.replace(pair, level=pair.level + shift).compare()
    assert after.nonfinite == before.nonfinite
    # Every difference of logits is exact here, so float64 rounding is all there is: 3e-13 at most.
    assert np.abs(after.kld - before.kld).max(initial=0) <= 1e-11
    assert np.abs(after.nll - before.nll).max(initial=0) <= 1e-11
    assert (after.same_top == before.same_top).all()


@searched
@given(pairs(st.one_of(GRID, GRID, GRID, st.just(-np.inf))), st.data())
def test_shift_of_both_models_logits_changes_nothing(pair: Pair, data: st.DataObject) -> None:
    pair = pair.only(is_defined(pair))
    shift = data.draw(hnp.arrays(np.float32, (len(pair.targets), 1), elements=GRID))
    moved = dataclasses.replace(pair, reference=pair.reference + shift, level=pair.level + shift)
    before, after = pair.compare(), moved.compare()
    assert after.nonfinite == before.nonfinite == 0
    # The probabilities are float32, made from a rounded log sum exp: 1.0 at most.
    lse = np.maximum(np.abs(exact(pair).lse), np.abs(exact(moved).lse))
    assert (np.abs(after.kld - before.kld) <= 4 * UNIT * (1 + (1 + lse) * before.kld)).all()
    for name in ("nll", "nll_reference", "confidence"):
        assert np.abs(getattr(after, name) - getattr(before, name)).max(initial=0) <= 1e-11
    assert (after.same_top == before.same_top).all()
    assert (after.position == before.position).all()


@searched
@given(pairs(RULING_OUT), st.randoms(use_true_random=False))
def test_order_of_the_vocabulary_does_not_matter(pair: Pair, random: Random) -> None:
    order = list(range(pair.reference.shape[1]))
    random.shuffle(order)
    moved = Pair(pair.reference[:, order], pair.level[:, order], [order.index(t) for t in pair.targets])
    kept = is_defined(pair)
    before, after = pair.compare(), moved.compare()
    assert after.nonfinite == before.nonfinite
    assert after.kld == pytest.approx(before.kld, rel=0, abs=1e-11)  # sums in another order: 2e-12 at most
    for name in ("nll", "nll_reference", "confidence"):
        assert getattr(after, name) == pytest.approx(getattr(before, name), rel=0, abs=1e-11)
    # Among equal logits the first is the top one, so only a clear top is the same in any order.
    best = [(rows == rows.max(axis=1, keepdims=True)).sum(axis=1) == 1 for rows in (pair.reference, pair.level)]
    clear = (best[0] & best[1])[kept]
    assert (after.same_top == before.same_top)[clear].all()


@searched
@given(pairs(ANY), st.integers(1, 4))
def test_rows_that_share_a_block_do_not_matter(pair: Pair, rows: int) -> None:
    together = pair.compare()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "_BLOCK_ROWS", rows)
        apart = pair.compare()
    assert apart.nonfinite == together.nonfinite
    for name in ("kld", "nll", "nll_reference", "confidence"):
        assert getattr(apart, name) == pytest.approx(getattr(together, name), rel=0, abs=1e-11)
    assert (apart.same_top == together.same_top).all()


def test_logits_near_the_end_of_float32_do_not_warn() -> None:
    rows = np.array([[3e38, -3e38]], dtype=np.float32)
    found = Pair(rows, rows.copy(), [0]).compare()
    assert len(found.kld) + found.nonfinite == 1


# ---------------------------------------------------------------- the record of a level


def floats_of(value: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Every float within a record, with its path."""
    if isinstance(value, float):
        yield path, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from floats_of(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from floats_of(item, f"{path}[{i}]")


def output_of(chunks: Sequence[TokenScores]) -> Output:
    found = OutputStats()
    for chunk in chunks:
        found.update(chunk)
    return found.compute()


@searched
@given(st.lists(pairs(ANY), min_size=1, max_size=3))
def test_broken_logits_are_counted_and_never_reach_the_record(chunks: list[Pair]) -> None:
    kept = [is_defined(pair) for pair in chunks]
    found = output_of([pair.compare() for pair in chunks])
    assert found.tokens == sum(int(mask.sum()) for mask in kept)
    assert found.nonfinite_tokens == sum(int((~mask).sum()) for mask in kept)
    assert found.chunks == sum(bool(mask.any()) for mask in kept)
    assert [path for path, value in floats_of(found) if not math.isfinite(value)] == []
    for groups in (found.by_position, found.by_confidence):
        assert sum(group.tokens for group in groups) == found.tokens
    assert sum(found.kld_histogram.counts) == found.tokens
    assert (found.kld_mean is None) == (found.same_top is None) == (found.tokens == 0)
    # The whole positions of a chunk give what they give on their own; their place in the chunk is another matter.
    alone = output_of([pair.only(mask).compare() for pair, mask in zip(chunks, kept, strict=True)])
    assert found.reference_nonfinite_tokens <= found.nonfinite_tokens
    places = {"by_position": alone.by_position, "nonfinite_tokens": 0, "reference_nonfinite_tokens": 0}
    assert dataclasses.replace(found, **places) == alone  # type: ignore[arg-type]


@searched
@given(st.lists(pairs(RULING_OUT), min_size=1, max_size=3))
def test_figures_of_a_level_keep_their_bounds(chunks: list[Pair]) -> None:
    found = output_of([pair.compare() for pair in chunks])
    assume(found.tokens)
    rising = [found.kld_median, found.kld_p90, found.kld_p95, found.kld_p99, found.kld_p999]
    known = [value for value in rising if value is not None]
    assert len(known) == 5
    assert known == sorted(known)
    assert known[0] >= 0
    assert found.kld_max is not None
    assert known[-1] <= found.kld_max * (1 + RESOLUTION)  # the middle of a bin may lie above the largest value in it
    assert found.kld_mean is not None
    assert 0 <= found.kld_mean <= found.kld_max * (1 + 1e-12)
    assert found.same_top is not None
    assert 0 <= found.same_top <= 1
    assert found.ppl_reference is None or found.ppl_reference >= 1
    falls = (found.delta_p_p05, found.delta_p_median, found.delta_p_p95)
    low, middle, high = (value for value in falls if value is not None)
    assert -1 <= low <= middle <= high <= 1
    assert found.rms_delta_p is not None
    assert found.mean_delta_p is not None
    # Squares of changes below 1e-154 underflow.
    assert abs(found.mean_delta_p) <= found.rms_delta_p * (1 + 1e-12) + 1e-150 <= 1 + 1e-9


def test_correlation_of_likelihoods_that_never_change_is_none() -> None:
    # Both models give the next token the same probability everywhere: 2.449 is no correlation.
    n = 15
    pair = Pair(np.zeros((n, 2), np.float32), np.tile(np.array([0.5, 0], np.float32), (n, 1)), [0] * n)
    assert output_of([pair.compare()]).ln_ppl_correlation is None


# ---------------------------------------------------------------- merging


@st.composite
def token_scores(draw: st.DrawFn) -> TokenScores:
    """One chunk of any finite scores; now and then an empty one, all of whose positions were broken."""
    n = draw(st.integers(0, 6))

    def column(elements: st.SearchStrategy[float]) -> Doubles:
        return draw(hnp.arrays(np.float64, n, elements=elements))

    # Of float32 logits, the smallest that is not 0 is the last place of 1.
    likelihood = st.one_of(st.floats(0, 10), st.floats(0, 1e4)).map(lambda x: x if x > 2.0**-52 else 0.0)
    return TokenScores(
        kld=column(st.one_of(st.just(0.0), st.floats(0, 1), st.floats(0, 1e5))),
        nll=column(likelihood),
        nll_reference=column(likelihood),
        same_top=draw(hnp.arrays(np.bool_, n)),
        position=np.arange(n) / max(n, 1),
        confidence=column(st.floats(0, 1)),
        nonfinite=draw(st.integers(0, 3)),
    )


def assert_same(a: Output, b: Output, varied: bool) -> None:
    """Counts, quantiles and histograms exactly, sums to their rounding; the correlation only where something varies."""
    for field in dataclasses.fields(Output):
        one, two = getattr(a, field.name), getattr(b, field.name)
        if field.name in {"by_position", "by_confidence"}:
            assert [(group.label, group.tokens) for group in one] == [(group.label, group.tokens) for group in two]
            for left, right in zip(one, two, strict=True):
                assert close(left.kld_mean, right.kld_mean)
                assert close(left.same_top, right.same_top)
        elif field.name in _ROUNDED:
            assert close(one, two), field.name
        elif field.name != "ln_ppl_correlation":
            assert one == two, field.name
    if varied:
        assert a.ln_ppl_correlation == pytest.approx(b.ln_ppl_correlation, rel=0, abs=1e-9)


def close(one: float | None, two: float | None) -> bool:
    """Equal up to the order of additions: 2e-13 at most, of a perplexity of 1e300."""
    if one is None or two is None:
        return one is two
    return math.isclose(one, two, rel_tol=1e-11, abs_tol=1e-11)


_ROUNDED = {
    *("kld_se", "same_top_se", "ppl", "ppl_reference", "ln_ppl_ratio_se", "rms_delta_p", "mean_delta_p"),
    # ChunkMean adds with fsum, so its means do not depend on the order at all: they are not in this list.
}


@searched
@given(st.lists(token_scores(), min_size=1, max_size=6), st.randoms(use_true_random=False), st.integers(0, 6))
def test_order_of_chunks_and_merging_do_not_matter(chunks: list[TokenScores], random: Random, cut: int) -> None:
    expected = output_of(chunks)
    columns = [np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in ("nll", "nll_reference")]
    varied = all(len(column) and column.var() > 1e-6 * (1 + np.square(column).mean()) for column in columns)
    shuffled = list(chunks)
    random.shuffle(shuffled)
    assert_same(output_of(shuffled), expected, varied)
    first, second = OutputStats(), OutputStats()
    for i, chunk in enumerate(shuffled):
        (first if i < cut else second).update(chunk)
    before = second.compute()
    first.merge(second)
    assert_same(first.compute(), expected, varied)
    first.update(chunks[0])
    assert second.compute() == before  # nothing of it is shared with what it was merged into


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


# ---------------------------------------------------------------- the choice of types

MAKEABLE = [traits.name for traits in levels.TYPE_TRAITS.values() if not traits.removed]
REMOVED = [traits.name for traits in levels.TYPE_TRAITS.values() if traits.removed]
ROWS = st.builds(int.__mul__, st.integers(1, 80), st.sampled_from([1, 31, 32, 64, 128, 160, 256]))
"""Row lengths, most of which hold whole blocks of some type."""
GGUF_PY_DIFFERS = {"Q8_1", "Q2_0"}
"""gguf-py has 40 bytes for Q8_1, where ggml-common.h has 36, and does not know Q2_0 yet."""


def bits(name: str) -> Fraction:
    traits = levels.TYPE_TRAITS[name]
    return Fraction(8 * traits.block_bytes, traits.block_size)


def fitting(name: str, row: int) -> str | None:
    try:
        return levels.fitting_type(name, row)
    except UsageError:
        return None


@searched
@given(ROWS)
def test_fitting_type_always_fits(row: int) -> None:
    for name in MAKEABLE:
        block = levels.TYPE_TRAITS[name].block_size
        found = fitting(name, row)
        if found is None:  # only the few types whose larger blocks llama.cpp has nothing in place of
            assert name in {"Q8_K", "NVFP4", "Q1_0"}
            assert row % block
            continue
        assert row % levels.TYPE_TRAITS[found].block_size == 0
        assert levels.fitting_type(found, row) == found
        if row % block == 0:
            assert found == name
            continue
        assert bits(found) > bits(name)  # what stands in never has fewer bits
        assert found == "F16" if row % 32 else found == levels.FALLBACK[name]  # F16 where no blocks fit any more


@searched
@given(st.one_of(st.text(max_size=12), st.sampled_from([*REMOVED, *map(str.lower, MAKEABLE), *levels.LEVELS_BY_NAME])))
def test_fitting_type_takes_known_types_only(name: str) -> None:
    assume(name not in MAKEABLE)
    with pytest.raises(UsageError, match="unknown tensor type"):
        levels.fitting_type(name, 256)


@searched
@given(ROWS, st.lists(st.integers(1, 3000), max_size=2))
def test_bytes_at_are_those_of_gguf_py(row: int, rest: list[int]) -> None:
    for name in MAKEABLE:
        found = fitting(name, row)
        if found is None or found in GGUF_PY_DIFFERS:
            continue
        counted = model_file.bytes_at(tensor((row, *rest)), name)
        theirs = GGMLQuantizationType[found]
        block, size = GGML_QUANT_SIZES[theirs]
        assert counted == math.prod(rest) * (row // block * size)
        assert counted == math.prod(quant_shape_to_byte_shape((*reversed(rest), row), theirs))
        assert model_file.bytes_at(tensor((row, *rest, 2)), name) == 2 * counted


@searched
@given(ROWS, st.integers(1, 5000))
def test_bytes_at_grow_by_whole_rows(row: int, rows: int) -> None:
    for name in MAKEABLE:
        found = fitting(name, row)
        if found is None:
            continue
        one, before, after = (model_file.bytes_at(tensor((row, n)), name) for n in (1, rows, rows + 1))
        assert 0 < before < after == before + one
        assert before == bits(found) * row * rows / 8


def tensor(shape: tuple[int, ...], type: str = "F16", name: str = "blk.0.ffn_up.weight") -> Tensor:
    return Tensor(name, shape, type, levels.TYPE_TRAITS[type].id, math.prod(shape), None, 0)


def inventory(level: str, tensors: tuple[Tensor, ...]) -> Inventory:
    path = Path("model.gguf")
    return Inventory(path, (path,), 3, "model", "llama", "", level, 1, 64, 512, 100, tensors, 0, {})


@searched
@given(st.sampled_from(levels.LEVELS), st.lists(ROWS.filter(lambda row: row > 32), min_size=1, max_size=4))
def test_fallbacks_read_back_what_the_choice_of_types_did(level: levels.LevelSpec, rows: list[int]) -> None:
    assume(levels.TYPE_TRAITS[level.base].block_size == 256)
    made = [levels.fitting_type(level.base, row) for row in rows]
    tensors = tuple(tensor((row, 2), type, f"{i}.weight") for i, (row, type) in enumerate(zip(rows, made, strict=True)))
    found = {item.tensor: item for item in fallbacks.fallbacks(inventory(level.name, tensors))}
    assert list(found) == [t.name for t in tensors if t.type != level.base]
    for item in found.values():
        assert item.type == made[int(item.tensor.removesuffix(".weight"))]
        assert level.base in item.wanted.split(" or ")


# ---------------------------------------------------------------- names of levels

ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
NAMES = sorted({*levels.LEVELS_BY_NAME, *ALIASES})


@searched
@given(st.sampled_from(NAMES), st.data())
def test_parse_takes_a_level_in_any_spelling(name: str, data: st.DataObject) -> None:
    spelled = "".join(data.draw(st.sampled_from([c, c.lower(), "-" if c == "_" else c])) for c in name)
    blank = st.text(st.sampled_from(" \t\n"), max_size=3)
    assert levels.parse(data.draw(blank) + spelled + data.draw(blank)).name == ALIASES.get(name, name)


NEAR_MISSES = st.builds(
    lambda name, at, old, new: name[: at % len(name)] + new + name[at % len(name) + old :],
    st.sampled_from(NAMES),
    st.integers(0, 20),
    st.integers(0, 2),
    st.text(max_size=2),
)


@searched
@given(st.one_of(st.text(), st.text(string.ascii_letters + string.digits + "_-. "), NEAR_MISSES))
def test_parse_of_any_text_is_a_level_or_a_usage_error(text: str) -> None:
    wanted = text.strip().upper().replace("-", "_")
    if wanted in NAMES:
        assert levels.parse(text).name == ALIASES.get(wanted, wanted)
        return
    with pytest.raises(UsageError) as caught:
        levels.parse(text)
    assert caught.value.message.isprintable()  # whatever was typed goes to a terminal
    assert "Q4_K_M" in caught.value.hint
    suggested = re.search(r", did you mean (.+)\?$", caught.value.message)
    assert suggested is None or set(suggested[1].split(" or ")) <= set(levels.LEVELS_BY_NAME)


KNOWN_FTYPES = {level.ftype: level.name for level in levels.LEVELS}


@searched
@given(st.one_of(st.integers(), st.integers(0, 3000)), st.one_of(st.integers(), st.integers(0, 3000)))
def test_name_of_any_ftype(ftype: int, other: int) -> None:
    found = levels.name_of_ftype(ftype)
    assert levels.name_of_ftype(ftype | 1024) == levels.name_of_ftype(ftype & ~1024) == found  # a flag, no number
    assert (levels.name_of_ftype(other) == found) == (other | 1024 == ftype | 1024)  # no two share a name
    if found.startswith("ftype "):
        assert int(found.removeprefix("ftype ")) == ftype & ~1024
        assert (ftype & ~1024) not in KNOWN_FTYPES
    elif (ftype & ~1024) in KNOWN_FTYPES:
        assert found == KNOWN_FTYPES[ftype & ~1024]
        assert levels.parse(found).ftype == ftype & ~1024


# ---------------------------------------------------------------- the keep list


@dataclasses.dataclass(frozen=True)
class Question:
    """What `keep_list` is asked."""

    units: list[UnitDamage]
    level_kld: float
    noise: float | None
    alternative: NextLevel | None

    def ask(self) -> tuple[Keep, ...]:
        return keep_list(self.units, self.level_kld, self.noise, self.alternative)


MIB = 2**20


@st.composite
def questions(draw: st.DrawFn) -> Question:
    """Units so alike that draws of chunks order them differently; some are below the noise, some hit in one chunk.

    The values are seeded: searched for one by one they would nearly all be equal, and no order would be in doubt.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    chunks, n = draw(st.sampled_from([1, 2, 3, 3, 3, 6])), draw(st.sampled_from([0, 1, 4, 8, 8]))
    tokens = tuple(int(x) for x in rng.choice([255, 255, 255, 255, 100, 0], chunks))
    units = []
    for i in range(n):
        mean = rng.choice([1e-3, 1e-3, 1e-3, 2e-3, 0.1, 1e-6, 0.0])
        factors = rng.choice([0.0, 0.0, 5.0], chunks) if rng.random() < 0.2 else rng.uniform(0.5, 1.5, chunks)
        sums = tuple(float(mean * factor * n) for factor, n in zip(factors, tokens, strict=True))
        added = int(rng.choice([MIB, MIB, MIB, MIB + 1, 3 * MIB // 2, 64 * MIB, 0, -1]))
        units.append(UnitDamage(f"{i}.ffn", sums, tokens, added, "F16"))
    other = draw(st.sampled_from([(1e-3, MIB), (1e-3, MIB), (1e-3, MIB), (0.1, 4 * MIB), (0.1, 0), (0.1, -MIB), None]))
    noise = draw(st.sampled_from([None, 0.0, 1e-5, 3e-4]))
    level_kld = draw(st.floats(1e-6, 5) | st.just(0.0))
    return Question(units, level_kld, noise, other and NextLevel("Q6_K", *other))


@searched
@given(questions())
def test_keep_list_lists_what_stands_out_in_order(question: Question) -> None:
    rows = question.ask()
    assert question.ask() == rows
    by_name = {unit.unit: unit for unit in question.units}
    for row in rows:
        unit = by_name[row.unit]
        error = means.clustered_se(unit.kld_sums, unit.tokens)
        assert row.bytes_added == unit.bytes_added > 0
        assert row.kld_recovered == pytest.approx(sum(unit.kld_sums) / sum(unit.tokens))
        assert row.kld_recovered > max(NOISE_FACTOR * (question.noise or 0.0), 2 * (error or 0.0), 0.0)
        assert row.gap_share * question.level_kld == pytest.approx(row.kld_recovered if question.level_kld else 0.0)
    for name in by_name.keys() - {row.unit for row in rows}:  # and nothing that stands out is left out
        unit = by_name[name]
        error = means.clustered_se(unit.kld_sums, unit.tokens) or 0.0
        assert unit.bytes_added <= 0 or unit.kld <= max(NOISE_FACTOR * (question.noise or 0.0), 2 * error)
    rates = [row.kld_recovered / row.bytes_added for row in rows]
    assert rates == sorted(rates, reverse=True)
    worth = [row.worth_it for row in rows]
    assert worth == sorted(worth, reverse=True)  # cut once
    other = question.alternative
    least = other.kld_recovered / other.bytes_added if other and other.bytes_added > 0 else 0.0
    assert worth == [rate > least for rate in rates]


@searched
@given(questions())
def test_confidence_is_a_share_of_draws(question: Question) -> None:
    rows = question.ask()
    if not rows or len(question.units[0].tokens) < 3:
        assert all(row.confidence is None for row in rows)
        return
    shares = [row.confidence for row in rows if row.confidence is not None]
    assert len(shares) == len(rows)
    assert all(0 <= share <= 1 for share in shares)
    assert shares[-1] == 1.0  # the last place, and every place of a list that is not cut, holds whatever is drawn
    cut = sum(row.worth_it for row in rows)
    by_name = {unit.unit: unit for unit in question.units}
    rates = np.array([by_name[row.unit].kld_sums for row in rows]) / [[row.bytes_added] for row in rows]
    for i, share in enumerate(shares):
        places = cut if i < cut else i + 1
        ahead = rates > rates[i] * (1 + 1e-9)  # [units, chunks]
        level_with = rates >= rates[i] * (1 - 1e-9)
        # Only those that recover as much per byte in some chunk can pass it where chunks are drawn again.
        assert share == 1.0 or level_with.any(axis=1).sum() - 1 >= places
        # Of three chunks, every 27th draw is one chunk thrice: what is behind in it cannot be always ahead.
        assert len(question.units[0].tokens) > 3 or share < 1.0 or ahead.sum(axis=0).max() < places


@searched
@given(questions(), st.randoms(use_true_random=False))
def test_keep_list_does_not_depend_on_the_order_of_units(question: Question, random: Random) -> None:
    rows = question.ask()
    rates = [row.kld_recovered / row.bytes_added for row in rows]
    assume(len(set(rates)) == len(rates))
    shuffled = list(question.units)
    random.shuffle(shuffled)
    assert dataclasses.replace(question, units=shuffled).ask() == rows


@searched
@given(questions(), st.integers(0, 8))
def test_units_that_are_not_listed_change_nothing(question: Question, at: int) -> None:
    assume(question.units)
    tokens = question.units[0].tokens
    silent = UnitDamage("silent", (0.0,) * len(tokens), tokens, 1, "F16")
    free = UnitDamage("free", (1e3,) * len(tokens), tokens, 0, "F16")
    units = [*question.units[:at], silent, free, *question.units[at:]]
    assert dataclasses.replace(question, units=units).ask() == question.ask()


@searched
@given(questions())
def test_keep_list_does_not_depend_on_the_units_of_bytes_and_nats(question: Question) -> None:
    def scaled(kld: float, size: int) -> Question:
        units = [
            dataclasses.replace(u, kld_sums=tuple(s * kld for s in u.kld_sums), bytes_added=u.bytes_added * size)
            for u in question.units
        ]
        other = question.alternative
        return Question(
            units,
            question.level_kld * kld,
            None if question.noise is None else question.noise * kld,
            other and NextLevel(other.name, other.kld_recovered * kld, other.bytes_added * size),
        )

    def choice(rows: tuple[Keep, ...]) -> list[tuple[str, float, float | None, bool]]:
        return [(row.unit, row.gap_share, row.confidence, row.worth_it) for row in rows]

    rows = question.ask()
    for kld, size in ((2.0, 1), (0.25, 1), (1.0, 4), (8.0, 2)):  # powers of two: no rounding of their own
        assert choice(scaled(kld, size).ask()) == choice(rows)


# ---------------------------------------------------------------- chunks


@searched
@given(
    st.integers(2, 90),
    st.integers(2, 12) | st.integers(2, 99),
    st.none() | st.integers(0, 90),
    st.none() | st.integers(1, 9),
)
def test_chunks_are_the_text_in_equal_even_pieces(n: int, n_ctx: int, bos: int | None, limit: int | None) -> None:
    ids = list(range(n))  # all different, so that nothing can move unseen; often BOS is one of them
    found = chunks_module.chunk(ids, n_ctx, bos, limit)
    (size,) = {len(piece) for piece in found.chunks}
    assert size % 2 == 0
    assert size == max(k for k in range(0, len(ids) + 1, 2) if k <= n_ctx)  # the longest even one that there is
    assert size * len(found.chunks) + found.unused == len(ids)
    whole = len(ids) // size
    assert len(found.chunks) == (whole if limit is None else min(whole, limit))
    for i, piece in enumerate(found.chunks):
        own = ids[i * size : (i + 1) * size]
        assert piece[0] == (own[0] if bos is None else bos)
        assert list(piece[1:]) == own[1:]  # BOS is put into the first place and into no other


# ---------------------------------------------------------------- texts and ids from files

BOM = b"\xef\xbb\xbf"
LINES = st.text(st.characters(exclude_characters="\r\0", exclude_categories=["Cs"]), min_size=1, max_size=30)
BYTES = st.one_of(
    st.binary(max_size=40),
    st.builds(bytes.__add__, st.just(BOM), st.binary(max_size=9)),
    st.text(st.sampled_from(" \t\r\n\0aé中\ufeff"), max_size=12).map(lambda text: text.encode()),
    LINES.map(lambda text: text.encode("utf-16")),
    LINES.map(lambda text: text.encode("utf-32")),
)


@pytest.fixture(scope="module")
def put(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], Path]:
    """Write a file; the same one each time, so that a search leaves one file behind."""
    path = tmp_path_factory.mktemp("properties") / "text.txt"

    def write(data: bytes) -> Path:
        path.write_bytes(data)
        return path

    return write


def utf8(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


@searched
@given(data=BYTES)
def test_any_bytes_are_a_text_or_refused(put: Callable[[bytes], Path], data: bytes) -> None:
    path = put(data)
    text = utf8(data)
    body = data[3:] if data.startswith(BOM) else data
    if text is None or "\0" in text or not body.strip(b" \t\n\r\f\v"):
        with pytest.raises(InputError) as caught:
            source.read_text(path)
        assert str(path) in caught.value.message
        assert caught.value.message.isprintable()
        assert caught.value.hint
        return
    assert source.read_text(path) == Source(str(path), text=body.replace(b"\r\n", b"\n"))


@searched
@given(text=LINES.filter(lambda text: not text.startswith("\ufeff") and text.encode().strip() != b""))
def test_text_is_the_same_from_any_editor(put: Callable[[bytes], Path], text: str) -> None:
    for mark in (b"", BOM):
        for end in ("\n", "\r\n"):
            assert source.read_text(put(mark + text.replace("\n", end).encode())).text == text.encode()


def test_byte_that_is_not_utf8_is_counted_from_the_start_of_the_file(put: Callable[[bytes], Path]) -> None:
    with pytest.raises(InputError, match=r"byte 3 is 0xff"):
        source.read_text(put(BOM + b"\xff"))


SEPARATORS = st.text(st.sampled_from(" ,\t\n\r\f\v"), min_size=1, max_size=3).map(lambda text: text.encode())
ID_LIST = re.compile(rb"(\xef\xbb\xbf)?[\s,]*[0-9]{1,10}([\s,]+[0-9]{1,10})*[\s,]*")
NO_DIGIT = [b"x", b"-", b"+", b"_", b".", b"\x1c", b"\xb2", b"\xff", "２".encode()]
"""What float, int or str would take, or another encoding holds a digit in."""
LIST_OF_IDS = st.lists(st.integers(0, 10**11), max_size=4).map(lambda ids: b" ".join(b"%d" % i for i in ids))
ID_BYTES = st.one_of(
    LIST_OF_IDS,
    st.binary(max_size=20),
    st.lists(st.sampled_from(b"0019 ,\n\r\t"), max_size=14).map(bytes),
    st.builds(
        lambda data, at, other: data[:at] + other + data[at:],
        st.lists(st.integers(0, 99), max_size=4).map(lambda ids: b",".join(b"%d" % i for i in ids)),
        st.integers(0, 6),
        st.sampled_from(NO_DIGIT),
    ),
)


@settings(searched, max_examples=300)
@given(data=ID_BYTES, mark=st.sampled_from([b"", BOM, BOM + BOM]))
def test_any_bytes_are_ids_or_refused(put: Callable[[bytes], Path], data: bytes, mark: bytes) -> None:
    path = put(mark + data)
    if ID_LIST.fullmatch(mark + data):
        assert source.read_ids(path) == Source(str(path), ids=tuple(map(int, re.findall(rb"[0-9]+", data))))
        return
    with pytest.raises(InputError) as caught:
        source.read_ids(path)
    assert str(path) in caught.value.message
    assert caught.value.message.isprintable()


@searched
@given(ids=st.lists(st.integers(0, 10**10 - 1), min_size=1, max_size=20), drawn=st.data())
def test_ids_are_the_same_however_they_are_set_apart(
    put: Callable[[bytes], Path], ids: list[int], drawn: st.DataObject
) -> None:
    pieces = [b"%d" % i + drawn.draw(SEPARATORS) for i in ids]
    start = drawn.draw(st.sampled_from([b"", BOM, b" ", BOM + b"\r\n"]))
    assert source.read_ids(put(start + b"".join(pieces))).ids == tuple(ids)
