"""Statistics of a comparison, in update / compute / merge form; pure numpy, no model.

Sums are float64. Quantiles come from logarithmic histograms of fixed size, so memory does not grow with the text; their
values are exact to `RESOLUTION`. Standard errors cluster tokens by chunk: tokens of one chunk share their context, and
treating them as independent gives errors several times too small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qres.records import Group, Histogram, Output

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

RESOLUTION = 0.002
"""Half the relative width of a quantile bin."""
_LOW, _HIGH = 1e-12, 1e12
_STEP = math.log1p(2 * RESOLUTION)
_BINS = math.ceil(math.log(_HIGH / _LOW) / _STEP) + 1
_BLOCK_ROWS = 16
"""Rows of logits per numpy call: a few MB, so that intermediate results stay in the CPU cache."""


class Quantiles:
    """Histograms of non-negative values, one per row; values below 1e-12 count as 0."""

    def __init__(self, rows: int = 1) -> None:
        self.counts = np.zeros((rows, _BINS), dtype=np.uint32)
        self.max = np.zeros(rows)

    def update(self, values: Doubles) -> None:
        """Add values [rows, n]; non-finite ones are left out."""
        values = np.atleast_2d(values)
        finite = np.isfinite(values)
        rows = np.broadcast_to(np.arange(len(values))[:, None], values.shape)[finite]
        kept = values[finite]
        bins = np.zeros(kept.shape, dtype=np.int64)
        above = kept >= _LOW
        bins[above] = np.clip(np.log(kept[above] / _LOW) / _STEP + 1, 1, _BINS - 1).astype(np.int64)
        flat = np.bincount(rows * _BINS + bins, minlength=self.counts.size)
        self.counts += flat.reshape(self.counts.shape).astype(np.uint32)
        self.max = np.maximum(self.max, np.where(finite, values, 0.0).max(axis=1, initial=0.0))

    def merge(self, other: Quantiles) -> None:
        """Add what another has seen."""
        self.counts += other.counts
        self.max = np.maximum(self.max, other.max)

    def quantile(self, q: float, row: int = 0) -> float | None:
        """The q-quantile (linear between order statistics, as numpy's default); None when nothing was seen."""
        cumulative = np.cumsum(self.counts[row], dtype=np.int64)
        n = int(cumulative[-1])
        if n == 0:
            return None
        if q == 1.0:
            return float(self.max[row])
        rank = q * (n - 1)
        low, high = (self._value(int(np.searchsorted(cumulative, math.floor(rank) + k, side="right"))) for k in (0, 1))
        part = rank - math.floor(rank)
        value = low if part == 0 else low + part * (high - low)
        return min(value, float(self.max[row]))

    @staticmethod
    def _value(index: int) -> float:
        """The middle of a bin."""
        return 0.0 if index == 0 else _LOW * math.exp((index - 0.5) * _STEP)

    def coarse(self, per_decade: int = 8) -> Histogram:
        """Counts of the first row in wider bins, from the lowest to the highest that hold anything."""
        filled = np.flatnonzero(self.counts[0])
        if filled.size == 0:
            return Histogram((), ())
        values = np.array([self._value(int(i)) for i in filled])
        floor = values[values > 0].min() if (values > 0).any() else _LOW
        logs = np.log10(np.maximum(values, floor))
        first = math.floor(logs.min() * per_decade)
        edges = 10 ** (np.arange(first, math.floor(logs.max() * per_decade) + 2) / per_decade)
        which = np.floor(logs * per_decade).astype(int) - first
        counts = np.bincount(which, weights=self.counts[0][filled], minlength=len(edges) - 1)
        return Histogram(tuple(float(f"{e:.4g}") for e in edges), tuple(int(c) for c in counts))


class ChunkMean:
    """Mean over tokens with a standard error that clusters them by chunk."""

    def __init__(self) -> None:
        self.sums: list[float] = []
        self.counts: list[int] = []

    def update(self, values: Doubles) -> None:
        """Add one chunk's per-token values; a chunk without any counts neither as tokens nor as a chunk."""
        self.sums.append(float(np.sum(values, dtype=np.float64)))
        self.counts.append(int(np.size(values)))

    def merge(self, other: ChunkMean) -> None:
        """Add another's chunks."""
        self.sums += other.sums
        self.counts += other.counts

    @property
    def mean(self) -> float | None:
        """Mean over all tokens; None without any."""
        n = sum(self.counts)
        return math.fsum(self.sums) / n if n else None

    @property
    def se(self) -> float | None:
        """Cluster-robust standard error of a ratio of sums (Cochran, Sampling Techniques, 6.4); None below 2 chunks."""
        return clustered_se(self.sums, self.counts)


def clustered_se(sums: Sequence[float], counts: Sequence[float]) -> float | None:
    """Standard error of the ratio sum(sums) / sum(counts) with whole chunks as the independent units.

    se^2 = C / (C - 1) * sum_c (s_c - m n_c)^2 / N^2 with m = sum(s) / N, N = sum(n).
    """
    chunks, n = sum(count > 0 for count in counts), sum(counts)
    if chunks < 2 or n == 0:
        return None
    s, c = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    spread = s - s.sum() / n * c
    return float(math.sqrt(chunks / (chunks - 1) * float(spread @ spread)) / n)


def paired_se(a: ChunkMean, b: ChunkMean) -> float | None:
    """Standard error of the difference of two means over the same tokens, chunk by chunk; None below 2 chunks."""
    return clustered_se([x - y for x, y in zip(a.sums, b.sums, strict=True)], a.counts)


@dataclass(frozen=True)
class Scored:
    """The reference's next-token distribution at the scored positions of a chunk."""

    first: int
    """Row of the logits that the first scored position is."""
    targets: npt.NDArray[np.int64]
    """Next token at each scored position [n]."""
    logits: Floats
    """[n, n_vocab]."""
    p: Floats
    """softmax(logits), float32 [n, n_vocab]."""
    lse: Doubles
    """log sum exp of each row [n]."""
    nll: Doubles
    top: npt.NDArray[np.int64]


def score_reference(logits: Floats, tokens: Sequence[int]) -> Scored:
    """Take the scored positions of a chunk, as llama-perplexity does: the second half, less the last token.

    Args:
        logits: [n_tokens, n_vocab].
        tokens: The chunk; position t predicts tokens[t + 1].
    """
    first = len(tokens) // 2
    targets = np.asarray(tokens[first + 1 :], dtype=np.int64)
    rows = np.array(
        logits[first : len(tokens) - 1], dtype=np.float32
    )  # a copy: the buffer is reused by the next decode
    lse = _log_sum_exp(rows)
    p = np.empty_like(rows)
    with np.errstate(invalid="ignore", over="ignore"):  # infinite logits are counted, not hidden
        for block in _blocks(len(rows)):
            p[block] = np.exp(rows[block] - lse[block, None].astype(np.float32))
    nll = lse - rows[np.arange(len(rows)), targets].astype(np.float64)
    return Scored(first, targets, rows, p, lse, nll, rows.argmax(axis=1))


@dataclass(frozen=True)
class TokenScores:
    """Per-token comparison of one chunk, finite positions only; arrays [n]."""

    kld: Doubles
    nll: Doubles
    nll_reference: Doubles
    same_top: npt.NDArray[np.bool_]
    position: Doubles
    """0 at the first scored position, 1 after the last."""
    confidence: Doubles
    """The reference's top probability."""
    nonfinite: int
    """Positions left out because either model's logits are not finite there."""
    reference_nonfinite: int = 0
    """Those of them where the reference's are not."""


def score(reference: Scored, logits: Floats) -> TokenScores:
    """Compare a model's logits with the reference's at its scored positions.

    KL(P || Q) = sum_v p_v (z^P_v - z^Q_v) - lse^P + lse^Q, in nats: exactly 0 for equal logits, and free of the
    logarithm of a rounded probability. Products and sums are float64.
    """
    n = len(reference.targets)
    rows = logits[reference.first : reference.first + n]
    lse = _log_sum_exp(rows)
    kld = np.empty(n)
    top = np.empty(n, dtype=np.int64)
    for block in _blocks(n):
        with np.errstate(invalid="ignore", over="ignore"):  # infinity - infinity: counted below
            difference = reference.logits[block] - rows[block]
        kld[block] = np.einsum("tv,tv->t", reference.p[block], difference, dtype=np.float64, casting="safe")
        if not np.isfinite(kld[block]).all():  # 0 * infinity: a token that the reference rules out adds nothing
            ruled_out = np.where(reference.p[block] == 0, np.float32(0), difference)
            kld[block] = np.einsum("tv,tv->t", reference.p[block], ruled_out, dtype=np.float64, casting="safe")
        top[block] = rows[block].argmax(axis=1)
        # p is float32 and adds up to 1 only nearly: without this a shift common to all logits would count as damage.
        kld[block] += (lse[block] - reference.lse[block]) * reference.p[block].sum(axis=1, dtype=np.float64)
    nll = lse - rows[np.arange(n), reference.targets].astype(np.float64)
    ok = np.isfinite(kld) & np.isfinite(nll) & np.isfinite(reference.nll)
    best = reference.logits[np.arange(n), reference.top].astype(np.float64)
    return TokenScores(
        kld=np.maximum(kld[ok], 0.0),  # rounding can leave -1e-9 where the distributions agree
        nll=nll[ok],
        nll_reference=reference.nll[ok],
        same_top=(top == reference.top)[ok],
        position=(np.arange(n) / n)[ok],
        confidence=np.exp(best - reference.lse)[ok],
        nonfinite=int(n - ok.sum()),
        reference_nonfinite=int(n - np.isfinite(reference.nll).sum()),
    )


def _blocks(n: int) -> list[slice]:
    return [slice(i, min(i + _BLOCK_ROWS, n)) for i in range(0, n, _BLOCK_ROWS)]


def _log_sum_exp(rows: Floats) -> Doubles:
    out = np.empty(len(rows))
    for block in _blocks(len(rows)):
        part = rows[block]
        top = part.max(axis=1)
        with np.errstate(invalid="ignore", over="ignore"):  # infinite logits are counted, not hidden
            out[block] = np.log(np.exp(part - top[:, None]).sum(axis=1, dtype=np.float64)) + top
    return out


_ROUNDING = 1e-12
"""Of a sum of squares: less than that cannot be told from 0 when two of them are subtracted."""
_CONFIDENCE = ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.01))
_DELTA_BINS = 20_000


