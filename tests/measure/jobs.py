"""Jobs for the measuring part, without the command around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qres.files import stamp
from qres.gguf import magnitudes
from qres.gguf.inventory import Inventory
from qres.gguf.model_file import read
from qres.measure.job import Job, ModelFile, PredictionJob
from qres.pipeline import sizes
from qres.text import chunks


def model_file(name: str, path: Path) -> ModelFile:
    """A file as the worker gets it."""
    inventory = read(path)
    return sizes.model_file(name, inventory, {shard: stamp(shard) for shard in inventory.shards})


def level_file(name: str, reference: Inventory, path: Path) -> ModelFile:
    """A level's file as the worker gets it."""
    inventory = read(path)
    return sizes.level_file(name, reference, inventory, {shard: stamp(shard) for shard in inventory.shards})


def job(reference: Path, levels: Mapping[str, Path], texts: chunks.Texts, **changes: Any) -> Job:  # noqa: ANN401
    """A job with every setting at its plainest."""
    inventory = read(reference)
    plain = Job(
        reference=model_file("reference", reference),
        types_16bit=sizes.types_16bit(inventory, magnitudes.scan(inventory)),
        bytes_16bit=sizes.bytes_16bit(inventory),
        bytes_q8_0=sizes.bytes_q8_0(inventory),
        levels=tuple(level_file(name, inventory, path) for name, path in levels.items()),
        texts=texts,
        n_ctx=len(texts.report[0]),
        threads=1,  # more spin on each other's barriers longer than a small model computes
        n_gpu_layers=0,
        all_units=False,
        with_noise_floor=False,
        prediction=prediction(),
    )
    return replace(plain, **changes)


def prediction(**changes: Any) -> PredictionJob:  # noqa: ANN401 - fields of PredictionJob
    """A prediction of no tensor: the replay is checked, and nothing is quantized."""
    plain = PredictionJob(
        {}, {}, imatrix="", imatrix_digest="", make_imatrix=None, draws=1, device="cpu", dtype="float32"
    )
    return replace(plain, **changes)


def one_chunk(ids: tuple[int, ...]) -> chunks.Texts:
    """One chunk that ranks and reports."""
    return chunks.Texts((ids,), (ids,), "ids", "ids", 0)
