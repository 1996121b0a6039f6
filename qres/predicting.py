"""Prediction within a scan: what to predict, which units to patch after it, and how far the two agree.

The prediction costs about ten decodes per chunk and knows every tensor; patching costs one decode per unit and chunk,
and is measured. So the prediction chooses what is patched: the worst units, and as a test of itself some at random.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from qres import gguf_file, imatrix
from qres.branch import block_number
from qres.job import Job
from qres.levels import TYPE_TRAITS
from qres.lockstep import Lockstep
from qres.metrics import spearman
from qres.records import Unit
from qres.residual import ResidualMap
from qres.sensitivity.patching import unit_name
from qres.sensitivity.prediction import Prediction, added
from qres.sensitivity.roles import role
from qres.sensitivity_records import Calibration, Sensitivity, TensorDamage, Trust, TypeDamage

if TYPE_CHECKING:
    from qres.sensitivity.collector import Inputs

KLD_LIMIT = 1e-5
"""Of the replay against llama.cpp; or twice the noise floor where llama.cpp's own arithmetic is noisier."""
RANDOM_UNITS = 8
"""Patched per level although the prediction did not choose them."""


class Events(Protocol):
    """Hears how the prediction gets on."""

    def predicting(self, done: int, total: int, doing: str) -> None:
        """Progress, in steps of its own."""

    def note(self, text: str) -> None:
        """Something the user should know now."""


def predict(job: Job, lockstep: Lockstep, noise_kld: float | None, events: Events) -> Prediction:
    """The prediction on the ranking text, and the importance matrix if one was asked for.

    Args:
        job: The scan.
        lockstep: Its models.
        noise_kld: Noise floor of the KLD.
        events: Hears of progress.

    Returns:
        The prediction, with a reason where there is none: the scan then ranks by patching alone.
    """
    from qres.sensitivity import adjoint, collector  # torch takes a second

    wanted = job.prediction
    request = adjoint.Request(
        types=wanted.types,
        importance=wanted.importance,
        draws=wanted.draws,
        device=wanted.device,
        dtype=wanted.dtype,
        threads=job.threads,
        limit=max(KLD_LIMIT, 2 * (noise_kld or 0.0)),
    )
    inputs = collector.Inputs({}, {}) if wanted.make_imatrix else None
    inventory = gguf_file.read(Path(job.reference.path))
    try:
        found = adjoint.predict(lockstep.reference, inventory, job.texts.rank, lockstep.rmap, request, events, inputs)
    except (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        # Of memory, or of what some architecture brings that no fixture has: the scan can do without a prediction.
        found = Prediction(f"the replay failed: {' '.join(str(error).split())[:200]}", limit=request.limit)
    if not found.used:
        events.note(f"No predictions, units are ranked by patching: {found.reason}")
    if inputs is not None and wanted.make_imatrix:
        _write_imatrix(job, inputs, found, wanted.make_imatrix, events)
    return found


def _write_imatrix(job: Job, inputs: Inputs, found: Prediction, path: Path, events: Events) -> None:
    if not found.used:
        events.note(f"No importance matrix: {found.reason}")
        return
    # As llama-imatrix by default: of the blocks. A head that it leaves out is quantized without.
    names = [name for name in inputs.sums if block_number(name) is not None]
    imatrix.write(
        path,
        {name: inputs.sums[name] for name in names},
        {name: inputs.counts[name] for name in names},
        dataset=job.texts.rank_name,
        chunks=len(job.texts.rank),
        chunk_size=len(job.texts.rank[0]),
    )


# -- which units to patch


def choose(
    prediction: Prediction, types: Mapping[str, str], injected_errors: Sequence[float | None], count: int
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


# -- records


def calibration(prediction: Prediction, types: Mapping[str, str], measured_kld: float | None) -> Calibration | None:
    """What the level's predictions are multiplied with; None where nothing was predicted or measured."""
    units = prediction.level(types)
    if not units or not measured_kld:
        return None
    predicted, se = prediction.kld(added(units.values()))
    if predicted <= 0:
        return None
    return Calibration(measured_kld / predicted, predicted, se, measured_kld)


def with_predictions(
    units: Sequence[Unit], rmap: ResidualMap, prediction: Prediction, types: Mapping[str, str], factor: float
) -> tuple[Unit, ...]:
    """Units with their calibrated predictions."""
    names = {unit_name(rmap, i): i for i in range(len(rmap.branches) + 2)}
    sums = prediction.level(types)
    rows = []
    for unit in units:
        found = sums.get(names[unit.unit])
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
    """Of the least-squares line of y over x; None below 4 pairs or where x does not vary."""
    if len(x) < 4 or max(x) == min(x):
        return None
    return float(np.polyfit(x, y, 1)[0])


def sensitivity(job: Job, prediction: Prediction, rmap: ResidualMap | None) -> Sensitivity:
    """The whole table as a record.

    Args:
        job: The scan.
        prediction: Its prediction.
        rmap: For the names of units.
    """
    wanted = job.prediction
    weights = {name: size // 2 for name, size in job.bytes_16bit.items()}
    rows = []
    for row in prediction.tensors:
        unit = "" if rmap is None or row.unit is None else unit_name(rmap, row.unit)
        damages = [
            TypeDamage(name, TYPE_TRAITS[name].bytes_of(weights[row.tensor]), *prediction.kld(found))
            for name, found in row.sums.items()
        ]
        rows.append(
            TensorDamage(
                tensor=row.tensor,
                role=role(row.tensor, unit),
                unit=unit,
                layer=block_number(row.tensor),
                weights=weights[row.tensor],
                types=tuple(sorted(damages, key=lambda damage: damage.bytes)),
            )
        )
    return Sensitivity(
        used=prediction.used,
        reason=prediction.reason,
        replay_kld=_finite(prediction.replay_kld),
        replay_nmse=_finite(prediction.replay_nmse),
        replay_kld_limit=prediction.limit,
        chunks=len(prediction.counts),
        tokens=sum(prediction.counts),
        draws=wanted.draws,
        dtype=prediction.dtype,
        device=wanted.device,
        imatrix=wanted.imatrix,
        elapsed_s=round(prediction.elapsed_s, 1),
        tensors=tuple(rows),
        imatrix_digest=wanted.imatrix_digest,
    )


def _finite(value: float | None) -> float | None:
    """None for what a record cannot hold."""
    return value if value is not None and math.isfinite(value) else None
