"""Predictions made steadier, and corrected by what patching measured: both as Gaussian processes over the layers.

A prediction comes from a few chunks and label draws; the standard error of one tensor's is a fifth to a third of it,
and an optimizer falls for those that came out too small. But the tensors of one role change slowly from layer to layer:
the first process takes the logarithms of a role's predictions, with their standard errors, as a constant, a part that
varies smoothly with the layer, and a part of each tensor's own, and keeps what it expects of each.

Squares are added up per position; where errors of different positions end up alike, that is too small, by how much
depends on how many layers follow. Patching measures some units. The second process takes the logarithms of measured
over predicted the same way over depth and kinds of branches, and gives a factor for every unit.

The expectation of a process at a place, given noisy values at others: Rasmussen and Williams, Gaussian Processes for
Machine Learning, 2006, equation 2.25.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from qres.arrays import Doubles
from qres.records.prediction import TensorDamage
from qres.records.result import Result
from qres.records.units import Unit

Key = tuple[str, str]
"""Tensor and unit: a tied head is two rows."""

ROLE_LEVEL, ROLE_SMOOTH, ROLE_OWN = 1.0, 0.6, 0.25
"""Prior standard deviations of the parts of ln(predicted), and how many layers the smooth one stays alike. On
Qwen2.5-Coder-1.5B and SmolLM2-135M neighbours of a role differ by 0.2 to 0.5, of which standard errors explain 0.2 to
0.4."""
ROLE_REACH = 2.0
UNKNOWN_ERROR = 0.3
"""Relative standard error where one chunk and draw give none."""

COMMON, SMOOTH, OWN = 0.4, 0.3, 0.15
"""The same of ln(measured / predicted) of units."""
REACH = 0.12
"""Share of the depth over which the smooth part of these stays alike."""
OTHER_KIND = 0.5
"""Correlation of it between kinds of branches."""
_LEAST = 5
"""Layers that a role needs."""
_PASSES = 3
_OUTLIER = 3.0
"""Squared standard deviations up to which a tensor that is off the others is put down to chance."""


def factors(result: Result) -> dict[Key, float]:
    """What the predictions of each tensor in each unit are multiplied with, at any type.

    Args:
        result: With predictions.
    """
    damages = result.prediction.tensors
    steady = steadied(damages)
    units = corrections(result, steady)
    rest = math.exp(sum(map(math.log, units.values())) / len(units)) if units else 1.0
    return {(row.tensor, row.unit): steady[row.tensor, row.unit] * units.get(row.unit, rest) for row in damages}


def steadied(damages: Sequence[TensorDamage]) -> dict[Key, float]:
    """For each row, what the first process expects over what was predicted; 1 for roles of few layers."""
    roles: dict[str, list[TensorDamage]] = defaultdict(list)
    for row in damages:
        if row.layer is not None and row.weights and any(one.predicted_kld for one in row.types):
            roles[row.role].append(row)
    found = {(row.tensor, row.unit): 1.0 for row in damages}
    for rows in roles.values():
        if len({row.layer for row in rows}) >= _LEAST:
            found |= dict(zip(((row.tensor, row.unit) for row in rows), _steadied(rows), strict=True))
    return found


def _steadied(rows: Sequence[TensorDamage]) -> list[float]:
    """What the first process expects over what was predicted, for each tensor of one role [rows]."""
    shared = set.intersection(*({one.type for one in row.types if one.predicted_kld} for row in rows))
    if not shared:
        return [1.0] * len(rows)
    logs = np.array(
        [
            [math.log((one.predicted_kld or 1.0) / row.weights) for one in row.types if one.type in shared]
            for row in rows
        ]
    )  # types in the order of their size: the same in all rows but for ties, which the sort keeps
    y = logs.mean(axis=1)
    mean = float(np.median(y))
    errors = [
        [one.predicted_se / one.predicted_kld for one in row.types if one.predicted_se and one.predicted_kld]
        for row in rows
    ]
    noise = np.array([sum(found) / len(found) if found else UNKNOWN_ERROR for found in errors])
    layer = np.array([row.layer or 0 for row in rows], np.float64)
    smooth = ROLE_LEVEL**2 + ROLE_SMOOTH**2 * _near(layer, layer, ROLE_REACH)
    own = np.full(len(rows), ROLE_OWN**2)
    for _ in range(_PASSES):  # a tensor far off the others by more than its error is off: its own part is that large
        inverse = np.linalg.inv(smooth + np.diag(own + noise**2))
        off = (inverse @ (y - mean)) / np.diag(inverse)  # from what the others say of it (same book, equation 5.12)
        own = np.maximum(ROLE_OWN**2, off**2 - noise**2 - _OUTLIER * (ROLE_OWN**2 + noise**2))
    prior = smooth + np.diag(own)
    expected = mean + prior @ np.linalg.solve(prior + np.diag(noise**2), y - mean)
    return [math.exp(value) for value in (expected - y).tolist()]


def corrections(result: Result, steady: Mapping[Key, float]) -> dict[str, float]:
    """Unit -> what the second process expects of measured over (steadied) predicted; empty where nothing has both."""
    known = _known(result, steady)
    places = {unit.unit: unit for level in result.levels for unit in level.sensitivity.units}
    names = [name for name in known if name in places]
    if not names:
        return {}
    depth = max(result.reference.n_layer, 1)
    ratio = np.array([known[name][0] for name in names])
    noise = np.diag([known[name][1] for name in names])
    here = [places[name] for name in names]
    own = OWN**2 * np.array([[one.unit == other.unit for other in here] for one in places.values()])
    across = _covariance(list(places.values()), here, depth) + own
    seen = _covariance(here, here, depth) + OWN**2 * np.eye(len(here))
    found = across @ np.linalg.solve(seen + noise, ratio)
    return {name: math.exp(value) for name, value in zip(places, found.tolist(), strict=True)}


def _known(result: Result, steady: Mapping[Key, float]) -> dict[str, tuple[float, float]]:
    """Unit -> ln(measured / predicted), averaged over levels, and the variance of its error.

    The levels' figures come from the same text and gradients: their errors are taken to be alike, not independent.
    """
    rows: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for level in result.levels:
        factor = level.sensitivity.calibration.factor if level.sensitivity.calibration else None
        times = _steadied_units(result, level.file.tensor_types, steady)
        for unit in level.sensitivity.units:
            if factor and unit.is_measured and unit.kld and unit.predicted_kld:
                relative = [(unit.kld_se or 0.0) / unit.kld, (unit.predicted_se or 0.0) / unit.predicted_kld]
                value = math.log(unit.kld / unit.predicted_kld * factor / times.get(unit.unit, 1.0))
                rows[unit.unit].append((value, sum(one**2 for one in relative) + 1e-4))
    return {
        name: (sum(value for value, _ in found) / len(found), sum(noise for _, noise in found) / len(found))
        for name, found in rows.items()
    }


def _steadied_units(result: Result, types: Sequence[str], steady: Mapping[Key, float]) -> dict[str, float]:
    """Unit -> steadied over plain prediction of its tensors at a level's types."""
    held = dict(zip((tensor.name for tensor in result.tensors), types, strict=False))
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in result.prediction.tensors:
        for one in row.types:
            if one.type == held.get(row.tensor) and one.predicted_kld:
                sums[row.unit][0] += one.predicted_kld * steady[row.tensor, row.unit]
                sums[row.unit][1] += one.predicted_kld
    return {unit: after / before for unit, (after, before) in sums.items() if before}


def _covariance(one: Sequence[Unit], other: Sequence[Unit], depth: int) -> Doubles:
    a, b = (np.array([_depth(unit, depth) for unit in units]) for units in (one, other))
    kin = np.array([[1.0 if _kind(x) == _kind(y) else OTHER_KIND for y in other] for x in one])
    found: Doubles = COMMON**2 + SMOOTH**2 * _near(a, b, REACH) * kin
    return found


def _near(a: Doubles, b: Doubles, reach: float) -> Doubles:
    found: Doubles = np.exp(-((a[:, None] - b[None, :]) ** 2) / (2 * reach**2))
    return found


def _kind(unit: Unit) -> str:
    return unit.branch or unit.kind


def _depth(unit: Unit, layers: int) -> float:
    """0 the embedding, 1 the head."""
    if unit.kind == "embedding":
        return 0.0
    return 1.0 if unit.layer is None else (unit.layer + 0.5) / layers
