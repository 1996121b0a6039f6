"""What a scan is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qres.cpus import CPUS


@dataclass(frozen=True)
class ScanOptions:
    """What `qres scan` was asked for; `text` and `tokens` exclude each other."""

    model: Path
    """The 16-bit model; of a split one, any shard."""
    files: tuple[Path, ...] = ()
    """Quantized files to measure; empty to make `levels` instead."""
    levels: tuple[str, ...] = ("Q4_K_M", "Q5_K_M")
    text: Path | None = None
    """UTF-8 text to measure on; None for the built-in one."""
    tokens: Path | None = None
    """Token ids instead of text."""
    special: bool = False
    """Parse special tokens that stand in `text`."""
    n_ctx: int = 512
    """Tokens per chunk."""
    chunks: int | None = None
    """To report on; None for 8 of the built-in text, or at most 64 of one's own."""
    rank_chunks: int = 4
    """Chunks of other text that rank the units."""
    all_units: bool = False
    """Patch every unit, not only those predicted to be the worst and some at random."""
    threads: int = CPUS
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
    """Folder for the levels that are made; None for QRES_CACHE, or the user's cache."""
    out: Path | None = None
    """Folder for the state of an unfinished scan; None keeps none."""
    resume: bool = False
    """Go on with the unfinished scan in `out`."""
