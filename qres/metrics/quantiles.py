"""Quantiles of any number of values in fixed memory: logarithmic histograms, exact to `RESOLUTION`."""

from __future__ import annotations

import math

import numpy as np

from qres.arrays import Doubles
from qres.records.output import Histogram

RESOLUTION = 0.002
"""Half the relative width of a quantile bin."""
_LOW, _HIGH = 1e-12, 1e12
_STEP = math.log1p(2 * RESOLUTION)
_BINS = math.ceil(math.log(_HIGH / _LOW) / _STEP) + 1


class Quantiles:
    """Histograms of non-negative values, one per row; values below 1e-12 count as 0.

    >>> quantiles = Quantiles()
    >>> quantiles.update(np.array([3.0, 1.0, 2.0]))
    >>> round(quantiles.quantile(0.5), 2), quantiles.quantile(1.0)
    (2.0, 3.0)
    """

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
        """Add what another of as many rows has seen."""
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
