"""What a backward pass predicts, as sums that can be added up over tensors: plain numbers, no torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from qres.metrics.means import clustered_se

Sums = dict[str, list[list[float]]]
"""By type: for each chunk, one sum of squared effects per label draw."""


@dataclass
class TensorSums:
    """One matrix in one unit."""

    tensor: str
    unit: int | None
    """0 the embedding, 1..M the branches, M + 1 the head; None where it is in none."""
    sums: Sums
    silent: int = 0
    """Experts of it that no token reached: the sums have nothing of them."""
    silent_kld: dict[str, float] = field(default_factory=dict)
    """By type, what these would add if each were like the median of the others, nats per scored token."""


@dataclass
class PredictionSums:
    """Everything that the backward pass found, or why there is none."""

    reason: str = ""
    """Why the prediction is not used; empty when it is."""
    replay_kld: float | None = None
    replay_nmse: float | None = None
    limit: float = 0.0
    dtype: str = ""
    """Type of the products within backward: `float32` or `bfloat16`."""
    counts: list[int] = field(default_factory=list)
    """Scored positions of each chunk."""
    elapsed_s: float = 0.0
    tensors: list[TensorSums] = field(default_factory=list)

    @property
    def used(self) -> bool:
        """Whether there are predictions: there is no `reason` against them."""
        return not self.reason

    def hold_to(self, limit: float) -> None:
        """Set the limit of `replay_kld`; a replay that is beyond it predicts nothing."""
        self.limit = limit
        if self.replay_kld is not None and self.replay_kld > limit:
            self.tensors = []
            self.reason = (
                f"its logits are not llama.cpp's: KLD {self.replay_kld:.2g}, at most {limit:.2g} would be arithmetic"
            )

    def kld(self, sums: Sequence[Sequence[float]]) -> tuple[float, float | None]:
        """Predicted KLD in nats per scored token, and its standard error.

        Half the mean over positions and draws of the squared effect (second-order KLD). The error clusters by chunk;
        with one chunk it is that of the draws, None below two of either.
        """
        means = [statistics.fmean(draws) / 2 for draws in sums]
        total = sum(self.counts)
        if len(means) > 1:
            return sum(means) / total, clustered_se(means, self.counts)
        draws = [one / 2 / total for one in sums[0]]
        se = statistics.stdev(draws) / len(draws) ** 0.5 if len(draws) > 1 else None
        return statistics.fmean(draws), se

    def level(self, types: Mapping[str, str]) -> dict[int | None, list[list[float]]]:
        """The sums of each unit when every tensor has the type that a level's file gives it.

        Args:
            types: Tensor -> ggml type. A type that nothing was predicted for is one that changes nothing: the
                reference's own.
        """
        units: dict[int | None, list[list[float]]] = {}
        for row in self.tensors:
            found = row.sums.get(types.get(row.tensor, ""))
            if found is not None:
                units[row.unit] = added([units[row.unit], found] if row.unit in units else [found])
        return units


def added(rows: Iterable[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Sums of several tensors together; an exact row (the head's) has one entry for all draws."""
    total: list[list[float]] = []
    for row in rows:
        if not total:
            total = [list(draws) for draws in row]
            continue
        for i, draws in enumerate(row):
            width = max(len(total[i]), len(draws))
            a, b = _spread(total[i], width), _spread(draws, width)
            total[i] = [x + y for x, y in zip(a, b, strict=True)]
    return total


def _spread(draws: Sequence[float], width: int) -> list[float]:
    return list(draws) if len(draws) == width else [draws[0]] * width
