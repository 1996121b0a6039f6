"""Means with standard errors that cluster tokens by chunk, and rank correlation.

Tokens of one chunk share their context: treating them as independent gives errors several times too small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from qres.arrays import Doubles


class ChunkMean:
    """Mean over tokens with a standard error that clusters them by chunk.

    >>> mean = ChunkMean()
    >>> mean.update(np.array([0.0, 2.0]))
    >>> mean.update(np.array([3.0, 3.0]))
    >>> mean.mean, mean.se
    (2.0, 1.0)
    """

    def __init__(self) -> None:
        self.sums: list[float] = []
        self.counts: list[int] = []

    def update(self, values: Doubles) -> None:
        """Add one chunk's per-token values [n]; a chunk without any counts neither as tokens nor as a chunk."""
        self.sums.append(float(np.sum(values, dtype=np.float64)))
        self.counts.append(int(np.size(values)))

    def merge(self, other: ChunkMean) -> None:
        """Add the chunks of another, behind those that are here."""
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

    se^2 = C / (C - 1) * sum_c (s_c - m n_c)^2 / N^2 with m = sum(s) / N, N = sum(n). None below 2 chunks.

    >>> clustered_se([2.0, 6.0], [2, 2])  # means of 1 and 3: 2 / 1 * (2^2 + 2^2) / 4^2
    1.0
    """
    chunks, n = sum(count > 0 for count in counts), sum(counts)
    if chunks < 2 or n == 0:
        return None
    s, c = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    spread = s - s.sum() / n * c
    return float(math.sqrt(chunks / (chunks - 1) * float(spread @ spread)) / n)


def paired_se(a: ChunkMean, b: ChunkMean) -> float | None:
    """Standard error of the difference of two means over the same tokens, chunk by chunk; None below 2 chunks.

    >>> a, b = ChunkMean(), ChunkMean()
    >>> for x, y in ((2.0, 1.0), (4.0, 1.0)):
    ...     a.update(np.array([x]))
    ...     b.update(np.array([y]))
    >>> paired_se(a, b)  # differences of 1 and 3
    1.0
    """
    return clustered_se([x - y for x, y in zip(a.sums, b.sums, strict=True)], a.counts)


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman rank correlation with average ranks for ties; None below 4 pairs or when one side is constant.

    >>> spearman([1, 2, 3, 4], [10, 20, 40, 30])  # 1 - 6 * (1 + 1) / (4 * (4^2 - 1))
    0.8
    """
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
