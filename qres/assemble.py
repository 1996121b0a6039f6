"""Puts together what the headers say and what the worker measured: the records of a result."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from qres import __version__, gguf_file, levels
from qres.gguf_file import Inventory, Tensor
from qres.job import Measured, MeasuredLevel, ModelFile
from qres.records import Level, Reference, Settings

_BLOCK_WEIGHTS = 1 << 24


def model_file(name: str, inventory: Inventory) -> ModelFile:
    """What the worker needs to know about a model."""
    return ModelFile(
        name=name,
        path=str(inventory.path.resolve()),
        file_bytes=inventory.file_bytes,
        tensor_bytes={tensor.name: tensor.n_bytes or 0 for tensor in inventory.tensors},
    )


def bytes_16bit(inventory: Inventory) -> dict[str, int]:
    """Bytes of each matrix at 16 bit; vectors (norms, biases) stay as they are at every level."""
    return _matrix_bytes(inventory, "F16")


def bytes_q8_0(inventory: Inventory) -> dict[str, int]:
    """Bytes of each matrix at Q8_0."""
    return _matrix_bytes(inventory, "Q8_0")


def _matrix_bytes(inventory: Inventory, type_name: str) -> dict[str, int]:
    return {t.name: gguf_file.bytes_at(t, type_name) for t in inventory.tensors if t.n_dims >= 2}


def types_16bit(inventory: Inventory) -> dict[str, str]:
    """The 16-bit type that holds each matrix without loss of range.

    BF16 stays BF16, F32 becomes it where a weight is beyond the range of F16, and anything else is F16.
    """
    return {
        tensor.name: "BF16" if tensor.type == "BF16" or _beyond_f16(inventory, tensor) else "F16"
        for tensor in inventory.tensors
        if tensor.n_dims >= 2
    }


def _beyond_f16(inventory: Inventory, tensor: Tensor) -> bool:
    """Does an F32 matrix hold a value that 16-bit float cannot? Reads the data, a block at a time."""
    if tensor.type != "F32" or tensor.n_weights == 0:
        return False
    path = inventory.shards[tensor.shard]
    data = np.memmap(path, dtype="<f4", mode="r", offset=tensor.offset, shape=(tensor.n_weights,))
    limit = float(np.finfo(np.float16).max)
    blocks = range(0, tensor.n_weights, _BLOCK_WEIGHTS)
    return any(bool((np.abs(data[start : start + _BLOCK_WEIGHTS]) > limit).any()) for start in blocks)


def reference(inventory: Inventory, measured: Measured) -> Reference:
    """The reference's record."""
    return Reference(
        path=_shown(inventory.path),
        name=inventory.name,
        architecture=inventory.architecture,
        norm_placement=measured.norm_placement,
        n_layer=measured.n_layer,
        n_embd=measured.n_embd,
        n_vocab=measured.n_vocab,
        n_ctx_train=measured.n_ctx_train,
        bytes=inventory.file_bytes,
        bpw=inventory.bpw,
        types=inventory.types,
        is_16bit=inventory.is_16bit,
    )


def level(name: str, inventory: Inventory, measured: MeasuredLevel) -> Level:
    """A level's record."""
    known = levels.LEVELS_BY_NAME.get(inventory.file_type)
    return Level(
        name=name,
        path=_shown(inventory.path),
        file_type=inventory.file_type,
        bytes=inventory.file_bytes,
        bpw=inventory.bpw,
        nominal_bpw=known.nominal_bpw if known else None,
        types=inventory.types,
        fallback_tensors=gguf_file.fallbacks(inventory),
        output=measured.output,
        points=measured.points,
        units=measured.units,
        keep_16bit=measured.keep_16bit,
        keep_check=measured.keep_check,
        rank_correlation=measured.rank_correlation,
        additivity=measured.additivity,
    )


def _shown(path: Path) -> str:
    """A path for people: bytes that are no UTF-8 become question marks instead of ending the report."""
    return os.fsencode(path).decode("utf-8", errors="replace")


def settings(threads: int, n_gpu_layers: int, all_units: bool, measured: Measured, elapsed_s: float) -> Settings:
    """What was run."""
    return Settings(
        qres_version=__version__,
        llama_cpp=version("llama-cpp-python"),
        system=measured.system,
        n_ctx=measured.n_ctx,
        chunks=measured.chunks,
        rank_chunks=measured.rank_chunks,
        scored_tokens=max(
            (level.output.tokens + level.output.nonfinite_tokens for level in measured.levels), default=0
        ),
        text=measured.text,
        rank_text=measured.rank_text,
        unused_tokens=measured.unused_tokens,
        massive_tokens=measured.massive_tokens,
        threads=threads,
        n_gpu_layers=n_gpu_layers,
        units="all" if all_units else "ranked",
        elapsed_s=round(elapsed_s, 1),
    )


def warnings(measured: Measured, records: Sequence[Level]) -> tuple[str, ...]:
    """What a reader must know before believing the figures."""
    out = []
    if measured.text == measured.rank_text:
        out.append(
            "The text fills one chunk only: the units were ranked on the text that reports them. Give a longer one."
        )
    if measured.chunks < 2:
        out.append("One chunk gives no standard errors: no difference between levels can be called significant.")
    for record in records:
        if record.output.nonfinite_tokens:
            out.append(
                f"{record.name}: {record.output.nonfinite_tokens} positions have non-finite logits and are left out."
            )
        if record.nominal_bpw and record.bpw > record.nominal_bpw + 0.5:
            fell = len(record.fallback_tensors)
            why = f"{fell} tensors fell back to larger types" if fell else "it mixes types in its own way"
            out.append(
                f"{record.name} really is {record.bpw:.2f} bits per weight (nominally {record.nominal_bpw:.2f}): {why}."
            )
    narrow = [row for row in measured.stream if row.f16_headroom is not None and row.f16_headroom < 2]
    if narrow:
        worst = min(narrow, key=lambda row: row.f16_headroom or 0.0)
        out.append(
            f"The stream reaches {worst.absmax:,.0f} at {worst.label}; 16-bit float ends at 65,504. Back ends that "
            "compute in F16 can overflow there: keep such layers at BF16."
        )
    return tuple(out)
