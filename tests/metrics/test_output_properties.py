"""What holds for the comparison of any two models' logits, and for the record of any level."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import special

from qres.arrays import Doubles, Floats
from qres.metrics import output
from qres.metrics.output import OutputStats, Scored, TokenScores
from qres.metrics.quantiles import RESOLUTION
from qres.records.output import Output
from tests.search import searched

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
