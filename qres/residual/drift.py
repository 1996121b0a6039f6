"""Running statistics of the residual stream: the reference's own health, and each level's drift from it.

Everything is computed per token first, then summarized over tokens (docs/measures.md). Tokens with massive
activations (BOS, sinks) are kept out of the summaries and counted: their norm is hundreds of times that of the others
and would be all one sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from qres.arrays import Doubles, Floats
from qres.metrics.quantiles import Quantiles
from qres.residual.capture import Snapshot

Mask = npt.NDArray[np.bool_]

MASSIVE = 20.0
"""A token counts as massive where its norm exceeds this many times the median token's norm at any stream point.
On SmolLM2-135M (2026-11) the first token of a chunk reaches 180 times the median, every other token stays below 12."""

_T = TypeVar("_T")


def _over_points(work: Callable[[int], _T], n: int, threads: int) -> list[_T]:
    """work(0..n-1) on a few threads: numpy releases the interpreter lock inside the loops that matter."""
    if threads < 2:
        return [work(i) for i in range(n)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, range(n)))


def _dot(a: Floats | Doubles, b: Floats | Doubles) -> Doubles:
    """Per-token inner product, accumulated in float64. [n_tokens]."""
    return np.asarray(np.einsum("te,te->t", a, b, dtype=np.float64))


def norms(x: Floats | Doubles) -> Doubles:
    """Per-token Euclidean norm, float64 [n_tokens]."""
    return np.sqrt(_dot(x, x))


def _ratio(a: Doubles, b: Doubles) -> Doubles:
    """A / b with 0 / 0 = 0: nothing relative to nothing is no error. x / 0 is infinite and left out of quantiles."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((a == 0) & (b == 0), 0.0, a / b)


@dataclass(frozen=True)
class ReferenceNorms:
    """Norms of a reference snapshot, computed once and used for every level."""

    stream: tuple[Doubles, ...]
    """Norm of the stream after the embedding and after each branch, per token: M + 1 arrays [n_tokens]."""
    branches: tuple[Doubles, ...]
    """Norm of what each branch adds, per token: M arrays [n_tokens]."""
    entering: tuple[Doubles, ...]
    """Norm of each stream point but the last as the next add takes it, after every scale or norm on the way: M arrays
    [n_tokens]."""
    plain: Mask
    """Tokens without massive activations [n_tokens]."""


def reference_norms(snapshot: Snapshot, threads: int) -> ReferenceNorms:
    """Norms of a snapshot, and which of its tokens are not massive."""
    stream = _over_points(lambda i: norms(snapshot.stream[i]), len(snapshot.stream), threads)
    branches = _over_points(lambda i: norms(snapshot.branches[i]), len(snapshot.branches), threads)
    entering = _entering(snapshot, stream)
    massive = np.zeros(len(stream[0]), dtype=np.bool_)
    for norm in stream:
        massive |= norm > MASSIVE * np.median(norm)
    return ReferenceNorms(tuple(stream), tuple(branches), entering, ~massive)


def _entering(snapshot: Snapshot, stream: Sequence[Doubles]) -> tuple[Doubles, ...]:
    """Norms of `Snapshot.entering`; `stream` has those of the stream points."""
    return tuple(
        norms(snapshot.stream_in[i + 1]) if i + 1 in snapshot.stream_in else stream[i]
        for i in range(len(snapshot.branches))
    )


class HealthStats:
    """The reference's stream: norms, moments and range at every point."""

    def __init__(self, points: int) -> None:
        self.norm = Quantiles(points)
        self.kurtosis = Quantiles(points)
        self.participation = Quantiles(points)
        self.ratio = Quantiles(points)
        self.absmax = np.zeros(points)
        self.sums = np.zeros((points, 2))  # of per-token mean and variance
        self.tokens = 0
        self.massive = 0

    def update(self, snapshot: Snapshot, known: ReferenceNorms, reads: tuple[int, ...], threads: int) -> None:
        """Add one chunk. `reads[j]` is the stream point that branch j + 1 reads."""

        def point(i: int) -> tuple[Doubles, Doubles, Doubles, Doubles, float]:
            x = snapshot.stream[i]
            n = x.shape[1]
            square = np.square(x, dtype=np.float64)
            mean = x.mean(axis=1, dtype=np.float64)
            second = square.sum(axis=1)
            variance = second / n - mean**2
            fourth = _dot(square, square)
            centred = x - mean[:, None]
            squared = np.square(centred)
            kurtosis = _ratio(_dot(squared, squared) / n, variance**2)
            return mean, variance, kurtosis, _ratio(second**2, fourth), float(np.abs(x).max())

        rows = _over_points(point, len(snapshot.stream), threads)
        keep = known.plain
        self.norm.update(np.stack(known.stream)[:, keep])
        self.kurtosis.update(np.stack([r[2] for r in rows])[:, keep])
        self.participation.update(np.stack([r[3] for r in rows])[:, keep])
        ratios = [_ratio(known.branches[j], known.entering[reads[j]]) for j in range(len(reads))]
        self.ratio.update(np.stack([np.full_like(known.stream[0], np.nan), *ratios])[:, keep])
        self.sums += np.array([[r[0][keep].sum(), r[1][keep].sum()] for r in rows])
        self.absmax = np.maximum(self.absmax, [r[4] for r in rows])
        self.tokens += int(keep.sum())
        self.massive += int((~keep).sum())


