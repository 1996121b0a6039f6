"""What a scan is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ScanOptions:
    """What `qres scan` was asked for."""

    model: Path
    files: tuple[Path, ...] = ()
    """Quantized files to measure; empty to make `levels` instead."""
    levels: tuple[str, ...] = ("Q4_K_M", "Q5_K_M")
    text: Path | None = None
    tokens: Path | None = None
    n_ctx: int = 512
    chunks: int | None = None
    rank_chunks: int = 4
    all_units: bool = False
    threads: int = 4
    n_gpu_layers: int = 0
    draws: int = 1
    """Label draws per chunk, for the prediction."""
    device: str = "cpu"
    """Where the prediction is computed."""
    dtype: str = "auto"
    """What it multiplies in."""
    imatrix: Path | None = None
    """Importance matrix to make levels with."""
    make_imatrix: Path | None = None
    """Where to write an importance matrix of the model."""
    recipe: bool = False
    """Build and verify recipes for the default budgets, in the folder `recipes` of `out`."""
    cache: Path | None = None
    out: Path | None = None
    """Folder for the state of an unfinished scan; None keeps none."""
    resume: bool = False
