"""Output statistics against scipy and plain float64 numpy."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from qres.arrays import Doubles, Floats
from qres.metrics import output
from qres.metrics.output import OutputStats, TokenScores
from qres.records.output import Output
from tests.metrics.comparing import TOLERANCE, direct_se


def logits(n_tokens: int, n_vocab: int, scale: float = 3.0, seed: int = 0) -> Floats:
    return (np.random.default_rng(seed).normal(size=(n_tokens, n_vocab)) * scale).astype(np.float32)


def tokens(n: int, n_vocab: int, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, n_vocab, n)]


def compare(a: Floats, b: Floats, ids: list[int]) -> TokenScores:
    return output.score(output.score_reference(a, ids), b)


def log_softmax(rows: Floats) -> Doubles:
    return np.asarray(special.log_softmax(rows.astype(np.float64), axis=1), dtype=np.float64)


def kld64(a: Floats, b: Floats) -> Doubles:
    """KL(softmax a || softmax b) per row, float64, from log-probabilities: no probability underflows."""
    log_p, log_q = log_softmax(a), log_softmax(b)
    return np.asarray((np.exp(log_p) * (log_p - log_q)).sum(axis=1), dtype=np.float64)


# ---------------------------------------------------------------- one chunk


@pytest.mark.parametrize(("n_vocab", "scale"), [(17, 1.0), (300, 3.0), (32_000, 2.0), (2, 1e-3), (1, 1.0)])
def test_kld_is_that_of_scipy(n_vocab: int, scale: float) -> None:
    a, b = logits(12, n_vocab, scale), logits(12, n_vocab, scale, seed=7)
    found = compare(a, b, tokens(12, n_vocab))
    p, q = (np.exp(log_softmax(x[6:11])) for x in (a, b))
    assert found.kld == pytest.approx(special.rel_entr(p, q).sum(axis=1), rel=3e-6, abs=1e-7)
    assert found.kld == pytest.approx(stats.entropy(p, q, axis=1), rel=3e-6, abs=1e-7)


@pytest.mark.parametrize("scale", [30.0, 300.0, 3000.0])
def test_kld_of_extreme_logits(scale: float) -> None:
    a, b = logits(40, 500, scale), logits(40, 500, scale, seed=7)
    found = compare(a, b, tokens(40, 500))
    assert found.nonfinite == 0
    # The probabilities are float32: off by the rounding of a logit, which weighs on a logit difference.
    assert found.kld == pytest.approx(kld64(a, b)[20:39], rel=1e-6 * scale, abs=1e-6)


def test_kld_of_a_small_change_is_resolved() -> None:
    a = logits(64, 32_000, 2.5)
    b = a + logits(64, 32_000, 0.01, seed=9)
    exact = kld64(a, b)[32:63]
    assert exact.max() < 1e-3
    assert compare(a, b, tokens(64, 32_000)).kld == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("scale", [0.0, 1.0, 1000.0])
def test_equal_logits_give_exactly_zero(scale: float) -> None:
    a = logits(20, 999, scale)
    found = compare(a, a.copy(), tokens(20, 999))
    assert (found.kld == 0.0).all()
    assert (found.nll == found.nll_reference).all()
    assert found.same_top.all()


@pytest.mark.parametrize("seed", range(4))
def test_kld_is_never_negative(seed: int) -> None:
    a = logits(200, 64, 4.0, seed)
    b = a + np.float32(1e-7) * logits(200, 64, 1.0, seed + 50)
    shifted = a + np.float32(0.37)  # the same distribution, other logits
    for other in (b, shifted):
        kld = compare(a, other, tokens(200, 64)).kld
        assert kld.min() >= 0.0
        assert kld.max() < 1e-7


@pytest.mark.parametrize("shift", [0.25, -37.5, 1000.0, 8192.0, -8192.0])
@pytest.mark.parametrize("n_vocab", [64, 32_000])
def test_shift_of_all_logits_adds_nothing(n_vocab: int, shift: float) -> None:
    a = np.round(logits(40, n_vocab, 4.0) * 1024).astype(np.float32) / np.float32(1024)
    b = a + np.float32(shift)
    assert (b.astype(np.float64) - a == shift).all()  # few enough bits that float32 holds the sum exactly
    found = compare(a, b, tokens(40, n_vocab))
    assert found.kld.max() < 1e-10  # measured: 3e-11 at most
    assert found.nll == pytest.approx(found.nll_reference, abs=1e-9)
    assert found.same_top.all()


@pytest.mark.parametrize("shift", [-5.3, 100.0, 1e4])
def test_shift_that_float32_rounds_adds_its_rounding_at_most(shift: float) -> None:
    a = logits(200, 64, 4.0)
    b = a + np.float32(shift)
    kld = compare(a, b, tokens(200, 64)).kld
    # A difference of two float32 logits is itself rounded, by half a unit in the last place of the shift.
    assert kld == pytest.approx(kld64(a, b)[100:199], abs=2**-24 * (1 + abs(shift)))


def test_log_sum_exp_is_that_of_scipy() -> None:
    for scale in (0.0, 1.0, 50.0, 1e4):
        rows = logits(37, 1001, scale)
        expected = special.logsumexp(rows.astype(np.float64), axis=1)
        assert output._log_sum_exp(rows) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_log_sum_exp_does_not_overflow() -> None:
    rows = np.array([[1e4, 1e4], [-1e4, -1e4]], dtype=np.float32)
    assert output._log_sum_exp(rows) == pytest.approx([1e4 + math.log(2), -1e4 + math.log(2)])


@pytest.mark.parametrize(("n", "positions"), [(64, [1, 5, 9, 13, 17, 21, 25, 29]), (34, [1, 5, 9, 13]), (4, [1])])
def test_first_half_is_that_of_scipy(n: int, positions: list[int]) -> None:
    a, b = logits(n, 300), logits(n, 300, seed=7)
    reference = output.score_reference(a, tokens(n, 300))
    assert reference.early is not None
    early = output.score(reference.early, b)
    p, q = (np.exp(log_softmax(x[positions])) for x in (a, b))
    assert early.kld == pytest.approx(stats.entropy(p, q, axis=1), rel=3e-6)
    assert early.same_top.tolist() == (a[positions].argmax(axis=1) == b[positions].argmax(axis=1)).tolist()
    running, alone, halves = OutputStats(), OutputStats(), [OutputStats(), OutputStats()]
    for one in (running, halves[0], halves[1]):
        one.update(output.score(reference, b), early)
    alone.update(output.score(reference, b))
    found = running.compute()
    assert found.first_half is not None
    assert found.first_half.tokens == len(positions)
    assert found.first_half.kld_mean == pytest.approx(stats.entropy(p, q, axis=1).mean(), rel=3e-6)
    assert dataclasses.replace(found, first_half=None) == alone.compute()  # no other figure has a part of it
    halves[0].merge(halves[1])
    merged = halves[0].compute().first_half
    assert merged is not None
    assert merged.tokens == 2 * len(positions)
    assert merged.kld_mean == pytest.approx(found.first_half.kld_mean)


@pytest.mark.parametrize(("n", "first", "scored"), [(32, 16, 15), (33, 16, 16), (4, 2, 1), (512, 256, 255)])
def test_scored_positions_are_those_of_llama_perplexity(n: int, first: int, scored: int) -> None:
    a, ids = logits(n, 600), list(range(n))  # token t at position t
    reference = output.score_reference(a, ids)
    assert reference.first == first
    assert reference.targets.tolist() == list(range(first + 1, n))  # shifted by one, the last token predicts nothing
    assert len(reference.targets) == scored
    assert (reference.logits == a[first : n - 1]).all()
    expected = -log_softmax(a)[np.arange(first, n - 1), np.arange(first + 1, n)]
    assert reference.nll == pytest.approx(expected, abs=1e-5)
    assert np.abs(reference.p - np.exp(log_softmax(a))[first : n - 1]).max() < 1e-6
    assert reference.top.tolist() == a[first : n - 1].argmax(axis=1).tolist()


def test_scored_logits_are_a_copy() -> None:
    a = logits(8, 10)
    reference = output.score_reference(a, tokens(8, 10))
    a[:] = 0  # the next decode writes into the same buffer
    assert reference.logits.any()


def test_position_and_confidence() -> None:
    a = logits(40, 30, 3.0)
    found = compare(a, logits(40, 30, seed=5), tokens(40, 30))
    assert found.position.tolist() == pytest.approx([i / 19 for i in range(19)])
    assert found.confidence == pytest.approx(np.exp(log_softmax(a)).max(axis=1)[20:39], rel=1e-5)


@pytest.mark.parametrize(
    ("where", "bad"),
    [("reference", np.nan), ("reference", np.inf), ("level", np.nan), ("level", np.inf), ("level", -np.inf)],
)
def test_non_finite_logits_are_counted_and_left_out(where: str, bad: float) -> None:
    a, b, ids = logits(20, 30), logits(20, 30, seed=2), tokens(20, 30)
    whole = compare(a, b, ids)
    (a if where == "reference" else b)[[12, 3, 19], 4] = bad  # rows 3 and 19 are not scored
    found = compare(a, b, ids)
    assert found.nonfinite == 1
    kept = np.arange(9) != 2
    for name in ("kld", "nll", "nll_reference", "same_top", "position", "confidence"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name)[kept])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_logits_in_both_models_are_counted_and_do_not_warn(bad: float) -> None:
    a, b, ids = logits(20, 30), logits(20, 30, seed=2), tokens(20, 30)
    whole = compare(a, b, ids)
    a[12, 4] = b[12, 4] = bad
    found = compare(a, b, ids)
    assert found.nonfinite == 1
    assert found.kld == pytest.approx(whole.kld[np.arange(9) != 2])


@pytest.mark.parametrize("level_too", [False, True])
def test_token_that_the_reference_rules_out_adds_nothing(level_too: bool) -> None:
    a, b, ids = logits(20, 30), logits(20, 30, seed=2), tokens(20, 30)
    assert ids[13] != 4
    a[12, 4] = -np.inf
    if level_too:
        b[12, 4] = -np.inf
    found = compare(a, b, ids)
    assert found.nonfinite == 0
    p, q = (special.softmax(x[10:19].astype(np.float64), axis=1) for x in (a, b))
    assert p[2, 4] == 0.0
    # rel_entr(0, q) is 0, whatever q is.
    assert found.kld == pytest.approx(special.rel_entr(p, q).sum(axis=1), rel=3e-6, abs=1e-7)
    assert found.nll_reference == pytest.approx(-np.log(p[np.arange(9), ids[11:]]), rel=1e-5, abs=1e-6)
    assert found.confidence == pytest.approx(p.max(axis=1), rel=1e-5)


def test_token_with_a_probability_that_the_level_rules_out_is_counted() -> None:
    a, b, ids = logits(20, 30), logits(20, 30, seed=2), tokens(20, 30)
    a[12, 4] = -500.0  # so small that its probability is 0 in float32
    b[[12, 15], 4] = -np.inf
    found = compare(a, b, ids)
    assert found.nonfinite == 1  # row 15, where the reference gives it a chance
    p, q = (special.softmax(x[10:19].astype(np.float64), axis=1) for x in (a, b))
    p[2, 4] = 0.0
    kept = np.arange(9) != 5
    assert found.kld == pytest.approx(special.rel_entr(p, q).sum(axis=1)[kept], rel=3e-6, abs=1e-7)


@pytest.mark.parametrize("where", ["reference", "level"])
def test_next_token_that_is_ruled_out_has_no_likelihood_and_is_counted(where: str) -> None:
    a, b, ids = logits(20, 30), logits(20, 30, seed=2), tokens(20, 30)
    (a if where == "reference" else b)[12, ids[13]] = -np.inf
    assert compare(a, b, ids).nonfinite == 1


# ---------------------------------------------------------------- output statistics


def scores(seed: int, sizes: list[int]) -> list[TokenScores]:
    """Chunks of made-up token scores, each with its own level of damage."""
    rng = np.random.default_rng(seed)
    out = []
    for n in sizes:
        reference = rng.exponential(2.0, n)
        out.append(
            TokenScores(
                kld=rng.lognormal(-4, 2, n) * (rng.random(n) > 0.1),
                nll=np.abs(reference + rng.normal(0, 0.3, n)),
                nll_reference=reference,
                same_top=rng.random(n) < 0.85,
                position=np.arange(n) / max(n, 1),
                confidence=rng.random(n),
                nonfinite=int(rng.integers(0, 3)),
            )
        )
    return out


def statistics(chunks: list[TokenScores]) -> OutputStats:
    found = OutputStats()
    for chunk in chunks:
        found.update(chunk)
    return found


def assert_same(a: Output, b: Output) -> None:
    left, right = (dataclasses.asdict(x) for x in (a, b))
    for groups in ("by_position", "by_confidence"):
        for one, two in zip(left.pop(groups), right.pop(groups), strict=True):
            assert one == pytest.approx(two)
    assert left.pop("kld_histogram") == right.pop("kld_histogram")
    assert left == pytest.approx(right, abs=1e-9)


def test_output_is_that_of_plain_numpy() -> None:
    chunks = scores(3, [255, 255, 255, 100])
    found = statistics(chunks).compute()
    kld, a, b, same = (
        np.concatenate([np.asarray(getattr(c, name)) for c in chunks])
        for name in ("kld", "nll", "nll_reference", "same_top")
    )
    delta = np.exp(-a) - np.exp(-b)
    assert (found.tokens, found.chunks) == (865, 4)
    assert found.nonfinite_tokens == sum(c.nonfinite for c in chunks) > 0
    assert found.kld_mean == pytest.approx(kld.mean())
    assert found.kld_max == kld.max()
    for q, value in (
        (0.5, found.kld_median),
        (0.9, found.kld_p90),
        (0.95, found.kld_p95),
        (0.99, found.kld_p99),
        (0.999, found.kld_p999),
    ):
        assert value == pytest.approx(np.quantile(kld, q), rel=TOLERANCE)
    assert found.same_top == pytest.approx(same.mean())
    assert found.ppl == pytest.approx(np.exp(a.mean()))
    assert found.ppl_reference == pytest.approx(np.exp(b.mean()))
    assert found.ln_ppl_ratio == pytest.approx(np.log(np.exp(a.mean()) / np.exp(b.mean())))
    assert found.ln_ppl_correlation == pytest.approx(stats.pearsonr(a, b).statistic)
    assert found.rms_delta_p == pytest.approx(np.sqrt(np.mean(delta**2)))
    assert found.mean_delta_p == pytest.approx(delta.mean())
    for q, value in ((0.05, found.delta_p_p05), (0.5, found.delta_p_median), (0.95, found.delta_p_p95)):
        assert value == pytest.approx(np.quantile(delta, q, method="lower"), abs=6e-5)
    for name, field in (("kld", "kld_se"), ("same_top", "same_top_se")):
        sums = [float(np.sum(getattr(c, name))) for c in chunks]
        assert getattr(found, field) == pytest.approx(direct_se(sums, [255, 255, 255, 100]))
    differences = [float(np.sum(c.nll - c.nll_reference)) for c in chunks]
    assert found.ln_ppl_ratio_se == pytest.approx(direct_se(differences, [255, 255, 255, 100]))


def test_groups_are_those_of_plain_numpy() -> None:
    chunks = scores(4, [64, 40])
    found = statistics(chunks).compute()
    for groups, name in ((found.by_position, "position"), (found.by_confidence, "confidence")):
        value = np.concatenate([getattr(c, name) for c in chunks])
        kld = np.concatenate([c.kld for c in chunks])
        same = np.concatenate([c.same_top for c in chunks])
        for quarter, group in enumerate(groups):
            mask = (value >= quarter / 4) & (value < (quarter + 1) / 4)
            assert group.tokens == mask.sum() > 0
            assert group.kld_mean == pytest.approx(kld[mask].mean())
            assert group.same_top == pytest.approx(same[mask].mean())
    assert [g.tokens for g in found.by_position] == [26, 26, 26, 26]


def test_sure_reference_is_in_the_last_confidence_group() -> None:
    (chunk,) = scores(5, [3])
    found = statistics([dataclasses.replace(chunk, confidence=np.array([1.0, 0.25, 0.75]))]).compute()
    assert [g.tokens for g in found.by_confidence] == [0, 1, 0, 2]
    assert found.by_confidence[0].kld_mean is None


def test_output_of_nothing() -> None:
    found = OutputStats().compute()
    numbers = {k: v for k, v in dataclasses.asdict(found).items() if v not in (0, None)}
    assert set(numbers) == {"by_position", "by_confidence", "kld_histogram"}
    assert found.kld_histogram.counts == ()


def test_perplexity_that_overflows_is_none() -> None:
    (chunk,) = scores(5, [4])
    found = statistics([dataclasses.replace(chunk, nll=np.full(4, 1e5))]).compute()
    assert found.ppl is None
    assert found.ppl_reference is not None
    assert found.ln_ppl_ratio == pytest.approx(1e5 - chunk.nll_reference.mean())


def test_equal_models_have_no_damage() -> None:
    a = logits(64, 50)
    found = statistics([compare(a, a, tokens(64, 50))] * 3).compute()
    assert (found.kld_mean, found.kld_max, found.kld_se, found.same_top) == (0.0, 0.0, 0.0, 1.0)
    assert (found.ln_ppl_ratio, found.ln_ppl_ratio_se, found.rms_delta_p, found.delta_p_median) == (0.0, 0.0, 0.0, 0.0)
    assert found.ln_ppl_correlation == pytest.approx(1.0)


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(2, 60), min_size=2, max_size=6),
    cut=st.integers(0, 6),
)
def test_merge_is_update_of_everything(seed: int, sizes: list[int], cut: int) -> None:
    chunks = scores(seed, sizes)
    parts = statistics(chunks[:cut])
    parts.merge(statistics(chunks[cut:]))
    assert_same(parts.compute(), statistics(chunks).compute())
