"""What the residual stream says about the model, in plain words made from the numbers.

One paragraph per level. Correlations are judged by the same two numbers as everywhere in the report; with few units
nothing is judged.
"""

from __future__ import annotations

import math

from qres.records.result import Level, Result
from qres.records.units import Additivity, RankCorrelation
from qres.report.formatting import PREDICTED, fixed, percent, predicted, significant

YES, WEAKLY = 0.8, 0.5
"""Rank correlation from which a measure orders the units, or roughly does; a judgement, as in `layer_tables`."""
FEW = 8
"""Below so many units a rank correlation of 0.7 happens by chance once in twenty, so nothing is said."""
ADDS, ROUGHLY = 0.1, 0.25
"""Part of the level's KLD that a sum may be off; at 4 to 6 bits it is within the first (docs/facts.md, 11)."""
ENOUGH = 0.5
"""Part of a sum that must be measured for a word about it: predictions are calibrated to add up."""


def paragraphs(result: Result) -> tuple[str, ...]:
    """One paragraph for each level that something is known about, with a first one that says how to read them."""
    found = tuple(one for level in result.levels if (one := paragraph(level)))
    return (_reading(), *found) if found else ()


def paragraph(level: Level) -> str:
    """What the stream says at one level; empty when neither stream nor units were measured."""
    units = level.sensitivity
    if not level.points and units.rank_correlation is None and units.trust is None and units.additivity is None:
        return ""
    said = (_predictors(level), _better(level), _additive(level), _inherited(level))
    return f"{level.name}. {' '.join(part for part in said if part)}"


def _reading() -> str:
    return (
        f"A measure predicts the damage if its rank correlation with the patched KLD is at least {fixed(YES, 1)}, and "
        f"weakly so from {fixed(WEAKLY, 1)}; fewer than {FEW} units are too few to tell. Damage is additive if the sum "
        f"is within {percent(ADDS, 0)} of the whole, roughly so within {percent(ROUGHLY, 0)}."
    )


def _predictors(level: Level) -> str:
    """Does the size of a branch, or its depth, say how fragile it is?"""
    ranks = level.sensitivity.rank_correlation
    if ranks is None or (ranks.branch_ratio is None and ranks.depth is None):
        why = "no rank correlation was computed" if ranks is None else f"only {_branches(ranks)} can be ranked"
        return f"Whether the size or the depth of a branch predicts the damage is not known: {why}."
    size, depth = ranks.branch_ratio, ranks.depth
    if ranks.units < FEW:
        return (
            f"Whether the size or the depth of a branch predicts the damage cannot be told from {_branches(ranks)} "
            f"(rank correlations: branch ratio {fixed(size)}, depth {fixed(depth)})."
        )
    chance = 1.96 / math.sqrt(ranks.units - 1)  # two-sided, 5 %, for units that have nothing to do with each other
    return (
        f"Does the size of a branch, relative to the stream, predict the damage? {_answer(size)}, over "
        f"{_branches(ranks)}. Does its depth? {_answer(depth)}. (Among so many, up to {fixed(chance)} either way can "
        "be chance.)"
    )


def _branches(ranks: RankCorrelation) -> str:
    return f"{ranks.units} patched branch{'' if ranks.units == 1 else 'es'}"


def _answer(value: float | None) -> str:
    if value is None:
        return "Not known"
    said = "Yes" if abs(value) >= YES else "Weakly" if abs(value) >= WEAKLY else "No"
    reverse = ", the other way round" if value <= -WEAKLY else ""
    return f"{said}{reverse} (rank correlation {fixed(value)})"


def _better(level: Level) -> str:
    """The two better predictors beside each other."""
    parts: list[tuple[str, int]] = []
    ranks, trust = level.sensitivity.rank_correlation, level.sensitivity.trust
    if ranks is not None and ranks.injected_error is not None:
        parts.append((f"the injected error has {fixed(ranks.injected_error)} on the same branches", ranks.units))
    if trust is not None and trust.spearman is not None:
        words = f"the prediction from gradients has {fixed(trust.spearman)} over {trust.units} units"
        parts.append((f"{words}, embedding and head included", trust.units))
    if not parts:
        return ""
    few = "; too few to tell" if min(units for _, units in parts) < FEW else ""
    return f"For comparison, {' and '.join(words for words, _ in parts)}{few}."


def _additive(level: Level) -> str:
    known = level.sensitivity.additivity
    if known is None:
        return "Whether damage adds up was not measured."
    injected = known.kld_all_injected
    tail = "" if injected is None else f" All errors injected at once, except the head's, give {significant(injected)}."
    if known.kld_level is None or known.kld_level <= 0:
        return f"Whether damage adds up is not known: the level's KLD on the ranking text is missing.{tail}"
    return f"{_sum(level, known, known.kld_level)}{_raw(level)}{tail}"


def _sum(level: Level, known: Additivity, whole: float) -> str:
    """The sum of all units, measured where they were patched, against the level."""
    if known.kld_sum_of_units is not None:
        share = known.kld_sum_of_units / whole
        return (
            f"Damage is {_adds(share)}: the patched units, which are all, add up to "
            f"{significant(known.kld_sum_of_units)}, {percent(share, 0)} of the level's {significant(whole)}."
        )
    patched = [unit.kld for unit in level.sensitivity.units if unit.kld is not None]
    rest = [unit.predicted_kld for unit in level.sensitivity.units if unit.kld is None]
    guesses = [guess for guess in rest if guess is not None]
    units = len(level.sensitivity.units)
    start = f"{len(patched)} of {units} units were patched and add up to {significant(sum(patched))}"
    if not patched or len(guesses) < len(rest):
        return f"Whether damage adds up is not known: {start}; the level has {significant(whole)}."
    total = sum(patched) + sum(guesses)
    enough = sum(patched) >= ENOUGH * total
    verdict = f"damage looks {_adds(total / whole)}" if enough else "too much of that is predicted to call it additive"
    return (
        f"{start}; with predictions for the others that makes {predicted(total)}, "
        f"{PREDICTED}{percent(total / whole, 0)} of the level's measured {significant(whole)}: {verdict}."
    )


def _raw(level: Level) -> str:
    """Predictions that were not yet made to add up."""
    factor = level.sensitivity.calibration
    if factor is None or factor.measured_kld <= 0:
        return ""
    share = factor.predicted_kld / factor.measured_kld
    total = predicted(factor.predicted_kld)
    return f" Predictions alone, not calibrated, add up to {total}, {PREDICTED}{percent(share, 0)} of it."


def _adds(share: float) -> str:
    off = abs(share - 1)
    return "additive" if off <= ADDS else "roughly additive" if off <= ROUGHLY else "far from additive"


def _inherited(level: Level) -> str:
    if not level.points:
        return "The stream was not mapped, so nothing is known about its drift."
    known = [point.generated_share for point in level.points if point.generated_share is not None]
    missing = len(level.points) - len(known)
    if missing:
        return (
            f"Which share of the final drift is inherited is not known: {missing} of {len(level.points)} stream points "
            "have no figure."
        )
    own = sum(known)
    if own > 1:
        return (
            f"The layers' own errors make {percent(own, 0)} of the final drift: what layers do with drift from below "
            f"takes {percent(own - 1, 0)} back."
        )
    return (
        f"Of the final drift, {percent(own, 0)} is made by the layers' own errors; {percent(1 - own, 0)} is inherited, "
        "layers reacting to drift from below."
    )
