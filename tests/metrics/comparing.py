"""What several tests of the metrics share."""

from __future__ import annotations

import math

from qres.metrics.quantiles import RESOLUTION

TOLERANCE = RESOLUTION * 1.01
"""A value stands for its bin: half a bin off at most, plus rounding."""


def direct_se(sums: list[float], counts: list[int]) -> float:
    """Linearized ratio estimator, spelled out."""
    c, n = len(sums), sum(counts)
    mean = sum(sums) / n
    return math.sqrt(c / (c - 1) * sum((s - mean * k) ** 2 for s, k in zip(sums, counts, strict=True)) / n**2)
