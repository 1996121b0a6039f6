"""Jobs for the measuring part, without the command around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qres import assemble, corpus, gguf_file, tensor_values
from qres.file_stamp import stamp
from qres.job import Job, ModelFile, PredictionJob


def model_file(name: str, path: Path) -> ModelFile:
    """A file as the worker gets it."""
    inventory = gguf_file.read(path)
    return assemble.model_file(name, inventory, {shard: stamp(shard) for shard in inventory.shards})


def job(reference: Path, levels: Mapping[str, Path], texts: corpus.Texts, **changes: Any) -> Job:  # noqa: ANN401
    """A job with every setting at its plainest."""
    inventory = gguf_file.read(reference)
    plain = Job(
        reference=model_file("reference", reference),
        types_16bit=assemble.types_16bit(inventory, tensor_values.scan(inventory)),
        bytes_16bit=assemble.bytes_16bit(inventory),
        bytes_q8_0=assemble.bytes_q8_0(inventory),
        levels=tuple(model_file(name, path) for name, path in levels.items()),
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


def one_chunk(ids: tuple[int, ...]) -> corpus.Texts:
    """One chunk that ranks and reports."""
    return corpus.Texts((ids,), (ids,), "ids", "ids", 0)
