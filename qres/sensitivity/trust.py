"""How far predictions can be trusted: their calibration, and predicted against patched."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from qres.metrics.means import spearman
from qres.records.prediction import Calibration, Trust
from qres.records.units import Unit
from qres.residual.map import ResidualMap
from qres.sensitivity.prediction import PredictionSums, added


def calibration(prediction: PredictionSums, types: Mapping[str, str], measured_kld: float | None) -> Calibration | None:
    """What the level's predictions are multiplied with; None where nothing was predicted or measured."""
    units = prediction.level(types)
    if not units or not measured_kld:
        return None
    predicted, se = prediction.kld(added(units.values()))
    factor = measured_kld / predicted if predicted > 0 else math.inf
    return Calibration(factor, predicted, se, measured_kld) if math.isfinite(factor) else None


def with_predictions(
    units: Sequence[Unit], rmap: ResidualMap, prediction: PredictionSums, types: Mapping[str, str], factor: float
) -> tuple[Unit, ...]:
    """Units with their calibrated predictions."""
    indices = {unit.name: unit.index for unit in rmap.units}
    sums = prediction.level(types)
    rows = []
    for unit in units:
        found = sums.get(indices[unit.unit])
        if found is None:
            rows.append(unit)
            continue
        kld, se = prediction.kld(found)
        rows.append(replace(unit, predicted_kld=kld * factor, predicted_se=None if se is None else se * factor))
    return tuple(rows)


def trust(units: Sequence[Unit], drawn: Collection[str]) -> Trust | None:
    """Predicted against measured, over the units that have both; `drawn` are the names of those drawn at random."""
    pairs = [(u, u.predicted_kld, u.kld) for u in units if u.predicted_kld and u.kld and u.is_measured]
    if not pairs:
        return None
    x, y = [math.log(p) for _, p, _ in pairs], [math.log(m) for _, _, m in pairs]
    worst = sorted(pairs, key=lambda row: -abs(math.log((row[2] or 0) / (row[1] or 1))))[:3]
    return Trust(
        units=len(pairs),
        top=sum(unit.method == "patched" and unit.unit not in drawn for unit, _, _ in pairs),
        random=sum(unit.unit in drawn for unit, _, _ in pairs),
        spearman=spearman(x, y),
        slope=_slope(x, y),
        worst=tuple(unit.unit for unit, _, _ in worst),
    )


def _slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Slope of the least-squares line of y over x; None below 4 pairs or where x does not vary."""
    if len(x) < 4 or max(x) == min(x):
        return None
    return float(np.polyfit(x, y, 1)[0])
