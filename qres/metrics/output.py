"""A level's next-token distribution against the reference's, in update / compute / merge form; pure numpy, no model.

Sums are float64. Quantiles come from histograms of fixed size, so memory does not grow with the text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from qres.arrays import Doubles, Floats
from qres.metrics.means import ChunkMean
from qres.metrics.quantiles import Quantiles
from qres.records.output import Group, Output

_BLOCK_ROWS = 16
"""Rows of logits per numpy call: a few MB, so that intermediate results stay in the CPU cache."""


@dataclass(frozen=True)
class Scored:
    """The reference's next-token distribution at the scored positions of a chunk.

    >>> likely = np.log(np.array([[1, 3]], np.float32))  # token 1 in 3 of 4 cases
    >>> scored = score_reference(np.repeat(likely, 4, axis=0), [0, 0, 0, 1])
    >>> scored.p.round(6).tolist(), scored.nll.round(6).tolist()  # ln(4 / 3)
    ([[0.25, 0.75]], [0.287682])
    """

    first: int
    """Row of the logits that the first scored position is."""
    targets: npt.NDArray[np.int64]
    """Next token at each scored position [n]."""
    logits: Floats
    """The reference's logits at the scored positions [n, n_vocab]."""
    p: Floats
    """softmax(logits), float32 [n, n_vocab]."""
    lse: Doubles
    """log sum exp of each row [n]."""
    nll: Doubles
    """-ln p of the next token [n]."""
    top: npt.NDArray[np.int64]
    """The likeliest token [n]."""
    step: int = 1
    """Rows from one position to the next."""
    early: Scored | None = None
    """The same of positions of the first half, which no other figure comes from."""


EARLY_STEP = 4
"""Every so many positions of the first half are scored: a row of the report is worth so much time."""


def early_positions(tokens: int) -> slice:
    """The positions of a chunk's first half that are looked at: every fourth, from the second token on.

    >>> early_positions(32)  # 1, 5, 9 and 13
    slice(1, 16, 4)
    """
    return slice(1, tokens // 2, EARLY_STEP)


def scored_positions(tokens: int) -> slice:
    """The positions of a chunk that are scored, as llama-perplexity does: the second half, less the last token.

    >>> scored_positions(8)  # 4, 5 and 6, which predict the tokens 5, 6 and 7
    slice(4, 7, None)
    """
    return slice(tokens // 2, tokens - 1)


def score_reference(logits: Floats, tokens: Sequence[int]) -> Scored:
    """Take the scored positions of a chunk, and what the reference says there.

    Args:
        logits: [n_tokens, n_vocab].
        tokens: The chunk; position t predicts tokens[t + 1].

    >>> scored = score_reference(np.zeros((4, 2), np.float32), [0, 1, 0, 1])  # two tokens, equally likely
    >>> scored.first, scored.targets.tolist(), scored.p.tolist()
    (2, [1], [[0.5, 0.5]])
    """
    scored = _score_positions(logits, tokens, scored_positions(len(tokens)))
    return replace(scored, early=_score_positions(logits, tokens, early_positions(len(tokens))))


def _score_positions(logits: Floats, tokens: Sequence[int], where: slice) -> Scored:
    step = where.step or 1
    targets = np.asarray(tokens[where.start + 1 : where.stop + 1 : step], dtype=np.int64)
    rows = np.array(logits[where], dtype=np.float32)  # a copy: the buffer is reused by the next decode
    lse = _log_sum_exp(rows)
    p = np.empty_like(rows)
    with np.errstate(invalid="ignore", over="ignore"):  # infinite logits are counted, not hidden
        for block in _blocks(len(rows)):
            p[block] = np.exp(rows[block] - lse[block, None].astype(np.float32))
    nll = lse - rows[np.arange(len(rows)), targets].astype(np.float64)
    return Scored(where.start, targets, rows, p, lse, nll, rows.argmax(axis=1), step)


@dataclass(frozen=True)
class TokenScores:
    """Per-token comparison of one chunk, finite positions only; arrays [n].

    >>> logits = np.zeros((4, 2), np.float32)
    >>> found = score(score_reference(logits, [0, 1, 0, 1]), logits)  # a model and itself
    >>> found.kld.tolist(), found.same_top.tolist(), found.confidence.tolist(), found.nonfinite
    ([0.0], [True], [0.5], 0)
    """

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

    >>> even = score_reference(np.zeros((4, 2), np.float32), [0, 1, 0, 1])
    >>> other = np.log(np.array([[3, 1]] * 4, np.float32))
    >>> round(float(score(even, other).kld[0]), 6)  # 1/2 ln(2 / 3) + 1/2 ln 2
    0.143841
    """
    n = len(reference.targets)
    rows = logits[reference.first : reference.first + n * reference.step : reference.step]
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
"""Share of a sum of squares below which the difference of two of them cannot be told from 0."""
_CONFIDENCE = ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.01))
_DELTA_BINS = 20_000


class OutputStats:
    """Running output statistics of one level; `compute` gives the record.

    >>> even = score_reference(np.zeros((4, 2), np.float32), [0, 1, 0, 1])
    >>> stats = OutputStats()
    >>> stats.update(score(even, np.log(np.array([[3, 1]] * 4, np.float32))))
    >>> found = stats.compute()
    >>> round(found.ppl, 6), round(found.ppl_reference, 6)  # 1 of 4 against 1 of 2
    (4.0, 2.0)
    """

    def __init__(self) -> None:
        self.kld = ChunkMean()
        self.same_top = ChunkMean()
        self.nll_difference = ChunkMean()
        self._quantiles = Quantiles()
        self._moments = np.zeros(6)  # n, sum a, sum b, sum aa, sum bb, sum ab of (nll, nll_reference)
        self._delta = np.zeros(3)  # n, sum, sum of squares of delta p
        self._delta_histogram = np.zeros(_DELTA_BINS + 1, dtype=np.int64)
        self._groups = np.zeros((2, 4, 3))  # position | confidence, quarter, (n, kld, same top)
        self._early = np.zeros(3)  # of the first half: n, kld, same top
        self.nonfinite = 0
        self.reference_nonfinite = 0

    def update(self, s: TokenScores, early: TokenScores | None = None) -> None:
        """Add the comparison of one chunk; `early` is that of positions of its first half."""
        if early is not None:
            self._early += [len(early.kld), early.kld.sum(), early.same_top.sum()]
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
        self._early += other._early
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
            first_half=self._first_half(),
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

    def _first_half(self) -> Group | None:
        n, kld, same_top = self._early.tolist()
        return Group("first half", int(n), kld / n, same_top / n) if n else None

    def _group(self, kind: int, labels: list[str]) -> tuple[Group, ...]:
        rows = zip(labels, self._groups[kind].tolist(), strict=True)
        return tuple(
            Group(label, int(n), kld / n if n else None, top / n if n else None) for label, (n, kld, top) in rows
        )


def _exp(x: float) -> float | None:
    """exp(x), or None where it overflows."""
    return float(math.exp(x)) if x < 700 else None
