"""The worker's job, and what must be the same for a scan to be gone on with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from qres.files import Stamp
from qres.gguf.imatrix import Imatrix
from qres.gguf.inventory import Inventory
from qres.gguf.magnitudes import Magnitudes
from qres.measure.job import STATE_NAME, Job, PredictionJob, Preflight
from qres.pipeline import sizes
from qres.pipeline.candidates import Candidate
from qres.pipeline.options import ScanOptions
from qres.text import chunks
from qres.version import __version__

Stamps = dict[Path, Stamp]


def worker_job(
    options: ScanOptions,
    reference: Inventory,
    levels: Sequence[Candidate],
    flight: Preflight,
    values: Sequence[Magnitudes],
    stamps: Stamps,
    imatrix: Imatrix | None,
) -> Job:
    """Everything the worker needs.

    Args:
        options: What was asked for.
        reference: The 16-bit model.
        levels: What is measured beside it.
        flight: What was found out before anything large was made: the texts.
        values: Magnitudes of the reference's tensors, in the order of its file.
        stamps: Of every file that is measured.
        imatrix: Importance matrix of the levels and the prediction.
    """
    return Job(
        reference=sizes.model_file(reference.path.name, reference, stamps),
        types_16bit=sizes.types_16bit(reference, values),
        bytes_16bit=sizes.bytes_16bit(reference),
        bytes_q8_0=sizes.bytes_q8_0(reference),
        levels=tuple(
            sizes.level_file(level.name, reference, level.inventory, stamps, frozenset(level.changes.tensors))
            for level in levels
        ),
        texts=flight.texts,
        n_ctx=options.n_ctx,
        threads=options.threads,
        n_gpu_layers=options.n_gpu_layers,
        all_units=options.all_units,
        prediction=PredictionJob(
            types=sizes.predicted_types(reference, [level.inventory for level in levels]),
            importance=imatrix.for_model(reference) if imatrix else {},
            imatrix=options.imatrix.name if options.imatrix else "",
            imatrix_digest=imatrix.digest if imatrix else "",
            make_imatrix=options.make_imatrix,
            draws=options.draws,
            device=options.device,
            dtype=options.dtype,
        ),
        with_noise_floor=reference.kind != "diffusion",  # halves of a chunk see another context there
        state=options.out / STATE_NAME if options.out else None,
        resume=options.resume,
        about=_about(options, reference, levels, flight.texts, stamps, imatrix),
    )


def _about(
    options: ScanOptions,
    reference: Inventory,
    levels: Sequence[Candidate],
    texts: chunks.Texts,
    stamps: Stamps,
    imatrix: Imatrix | None,
) -> Mapping[str, str]:
    """What must be the same for a scan to be gone on with: anything that a figure depends on."""

    def files(inventory: Inventory) -> str:
        # A level from the cache may have been made again: the same bytes at another time.
        known = [stamps[path] for path in inventory.shards]
        dated = inventory is reference or options.files
        return " ".join(f"{one.path.name} {one.size}{f' {one.modified_ns}' if dated else ''}" for one in known)

    ids = hashlib.sha256(repr((texts.rank, texts.report)).encode()).hexdigest()[:16]
    return {
        "reference": files(reference),
        "levels": "; ".join(f"{level.name}: {files(level.inventory)}" for level in levels),
        "text": f"{texts.report_name} and {texts.rank_name}, {ids}",
        "--special": str(options.special),
        "--n-ctx": str(options.n_ctx),
        "--units": "all" if options.all_units else "ranked",
        "--imatrix": imatrix.digest[:16] if imatrix else "none",
        "--make-imatrix": str(
            options.make_imatrix or "not given"
        ),  # written with the prediction, which is in the state
        "--draws": str(options.draws),
        "--device": f"{options.device}, {options.dtype}",
        "--threads": str(options.threads),
        "--n-gpu-layers": str(options.n_gpu_layers),
        "qres": __version__,
        "llama-cpp-python": version("llama-cpp-python"),
    }