class OutputStats:
    """Running output statistics of one level; `compute` gives the record."""

    def __init__(self) -> None:
        self.kld = ChunkMean()
        self.same_top = ChunkMean()
        self.nll_difference = ChunkMean()
        self._quantiles = Quantiles()
        self._moments = np.zeros(6)  # n, sum a, sum b, sum aa, sum bb, sum ab of (nll, nll_reference)
        self._delta = np.zeros(3)  # n, sum, sum of squares of delta p
        self._delta_histogram = np.zeros(_DELTA_BINS + 1, dtype=np.int64)
        self._groups = np.zeros((2, 4, 3))  # position | confidence, quarter, (n, kld, same top)
        self.nonfinite = 0
        self.reference_nonfinite = 0

    def update(self, s: TokenScores) -> None:
        """Add one chunk."""
        self.kld.update(s.kld)
        self.same_top.update(s.same_top.astype(np.float64))
        self.nll_difference.update(s.nll - s.nll_reference)
        self._quantiles.update(s.kld)
        a, b = s.nll, s.nll_reference
        self._moments += [len(a), a.sum(), b.sum(), a @ a, b @ b, a @ b]
        delta = np.exp(-a) - np.exp(-b)
        self._delta += [len(delta), delta.sum(), delta @ delta]
        bins = np.rint((delta + 1) / 2 * _DELTA_BINS).astype(np.int64)
        self._delta_histogram += np.bincount(bins, minlength=_DELTA_BINS + 1)
        for quarter in range(4):
            low, high = _CONFIDENCE[quarter]
            masks = (np.floor(s.position * 4) == quarter, (s.confidence >= low) & (s.confidence < high))
            for kind, mask in enumerate(masks):
                self._groups[kind, quarter] += [mask.sum(), s.kld[mask].sum(), s.same_top[mask].sum()]
        self.nonfinite += s.nonfinite
        self.reference_nonfinite += s.reference_nonfinite

    def merge(self, other: OutputStats) -> None:
        """Add what another has seen."""
        self.kld.merge(other.kld)
        self.same_top.merge(other.same_top)
        self.nll_difference.merge(other.nll_difference)
        self._quantiles.merge(other._quantiles)
        self._moments += other._moments
        self._delta += other._delta
        self._delta_histogram += other._delta_histogram
        self._groups += other._groups
        self.nonfinite += other.nonfinite
        self.reference_nonfinite += other.reference_nonfinite

    def compute(self) -> Output:
        """The statistics so far."""
        n, sum_a, sum_b, *_ = self._moments
        d_n, d_sum, d_squares = self._delta
        q = self._quantiles.quantile
        return Output(
            tokens=int(n),
            chunks=sum(count > 0 for count in self.kld.counts),
            kld_mean=self.kld.mean,
            kld_se=self.kld.se,
            kld_median=q(0.5),
            kld_p90=q(0.9),
            kld_p95=q(0.95),
            kld_p99=q(0.99),
            kld_p999=q(0.999),
            kld_max=q(1.0),
            same_top=self.same_top.mean,
            same_top_se=self.same_top.se,
            ppl=_exp(sum_a / n) if n else None,
            ppl_reference=_exp(sum_b / n) if n else None,
            ln_ppl_ratio=self.nll_difference.mean,
            ln_ppl_ratio_se=self.nll_difference.se,
            ln_ppl_correlation=self._correlation(),
            rms_delta_p=math.sqrt(d_squares / d_n) if d_n else None,
            mean_delta_p=float(d_sum / d_n) if d_n else None,
            delta_p_p05=self._delta_quantile(0.05),
            delta_p_median=self._delta_quantile(0.5),
            delta_p_p95=self._delta_quantile(0.95),
            by_position=self._group(0, [f"quarter {i + 1}" for i in range(4)]),
            by_confidence=self._group(1, ["below 25 %", "25 to 50 %", "50 to 75 %", "above 75 %"]),
            kld_histogram=self._quantiles.coarse(),
            nonfinite_tokens=self.nonfinite,
            reference_nonfinite_tokens=self.reference_nonfinite,
        )

    def _correlation(self) -> float | None:
        n, a, b, aa, bb, ab = self._moments
        if n < 2:
            return None
        var_a, var_b = aa - a * a / n, bb - b * b / n
        if var_a <= _ROUNDING * aa or var_b <= _ROUNDING * bb:  # the same everywhere: what is left is rounding
            return None
        return float((ab - a * b / n) / math.sqrt(var_a * var_b))

    def _delta_quantile(self, q: float) -> float | None:
        cumulative = np.cumsum(self._delta_histogram)
        if cumulative[-1] == 0:
            return None
        index = int(np.searchsorted(cumulative, q * (cumulative[-1] - 1), side="right"))
        return index / _DELTA_BINS * 2 - 1

    def _group(self, kind: int, labels: list[str]) -> tuple[Group, ...]:
        rows = zip(labels, self._groups[kind].tolist(), strict=True)
        return tuple(
            Group(label, int(n), kld / n if n else None, top / n if n else None) for label, (n, kld, top) in rows
        )


def _exp(x: float) -> float | None:
    """exp(x), or None where it overflows."""
    return float(math.exp(x)) if x < 700 else None


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman rank correlation with average ranks for ties; None below 4 pairs or when one side is constant."""
    if len(x) < 4:
        return None
    a, b = _ranks(np.asarray(x)), _ranks(np.asarray(y))
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale else None


def _ranks(values: Doubles) -> Doubles:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse], dtype=np.float64)
