"""The stream's health and a level's drift from it, on made-up snapshots, against plain float64 numpy and scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from qres.arrays import Doubles, Floats
from qres.metrics.quantiles import RESOLUTION
from qres.residual.capture import Snapshot
from qres.residual.drift import MASSIVE, DriftStats, HealthStats, norms, reference_norms

TOLERANCE = RESOLUTION * 1.01
N_TOKENS, N_EMBD = 16, 96
READS = (0, 1, 2, 3)
"""Stream point that each of four branches reads: a sequential model of two layers."""


def arrays(seed: int, count: int, scale: float = 1.0) -> list[Floats]:
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(N_TOKENS, N_EMBD)) * scale).astype(np.float32) for _ in range(count)]


def snapshot(embedding: Floats, branches: list[Floats]) -> Snapshot:
    """A stream that adds up: each point is the one before plus a branch."""
    stream = [embedding]
    for branch in branches:
        stream.append(stream[-1] + branch)
    return Snapshot(tuple(stream), tuple(branches), {}, {})


def reference(seed: int = 0) -> Snapshot:
    first, *rest = arrays(seed, 5, 2.0)
    return snapshot(first, rest)


def damaged(base: Snapshot, errors: list[Floats]) -> Snapshot:
    """The level whose embedding and branches are off by `errors`, with nothing reacting to them."""
    return snapshot(base.stream[0] + errors[0], [b + e for b, e in zip(base.branches, errors[1:], strict=True)])


def drift(
    base: Snapshot, level: Snapshot, errors: list[Floats], reads: tuple[int, ...] = READS, threads: int = 1
) -> DriftStats:
    found = DriftStats(len(base.stream))
    found.update(base, reference_norms(base, threads), level, tuple(errors), reads, threads)
    return found


def nothing() -> list[Floats]:
    return [np.zeros((N_TOKENS, N_EMBD), np.float32) for _ in range(5)]


def norm64(x: Floats | Doubles) -> Doubles:
    return np.asarray(np.linalg.norm(x.astype(np.float64), axis=1), dtype=np.float64)


# ---------------------------------------------------------------- norms and massive tokens


def test_norms_are_those_of_float64() -> None:
    x = np.concatenate(arrays(3, 4, 1e3))
    assert norms(x) == pytest.approx(norm64(x), rel=1e-12)


@pytest.mark.parametrize("value", [1e30, 1e-30])
def test_norms_neither_overflow_nor_vanish(value: float) -> None:
    x = np.full((2, N_EMBD), value, np.float32)  # its squares are beyond float32
    assert norms(x) == pytest.approx(value * np.sqrt(N_EMBD), rel=1e-6)


def test_reference_norms_of_stream_and_branches() -> None:
    base = reference()
    known = reference_norms(base, 1)
    assert len(known.stream) == 5
    assert len(known.branches) == 4
    for found, x in zip((*known.stream, *known.branches), (*base.stream, *base.branches), strict=True):
        assert found == pytest.approx(norm64(x), rel=1e-12)
    assert known.plain.all()


@pytest.mark.parametrize(("factor", "plain"), [(MASSIVE * 1.01, False), (MASSIVE * 0.99, True)])
@pytest.mark.parametrize("point", [0, 2, 4])
def test_token_is_massive_where_any_point_is(factor: float, plain: bool, point: int) -> None:
    x = np.zeros((9, N_EMBD), np.float32)
    x[:, 0] = 1.0
    stream = [x.copy() for _ in range(5)]
    stream[point][4] *= factor
    found = reference_norms(Snapshot(tuple(stream), (x,) * 4, {}, {}), 1).plain
    assert found.tolist() == [True] * 4 + [plain] + [True] * 4


# ---------------------------------------------------------------- drift


def test_drift_of_identical_snapshots_is_exactly_zero() -> None:
    base = reference()
    found = drift(base, reference(), nothing())
    for quantiles in (found.drift, found.one_minus_cosine, found.local, found.injected):
        for point in range(5):
            assert [quantiles.quantile(q, point) for q in (0.0, 0.5, 1.0)] == [0.0, 0.0, pytest.approx(0, abs=1e-15)]
            assert quantiles.counts[point].sum() == N_TOKENS
    assert found.drift.max.tolist() == [0.0] * 5
    assert found.share.tolist() == [0.0] * 5
    assert found.generated.tolist() == [0.0] * 5
    assert found.ledger_tokens == 0


def test_drift_figures_are_those_of_float64() -> None:
    base = reference()
    errors = arrays(1, 5, 0.3)
    level = damaged(base, errors)
    found = drift(base, level, errors, reads := (0, 0, 2, 2))
    for i in range(5):
        x, y = base.stream[i].astype(np.float64), level.stream[i].astype(np.float64)
        source = base.stream[0] if i == 0 else base.branches[i - 1]
        cosine = (x * y).sum(axis=1) / (norm64(x) * norm64(y))
        expected = {
            "drift": norm64(y - x) / norm64(x),
            "one_minus_cosine": 1 - cosine,
            "local": norm64(errors[i]) / norm64(source),
            "injected": norm64(errors[i]) / norm64(x),
        }
        if i:
            expected["ratio"] = norm64(level.branches[i - 1]) / norm64(level.stream[reads[i - 1]])
        for name, values in expected.items():
            quantiles = getattr(found, name)
            for q in (0.0, 0.5, 0.95):
                assert quantiles.quantile(q, i) == pytest.approx(np.quantile(values, q), rel=TOLERANCE)
            assert quantiles.max[i] == pytest.approx(values.max(), rel=1e-6)
        assert found.absmax[i] == np.abs(level.stream[i]).max()
    assert found.ratio.quantile(0.5, 0) is None  # the embedding is no branch


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_ledger_shares_add_up_to_one(scale: float, seed: int) -> None:
    base = reference()
    errors = arrays(seed, 5, scale)
    found = drift(base, damaged(base, errors), errors)
    assert found.ledger_tokens == N_TOKENS
    # `difference` is rounded to float32 once; where drift is small against the stream, it is exact.
    assert found.share.sum() / found.ledger_tokens == pytest.approx(1, abs=1e-9 if scale < 0.5 else 5e-9)


def test_ledger_is_that_of_float64() -> None:
    base = reference()
    errors = arrays(1, 5, 0.05)
    level = damaged(base, errors)
    found = drift(base, level, errors)
    moved = [y.astype(np.float64) - x for x, y in zip(base.stream, level.stream, strict=True)]
    weight = (moved[-1] ** 2).sum(axis=1)
    along = [(d * moved[-1]).sum(axis=1) / weight for d in moved]
    share = np.diff(np.array([np.zeros(N_TOKENS), *along]), axis=0)
    assert found.share == pytest.approx(share.sum(axis=1), abs=1e-6)
    made = [(e.astype(np.float64) * moved[-1]).sum(axis=1) / weight for e in errors]
    assert found.generated == pytest.approx(np.array(made).sum(axis=1), abs=1e-9)


@pytest.mark.parametrize("guilty", range(5))
def test_ledger_of_one_error_blames_its_branch_alone(guilty: int) -> None:
    base = reference()
    errors = nothing()
    errors[guilty] = arrays(7, 1, 0.5)[0]
    found = drift(base, damaged(base, errors), errors)
    expected = [1.0 if i == guilty else 0.0 for i in range(5)]
    # Rounding of the later sums moves the rest by a rounding of the stream.
    assert found.share / found.ledger_tokens == pytest.approx(expected, abs=1e-6)
    assert found.generated / found.ledger_tokens == pytest.approx(expected, abs=1e-6)


def test_ledger_tells_inherited_from_generated() -> None:
    # The embedding is off by e; branch 2 reacts to that by e once more, without any error of its own.
    base = reference()
    e = arrays(7, 1, 0.5)[0]
    own, all_of_it = nothing(), nothing()
    own[0] = all_of_it[0] = all_of_it[2] = e
    found = drift(base, damaged(base, all_of_it), own)
    assert found.share / found.ledger_tokens == pytest.approx([0.5, 0, 0.5, 0, 0], abs=1e-6)
    assert found.generated / found.ledger_tokens == pytest.approx([0.5, 0, 0, 0, 0], abs=1e-6)


def scaled(embedding: Floats, branches: list[Floats], scales: dict[int, float]) -> Snapshot:
    """A stream that is scaled on its way into some adds: `scales` by the branch that is added there."""
    stream, stream_in = [embedding], {}
    for index, branch in enumerate(branches, 1):
        before = stream[-1]
        if index in scales:
            before = stream_in[index] = before * np.float32(scales[index])
        stream.append(before + branch)
    return Snapshot(tuple(stream), tuple(branches), stream_in, {})


SCALES = {2: 0.25, 4: 3.0}


def test_ledger_has_a_share_for_what_scaling_the_stream_does() -> None:
    base, errors = reference(), arrays(1, 5, 0.05)
    first, *rest = (x + e for x, e in zip((base.stream[0], *base.branches), errors, strict=True))
    before, after = scaled(base.stream[0], list(base.branches), SCALES), scaled(first, rest, SCALES)
    found = drift(before, after, errors)
    moved = [y.astype(np.float64) - x for x, y in zip(before.stream, after.stream, strict=True)]
    weight = (moved[-1] ** 2).sum(axis=1)
    expected = np.zeros(5)
    for index, scale in SCALES.items():
        expected[index] = ((scale - 1) * (moved[index - 1] * moved[-1]).sum(axis=1) / weight).sum()
    assert found.scaling == pytest.approx(expected, abs=1e-5)
    assert found.scaling.tolist()[::2] != [0.0] * 3
    assert (found.scaling[1], found.scaling[3]) == (0.0, 0.0)
    # No branch reacts to anything here: nothing is inherited, and the two parts are all there is.
    assert found.share == pytest.approx(found.generated + found.scaling, abs=1e-5)
    assert found.share.sum() / found.ledger_tokens == pytest.approx(1, abs=1e-9)


def test_ledger_has_no_scaling_share_where_nothing_is_scaled() -> None:
    base, errors = reference(), arrays(1, 5, 0.1)
    assert drift(base, damaged(base, errors), errors).scaling.tolist() == [0.0] * 5
    alone = scaled(base.stream[0], list(base.branches), {2: 1.0})
    first, *rest = (x + e for x, e in zip((base.stream[0], *base.branches), errors, strict=True))
    assert drift(alone, scaled(first, rest, {2: 1.0}), errors).scaling.tolist() == [0.0] * 5


@pytest.mark.parametrize("reads", [(0, 1, 2, 3), (0, 0, 2, 2), (0, 1, 1, 3)])
def test_ratio_is_over_the_stream_as_it_enters_the_add(reads: tuple[int, ...]) -> None:
    base, level = reference(), reference(5)
    known, quantized = (scaled(one.stream[0], list(one.branches), SCALES) for one in (base, level))
    found, own = drift(known, quantized, nothing(), reads), HealthStats(5)
    own.update(known, reference_norms(known, 1), reads, 1)
    for statistics, snap in ((found, quantized), (own, known)):
        for index, read in enumerate(reads, 1):
            stream = norm64(snap.stream[read]) * SCALES.get(read + 1, 1.0)
            expected = np.median(norm64(snap.branches[index - 1]) / stream)
            assert statistics.ratio.quantile(0.5, index) == pytest.approx(expected, rel=TOLERANCE)


def test_ledger_of_a_correction_is_negative() -> None:
    base = reference()
    e = arrays(7, 1, 0.5)[0]
    errors = nothing()
    errors[0], errors[3] = e, e * np.float32(-0.5)
    found = drift(base, damaged(base, errors), errors)
    assert found.share / found.ledger_tokens == pytest.approx([2, 0, 0, -1, 0], abs=1e-6)


def test_ledger_leaves_out_tokens_that_did_not_move() -> None:
    base = reference()
    errors = nothing()
    errors[1][:5] = arrays(7, 1, 0.5)[0][:5]
    found = drift(base, damaged(base, errors), errors)
    assert found.ledger_tokens == 5
    assert found.share / found.ledger_tokens == pytest.approx([0, 1, 0, 0, 0], abs=1e-6)


def test_massive_tokens_are_left_out() -> None:
    base = reference()
    errors = arrays(1, 5, 0.1)
    expected = drift(base, damaged(base, errors), errors)

    def extended(rows: list[Floats], scale: float) -> list[Floats]:
        return [np.concatenate([one, np.float32(scale) * one[:1]]) for one in rows]

    # The same tokens and one whose stream and error are 1000 and 50 000 times as large.
    first, *rest = extended([base.stream[0], *base.branches], 1e3)
    more = snapshot(first, rest)
    more_errors = extended(errors, 5e4)
    known = reference_norms(more, 1)
    assert known.plain.tolist() == [True] * N_TOKENS + [False]
    found = drift(more, damaged(more, more_errors), more_errors)
    for name in ("ratio", "drift", "one_minus_cosine", "local", "injected"):
        assert (getattr(found, name).counts == getattr(expected, name).counts).all()
    assert found.share == pytest.approx(expected.share)
    assert found.generated == pytest.approx(expected.generated)
    assert found.ledger_tokens == N_TOKENS
    assert (found.absmax > 100 * expected.absmax).all()  # the range is over all tokens
    health = HealthStats(5)
    health.update(more, known, READS, 1)
    assert (health.tokens, health.massive) == (N_TOKENS, 1)
    assert health.norm.counts.sum(axis=1).tolist() == [N_TOKENS] * 5


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_non_finite_tokens_are_left_out(bad: float) -> None:
    base = reference()
    errors = arrays(1, 5, 0.1)
    level = damaged(base, errors)
    level.stream[4][3, 0] = bad
    found = drift(base, level, errors)
    assert found.drift.counts.sum(axis=1).tolist() == [N_TOKENS] * 4 + [N_TOKENS - 1]
    assert found.ledger_tokens == N_TOKENS - 1
    assert np.isfinite(found.share).all()
    assert found.share.sum() / found.ledger_tokens == pytest.approx(1, abs=1e-8)


def test_drift_of_a_stream_at_zero_is_left_out() -> None:
    base = reference()
    for x in (base.stream[0], base.branches[0]):
        x[2] = 0.0
    level = damaged(base, errors := arrays(1, 5, 0.1))
    found = drift(base, level, errors)
    assert found.drift.counts[0].sum() == N_TOKENS - 1  # something relative to nothing has no size
    assert found.local.counts[:2].sum(axis=1).tolist() == [N_TOKENS - 1] * 2
    assert found.drift.counts[4].sum() == N_TOKENS


def test_chunks_add_up() -> None:
    parts = [(reference(seed), arrays(seed + 10, 5, 0.1)) for seed in (1, 2)]
    both = DriftStats(5)
    for base, errors in parts:
        both.update(base, reference_norms(base, 1), damaged(base, errors), tuple(errors), READS, 1)
    one, two = (drift(base, damaged(base, errors), errors) for base, errors in parts)
    assert (both.drift.counts == one.drift.counts + two.drift.counts).all()
    assert both.share == pytest.approx(one.share + two.share)
    assert both.ledger_tokens == 2 * N_TOKENS
    assert (both.absmax == np.maximum(one.absmax, two.absmax)).all()


def test_threads_change_nothing() -> None:
    base = reference()
    errors = arrays(1, 5, 0.1)
    one, three = (drift(base, damaged(base, errors), errors, threads=n) for n in (1, 3))
    assert (one.drift.counts == three.drift.counts).all()
    assert one.share.tolist() == three.share.tolist()
    assert one.absmax.tolist() == three.absmax.tolist()


# ---------------------------------------------------------------- health


def health(stream: list[Floats], branches: list[Floats], reads: tuple[int, ...]) -> HealthStats:
    made = Snapshot(tuple(stream), tuple(branches), {}, {})
    found = HealthStats(len(stream))
    found.update(made, reference_norms(made, 1), reads, 1)
    return found


def test_health_is_that_of_scipy() -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_t(5, (32, 4096)) * 3 + 0.5).astype(np.float32)
    wide = x.astype(np.float64)
    found = health([x, x], [x], (0,))
    assert found.tokens == 32
    assert found.sums[0] / found.tokens == pytest.approx([wide.mean(axis=1).mean(), wide.var(axis=1).mean()])
    assert found.kurtosis.quantile(0.5) == pytest.approx(
        np.median(stats.kurtosis(wide, axis=1, fisher=False)), rel=TOLERANCE
    )
    participation = (wide**2).sum(axis=1) ** 2 / (wide**4).sum(axis=1)
    assert found.participation.quantile(0.5) == pytest.approx(np.median(participation), rel=TOLERANCE)
    assert found.norm.quantile(0.5) == pytest.approx(np.median(norm64(x)), rel=TOLERANCE)
    assert found.absmax.tolist() == [np.abs(x).max()] * 2


def test_kurtosis_of_normal_values_is_3() -> None:
    x = np.random.default_rng(0).normal(0.7, 5.0, (64, 16384)).astype(np.float32)
    found = health([x], [], ())
    assert found.kurtosis.quantile(0.5) == pytest.approx(3, rel=0.02)
    assert found.participation.quantile(0.5) == pytest.approx(16384 / 3, rel=0.05)


def test_participation_of_one_channel_is_1_and_of_equal_channels_all() -> None:
    one, equal, half = (np.zeros((4, 64), np.float32) for _ in range(3))
    one[:, 5] = -7.0
    equal[:] = 0.25
    half[:, ::2] = 3.0
    found = health([one, equal, half], [], ())
    for point, expected in enumerate((1, 64, 32)):
        assert found.participation.quantile(0.5, point) == pytest.approx(expected, rel=TOLERANCE)


def test_kurtosis_does_not_see_the_mean() -> None:
    x = np.random.default_rng(1).normal(0, 1, (8, 4096))
    near, far = (health([(x + shift).astype(np.float32)], [], ()).kurtosis.quantile(0.5) for shift in (0, 1000))
    assert near == pytest.approx(far, rel=0.005)


def test_health_of_a_stream_at_zero() -> None:
    x = np.zeros((4, 8), np.float32)
    found = health([x, x], [x], (0,))
    for quantiles in (found.norm, found.kurtosis, found.participation):
        assert quantiles.quantile(0.5) == 0.0
    assert found.ratio.quantile(0.5, 1) == 0.0  # nothing relative to nothing


def test_health_ratio_is_of_the_stream_that_the_branch_reads() -> None:
    unit = np.zeros((4, 8), np.float32)
    unit[:, 0] = 1.0
    found = health([unit, 2 * unit, 7 * unit], [6 * unit, 10 * unit], (0, 0))  # parallel: both read point 0
    assert found.ratio.quantile(0.5, 0) is None
    assert found.ratio.quantile(0.5, 1) == pytest.approx(6, rel=TOLERANCE)
    assert found.ratio.quantile(0.5, 2) == pytest.approx(10, rel=TOLERANCE)
