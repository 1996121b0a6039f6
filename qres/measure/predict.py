"""Prediction within a scan: what to predict, and the table of it as a record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qres.events import Listener
from qres.gguf import imatrix, model_file
from qres.gguf.names import block_number, role
from qres.levels import TYPE_TRAITS
from qres.measure.job import Job
from qres.measure.lockstep import Lockstep
from qres.measure.summary import finite
from qres.records.prediction import Prediction, TensorDamage, TypeDamage
from qres.residual.map import ResidualMap
from qres.sensitivity.prediction import PredictionSums

if TYPE_CHECKING:
    from qres.sensitivity.collector import InputSquares


KLD_LIMIT = 1e-5
"""Of the replay against llama.cpp; or twice the noise floor where llama.cpp's own arithmetic is noisier."""


def predict(job: Job, lockstep: Lockstep, noise_kld: float | None, listener: Listener) -> PredictionSums:
    """The prediction on the ranking text, and the importance matrix if one was asked for.

    Args:
        job: The scan.
        lockstep: Its models.
        noise_kld: Noise floor of the KLD.
        listener: Hears of progress.

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
    inputs = collector.InputSquares({}, {}) if wanted.make_imatrix else None
    inventory = model_file.read(Path(job.reference.path))
    try:
        found = adjoint.predict(lockstep.reference, inventory, job.texts.rank, lockstep.rmap, request, listener, inputs)
    except (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        # Of memory, or of what some architecture brings that no fixture has: the scan can do without a prediction.
        found = PredictionSums(f"the replay failed: {' '.join(str(error).split())[:200]}", limit=request.limit)
    if not found.used:
        listener.note(f"No predictions, units are ranked by patching: {found.reason}")
    if inputs is not None and wanted.make_imatrix:
        _write_imatrix(job, inputs, found, wanted.make_imatrix, listener)
    return found


def _write_imatrix(job: Job, inputs: InputSquares, found: PredictionSums, path: Path, listener: Listener) -> None:
    if not found.used:
        listener.note(f"No importance matrix: {found.reason}")
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


def record(job: Job, prediction: PredictionSums, rmap: ResidualMap | None) -> Prediction:
    """The whole table as a record.

    Args:
        job: The scan.
        prediction: Its prediction.
        rmap: For the names of units.
    """
    wanted = job.prediction
    held = {name: TYPE_TRAITS[kind] for name, kind in job.reference.tensor_types.items()}
    weights = {
        name: job.reference.tensor_bytes[name] // traits.block_bytes * traits.block_size
        for name, traits in held.items()
    }
    rows = []
    for row in prediction.tensors:
        unit = "" if rmap is None or row.unit is None else rmap.units[row.unit].name
        damages = [
            TypeDamage(
                name,
                TYPE_TRAITS[name].bytes_of(weights[row.tensor]),
                *prediction.kld(found),
                row.silent_kld.get(name, 0.0),
            )
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
                silent_experts=row.silent,
            )
        )
    return Prediction(
        used=prediction.used,
        reason=prediction.reason,
        replay_kld=finite(prediction.replay_kld),
        replay_nmse=finite(prediction.replay_nmse),
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