class DriftStats:
    """One level's stream against the reference's: free-run drift, local and injected error, ledger."""

    def __init__(self, points: int) -> None:
        self.ratio = Quantiles(points)
        self.drift = Quantiles(points)
        self.one_minus_cosine = Quantiles(points)
        self.local = Quantiles(points)
        self.injected = Quantiles(points)
        self.absmax = np.zeros(points)
        self.share = np.zeros(points)
        self.generated = np.zeros(points)
        self.scaling = np.zeros(points)
        self.ledger_tokens = 0

    @property
    def largest_median(self) -> float | None:
        """Of the drift at all stream points; None where nothing was seen."""
        found = (self.drift.quantile(0.5, point) for point in range(len(self.share)))
        return max((x for x in found if x is not None), default=None)

    def update(
        self,
        reference: Snapshot,
        known: ReferenceNorms,
        level: Snapshot,
        errors: tuple[Floats, ...],
        reads: tuple[int, ...],
        threads: int,
    ) -> None:
        """Add one chunk.

        Args:
            reference: The reference's snapshot.
            known: Its norms.
            level: The free-running level's snapshot.
            errors: Forced errors of embedding and branches (`Forced.errors`).
            reads: Stream point that each branch reads.
            threads: For the sums.
        """
        points = len(reference.stream)
        final = level.stream[-1].astype(np.float64) - reference.stream[-1]  # d_M
        weight = _dot(final, final)

        def point(i: int) -> tuple[Doubles, ...]:
            x, y = reference.stream[i], level.stream[i]
            difference = y - x  # exact in float32 up to one rounding, and the rounding is far below any drift
            norm = norms(y)
            cosine = _ratio(_dot(x, y), known.stream[i] * norm)
            drift = _ratio(norms(difference), known.stream[i])
            error = norms(errors[i])
            of = known.stream[0] if i == 0 else known.branches[i - 1]
            branch = norms(level.branches[i - 1]) if i else np.full_like(norm, np.nan)
            # <d_i, d_M>; the ledger's shares are its differences, so that they telescope to 1.
            along = np.einsum("te,te->t", difference.astype(np.float64), final)
            made = np.einsum("te,te->t", errors[i].astype(np.float64), final)
            absmax = np.array([np.abs(y).max()])
            return (
                drift,
                1 - cosine,
                _ratio(error, of),
                _ratio(error, known.stream[i]),
                norm,
                branch,
                along,
                made,
                absmax,
            )

        rows = _over_points(point, points, threads)
        keep = known.plain
        entering = _entering(level, [r[4] for r in rows])
        ratio = [rows[0][5], *(_ratio(rows[j + 1][5], entering[reads[j]]) for j in range(len(reads)))]
        self.ratio.update(np.stack(ratio)[:, keep])
        for quantiles, column in ((self.drift, 0), (self.one_minus_cosine, 1), (self.local, 2), (self.injected, 3)):
            quantiles.update(np.stack([r[column] for r in rows])[:, keep])
        moved = keep & (weight > 0) & np.isfinite(weight)
        along = np.stack([r[6] for r in rows])[:, moved] / weight[moved]
        self.share += np.diff(along, axis=0, prepend=0.0).sum(axis=1)
        self.generated += (np.stack([r[7] for r in rows])[:, moved] / weight[moved]).sum(axis=1)
        for i, scaled in reference.stream_in.items():
            # What the scale or norm between point i - 1 and the next add does to the drift, along d_M.
            after = _dot((level.stream_in[i] - scaled).astype(np.float64), final)[moved] / weight[moved]
            self.scaling[i] += (after - along[i - 1]).sum()
        self.ledger_tokens += int(moved.sum())
        self.absmax = np.maximum(self.absmax, [r[8][0] for r in rows])
