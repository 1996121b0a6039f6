"""What crosses the border to the worker when files are compared with the reference, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from qres.corpus import Source
from qres.metrics import OutputStats, Quantiles


@dataclass(frozen=True)
class ComparisonJob:
    """What to compare, on what."""

    reference: Path
    weights: frozenset[str]
    """Names of the tensors in the models' files."""
    files: tuple[Path, ...]
    sources: tuple[Source, ...]
    """The first that has enough is taken."""
    used: tuple[str, ...]
    """Digests of chunks to leave out."""
    chunks: int
    n_ctx: int
    threads: int
    n_gpu_layers: int


@dataclass
class Compared:
    """One file's statistics."""

    output: OutputStats = field(default_factory=OutputStats)
    drift: Quantiles = field(default_factory=Quantiles)
    """Of the last stream point; empty where the stream is not mapped."""
