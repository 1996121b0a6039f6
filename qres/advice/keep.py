"""What to keep at 16 bit at a level, from the measured damage of its units.

Pure functions; every threshold is explained where it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qres.metrics.means import clustered_se
from qres.records.units import Keep

RESAMPLES = 1000
NOISE_FACTOR = 3.0
"""A unit is listed only if its KLD exceeds the noise floor by this factor and its own standard error twice."""
_FREE_BYTES = 1e-6
"""What a unit counts as that costs no bytes to mend: such units come first, the most damaged before the others."""


@dataclass(frozen=True)
class UnitDamage:
    """Measured damage of one unit, with what keeping it would cost."""

    unit: str
    kld_sums: tuple[float, ...]
    """Sum of KLD over the scored tokens of each ranking chunk."""
    tokens: tuple[int, ...]
    bytes_added: int
    type: str
    """ggml type of the unit when it is kept: `F16` or `BF16`."""
    tensors: tuple[str, ...] = ()
    """Those that the level holds below 16 bit, or otherwise than the reference."""

    @property
    def kld(self) -> float:
        """Mean KLD per token, nats."""
        return sum(self.kld_sums) / sum(self.tokens) if sum(self.tokens) else 0.0

    @property
    def rate(self) -> float:
        """KLD per byte."""
        return self.kld / max(self.bytes_added, _FREE_BYTES)


@dataclass(frozen=True)
class NextLevel:
    """The uniform alternative to keeping units at 16 bit."""

    name: str
    kld_recovered: float
    bytes_added: int


def keep_list(
    units: Sequence[UnitDamage], level_kld: float, noise: float | None, alternative: NextLevel | None
) -> tuple[Keep, ...]:
    """What to keep at 16 bit, most KLD recovered per byte first.

    The list is cut (`worth_it` False from there on) where a unit recovers less per byte than the next larger uniform
    level does.

    Args:
        units: Measured units; those that are the reference's are left out, whatever they cost.
        level_kld: The level's KLD on the same text.
        noise: KLD of the reference against itself.
        alternative: The next larger level that was measured, or the best that Q8_0 could do; None where there is none.
    """
    floor = NOISE_FACTOR * (noise or 0.0)
    held = [u for u in units if u.bytes_added > 0 or u.tensors]
    listed = [u for u in held if u.kld > floor and u.kld > 2 * (_se(u) or 0.0)]
    listed.sort(key=lambda u: -u.rate)
    rate = alternative.kld_recovered / alternative.bytes_added if alternative and alternative.bytes_added > 0 else 0.0
    worth = [u.rate > rate for u in listed]
    cut = sum(worth)  # sorted by the same quantity: the first `cut` are worth it
    confidence = _confidence(listed, cut)
    return tuple(
        Keep(
            unit=u.unit,
            type=u.type,
            kld_recovered=u.kld,
            gap_share=u.kld / level_kld if level_kld > 0 else 0.0,
            bytes_added=u.bytes_added,
            confidence=confidence[i],
            worth_it=worth[i],
            reason=_reason(u, rate, alternative),
            tensors=u.tensors,
        )
        for i, u in enumerate(listed)
    )


def _se(unit: UnitDamage) -> float | None:
    return clustered_se(unit.kld_sums, unit.tokens)


def _reason(unit: UnitDamage, rate: float, alternative: NextLevel | None) -> str:
    """KLD recovered per MiB, by the unit and by the uniform alternative."""
    if unit.bytes_added <= 0:
        return "it takes no more bytes in the reference"
    own = f"{unit.kld / unit.bytes_added * 2**20:.2g} nats per MiB"
    return own if alternative is None else f"{own}; {alternative.name}: {rate * 2**20:.2g}"


def _confidence(listed: Sequence[UnitDamage], cut: int) -> list[float | None]:
    """How often each unit is among the first `cut` (or, past the cut, its own rank) when chunks are drawn again."""
    if not listed or len(listed[0].tokens) < 3:
        return [None] * len(listed)
    sums = np.array([u.kld_sums for u in listed])
    tokens = np.array([u.tokens for u in listed], dtype=np.float64)
    cost = np.array([max(u.bytes_added, _FREE_BYTES) for u in listed])
    draws = np.random.default_rng(0).integers(0, sums.shape[1], (RESAMPLES, sums.shape[1]))
    drawn = np.maximum(tokens[:, draws].sum(axis=2), 1.0)
    rates = sums[:, draws].sum(axis=2) / drawn / cost[:, None]  # [units, resamples]
    ranks = (-rates).argsort(axis=0, kind="stable").argsort(axis=0, kind="stable")
    return [float((ranks[i] < (cut if i < cut else i + 1)).mean()) for i in range(len(listed))]
