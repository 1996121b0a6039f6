"""Sensitivity by patching: the KLD that one unit's quantization error causes in an otherwise exact model.

A unit is the embedding, a branch, or the head. Its error was recorded in a forced run (each branch read the reference's
stream); adding it to the reference's own run and letting everything downstream react gives the damage of quantizing
that unit alone, without building a file for it. Damage at 4 to 6 bits is additive within about 10 % (docs/facts.md, 10
to 12).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from qres.sensitivity.prediction import PredictionSums

MIN_UNITS = 16
"""Patched per level however short the scan: half of them to test the prediction."""
RANDOM_UNITS = 8
"""Patched per level although the prediction did not choose them."""


def budget(rest_decodes: int, levels: int, rank_chunks: int) -> int:
    """Units per level whose patching takes no longer than the rest of the scan, and at least MIN_UNITS.

    Args:
        rest_decodes: Decodes of the scan without patching.
        levels: Levels measured.
        rank_chunks: Chunks that each unit is patched on.
    """
    return max(MIN_UNITS, rest_decodes // max(1, levels * rank_chunks))


def choose(injected_errors: Sequence[float | None], count: int) -> tuple[int, ...]:
    """The units to patch: those that put the largest error into the stream, largest first.

    Of the cheap measures the injected error ranks best (docs/facts.md, 13: Spearman 0.88 with measured damage, against
    0.55 for the local error alone and 0.20 for the branch ratio). Units without any error are left out: their damage is
    exactly 0.

    Args:
        injected_errors: Median injected error of the embedding and each branch; None where there is none.
        count: At most this many.
    """
    ranked = sorted(range(len(injected_errors)), key=lambda i: -(injected_errors[i] or 0.0))
    return tuple(i for i in ranked[:count] if injected_errors[i])


def choose_predicted(
    prediction: PredictionSums, types: Mapping[str, str], injected_errors: Sequence[float | None], count: int
) -> tuple[int, ...]:
    """Units to patch at a level: the worst by prediction, largest first, then some of the others at random.

    Args:
        prediction: Of the reference.
        types: Tensor -> type in the level's file.
        injected_errors: Of the embedding and each branch; a unit without any has no damage. One that has, but has no
            prediction, is among the first.
        count: How many, RANDOM_UNITS of them at random.
    """
    predicted = {unit: prediction.kld(sums)[0] for unit, sums in prediction.level(types).items()}
    units = [unit for unit, error in enumerate(injected_errors) if error]
    ranked = sorted(units, key=lambda unit: -predicted.get(unit, math.inf))
    top = ranked[: max(0, count - RANDOM_UNITS)]
    rest = ranked[len(top) :]
    drawn = random.Random(count).sample(rest, min(len(rest), count - len(top)))  # the same in every run
    return (*top, *drawn)
