"""What a scan will need of disk and memory, before it begins: from shapes alone, to within about a quarter."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from qres.gguf import model_file
from qres.gguf.inventory import Inventory
from qres.levels import TYPE_TRAITS, LevelSpec

GIB = 2**30
_PROCESSES = 415 * 2**20
"""Two Python processes with numpy and llama.cpp's library, one of them with torch."""
_PIECE_POINTS = 100
"""What a layer's activations and gradients take while it is predicted, in stream points."""


@dataclass(frozen=True)
class Estimate:
    """Bytes needed, and there."""

    files: int
    """Of all models: mapped, so the system may drop and reread what does not fit."""
    memory: int
    """Beside the files."""
    memory_available: int
    disk: int
    """For levels that are to be made."""
    disk_free: int

    @property
    def warning(self) -> str:
        """What will not fit; empty when all does."""
        if self.disk > self.disk_free:
            return f"The levels need about {_size(self.disk)} of disk, {_size(self.disk_free)} are free: use --cache"
        if self.memory > self.memory_available:
            return (
                f"This scan needs about {_size(self.memory)} of memory beside the models, "
                f"{_size(self.memory_available)} are available: use a smaller --n-ctx or fewer levels at a time"
            )
        if self.files + self.memory > self.memory_available:
            return (
                f"The models take {_size(self.files)} and the scan about {_size(self.memory)} more, "
                f"{_size(self.memory_available)} of memory are available: the files will be read again and again"
            )
        return ""

    def __str__(self) -> str:
        text = (
            f"Needs about {_size(self.memory)} of memory beside {_size(self.files)} of model files "
            f"({_size(self.memory_available)} available)"
        )
        return f"{text} and {_size(self.disk)} of disk ({_size(self.disk_free)} free)" if self.disk else text


def estimate(
    reference: Inventory,
    given: Sequence[Inventory],
    wanted: Sequence[LevelSpec],
    n_ctx: int,
    rank_chunks: int,
    context: tuple[int, int] | None,
    cache: Path,
) -> Estimate:
    """What comparing these files, or making and comparing these levels, will take.

    Per model: logits of one chunk in llama.cpp's buffer, and its context. Once: the reference's distribution, its
    logits and those of the noise floor. While measuring, the stream of the reference and of one level, and one error
    per branch and level; while predicting, before that, the logits and their gradient, one layer, and of each chunk
    the stream in front of every layer.

    Args:
        reference: The 16-bit model.
        given: Quantized files.
        wanted: Levels to make instead.
        n_ctx: Tokens per chunk.
        rank_chunks: Chunks that are predicted together.
        context: Bytes of one context's cache and compute buffers, by llama.cpp; None when not known.
        cache: Where levels are made.
    """
    made = [level_bytes(reference, level) for level in wanted]
    levels = [inventory.tensor_bytes for inventory in given] or made
    count = len(levels)
    logits = 4 * n_ctx * reference.n_vocab * (count + 3)
    branches = 2 * reference.n_layer
    point = 4 * n_ctx * reference.n_embd
    stream = point * (2 * (2 * branches + 1) + count * (branches + 1))
    predicting = 2 * 4 * n_ctx * reference.n_vocab + point * (reference.n_layer * rank_chunks + _PIECE_POINTS)
    repacked = sum(levels)  # llama.cpp copies what it lays out anew for the CPU: nearly everything that is quantized
    return Estimate(
        files=reference.file_bytes + sum(levels),
        memory=_PROCESSES + logits + max(stream, predicting) + repacked + (count + 2) * sum(context or ()),
        memory_available=psutil.virtual_memory().available,
        disk=sum(made),
        disk_free=_free(cache),
    )


def level_bytes(reference: Inventory, level: LevelSpec) -> int:
    """About what a level will take: its base type for every matrix, fallbacks included, and 6 bits for the head.

    llama.cpp's recipes also give some tensors more; that is a few percent. MXFP4_MOE is for experts, the rest of the
    model becomes Q8_0; Q3_K_L mixes Q3_K and Q5_K, together about Q4_K.
    """
    head = "token_embd.weight" if reference.tied_head else "output.weight"
    total = 0
    for tensor in reference.tensors:
        if tensor.n_dims < 2 or tensor.row % 32:
            total += tensor.n_bytes or 0
            continue
        base = {"Q3_K_L": "Q4_K", "MXFP4_MOE": level.base if "_exps" in tensor.name else "Q8_0"}.get(
            level.name, level.base
        )
        size = model_file.bytes_at(tensor, base)
        if tensor.name == head and TYPE_TRAITS[level.base].block_size > 1:
            size = max(size, model_file.bytes_at(tensor, "Q6_K"))
        total += size
    return total


def _free(folder: Path) -> int:
    """Of the first folder above that exists."""
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path.cwd())
    return shutil.disk_usage(there).free


def _size(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.1f} GiB" if n_bytes >= GIB else f"{n_bytes / 2**20:.0f} MiB"
